"""No mapping is read loosely: what each argument that is one refuses stands in tests/refusals/mappings.txt."""

from __future__ import annotations

import inspect
import re
from typing import Any

import numpy as np
from refusals.transcript import HERE

import sdpa_xp
from sdpa_xp import layers, masks, positional
from sdpa_xp.layers import Linear, MultiHeadAttention

F = np.float32
RNG = np.random.default_rng(0)
FILES = ("mapping",)
"""Arguments that may have more arrays than are read: files of whole models."""


def public_functions() -> dict[str, Any]:
    """The functions of the library, and the methods of its classes, by name."""
    functions: dict[str, Any] = {}
    for module in (sdpa_xp, layers, positional, masks, sdpa_xp.biases, sdpa_xp.plot, sdpa_xp.typing):
        for name in module.__all__:
            value = getattr(module, name)
            if inspect.isfunction(value):
                functions[name] = value
            elif inspect.isclass(value) and value.__module__.startswith("sdpa_xp"):
                members = inspect.getmembers(value, callable)
                functions |= {f"{name}.{key}": x for key, x in members if not key.startswith("_")}
    return functions


def test_each_argument_that_is_a_mapping_has_its_refusals_recorded() -> None:
    """In a section of its own, under the name of the function and of the argument."""
    recorded = re.findall(r"^# (?:\w+\.)?(\w+): `(\w+)`$", (HERE / "mappings.txt").read_text(), re.MULTILINE)
    missing = []
    for name, function in public_functions().items():
        try:
            parameters = inspect.signature(function).parameters.values()
        except ValueError:  # of a builtin
            continue
        for parameter in parameters:
            is_mapping = "Mapping" in str(parameter.annotation) or "dict" in str(parameter.annotation)
            is_known = (name.rpartition(".")[2], parameter.name) in recorded or parameter.name in FILES
            if is_mapping and not is_known:
                missing.append(f"{name}: {parameter.name}")
    assert not missing


W = {name: RNG.standard_normal((8, 8)).astype(F) for name in ("q_proj", "k_proj", "v_proj", "o_proj")}
FILE = {f"{name}.weight": x for name, x in W.items()}
NAMES = {"query": "q_proj", "key": "k_proj", "value": "v_proj"}


def from_file(names: Any, file: Any = FILE) -> MultiHeadAttention:
    return MultiHeadAttention.from_mapping(file, num_heads=2, names=names)


def test_a_scale_without_axes_may_have_become_a_number() -> None:
    layer = MultiHeadAttention(*[Linear(x) for x in W.values()], num_heads=2, scale=np.asarray(0.5, F))
    (scale,) = [x for name, x in layer.parameters.items() if name == "scale"]
    assert layer.with_parameters({"scale": scale * F(2)}).scale == 1


def test_only_what_a_layer_needs_is_read_of_a_mapping() -> None:
    """A file may read an array when it is asked for, and hold what no layer has."""

    class Recorded(dict[Any, Any]):
        def items(self) -> Any:
            raise AssertionError("all entries are read")

    mapping = Recorded({f"{role}.weight": W["q_proj"] for role in ("query", "key", "value")} | {3: "no name"})
    assert MultiHeadAttention.from_mapping(mapping, num_heads=4).num_heads == 4
