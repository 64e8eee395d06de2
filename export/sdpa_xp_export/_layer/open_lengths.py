"""Which lengths of the arrays of a call may be open in its graph: names for them, and what fits the names.

The first call of a layer shows lengths, and not which of them may differ from call to call. So the layer is
traced with names for all lengths, and with fewer of them if it does not work with so many.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from typing import TypeVar

from .._dtypes.dtype import FLOATING
from ..spec import SymbolicShape, TensorSpec

PAST = "past"
"""An input with this in its name may have no tokens; `verify_layer` tries such inputs without tokens, too."""
_NOT_IN_NAMES = re.compile(r"\W")
T = TypeVar("T")


def most_open(
    specs: Sequence[tuple[str, TensorSpec]], exported: Callable[[Sequence[SymbolicShape]], T]
) -> tuple[Sequence[SymbolicShape], T]:
    """Return the most open shapes with which a layer can be traced, and what it gave with them."""
    *tried, fixed = _openings(specs)
    for shapes in tried:
        with suppress(Exception):  # it uses a length as a number; if it is another error, it comes again
            return shapes, exported(shapes)
    results: list[tuple[Sequence[SymbolicShape], T]] = [(fixed, exported(fixed))]

    def works(shapes: Sequence[SymbolicShape]) -> bool:
        with suppress(Exception):  # the result with fixed lengths is there already
            results.append((shapes, exported(shapes)))
            return True
        return False

    _open_one_by_one(specs, works)
    return results[-1]


def _openings(specs: Sequence[tuple[str, TensorSpec]]) -> Iterator[list[SymbolicShape]]:
    """Yield shapes with names for lengths, the most open ones first; equal lengths have one name.

    A length of 1 stays, since it may broadcast; so does 0, except in a past. The last shapes have no names.
    """
    yielded: list[list[SymbolicShape]] = []
    for is_fixed in (lambda *_: False, *map(_widths_and, (0, -3, -2)), lambda *_: True):
        shapes = _named_shapes(specs, is_fixed)
        if shapes not in yielded:
            yielded.append(shapes)
            yield shapes


def _open_one_by_one(
    specs: Sequence[tuple[str, TensorSpec]], works: Callable[[list[SymbolicShape]], bool]
) -> None:
    """Call `works` with a name for each length in turn, beside the names for which it returned True."""
    lengths = {length for _, spec in specs for length in spec.shape} - {0, 1}
    names: set[int | str] = set()
    for length in sorted(lengths, key=int):
        names.add(length)
        if not works(_named_shapes(specs, lambda spec, axis: spec.shape[axis] not in names)):
            names.discard(length)


def _named_shapes(
    specs: Sequence[tuple[str, TensorSpec]], is_fixed: Callable[[TensorSpec, int], bool]
) -> list[SymbolicShape]:
    """Return the shapes with a name for each length that may be open, after the first axis that has it."""
    names: dict[int | str, str] = {}

    def named(name: str, spec: TensorSpec, axis: int) -> int | str:
        length = spec.shape[axis]
        if length == 1 or (length == 0 and PAST not in name) or is_fixed(spec, axis - spec.ndim):
            return length
        if length not in names:
            text = f"{_NOT_IN_NAMES.sub('_', name)}_{axis}"
            text = text if text.isidentifier() else f"length_{text}"
            others = {*names.values()}  # the arrays of a list have one name
            names[length] = text if text not in others else f"{text}_{len(names)}"
        return names[length]

    return [tuple(named(name, spec, axis) for axis in range(spec.ndim)) for name, spec in specs]


def lengths_of_pasts(names: Sequence[str], shapes: Sequence[SymbolicShape]) -> frozenset[str]:
    """Return the names of lengths that stand only in inputs with a past, and so may be 0."""
    pasts, others = set[int | str](), set[int | str]()
    for name, shape in zip(names, shapes, strict=True):
        (pasts if PAST in name else others).update(shape)
    return frozenset(length for length in pasts - others if isinstance(length, str))


def _widths_and(heads: int) -> Callable[[TensorSpec, int], bool]:
    """Return a function that fixes widths, and the heads, which stand at that axis of arrays with four axes."""
    return lambda spec, axis: (
        (axis == -1 and spec.ndim > 1 and spec.dtype in FLOATING) or (axis == heads and spec.ndim > 3)
    )


def fits(
    shapes: Sequence[SymbolicShape], sizes: Sequence[tuple[int, ...]], may_be_empty: frozenset[str]
) -> bool:
    """Return whether arrays of these shapes may be passed to a graph whose inputs have `shapes`."""
    lengths: dict[str, int] = {}
    for shape, numbers in zip(shapes, sizes, strict=True):
        if len(shape) != len(numbers):
            return False
        for name, length in zip(shape, numbers, strict=True):
            if isinstance(name, int):
                if name != length:
                    return False
            elif lengths.setdefault(name, length) != length or (length == 0 and name not in may_be_empty):
                return False
    return True
