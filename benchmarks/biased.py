"""Calls with a bias, compared with the same call without one."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import bars
import beside_one
import numpy as np
from cells import HEADS, Call
from measuring import Row

from sdpa_xp import biases, scaled_dot_product_attention


def rows(length: int, seconds: float) -> list[Row]:
    """Time ALiBi and the relative biases of T5."""
    query, key, value = Call(length, length).arrays()
    table = np.random.default_rng(0).standard_normal((32, HEADS), np.float32)
    attend = partial(scaled_dot_product_attention, query, key, value)
    runs: dict[str, Callable[[], object]] = {
        "no bias": attend,
        "biases.alibi": partial(attend, bias=biases.alibi(HEADS)),
        "biases.relative": partial(attend, bias=biases.relative(table)),
    }
    return beside_one.rows("biases", length, runs, bars.TO_NO_BIAS, seconds)
