"""A call of chunked arrays, cut into pieces: the tasks, and the inputs of each task."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from .._call import PreparedCall
from .._libraries import dtype_name, library_of, numpy_array
from .._libraries.dask import DaskGraphs
from .._libraries.protocols import READ_ONLY, Array, Chunks, Key
from .._libraries.trees import with_arrays
from .._programs import BoundOptions, Scores
from .._programs.dropout import Dropout
from .._programs.gradients import PROBE_SIDE
from .._tiles import ArraySource, Tile
from .._tiles.grid import CallGrid, ScoreGrid
from .._tiles.modifier import ScoreModifier
from ..biases.algebra import Bias, Sum, Term
from ..biases.custom import FunctionBias
from ..masks.algebra import Combined, Mask, Pattern
from ..masks.custom import FunctionMask
from .blocks import KEY_AXES, QUERY_AXES, AlignedArray, Place, aligned_axes, cut, take_arrays
from .tasks import OF_ANY_LIBRARY, ChunkedCall


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class BoundMask(Mask):
    """A mask that has been bound already, to the grid of lazy arrays, because it holds some."""

    pattern: Pattern

    def bind(self, _grid: CallGrid) -> Pattern:
        return self.pattern


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class BoundBias(Bias):
    """A bias that has been bound already."""

    terms: tuple[Term, ...]

    def bind(self, _grid: CallGrid) -> tuple[Term, ...]:
        return self.terms


class CutCall:
    """A call whose scores are cut where its arrays are cut."""

    def __init__(self, call: PreparedCall, library: DaskGraphs, dropout: Dropout | None) -> None:
        self.library, self.grid = library, readable_grid(call)
        arrays = dict(call.arrays)
        self.like = arrays["query"]
        arrays.setdefault("value", arrays["key"])  # the weights need no values
        self.width = arrays["value"].shape[-1]
        self.pieces = cut(self.grid.shape, *(library.chunks_of(x) for x in arrays.values()))
        self.bound = _bind_readable(call, library, self.grid)
        if dropout is not None:  # the words of the seed go into the tasks, if they are known
            dropout = Dropout(dropout.p, call.grid.library.known_values(dropout.seed))
        options, option_arrays = take_arrays(self.bound._replace(sinks=None, dropout=dropout))
        self.query, self.key, self.value = (
            self._align(AlignedArray(arrays[name], aligned_axes(axes, arrays[name].ndim)))
            for name, axes in (("query", QUERY_AXES), ("key", KEY_AXES), ("value", KEY_AXES))
        )
        self.arrays = [self._align(array) for array in option_arrays]
        self.sinks = None  # apart from `arrays`: they join once for each row, not with each block
        if self.bound.sinks is not None:
            self.sinks = self._align(AlignedArray(self.bound.sinks, aligned_axes((), self.bound.sinks.ndim)))
        of_grid = {name: getattr(self.grid, name) for name in OF_ANY_LIBRARY}
        self.shared = ChunkedCall(of_grid, dtype_name(call.grid.dtype), options)

    @property
    def inputs(self) -> list[Array]:
        """All arrays whose chunks the tasks get."""
        aligned = [self.query, self.key, self.value, *self.arrays, *([self.sinks] if self.sinks else [])]
        return [part.array for part in aligned]

    @property
    def output_chunks(self) -> Chunks:
        """The chunks of the output, (..., Hq, L, Ev)."""
        shape = (*self.grid.shape[:-1], self.width)
        return self.pieces.chunks(shape, aligned_axes(QUERY_AXES, len(shape)))

    def readable_scores(self) -> Scores:
        """Return the scores of the whole call with all readable values; they are never computed."""
        return Scores(self.grid, self.query.array, ArraySource(self.key.array), self.bound)

    def rows(self) -> Iterator[Place]:
        """Return the place of each chunk of queries, on the axes (..., Hq, L)."""
        return itertools.product(*(range(len(ranges)) for ranges in self.pieces.ranges[:-1]))

    def blocks_of(self, rows: Place) -> list[Place]:
        """Return the blocks of a chunk of queries in which a pair may attend, as far as the mask can tell."""
        *leading, queries = self.pieces.ranges_at(rows)
        tiles = (Tile(queries, keys, self.grid, tuple(leading)) for keys in self.pieces.ranges[-1])
        # `uniform` builds no array: a long call has thousands of blocks.
        uniform = map(self.bound.mask.uniform, tiles)
        return [(*rows, number) for number, answer in enumerate(uniform) if answer is not False]

    def key_of(self, aligned: AlignedArray, place: Place) -> Key:
        """Return the key of an array's chunk at a place."""
        array, axes = aligned
        return (self.library.name_of(array), *self.pieces.numbers(array.shape, axes, place))

    def keys_of(self, aligned: Sequence[AlignedArray], place: Place) -> tuple[Key, ...]:
        """Return the keys of the chunks of several arrays."""
        return tuple(self.key_of(array, place) for array in aligned)

    def sinks_of(self, rows: Place) -> tuple[Key, ...]:
        """Return the key of the sinks of a chunk of queries, if the call has sinks."""
        return () if self.sinks is None else (self.key_of(self.sinks, (*rows, 0)),)

    def _align(self, aligned: AlignedArray) -> AlignedArray:
        array, axes = aligned
        chunks = self.pieces.chunks(array.shape, axes)
        return AlignedArray(self.library.in_chunks(array, chunks, self.like), axes)


def unsupported_reason(call: PreparedCall) -> str | None:
    """Return why a call of chunked arrays has to be one block, or None."""
    if 0 in call.grid.shape or any(0 in array.shape for array in call.arrays.values()):
        return "an axis has no elements"
    error = _refused_function(call)
    return None if error is None else f"a function of the caller does not take arrays of a chunk: {error}"


def readable_grid(call: PreparedCall) -> ScoreGrid:
    """Return the grid of a call for arrays whose values can be read, so that masks tell what they skip.

    Nothing is computed on it: its arrays of NumPy are not written to, and no thread is started.
    """
    array = numpy_array()
    library = library_of(array)
    return replace(
        call.grid, library=library, xp=library.namespace(array), device=library.device(array), access=READ_ONLY
    )


def _refused_function(call: PreparedCall) -> Exception | None:
    """Return the error of a caller's function that cannot compute with the arrays of a chunk."""
    grid = readable_grid(call)
    leading = tuple(range(min(n, PROBE_SIDE)) for n in grid.leading_shape)
    tile = Tile(range(min(PROBE_SIDE, grid.queries)), range(min(PROBE_SIDE, grid.keys)), grid, leading)
    scores = grid.xp.zeros(tile.shape, dtype=grid.dtype, device=grid.device)
    try:
        for part in _flatten((*call.options.masks, *call.options.biases)):
            if isinstance(part, FunctionMask):
                part.allowed_in(tile)
            elif isinstance(part, FunctionBias):
                part.apply(tile, scores)
    except Exception as error:  # it may raise anything, and then takes the lazy arrays as a whole
        return error
    return None


def _flatten(modifiers: Sequence[ScoreModifier]) -> Iterator[ScoreModifier]:
    for modifier in modifiers:
        yield from _flatten(modifier.parts) if modifier.parts else (modifier,)


def _bind_readable(call: PreparedCall, library: DaskGraphs, grid: ScoreGrid) -> BoundOptions:
    """Bind the options to a readable grid, except for masks and biases that hold arrays of unknown values."""
    known_values = call.grid.library.known_values
    masks, biases = (
        tuple(_bound_if_lazy(call, library, with_arrays(part, known_values)) for part in parts)
        for parts in (call.options.masks, call.options.biases)
    )
    scale = known_values(call.options.scale)
    readable = call.options._replace(masks=masks, biases=biases, scale=scale, sinks=None)
    return readable.bind(grid, call.sizes.width)._replace(sinks=call.bound_options().sinks)


def _bound_if_lazy(call: PreparedCall, library: DaskGraphs, modifier: Any) -> Any:
    """Bind those parts of a mask or a bias that hold arrays of unknown values, to the grid of lazy arrays."""
    if all(library_of(array).chunks is None for _, array in modifier.arrays()):
        return modifier
    if isinstance(modifier, Combined | Sum):  # part by part: parts of known values still say what is skipped
        return type(modifier)(tuple(_bound_if_lazy(call, library, part) for part in modifier.parts))
    bound = with_arrays(modifier, partial(library.as_lazy, like=call.arrays["query"])).bind(call.grid)
    return BoundMask(bound) if isinstance(modifier, Mask) else BoundBias(bound)
