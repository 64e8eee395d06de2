"""The rule of `sdpa_xp_export.verify` for tests: a result, its float64 reference, and the textbook formula."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import repeat
from typing import TYPE_CHECKING, Any

import numpy as np
from internals import Compared, ExpectedRows, judge_rows

if TYPE_CHECKING:
    from sdpa_xp_export.report import Agreement


def judge(
    result: Any, reference: Any, textbook: Any, dtype: str, largest_terms: float | None = None
) -> Agreement:
    """Compare a result with the reference; `textbook` sets the bound.

    It is relative to `largest_terms`, the largest sum of the sizes of the terms of an element, or else to the
    largest value of the reference.
    """
    assert result.shape == reference.shape, (result.shape, reference.shape)
    terms = None if largest_terms is None else np.asarray(largest_terms)
    (agreement,) = judge_rows([Compared(result, ExpectedRows(reference, textbook, terms=terms))], dtype)
    return agreement


def judge_together(
    runs: Sequence[tuple[Any, Any, Any]], dtype: str, size: float = 1.0, sums: Iterable[int] = repeat(0)
) -> list[Agreement]:
    """Compare several results of one computation, each with its reference, by one bound for all.

    Scores of `size` have rounding errors of `size` times epsilon. `sums` are the numbers of terms of the
    longest sum in each run.
    """
    compared = [
        Compared(result, ExpectedRows(reference, textbook, longest_sum=terms), size)
        for (result, reference, textbook), terms in zip(runs, sums, strict=False)
    ]
    agreements: list[Agreement] = judge_rows(compared, dtype)
    return agreements
