"""Packed sequences and paged caches, compared with the same sequences as one batch."""

from __future__ import annotations

from collections.abc import Callable

import bars
import beside_one
import numpy as np
from cells import HEADS, WIDTH
from measuring import Row

from sdpa_xp import PagedKVCache, scaled_dot_product_attention, varlen_attention

SEQUENCES, TOKENS = 2000, 16
CACHES, CACHED, BLOCK = 64, 512, 16


def packed(seconds: float) -> list[Row]:
    """Time many short sequences: all of one length, and of 8 to 24 tokens."""
    rng = np.random.default_rng(0)
    random_lengths = rng.integers(8, 25, SEQUENCES)
    runs: dict[str, Callable[[], object]] = {}
    batch = [rng.standard_normal((SEQUENCES, HEADS, TOKENS, WIDTH), np.float32) for _ in range(3)]
    runs["one batch"] = lambda: scaled_dot_product_attention(*batch)
    for name, lengths in (("of one length", np.full(SEQUENCES, TOKENS)), ("of 8 to 24 tokens", random_lengths)):
        starts = [0, *np.cumsum(lengths).tolist()]
        arrays = [rng.standard_normal((starts[-1], HEADS, WIDTH), np.float32) for _ in range(3)]
        runs[name] = lambda arrays=arrays, starts=starts: varlen_attention(*arrays, starts, starts)
    return beside_one.rows("packed sequences", TOKENS, runs, bars.TO_BATCH, seconds)


def paged(seconds: float) -> list[Row]:
    """Time one query for each cache: all of one length, and of 256 to 512 tokens."""
    rng = np.random.default_rng(0)
    query = rng.standard_normal((CACHES, HEADS, 1, WIDTH), np.float32)
    key, value = (rng.standard_normal((CACHES, HEADS, CACHED, WIDTH), np.float32) for _ in range(2))
    blocks = CACHES * CACHED // BLOCK
    pools = [rng.standard_normal((blocks, HEADS, BLOCK, WIDTH), np.float32) for _ in range(2)]
    table = rng.permutation(blocks).reshape(CACHES, -1).tolist()
    random_lengths = rng.integers(CACHED // 2, CACHED + 1, CACHES).tolist()
    runs: dict[str, Callable[[], object]] = {}
    runs["one batch"] = lambda: scaled_dot_product_attention(query, key, value)
    for name, lengths in (("of one length", [CACHED] * CACHES), ("of 256 to 512 tokens", random_lengths)):
        cache = PagedKVCache(*pools, table, lengths)
        runs[name] = lambda cache=cache: cache.attend(query)
    return beside_one.rows("paged caches", CACHED, runs, bars.TO_BATCH, seconds)
