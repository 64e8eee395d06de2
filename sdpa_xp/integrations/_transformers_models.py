"""Which models of transformers call the attention that is registered, and what the others are told."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Iterator
from functools import wraps
from types import CodeType, FunctionType
from typing import Any

import torch
import transformers

from sdpa_xp.errors import ArgumentTypeError, ArgumentValueError, Message
from sdpa_xp.integrations.transformers import NAME

Interface = transformers.AttentionInterface
CHOICE = "get_correct_attn_implementation"
"""The method of a model that transformers asks about a name, before the layers of the model are made."""


def watch_models() -> None:
    """Let each model that gets our name be looked at first. transformers has no hook for that."""
    ask = getattr(transformers.PreTrainedModel, CHOICE, None)
    if ask is None or hasattr(ask, "asks_sdpa_xp"):
        return

    @wraps(ask)
    def choose_and_tell(self: Any, requested_attention: Any, is_init_check: bool = False) -> Any:
        if requested_attention == NAME and is_init_check:
            _prepare(type(self), getattr(self.config, "model_type", type(self).__name__))
        return ask(self, requested_attention, is_init_check)

    choose_and_tell.asks_sdpa_xp = True  # type: ignore[attr-defined]
    setattr(transformers.PreTrainedModel, CHOICE, choose_and_tell)


def _prepare(model: type, model_type: str) -> None:
    """Warn of a model that has attention code of its own; let one that looks up a class by our name raise."""
    variables = vars(sys.modules.get(model.__module__, torch))
    tables = [
        table for table in variables.values() if isinstance(table, dict) and _is_class(table.get("eager"))
    ]
    for table in tables:
        table.setdefault(NAME, _Refusal(model_type, [name for name in table if name != NAME]))
    layers = [
        value for value in variables.values() if _is_class(value) and value.__module__ == model.__module__
    ]
    attentions = [layer for layer in layers if "Attention" in layer.__name__]  # as transformers finds them
    if attentions and not tables and not any(_calls_interface(layer) for layer in layers):
        rule = f"models of type `{model_type}` have attention code of their own, which sdpa_xp does not replace"
        hint = "The results are right, but transformers computes them."
        message = Message(NAME, rule, {"attn_implementation": NAME}, hint)
        warnings.warn(message, UserWarning, stacklevel=2)


class _Refusal:
    """An entry in a model's table of attention classes, which raises when the model wants to build it."""

    def __init__(self, model_type: str, names: list[str]) -> None:
        self.model_type, self.names = model_type, names

    def __call__(self, *args: Any, **keywords: Any) -> Any:
        del args, keywords
        names = ", ".join(self.names)
        rule = f"`attn_implementation` must be one of {names} for models of type `{self.model_type}`"
        hint = "The code of these models has attention of its own, which sdpa_xp cannot replace."
        raise ArgumentValueError(NAME, rule, {"attn_implementation": NAME}, hint)


def uses_sdpa_xp(model: Any) -> bool:
    """Return whether a layer of the model calls the registered attention and has our name."""
    if not isinstance(model, torch.nn.Module):
        rule = "`model` must be a model of transformers"
        raise ArgumentTypeError("uses_sdpa_xp", rule, {"model": f"<{type(model).__qualname__}>"})
    return any(map(_calls_interface, {type(layer) for layer, name in _with_names(model, None) if name == NAME}))


def _with_names(layer: Any, name: Any) -> Iterator[tuple[Any, Any]]:
    """Yield each layer with the name of the attention in its config, or in that of the layer around it."""
    name = getattr(getattr(layer, "config", None), "_attn_implementation", name)
    yield layer, name
    for child in layer.children():
        yield from _with_names(child, name)


def _is_class(value: object) -> bool:
    return isinstance(value, type) and issubclass(value, torch.nn.Module)


def _calls_interface(layer: type) -> bool:
    """Return whether a method of a class names transformers' table of attention functions."""
    bases = [base for base in layer.__mro__ if base not in transformers.PreTrainedModel.__mro__]
    functions = [value for base in bases for value in vars(base).values()]
    return any(_names_interface(getattr(function, "__wrapped__", function), set()) for function in functions)


def _names_interface(function: object, visited: set[object]) -> bool:
    """Return whether the code of a function names the table, or another function of its module that does."""
    if not isinstance(function, FunctionType) or function in visited:
        return False
    visited.add(function)
    variables = [function.__globals__.get(name) for name in _names(function.__code__)]
    return any(
        isinstance(value, Interface)
        or (getattr(value, "__module__", "") == function.__module__ and _names_interface(value, visited))
        for value in variables
    )


def _names(code: CodeType) -> Iterator[str]:
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _names(constant)
