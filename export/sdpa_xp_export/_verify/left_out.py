"""Lengths that no run exceeds, because the scores would be too many: one report line for each."""

from __future__ import annotations

import math
from collections.abc import Sequence

from sdpa_xp_export._call.call import ExportCall
from sdpa_xp_export._call.numbers import constant_names
from sdpa_xp_export._verify.trial_lengths import OF_A_SCORE, Lengths, LengthsOfCall, numbers_within
from sdpa_xp_export._verify.trial_settings import LARGE_BATCH, THOROUGH_NUMBERS, Setting, larger_limit
from sdpa_xp_export.spec import evaluated


def left_out(
    call: ExportCall, blocks: Sequence[int], settings: Sequence[Setting], memory: int | None = None
) -> tuple[str, ...]:
    """Return a line for each number of the call, and each block, that `settings` do not go beyond.

    A number that no lengths of the call can exceed is not listed.
    """
    names = constant_names(call) | {block: f"blocks of {block} queries" for block in blocks}
    chosen = LengthsOfCall(call, THOROUGH_NUMBERS)
    missed: list[tuple[str, Lengths]] = []
    for number in sorted(names):
        lengths = chosen(number + 2, number + 2)
        if _is_missed(call, number + 2, lengths, settings):
            missed.append((names[number], lengths))
    batch = chosen.batch_name
    if batch and max(setting.lengths[batch] for setting in settings) < LARGE_BATCH:
        missed.append((f"a batch of {LARGE_BATCH}", chosen(19, 23, batch=LARGE_BATCH)))
    most = numbers_within(memory, OF_A_SCORE)
    return tuple(f"{name}: {_needs(chosen, lengths, most)}" for name, lengths in missed)


def _is_missed(call: ExportCall, length: int, lengths: Lengths, settings: Sequence[Setting]) -> bool:
    """Return whether `lengths` have at least `length` queries or keys, and no setting has that many."""
    # With a cache, queries are counted from the first key on, so a few queries are enough to exceed a number.
    sides = (call.sizes.keys,) if call.cached else (call.sizes.queries, call.sizes.keys)
    return any(
        evaluated(side, lengths) >= length > max(evaluated(side, setting.lengths) for setting in settings)
        for side in sides
    )


def _needs(chosen: LengthsOfCall, lengths: Lengths, most: int) -> str:
    """Return what a run of these lengths needs, and what has to be passed for one."""
    shape = [evaluated(length, lengths) for length in chosen.call.sizes.scores_shape]
    largest = chosen.largest(lengths)
    count = f"{largest / 1e6:,.0f} million" if largest >= 1e6 else f"{largest:,.0f}"
    kind = "scores" if math.prod(shape) >= largest else "numbers in an input"
    hint = larger_limit(largest, most) if chosen.affords(lengths) else ""
    return f"needs {shape[-2]:,} queries and {shape[-1]:,} keys, {count} {kind}{hint}"
