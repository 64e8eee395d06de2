"""Attention tile by tile: memory grows with L + S, never with L * S.

A plan cuts the call into tasks. Each task is a range of queries, and reads the keys one tile after the other
with the online softmax. A plan with one tile computes the textbook formula.
"""

from __future__ import annotations

from sdpa_xp._core import threads
from sdpa_xp._core.key_value_source import KeyValueSource
from sdpa_xp._core.online_softmax import attend_rows, attend_with_maximum
from sdpa_xp._core.products import key_leading_slice
from sdpa_xp._core.score_bound import ScoreNormBound
from sdpa_xp._core.scores import Scores
from sdpa_xp._libraries import astype_if_needed, quiet
from sdpa_xp._libraries.protocols import Array, Dtype, Namespace
from sdpa_xp._tiles.plan import Plan, Task
from sdpa_xp._tiles.tile import RowBlock


def attend(
    scores: Scores,
    value: KeyValueSource,
    plan: Plan,
    dtype: Dtype,
    *,
    with_lse: bool = True,
    in_parts: bool = False,
) -> tuple[Array, Array | None]:
    """Return output (..., Hq, L, Ev) in `dtype`, and log-sum-exp (..., Hq, L) in the accumulation dtype.

    With `in_parts` the log-sum-exp is (2, ..., Hq, L): the second part is what the rounding of the first lost.
    """
    xp, grid, bound = scores.xp, scores.grid, ScoreNormBound({})

    def compute(task: Task) -> tuple[Array, Array | None]:
        values = value
        if task.leading is not None:
            values = value.slice_leading(key_leading_slice(task.leading, scores.group))
        result = attend_rows(scores.slice_leading(task.leading), values, plan, task.rows, bound)
        lse = (result.lse_parts(xp) if in_parts else result.lse(xp)) if with_lse else None
        return astype_if_needed(xp, result.output, dtype), lse

    if plan.is_one_task:
        return compute(Task(None, range(plan.queries)))
    if plan.is_loop and not in_parts:
        return _attend_in_a_loop(scores, value, plan, dtype, with_lse=with_lse)
    tasks = plan.tasks()
    # With autograd, on devices and in lazy libraries arrays are not written to. There a task has all heads (the
    # plan has no leading slices), so that results are joined along the rows.
    if not grid.is_writeable:
        outputs, lses = zip(*[compute(task) for task in reversed(tasks)], strict=True)
        return xp.concat(outputs, axis=-2), xp.concat(lses, axis=-1) if with_lse else None
    shape = grid.shape[:-1]
    output = xp.zeros((*shape, value.width), dtype=dtype, device=grid.device)
    lse_shape = (2, *shape) if in_parts else shape
    lse = xp.zeros(lse_shape, dtype=grid.dtype, device=grid.device) if with_lse else None

    def write(task: Task) -> None:
        ranges = *(task.leading or map(range, grid.leading_shape)), task.rows
        index = tuple(slice(r.start, r.stop) for r in ranges)
        with quiet(scores.query):  # here too: a library may keep this setting for each thread
            output[index], task_lse = compute(task)
        if lse is not None and task_lse is not None:
            lse[(..., *index)] = task_lse

    threads.run(write, tasks, plan.threads)
    return output, lse


def _attend_in_a_loop(
    scores: Scores, value: KeyValueSource, plan: Plan, dtype: Dtype, *, with_lse: bool
) -> tuple[Array, Array | None]:
    """Return what `attend` returns, computed in a loop over blocks of queries that the compiler keeps.

    All blocks have the same length, as the compiler needs it: the last one begins early enough to be full.
    """
    xp, grid, all_rows = scores.xp, scores.grid, range(plan.queries)

    def compute(start: Array) -> tuple[Array, Array | None]:
        block = scores.in_block(RowBlock(start, plan.rows))
        result = attend_with_maximum(block, block.scaled_query(all_rows), value, plan, all_rows, "columns")
        lse = xp.expand_dims(result.lse(xp), axis=-1) if with_lse else None
        return astype_if_needed(xp, result.output, dtype), lse

    numbers = grid.arange(0, -(-plan.queries // plan.rows))
    starts = xp.clip(numbers * plan.rows, 0, plan.queries - plan.rows)
    outputs, lses = grid.library.rolled(compute, starts)
    lse = None if lses is None else _join_blocks(xp, lses, plan.queries)[..., 0]
    return _join_blocks(xp, outputs, plan.queries), lse


def _join_blocks(xp: Namespace, blocks: Array, queries: int) -> Array:
    """Return (blocks, ..., rows, width) as (..., L, width), without the rows that the last block repeats."""
    count, *leading, rows, width = blocks.shape
    axes = (*range(1, blocks.ndim - 2), 0, blocks.ndim - 2, blocks.ndim - 1)
    joined = xp.reshape(xp.permute_dims(blocks, axes), (*leading, count * rows, width))
    repeated, start_of_last = count * rows - queries, (count - 1) * rows
    if not repeated:
        return joined
    return xp.concat([joined[..., :start_of_last, :], joined[..., start_of_last + repeated :, :]], axis=-2)
