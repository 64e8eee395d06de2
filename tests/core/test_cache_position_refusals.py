"""What caches refuse of positions, and of tokens that are dropped or taken, by messages that say what came."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest
from calls import ones

from sdpa_xp import KVCache, PagedKVCache, masks
from sdpa_xp.positional import RotaryTables

REFUSED: dict[str, tuple[Any, type[Exception], str]] = {
    "too many dropped": (
        lambda c, p: c.drop_first(13),
        ValueError,
        "KVCache.drop_first: `count` must be at most 12",
    ),
    "a negative count": (
        lambda c, p: c.drop_last(-1),
        ValueError,
        "KVCache.drop_last: `count` must be at least 0",
    ),
    "a slot beyond": (
        lambda c, p: c.take_tokens([0, 12]),
        ValueError,
        "KVCache.take_tokens: `slots` must be from 0 to S - 1; got slots=12, S=12",
    ),
    "a negative slot": (
        lambda c, p: c.take_tokens([-1]),
        ValueError,
        "KVCache.take_tokens: `slots` must be from 0",
    ),
    "slots of other entries": (
        lambda c, p: c.take_tokens([[0], [1], [2]]),
        ValueError,
        "KVCache.take_tokens: `slots` must be (n,), or (B, n) with one row for each entry of one batch axis; got",
    ),
    "an entry beyond": (
        lambda c, p: c.take_entries([2]),
        ValueError,
        "KVCache.take_entries: `entries` must be from 0 to B - 1",
    ),
    "entries of two axes": (
        lambda c, p: c.take_entries([[0, 1]]),
        ValueError,
        "KVCache.take_entries: `entries` must have one axis; got entries.shape=(1, 2)",
    ),
    "entries without a batch": (
        lambda c, p: KVCache(ones(2, 3, 8), ones(2, 3, 5)).take_entries([0]),
        ValueError,
        "KVCache.take_entries: the cache must have batch entries, on an axis before the heads",
    ),
    "positions of another length": (
        lambda c, p: c.append(ones(2, 2, 2, 8), ones(2, 2, 2, 5), positions=[3]),
        ValueError,
        "KVCache.append: `positions` must have one integer for each token, (..., n); got positions.shape=(1,)",
    ),
    "positions that are no integers": (
        lambda c, p: c.attend(ones(2, 4, 1, 8), positions=[1.5]),
        TypeError,
        "KVCache.attend: `positions[0]` must be an integer",
    ),
    "rows of several lengths": (
        lambda c, p: c.append(ones(2, 2, 2, 8), ones(2, 2, 2, 5), positions=[[3], [3, 4]]),
        ValueError,
        "KVCache.append: the rows of `positions` must have one length; got lengths=[1, 2]",
    ),
    "two starts": (
        lambda c, p: KVCache(c.key, c.value, first_position=1, positions=range(12)),
        ValueError,
        "KVCache: `first_position` and `positions` must not both be given; got first_position=1",
    ),
    "starts of other entries": (
        lambda c, p: KVCache(c.key, c.value, first_position=[1, 2, 3]),
        ValueError,
        "KVCache: `first_position` must broadcast to",
    ),
    "queries before the first position": (
        lambda c, p: c.take_tokens([0, 3]).attend(ones(2, 4, 3, 8), masks.causal(), is_causal=False),
        ValueError,
        "KVCache.attend: queries that are not the last tokens of the cache need `positions`; got L=3, tokens=2",
    ),
    "tables of other sequences": (
        lambda c, p: PagedKVCache(
            p.key_blocks,
            p.value_blocks,
            p.block_table,
            p.lengths,
            rotary=RotaryTables(ones(9, 20, 4), ones(9, 20, 4)),
        ).attend(ones(4, 2, 8), cu_seqlens_q=[0, 1, 2]),
        ValueError,
        "PagedKVCache.attend: `rotary.cos` must broadcast to the batch",
    ),
    "a rotary of two tables": (
        lambda c, p: KVCache(c.key, c.value, rotary=(np.ones((9, 4)), np.ones((9, 4)))),
        TypeError,
        "KVCache: `rotary` must be a Rotary or None; got rotary=a tuple of length 2. A `RotaryTables` takes your own",
    ),
    "tables of two shapes": (
        lambda c, p: RotaryTables(ones(9, 4), ones(9, 3)),
        ValueError,
        "RotaryTables: `cos` and `sin` must have one shape, (P, width / 2) or (..., P, width / 2); got cos.shape",
    ),
    "a position beyond the tables": (
        lambda c, p: RotaryTables(ones(9, 4), ones(9, 4)).apply(c.key, [*range(11), 3]),
        ValueError,
        "RotaryTables.apply: the tables of the rotary must have a row for each position; got positions=0 to 10, rows=9",
    ),
    "a position before the tables": (
        lambda c, p: KVCache(c.key, c.value, rotary=RotaryTables(ones(9, 4), ones(9, 4)), first_position=-4),
        ValueError,
        "KVCache: the tables of the rotary must have a row for each position; got positions=-4 to 7, rows=9. Scores",
    ),
    "a position that would wrap": (
        lambda c, p: KVCache(c.key, c.value, first_position=np.asarray([2**40, 0])),
        ValueError,
        "KVCache: `first_position` must be at most 536870912; got first_position=1099511627776",
    ),
    "positions between the rows of tables": (
        lambda c, p: RotaryTables(ones(20, 4), ones(20, 4)).apply(c.key, np.arange(12.0)),
        TypeError,
        "RotaryTables.apply: `positions` must hold integers; got positions.dtype=float64",
    ),
    "tables of the whole width": (
        lambda c, p: RotaryTables(ones(20, 8), ones(20, 8)).apply(c.key, 0),
        ValueError,
        "RotaryTables.apply: `x` must have at least 2 axes, and a width (axis -1, E) of at least `rotary.width`; got x.shape=(2, 2, 12, 8), rotary.width=16. If tables have each number twice",
    ),
    "a part of a block": (
        lambda c, p: p.drop_first([0, 3]),
        ValueError,
        "PagedKVCache.drop_first: `count` must be a multiple of the block size; got count=3, block size=4",
    ),
    "more than a sequence has": (
        lambda c, p: p.drop_last([0, 5]),
        ValueError,
        "PagedKVCache.drop_last: `count` must be at most the tokens of sequence 1; got count=5, tokens=4",
    ),
    "counts of other sequences": (
        lambda c, p: p.drop_last([1]),
        ValueError,
        "PagedKVCache.drop_last: `count` and `cache.lengths` must have the same length",
    ),
    "no sequences": (
        lambda c, p: p.take_entries([]),
        ValueError,
        "PagedKVCache.take_entries: `entries` must have a row",
    ),
    "a sequence beyond": (
        lambda c, p: p.take_entries([2]),
        ValueError,
        "PagedKVCache.take_entries: `entries[0]` must be at most 1",
    ),
    "positions of other sequences": (
        lambda c, p: p.append(ones(2, 2, 1, 8), ones(2, 2, 1, 5), positions=[[3], [3, 4]]),
        ValueError,
        "PagedKVCache.append: `positions` must have one integer for each token of each sequence; got integers=[1, 2]",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused(name: str) -> None:
    call, error, words = REFUSED[name]
    cache = KVCache(ones(2, 2, 12, 8), ones(2, 2, 12, 5))
    paged = PagedKVCache(ones(4, 2, 4, 8), ones(4, 2, 4, 5), [[0, 1], [2, 3]], [5, 4])
    with pytest.raises(error, match=f"^{re.escape(words)}"):
        call(cache, paged)
