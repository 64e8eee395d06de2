"""Checks of linear attention and of the causal convolution. The exporter checks its calls here too."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from .._libraries import accumulation_dtype, dtype_name, library_of
from .._libraries.protocols import Array, Namespace, Shape
from ..errors import ArgumentTypeError, ArgumentValueError
from . import arrays as checks
from .keywords import check_choice, check_integer, check_layout, check_number

RULES = {"linear": (), "gated": ("decay",), "delta": ("beta",), "gated_delta": ("decay", "beta")}
"""The arguments of each rule."""


class LinearShapes(NamedTuple):
    """What a checked call has. Lengths may be names."""

    sizes: checks.Sizes
    layout: str
    rule: str
    scale: float
    chunk_size: int
    state_shape: Shape
    output_shape: Shape

    @property
    def axes(self) -> Shape:
        """The leading axes of a state, with those of the heads."""
        return (*self.sizes.batch, self.sizes.heads)


def check_linear_arrays(function: str, inputs: Mapping[str, Any]) -> tuple[Namespace, dict[str, Array]]:
    """Check the library, the dtypes and the device of the inputs that are not None, and return them."""
    xp, arrays = checks.check_one_library(function, {n: x for n, x in inputs.items() if x is not None})
    library = library_of(arrays["query"])
    if library.chunks is not None:
        rule = "`query` must not be in lazy chunks, because each token needs the state before it"
        hint = "Call the function in dask.array.map_blocks, for chunks of the batch."
        raise ArgumentTypeError(function, rule, {"query": f"an array of {library.name}"}, hint)
    checks.check_floating(function, "query", arrays["query"])
    may_have = dtype_name(accumulation_dtype(xp, arrays["query"].dtype))
    alike = {
        name: array
        for name, array in arrays.items()
        if name in ("query", "key", "value") or dtype_name(array.dtype) != may_have
    }
    checks.check_one_dtype(function, alike)
    checks.check_one_device(function, arrays)
    return xp, arrays


def check_linear_shapes(
    function: str,
    shapes: Mapping[str, Shape],
    dtype: Any,
    *,
    rule: Any,
    scale: Any,
    chunk_size: Any,
    layout: Any,
) -> LinearShapes:
    """Check that the shapes of the inputs and the other arguments fit; the state has that dtype."""
    check_layout(function, layout)
    size = check_integer(function, "chunk_size", chunk_size, least=1)
    passed = tuple(name for name in RULES["gated_delta"] if name in shapes)
    if rule is not None:
        check_choice(function, "rule", rule, [*RULES], "None")
        for name in RULES["gated_delta"]:
            if (name in passed) != (name in RULES[rule]):
                stated = f"`rule={rule!r}` {'takes no' if name in passed else 'needs'} `{name}`"
                raise ArgumentValueError(function, stated, {"arguments": ", ".join(shapes)})
    sizes = checks.check_shapes(function, shapes["query"], shapes["key"], shapes["value"], layout=layout)
    if sizes.queries != sizes.keys:
        got = {f"{name}.shape": shapes[name] for name in ("query", "key")}
        raise ArgumentValueError(function, "`query` and `key` must have the same tokens (L)", got)
    factor = sizes.width**-0.5 if scale is None else check_number(function, "scale", scale, dtype)
    axes = (*sizes.batch, sizes.heads)
    state_shape = (*(() if sizes.is_2d else axes), sizes.width, shapes["value"][-1])
    if shapes.get("state", state_shape) != state_shape:
        stated = f"`state` must have the shape {state_shape}, (..., H, E, Ev)"
        raise ArgumentValueError(function, stated, {"state.shape": shapes["state"]})
    whole = (*axes, sizes.queries, sizes.width)
    for name in passed:
        checks.check_known(function, name, shapes[name])
        fits = len(shapes[name]) > 1 and shapes[name][-1] in (1, sizes.width if name == "decay" else 1)
        if not fits or checks.broadcast(checks.headed(shapes[name], layout), whole) != whole:
            rows = "(..., H, L" if layout == checks.HLE else "(..., L, H"
            stated = f"`{name}` must broadcast to {rows}, 1)" + f" or {rows}, E)" * (name == "decay")
            got = {f"{name}.shape": shapes[name], "key.shape": shapes["key"]}
            raise ArgumentValueError(function, stated, got)
    output = (*sizes.scores_shape[:-1], shapes["value"][-1])
    output = output if sizes.is_2d else checks.headed(output, layout)
    rule = next(name for name, needed in RULES.items() if needed == passed)
    return LinearShapes(sizes, layout, rule, factor, size, state_shape, output)


def check_convolution(function: str, shapes: Mapping[str, Shape], activation: object) -> Shape:
    """Check that the shapes of a causal convolution fit, and return that of its state."""
    if activation is not None:
        check_choice(function, "activation", activation, ["silu", "swish"], "None")
    if len(shapes["input"]) < 2:
        rule = "`input` must have at least 2 axes, (..., channels, length)"
        raise ArgumentValueError(function, rule, {"input.shape": shapes["input"]})
    *batch, channels, _ = shapes["input"]
    width = max(1, *shapes["weight"][-1:])
    state = (*batch, channels, width - 1)
    needed = {"weight": (channels, 1, width), "bias": (channels,), "state": state}
    for name, letters in {"weight": "(C, 1, k)", "bias": "(C,)", "state": "(..., C, k - 1)"}.items():
        if shapes.get(name, needed[name]) != needed[name]:
            got = {f"{name}.shape": shapes[name], "input.shape": shapes["input"]}
            raise ArgumentValueError(function, f"`{name}` must be {letters}, here {needed[name]}", got)
    return state
