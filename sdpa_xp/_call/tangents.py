"""The tangents of a call: checked against the arrays that they belong to, and bound to the grid."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Any, cast

from .._checks.arrays import check_known, check_one_device, check_one_dtype, check_one_library
from .._checks.keywords import check_keys
from .._core.products import ArraySource
from .._core.scores import Tangents
from .._libraries import access_of
from .._libraries.protocols import TRACED, Array
from ..biases.algebra import ArrayBias, Bias
from ..errors import ArgumentTypeError, ArgumentValueError
from .options import CallOptions, named_arrays
from .prepared_call import PreparedCall


def check_tangents(
    function: str,
    tangents: object,
    arrays: Mapping[str, Array],
    argument: str = "tangents",
    count: int | None = None,
) -> dict[str, Array]:
    """Check that each tangent is like the array of its name among the floating `arrays` of a call.

    With a `count`, each has one more axis of that length in front.
    """
    check_keys(function, argument, tangents, [*arrays])
    checked = {}
    for name, value in cast(Mapping[str, Any], tangents).items():
        full_name = f'{argument}["{name}"]'
        _, named = check_one_library(function, {name: arrays[name], full_name: value})
        check_one_dtype(function, named)
        check_one_device(function, named)
        tangent = checked[name] = named[full_name]
        check_known(function, full_name, tangent.shape)
        shape = arrays[name].shape if count is None else (count, *arrays[name].shape)
        if tangent.shape != shape:
            rule = f"`{full_name}` must have the shape of `{name}`"
            rule += "" if count is None else f", behind an axis of length {count}, the directions"
            got = {f"{full_name}.shape": tangent.shape, f"{name}.shape": arrays[name].shape}
            raise ArgumentValueError(function, rule, got)
    return checked


def refuse_chunks(call: PreparedCall) -> None:
    """Refuse arrays in chunks."""
    if call.grid.library.chunks is None:
        return
    rule = "arrays in chunks support gradients, but no derivatives along directions"
    hint = "Compute the arrays first, or call it for blocks of queries."
    raise ArgumentTypeError(call.grid.function, rule, {"query": f"an array of {call.grid.library.name}"}, hint)


def accessible(call: PreparedCall, arrays: Iterable[Array]) -> PreparedCall:
    """Return the call, computed as more arrays allow: they may be traced, or record operations."""
    grid, access = call.grid, access_of([*call.arrays.values(), *arrays])
    if grid.is_traced or not (access.is_traced or (grid.is_writeable and not access.is_writeable)):
        return call
    access = TRACED if access.is_traced else grid.access._replace(is_writeable=False)
    return call._replace(grid=replace(grid, access=access), derived={})


def bind_tangents(call: PreparedCall, options: CallOptions, tangents: Mapping[str, Array]) -> Tangents:
    """Bind checked tangents of a call with these `options` to the grid of its scores."""
    inputs = call.heads_first({name: tangents[name] for name in call.arrays if name in tangents})
    biases = tuple(_changed_biases(options, tangents))
    of_options = call.options._replace(
        masks=(), biases=biases, scale=tangents.get("scale"), softcap=None, sinks=tangents.get("sinks")
    )
    key, value = (ArraySource(inputs[name]) if name in inputs else None for name in ("key", "value"))
    return Tangents(inputs.get("query"), key, value, of_options.bind(call.grid, call.sizes.width))


def _changed_biases(options: CallOptions, tangents: Mapping[str, Array]) -> Iterator[Bias]:
    """Yield the biases of the tangents of their arrays; those of which no array changes add nothing."""
    for argument in ("attn_mask", "bias"):
        if argument in tangents:
            yield ArrayBias(tangents[argument], argument)
    if isinstance(options.bias, Bias):
        for name, part, argument in named_arrays("bias", options.bias):
            if name in tangents:
                changes: dict[str, Any] = {argument: tangents[name]}
                yield cast(Bias, replace(part, **changes))
