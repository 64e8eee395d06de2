"""What quantised caches refuse, by a message that names function, argument, rule and what came."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from sdpa_xp import KVCache, PagedKVCache
from sdpa_xp.positional import Rotary

F = np.float32
EVEN = np.ones((2, 2, 3, 8), F)
ODD = np.ones((2, 2, 3, 5), F)
POOL = {"key_blocks": EVEN, "value_blocks": EVEN, "block_table": [[0]]}


STORED = KVCache(EVEN, EVEN).quantised("int8", per="channel").stored


def restored(**change: Any) -> Any:
    stored = {name: array for name, array in (STORED | change).items() if array is not None}
    return KVCache.from_stored(stored)


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: KVCache(EVEN, EVEN).quantised("int16"), "KVCache.quantised: `dtype` must be 'int8' or 'int4'; got dtype='int16'"),
        (lambda: KVCache(EVEN, EVEN).quantised(np.int8), "KVCache.quantised: `dtype` must be 'int8' or 'int4'; got dtype=<class"),
        (lambda: KVCache(EVEN, EVEN).quantised("int8", per="group"), "KVCache.quantised: `per` must be 'token' or 'channel'; got per='group'"),
        (lambda: KVCache(ODD, EVEN).quantised("int4"), r"KVCache.quantised: `cache.key` must have an even width \(axis -1\) for int4.*; got cache.key.shape=\(2, 2, 3, 5\)"),
        (lambda: KVCache(EVEN, ODD).quantised("int4"), r"KVCache.quantised: `cache.value` must have an even width .*\(2, 2, 3, 5\)"),
        (lambda: KVCache(EVEN, EVEN).quantised("int8", pre="token"), "KVCache.quantised: there is no argument `pre`; got pre='token'. Write per=... instead."),
        (lambda: PagedKVCache(**POOL, lengths=[2]).quantised(bits=4), "PagedKVCache.quantised: there is no argument `bits`"),
        (lambda: KVCache(EVEN, EVEN).quantised("int8").quantised("int4"), "KVCache.quantised: the cache must not be quantised already; got cache=int8 per token"),
        (lambda: KVCache(EVEN[:, :, :0], EVEN[:, :, :0]).quantised("int8", per="channel"), r"KVCache.quantised: the cache must have tokens, on which the magnitudes of the channels are measured; got cache.key.shape=\(2, 2, 0, 8\).*per='token'"),
        (lambda: KVCache(EVEN, EVEN).quantised("int8").append(EVEN.astype(float), EVEN.astype(float)), r"KVCache.append: `key` and `cache.key` must have one dtype; got key.dtype=float64, cache.key.dtype=float32"),
        (lambda: KVCache(EVEN, EVEN).quantised("int4").append(ODD, EVEN), r"KVCache.append: `key` must have the shape of the cache.*; got key.shape=\(2, 2, 3, 5\), cache.key.shape=\(2, 2, 3, 8\)"),
        (lambda: KVCache(EVEN, EVEN).quantised("int4").attend(ODD), r"KVCache.attend: `query` and `key` must agree on axis -1 \(E\); got query.shape=\(2, 2, 3, 5\), key.shape=\(2, 2, 3, 8\)"),
        (lambda: KVCache(EVEN, EVEN).quantised("int4").attend(EVEN.astype(float)), "KVCache.attend: `query` and `cache.key` must have one dtype; got query.dtype=float64, cache.key.dtype=float32"),
        (lambda: KVCache(EVEN, EVEN).quantised("int4").attend(EVEN[:, :, [0] * 4]), "KVCache.attend: `query` must have at most as many tokens"),
        (lambda: PagedKVCache(**POOL, lengths=[2]).quantised("bits"), "PagedKVCache.quantised: `dtype` must be 'int8' or 'int4'; got dtype='bits'"),
        (lambda: PagedKVCache(**POOL, lengths=[0]).quantised("int8", per="channel"), "PagedKVCache.quantised: the cache must have tokens"),
        (lambda: PagedKVCache(**POOL | {"value_blocks": ODD}, lengths=[2]).quantised("int4"), "PagedKVCache.quantised: `cache.value_blocks` must have an even width"),
        (lambda: PagedKVCache(**POOL, lengths=[2]).quantised("int8").quantised("int8"), "PagedKVCache.quantised: the cache must not be quantised already"),
        (lambda: PagedKVCache(**POOL, lengths=[2]).with_table([[0]], [4]), r"PagedKVCache.with_table: `block_table\[0\]` must have a block for each 3 tokens"),
        (lambda: PagedKVCache(**POOL, lengths=[2]).quantised("int8").attend(EVEN[:1].astype(float)), "PagedKVCache.attend: `query` and `cache.key_blocks` must have one dtype"),
        (lambda: restored(key_scale=None), "KVCache.from_stored: `stored` must have the key 'key_scale'; got keys=key, value, value_scale, key_channels"),
        (lambda: KVCache.from_stored([*STORED]), "KVCache.from_stored: `stored` must be a mapping with keys among key, value.*; got stored=.'key', 'value'"),
        (lambda: KVCache.from_stored(None), "KVCache.from_stored: `stored` must be a mapping with keys among key, value.*; got stored=None"),
        (lambda: restored(query=EVEN), "KVCache.from_stored: `stored` must have keys among key, value, key_scale, value_scale, key_channels; got key='query'"),
        (lambda: restored(key=EVEN), "KVCache.from_stored: the codes of a quantised cache must be int8, or uint8 with two of them in a byte; got key.dtype=float32, value.dtype=int8"),
        (lambda: restored(value_scale=EVEN.astype(float)), "KVCache.from_stored: `key_scale` and `value_scale` must have one dtype"),
        (lambda: restored(value_scale=EVEN), r"KVCache.from_stored: `value_scale` must have the shape of its codes, with 1 for the axis that it is shared along; got value_scale.shape=\(2, 2, 3, 8\), needed=\(2, 2, 3, 1\)"),
        (lambda: restored(key_channels=EVEN), r"KVCache.from_stored: `key_channels` must have the shape of its codes.*needed=\(2, 2, 1, 8\)"),
        (lambda: restored(value=STORED["value"][:, :, :2]), "KVCache.from_stored: `key` and `value` must have the same shape, except for the width"),
        (lambda: KVCache.from_stored(STORED, dtype=np.float64), "KVCache.from_stored: scales must be float64 for keys of float64, and float32 for others; got key_scale.dtype=float32, dtype=float64"),
        (lambda: KVCache.from_stored(STORED, dtype=np.int8), "KVCache.from_stored: scales must be float64 for keys of float64"),
        (lambda: KVCache.from_stored(STORED, rotary=Rotary(10)), "KVCache.from_stored: `key` must have at least 2 axes, and a width"),
        (lambda: KVCache.from_stored(STORED, first_position=1.5), "KVCache.from_stored: `first_position` must be an integer"),
    ],
)  # fmt: skip
def test_refusals(call: Any, words: str) -> None:
    with pytest.raises((TypeError, ValueError), match="^" + words):
        call()
