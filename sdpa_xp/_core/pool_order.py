"""Attention over the blocks of a paged cache in the order of their pool, which gathers no copies of them.

Each block is multiplied where it lies, with the query of the sequence that it belongs to. A product with a
matrix of zeros and ones then adds up what the blocks of a sequence gave. The queries must attend to all tokens.

The softmax needs no second pass for its maximum: m is the score of the last token of a sequence. So one weight
is 1, and the sum keeps its digits as with the true maximum. The result is not finite if exp overflows because a
score is much larger than m, or if there is a NaN in the pool, be it where no token is. Then the caller computes
the call in another way.
"""

from __future__ import annotations

from typing import NamedTuple, cast

from sdpa_xp._core import threads
from sdpa_xp._core.nonfinite import is_finite
from sdpa_xp._core.products import matmul_grouped
from sdpa_xp._core.scores import Scores
from sdpa_xp._core.tile_buffers import CallBuffers, call_buffers
from sdpa_xp._libraries import computing
from sdpa_xp._libraries.dtypes import astype_if_needed
from sdpa_xp._libraries.protocols import Array
from sdpa_xp._tiles.pool_plan import BlockRun, PoolPlan
from sdpa_xp._tiles.score_grid import rows_at


class _Sums(NamedTuple):
    """What a part of the pool adds to each sequence."""

    l: Array
    """(N, Hq, L, 1)."""
    o: Array
    """(N, Hq, L, Ev)."""


def attend_in_pool_order(
    scores: Scores, key_blocks: Array, value_blocks: Array, plan: PoolPlan
) -> tuple[Array, Array] | None:
    """Return output (N, Hq, L, Ev) and log-sum-exp (N, Hq, L, 1) of all sequences; None if they are not finite.

    `scores` has the query (N, Hq, L, E); its keys are not read. The blocks are (P, H, size, E or Ev).
    """
    xp, grid = scores.xp, scores.grid
    query = scores.scaled_query(range(grid.queries))
    blocks, places = (list(numbers) for numbers in zip(*plan.last_tokens, strict=True))
    last_keys = xp.expand_dims(key_blocks[blocks, :, places, :], axis=-2)
    m = _products(scores, query, last_keys)
    sums = [_zeros(scores, value_blocks.shape[-1]) for _ in plan.parts]

    def compute(part: int) -> None:
        with computing(query):  # here too: a library may keep this setting for each thread
            for run in plan.parts[part]:
                _add_run(with_buffers, query, key_blocks, value_blocks, run, m, sums[part])

    with call_buffers(grid) as buffers:
        with_buffers = scores._replace(buffers=buffers)
        threads.run(compute, range(len(plan.parts)), None if plan.takes_threads else 1)
    l, o = sums[0]
    for other in sums[1:]:
        l += other.l
        o += other.o
    if scores.options.sinks is not None:
        l += xp.exp(scores.options.sinks - m)
    o /= l
    return (o, m + xp.log(l)) if is_finite(xp, o, l) else None


def _zeros(scores: Scores, width: int) -> _Sums:
    grid = scores.grid
    shape, options = (*grid.leading_shape, grid.queries), {"dtype": grid.dtype, "device": grid.device}
    return _Sums(scores.xp.zeros((*shape, 1), **options), scores.xp.zeros((*shape, width), **options))


def _add_run(
    scores: Scores,
    query: Array,
    key_blocks: Array,
    value_blocks: Array,
    run: BlockRun,
    m: Array,
    sums: _Sums,
) -> None:
    """Add the blocks of a run to their sequences."""
    xp, grid, buffers = scores.xp, scores.grid, cast(CallBuffers, scores.buffers)
    options = {"dtype": grid.dtype, "device": grid.device}
    blocks, sequences = slice(run.blocks.start, run.blocks.stop), sorted({*run.owners})
    p = _products(scores, rows_at(query, run.owners), key_blocks[blocks, ...])
    p -= rows_at(m, run.owners)
    p = buffers.functions.exp(p, out=p)
    for number, length in run.lengths:
        p[number, :, :, length:] = 0.0
    l = p @ xp.full((p.shape[-1], 1), 1.0, **options)  # a product with ones is faster than a sum of rows
    values = astype_if_needed(xp, value_blocks[blocks, ...], grid.dtype)
    o = matmul_grouped(xp, p, values, buffers.product)
    if run.unused:  # what lies there may be NaN, which no product with zero removes
        l[run.unused, ...] = o[run.unused, ...] = 0.0
    numbers = [xp.asarray(numbers, dtype=xp.int32, device=grid.device) for numbers in (sequences, run.owners)]
    is_owner = xp.astype(cast(Array, xp.expand_dims(numbers[0], axis=-1) == numbers[1]), grid.dtype)
    index = slice(None) if len(sequences) == query.shape[0] else sequences
    for total, of_blocks in ((sums.l, l), (sums.o, o)):
        added = is_owner @ xp.reshape(of_blocks, (len(run.owners), -1))
        total[index, ...] += xp.reshape(added, (len(sequences), *total.shape[1:]))


def _products(scores: Scores, query: Array, keys: Array) -> Array:
    """Return the soft-capped scores of n queries with n blocks of keys, (n, Hq, L, size)."""
    return scores.products(
        query, scores.xp.matrix_transpose(astype_if_needed(scores.xp, keys, scores.grid.dtype))
    )
