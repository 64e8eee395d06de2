"""The rule of `sdpa_xp_export.verify` for tests: a result, its float64 reference, and the textbook formula."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import repeat
from typing import Any

import numpy as np
from internals import Compared, ExpectedRows, judge_rows


def judge(result: Any, reference: Any, textbook: Any, dtype: str, largest_terms: float | None = None) -> Any:
    """Compare a result with the reference; `textbook` sets the bound.

    It is relative to `largest_terms`, the largest sum of the sizes of the terms of an element, or else to the
    largest value of the reference.
    """
    terms = None if largest_terms is None else np.asarray(largest_terms)
    return judge_rows([Compared(result, ExpectedRows(reference, textbook, terms=terms))], dtype)[0]


def judge_together(
    runs: Sequence[tuple[Any, Any, Any]], dtype: str, size: float = 1.0, sums: Iterable[int] = repeat(0)
) -> Any:
    """Compare several results of one computation, each with its reference, by one bound for all.

    Scores of `size` have rounding errors of `size` times epsilon. `sums` are the numbers of terms of the
    longest sum in each run.
    """
    expected = [ExpectedRows(*run[1:], longest_sum=terms) for run, terms in zip(runs, sums, strict=False)]
    return judge_rows([Compared(run[0], rows, size) for run, rows in zip(runs, expected, strict=True)], dtype)
