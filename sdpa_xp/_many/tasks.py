"""What the tasks of a chunked call compute: each function gets blocks of arrays, and can be sent anywhere."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import reduce
from operator import add
from typing import Any, NamedTuple

from .._libraries import access_of, astype_if_needed, computing, library_of, namespace_of
from .._libraries.protocols import Array, Dtype, Namespace, Shape
from .._programs import BoundOptions, Scores
from .._programs.gradients import GradientProgram, gradient_targets, gradients
from .._programs.weights import full_matrix
from .._run import threads
from .._tiles import ArraySource
from .._tiles.grid import ScoreGrid
from .._tiles.plan import Plan, plan_full_rows
from . import windows
from .blocks import Block, put_blocks

OF_ANY_LIBRARY = ("function", "batch", "heads", "queries", "keys", "position", "part")


class ChunkedCall(NamedTuple):
    """What all tasks of a call share. It holds no array."""

    grid: Mapping[str, Any]
    """The fields of its grid that do not depend on a library, `OF_ANY_LIBRARY`: a chunk shows the others."""
    dtype: str
    """The accumulation dtype."""
    options: BoundOptions
    """With slots instead of arrays, and without the sinks."""


def partial_state(
    call: ChunkedCall, block: Block, query: Array, key: Array, value: Array, *arrays: Array
) -> windows.State:
    """Return attention of a chunk of queries over one chunk of keys."""
    with _task("attention-partial", call, block, query, key, arrays) as scores:
        return windows.window_state(scores, value)


def empty_state(call: ChunkedCall, block: Block, width: int, query: Array) -> windows.State:
    """Return the state of a chunk of queries that attends to no key."""
    return windows.state_without_keys(_whole_grid(call, query), block.shape[:-1], width)


def merged(states: Sequence[windows.State], sinks: Array | None = None) -> windows.State:
    """Merge states of the same queries over different keys, and the sinks, (..., Hq, 1, 1)."""
    output, *_ = states[0]
    with computing(output):
        return windows.merge_windows(states, None if sinks is None else to_library_of(output, sinks))


def output_of(dtype: str, states: Sequence[windows.State], sinks: Array | None = None) -> Array:
    """Merge states, and return the output in the dtype of the call."""
    output, *_ = merged(states, sinks)
    with computing(output):
        xp = namespace_of(output)
        return astype_if_needed(xp, output, _dtype(xp, dtype))


def lse_of(states: Sequence[windows.State], sinks: Array | None = None) -> Array:
    """Merge states, and return the log-sum-exp."""
    _, large, small = merged(states, sinks)
    with computing(large):
        return large + small


def lse_parts_of(states: Sequence[windows.State], sinks: Array | None = None) -> Array:
    """Merge states, and return two numbers that add up to the log-sum-exp, (..., Hq, L, 2)."""
    _, *parts = merged(states, sinks)
    with computing(parts[0]):
        return namespace_of(parts[0]).stack(parts, axis=-1)


def partial_gradients(
    call: ChunkedCall, block: Block, names: Sequence[str], has_sinks: bool, *arrays: Array
) -> Mapping[str, Array]:
    """Return what one chunk of queries and one of keys contribute to each gradient.

    The first of `arrays` are named below; with `has_sinks`, the last are the sinks.
    """
    query, key, value, cotangent, output, lse, *others = arrays
    sinks = others.pop() if has_sinks else None
    with _task("attention-gradient", call, block, query, key, others) as scores:
        if sinks is not None:
            options = scores.options._replace(sinks=to_library_of(query, sinks))
            scores = scores._replace(options=options)
        values = ArraySource(value)
        targets, bias_names = gradient_targets(scores, key, value, names)
        forward = GradientProgram(
            scores, windows.window_plan(scores, value), targets, values, output, lse, bias_names
        )
        return gradients(forward, cotangent)


def total_of(name: str, contributions: Sequence[Mapping[str, Array]]) -> Array:
    """Return the sum of what tasks contribute to the gradient `name`."""
    return total([contribution[name] for contribution in contributions])


def total(arrays: Sequence[Array]) -> Array:
    with computing(arrays[0]):
        return reduce(add, arrays)


def block_scores(
    call: ChunkedCall, block: Block, dtype: str, query: Array, key: Array, *arrays: Array
) -> Array:
    """Return the scores of a block, (..., Hq, rows, columns)."""
    with _task("attention-scores", call, block, query, key, arrays) as scores:
        return full_matrix("scores", scores, _plan_of_rows(scores), _dtype(scores.xp, dtype))


def row_sums(call: ChunkedCall, block: Block, query: Array, key: Array, *arrays: Array) -> windows.State:
    """Return what normalises the weights of a chunk of queries: its attention to values without a column."""
    with _task("attention-sums", call, block, query, key, arrays) as scores:
        return windows.window_state(scores, key[..., :0])


def block_weights(
    call: ChunkedCall, block: Block, dtype: str, query: Array, key: Array, lse: Array, *arrays: Array
) -> Array:
    """Return the weights of a block, (..., Hq, rows, columns), from the log-sum-exp over all keys in parts."""
    with _task("attention-weights", call, block, query, key, arrays) as scores:
        return full_matrix("weights", scores, _plan_of_rows(scores), _dtype(scores.xp, dtype), lse)


def filled(shape: Shape, dtype: str, value: float, query: Array) -> Array:
    """Return a block of one value, as an array of the library of the query."""
    library = library_of(query)
    xp = library.namespace(query)
    return xp.full(shape, value, dtype=_dtype(xp, dtype), device=library.device(query))


def to_library_of(array: Array, block: Array) -> Array:
    """Return a block as an array of the library and on the device of `array`."""
    library = library_of(array)  # known in the task: a lazy array does not say what its chunks are
    if library_of(block) is library:
        return block
    # Ids or slopes that were NumPy's beside chunks of another library, which may convert to another dtype.
    xp = library.namespace(array)
    dtype = getattr(xp, str(block.dtype))
    return xp.asarray(block, dtype=dtype, device=library.device(array))


@contextmanager
def _task(
    name: str, call: ChunkedCall, block: Block, query: Array, key: Array, arrays: Sequence[Array]
) -> Iterator[Scores]:
    """Yield the scores of a block, and compute with them in one thread. An error gets the block as a note."""
    try:
        with computing(query):
            window = windows.Window(_whole_grid(call, query), *block)
            options = put_blocks(call.options, [to_library_of(query, array) for array in arrays])
            scores = windows.window_scores(window, query, key, options)
            # The scheduler runs as many tasks at a time as it has cores, and each would start as many threads.
            with threads.one_blas_thread(scores.grid.access.uses_our_threads):
                yield scores
    except Exception as error:  # each error goes on; a caller's function may raise any
        error.add_note(f"{name} of {block}")
        raise


def _whole_grid(call: ChunkedCall, query: Array) -> ScoreGrid:
    library = library_of(query)
    xp = library.namespace(query)
    return ScoreGrid(
        library=library,
        xp=xp,
        device=library.device(query),
        dtype=getattr(xp, call.dtype),  # by name: only a chunk shows the library that computes
        input_dtype=query.dtype,
        access=access_of([query]),
        **call.grid,
    )


def _dtype(xp: Namespace, name: str) -> Dtype:
    """Return the dtype of a name; a name is the dtype that the standard lacks, as far as a library knows it."""
    return getattr(xp, name, name)


def _plan_of_rows(scores: Scores) -> Plan:
    return plan_full_rows(scores.grid, in_task=True)
