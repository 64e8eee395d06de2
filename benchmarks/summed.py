"""Statistics of the weights, compared with attention of the same arrays.

No peer has them on the CPU: FlexAttention of torch 2.13 returns its largest scores on a GPU alone.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import bars
import beside_one
from cells import Call
from measuring import Row

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
    return beside_one.rows("statistics", length, runs, bars.TO_ATTENTION, seconds)
