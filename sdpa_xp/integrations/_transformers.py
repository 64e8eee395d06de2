"""The attention function that models of transformers call, and which models call it."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial, wraps
from types import CodeType, FunctionType
from typing import Any, NoReturn

import torch
import transformers

from .._attention import scaled_dot_product_attention
from .._checks import type_name
from .._weights import attention_weights
from ..errors import ArgumentTypeError, ArgumentValueError, Message
from ._transformers_masks import EVERY_PAIR, MaskTensor, create_mask

NAME = "xp_attention"
"""The name in transformers. transformers refuses some models by a name with "sdpa" in it."""
UNSUPPORTED = {
    "cache": ("the cache of continuous batching", "Use `generate`, whose caches are supported."),
    "sinks": ("sinks that differ between tokens", 'Use `attn_implementation="eager"` for this model.'),
    "block_indices": ("lists of blocks", 'Use `attn_implementation="eager"` for this model.'),
    "reproducible": ("reproducible calls", "Use calls of your own: a model's projections are not."),
}
"""Keywords of transformers' attention functions that change the result, and that sdpa_xp does not compute."""
Interface, MaskInterface = transformers.AttentionInterface, transformers.AttentionMaskInterface
CHOICE = "get_correct_attn_implementation"
"""The method of a model that transformers asks about a name, before the layers of the model are made."""


def register() -> None:
    """Register the attention function and the masks under our name, and watch the models that ask for it."""
    Interface.register(NAME, attend)
    MaskInterface.register(NAME, create_mask)
    _watch_models()


def attend(
    module: Any,
    query: Any,
    key: Any,
    value: Any,
    attention_mask: Any,
    dropout: float = 0.0,
    scaling: float | None = None,
    softcap: float | None = None,
    s_aux: Any = None,
    position_bias: Any = None,
    is_causal: bool | None = None,
    output_attentions: bool = False,
    **keywords: Any,
) -> tuple[Any, Any]:
    """Return the output, (B, L, Hq, Ev), and the weights, (B, Hq, L, S), if they are asked for.

    Without a mask every pair may attend, as in eager attention; `create_mask` makes the mask of a causal model.
    """
    _refuse_keywords(keywords)
    query, key, value = _of_one_dtype(query, key, value)
    options = {
        "attn_mask": _mask(attention_mask, query.dtype),
        "bias": position_bias,
        # One query is a step with a cache, and attends to all keys before it.
        "is_causal": bool(is_causal) and attention_mask is None and query.shape[-2] > 1,
        "scale": scaling,
        "softcap": softcap,
        "sinks": s_aux,
    }
    drop = _dropout(dropout if module.training else 0.0, query.device)
    output = scaled_dot_product_attention(query, key, value, **options, **drop())
    weights = attention_weights(query, key, **options, **drop()) if output_attentions else None
    return output.transpose(1, 2).contiguous(), weights  # as from functions of transformers, which models view


def _mask(attention_mask: Any, dtype: Any) -> Any:
    """Return the mask for a call of arrays in `dtype`."""
    if isinstance(attention_mask, MaskTensor):
        return None if attention_mask.mask is EVERY_PAIR else attention_mask.mask
    if attention_mask is None or not attention_mask.is_floating_point():
        return attention_mask
    return attention_mask.to(torch.promote_types(attention_mask.dtype, dtype))


def _dropout(p: float, device: Any) -> Callable[[], dict[str, Any]]:
    """Return a function whose results drop the same weights each time; torch's generator of the CPU seeds them.

    Checkpointing restores that generator, so that a recomputed layer drops the same weights again.
    """
    if not p:
        return dict
    seed = int(torch.randint(2**63 - 1, ()))
    return lambda: {"dropout_p": p, "rng": torch.Generator(device).manual_seed(seed)}


def _of_one_dtype(*arrays: Any) -> tuple[Any, ...]:
    """Return the arrays in the dtype of autocast if they differ, as some layers leave them inside of it."""
    kind = arrays[0].device.type
    if len({array.dtype for array in arrays}) > 1 and torch.is_autocast_enabled(kind):
        return tuple(array.to(torch.get_autocast_dtype(kind)) for array in arrays)
    return arrays


def _refuse_keywords(keywords: Mapping[str, object]) -> None:
    """Refuse keywords that would change the result and are not computed."""
    for name, (rule, hint) in UNSUPPORTED.items():
        if keywords.get(name) is not None and keywords[name] is not False:
            got = {name: f"<{type_name(keywords[name])}>"}
            raise ArgumentValueError(NAME, f"sdpa_xp does not support {rule} (`{name}`)", got, hint)


def _watch_models() -> None:
    """Let each model that gets our name be looked at first. transformers has no hook for that."""
    ask = getattr(transformers.PreTrainedModel, CHOICE, None)
    if ask is None or hasattr(ask, "asks_sdpa_xp"):
        return  # in a release without this method, models run as before, but none is warned of

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
        names = [name for name in table if name != NAME]
        table.setdefault(NAME, partial(_refuse_attention, model_type, names))
    layers = [
        value for value in variables.values() if _is_class(value) and value.__module__ == model.__module__
    ]
    attentions = [layer for layer in layers if "Attention" in layer.__name__]  # as transformers finds them
    if attentions and not tables and not any(_calls_interface(layer) for layer in layers):
        rule = f"models of type `{model_type}` have attention code of their own, which sdpa_xp does not replace"
        hint = "The results are right, but transformers computes them."
        message = Message(NAME, rule, {"attn_implementation": NAME}, hint)
        warnings.warn(message, UserWarning, stacklevel=2)


def _refuse_attention(model_type: str, names: Sequence[str], *_args: Any, **_keywords: Any) -> NoReturn:
    """Raise when a model wants to build our entry in its table of attention classes."""
    rule = f"`attn_implementation` must be one of {', '.join(names)} for models of type `{model_type}`"
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
    # A decorator, as those of transformers on `forward`, keeps what it wraps in `__wrapped__`.
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
