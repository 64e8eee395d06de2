"""Statistics of the weights, compared with attention of the same arrays.

No peer has them on the CPU: FlexAttention of torch 2.13 returns its largest scores on a GPU alone.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import bars
from cells import Call
from contenders import NUMPY
from measuring import Row, Spread, interleaved, ratios

from sdpa_xp import attention_statistics, scaled_dot_product_attention


def rows(length: int, seconds: float) -> list[Row]:
    """Time each statistic."""
    query, key, value = Call(length, length).arrays()
    computed = partial(attention_statistics, query, key)
    runs: dict[str, Callable[[], object]] = {
        "attention": partial(scaled_dot_product_attention, query, key, value),
        "row_max": partial(computed, of="row_max"),
        "row_max and entropy": partial(computed, of=("row_max", "entropy")),
        "key_sums": partial(computed, of="key_sums"),
        "top_keys, 8": partial(computed, of="top_keys", top_k=8),
        "block_sums, 64": partial(computed, of="block_sums", block_size=64),
    }
    for run in runs.values():
        run()
    timings = interleaved(runs, seconds)
    table_rows = []
    for name, times in timings.items():
        numbers = {"milliseconds": Spread.from_numbers(times, 1e3)}
        if name != "attention":
            numbers[bars.TO_ATTENTION] = Spread.from_numbers(ratios(times, timings["attention"]))
        table_rows.append(Row("statistics", length, f"{NUMPY}, {name}", numbers, len(times)))
    return table_rows
