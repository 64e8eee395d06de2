"""Reproducible calls, quantised caches and masks of neighbours, compared with the calls that they replace."""

from __future__ import annotations

from functools import partial

import bars
import beside_one
import numpy as np
from cells import ONE_QUERY, Call
from measuring import Row

from sdpa_xp import KVCache, masks, scaled_dot_product_attention

SIDE, RADIUS = 64, 3
"""The height and the width of an image, and how far a token of it sees."""


def reproducible(cell: str, call: Call, seconds: float) -> list[Row]:
    """Time a call with the same bits in every batch."""
    attend = partial(scaled_dot_product_attention, *call.arrays(), is_causal=call.is_causal)
    runs = {"default": attend, "reproducible": partial(attend, reproducible=True)}
    return beside_one.rows(cell, call.keys, runs, bars.TO_DEFAULT, seconds)


def quantised(seconds: float) -> list[Row]:
    """Time one query of a cache whose tokens are stored as integers."""
    query, key, value = ONE_QUERY.arrays()
    cache = KVCache(key, value)
    caches = {
        "float32": cache,
        **{f"{dtype} per token": cache.quantised(dtype) for dtype in ("int8", "int4")},
        "int8 per channel": cache.quantised("int8", per="channel"),
    }
    runs = {name: partial(cache.attend, query) for name, cache in caches.items()}
    return beside_one.rows("quantised caches", ONE_QUERY.keys, runs, bars.TO_FLOAT32, seconds)


def neighbourhood(seconds: float) -> list[Row]:
    """Time a mask of neighbours in an image, as an array and as a formula."""
    tokens = SIDE * SIDE
    arrays, mask = Call(tokens, tokens).arrays(), masks.neighbourhood((SIDE, SIDE), RADIUS)
    array = np.asarray(masks.to_array(mask, (tokens, tokens)))
    attend = partial(scaled_dot_product_attention, *arrays)
    runs = {
        "a boolean array": partial(attend, attn_mask=array),
        "masks.neighbourhood": partial(attend, attn_mask=mask),
    }
    return beside_one.rows("neighbours", tokens, runs, bars.TO_ARRAY, seconds)
