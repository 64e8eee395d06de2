"""The tangents of a call: checked against the arrays that they belong to, and bound to the grid."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, cast

from .._checks.arrays import check_known, check_one_device, check_one_dtype, check_one_library
from .._checks.keywords import check_keys
from .._libraries import FLOATING, access_of, dtype_name, library_of, namespace_of
from .._libraries.base import Library
from .._libraries.jet_library import kind_of_jets
from .._libraries.jets import Jet
from .._libraries.protocols import Array
from .._tiles import is_masked
from ..errors import ArgumentTypeError, ArgumentValueError
from . import PreparedCall
from .options import floating_arrays

MAY_BE_ARRAYS = ("attn_mask", "bias", "scale", "sinks")
"""The options of a call that have tangents where they are floating arrays."""


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
    hints = {name: f"Pass `{name}` to the call as a floating array." for name in MAY_BE_ARRAYS}
    hints |= {name.partition(".")[0]: f"Write {name!r} instead." for name in arrays if "." in name}
    check_keys(function, argument, tangents, [*arrays], others=hints)
    return {
        name: check_tangent(function, f'{argument}["{name}"]', value, name, arrays[name], count)
        for name, value in cast(Mapping[str, Any], tangents).items()
    }


def check_tangent(
    function: str, full_name: str, value: object, name: str, array: Array, count: int | None = None
) -> Array:
    """Check that a tangent, which messages call `full_name`, is like the array `name`, and return it."""
    tangent = check_alike(function, full_name, value, name, array)
    if tangent.shape != (array.shape if count is None else (count, *array.shape)):
        rule = f"`{full_name}` must have the shape of `{name}`"
        rule += "" if count is None else f", behind an axis of length {count}, the directions"
        got = {f"{full_name}.shape": tangent.shape, f"{name}.shape": array.shape}
        raise ArgumentValueError(function, rule, got)
    return tangent


def check_alike(function: str, full_name: str, value: object, name: str, array: Array) -> Array:
    """Check that a derivative is like the array `name` in all but its shape, and return it."""
    _, named = check_one_library(function, {name: array, full_name: value})
    check_one_dtype(function, named)
    check_one_device(function, named)
    check_known(function, full_name, named[full_name].shape)
    return named[full_name]


def beside(array: Any, *derivatives: object) -> Any:
    """Return an array, as one with derivatives if some of these dicts of arrays hold such arrays alone."""
    for moved in derivatives:
        for other in moved.values() if isinstance(moved, Mapping) else ():
            adopted = library_of(other).adopted(array)
            array = array if adopted is None else adopted
    return array


def refuse_chunks(function: str, library: Library, name: str = "query") -> None:
    """Refuse arrays in chunks."""
    if library.chunks is None:
        return
    rule = "arrays in chunks support gradients, but no derivatives along directions"
    hint = "Compute the arrays first, or call it for blocks of queries."
    raise ArgumentTypeError(function, rule, {name: f"an array of {library.name}"}, hint)


def lifted(
    call: PreparedCall,
    directions: Sequence[Mapping[str, Array]],
    bends: Mapping[str, Array] | None = None,
    *,
    guards_all: bool = False,
) -> PreparedCall:
    """Return the call of jets: each array with its derivatives along the directions, and its bend.

    Derivatives have passed `check_tangents`. With `guards_all` no device is waited for to search the inputs.
    """
    moved = [
        {**arrays, **call.heads_first({name: arrays[name] for name in call.arrays if name in arrays})}
        for arrays in (*directions, *([] if bends is None else [bends]))
    ]
    kind = kind_of_jets(call.arrays["query"], len(directions), has_bend=bends is not None)

    def lift(name: str, array: Array) -> Any:
        return Jet(kind, (array, *[derivative.get(name) for derivative in moved]))

    arrays = {name: lift(name, array) for name, array in call.arrays.items()}
    names = iter(floating_arrays({}, call.call_options))
    of_options = [
        lift(next(names), array) if dtype_name(array.dtype) in FLOATING else array
        for array in call.options.arrays()
    ]
    library, xp = library_of(arrays["query"]), namespace_of(arrays["query"])
    grid = replace(call.grid, library=library, xp=xp, access=access_of([*arrays.values(), *of_options]))
    # Functions of biases are asked about in each tile, and a device is waited for after the last one.
    asking = grid.asking()
    finite_inputs = frozenset[str]() if guards_all and asking.questions is not None else None
    jets = call.changed(grid=grid, arrays=arrays, options=call.options.with_arrays(of_options))
    # A device is not asked about masks a second time, and not about derivatives, which the result shows.
    bound = jets.options._replace(masks=()).bind(grid, call.sizes.width)
    if bound.sinks is not None:  # one of -inf is none, however it changes
        bound = bound._replace(sinks=xp.where(is_masked(bound.sinks), -math.inf, bound.sinks))
    bound = bound._replace(mask=call.bound_options().mask, finite_inputs=finite_inputs)
    return jets._replace(grid=asking).with_bound_options(bound)
