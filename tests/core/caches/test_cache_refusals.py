"""What caches and packed sequences refuse, by a message that names function, argument, rule and what came."""

from __future__ import annotations

import importlib
import re
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from calls import ones
from libraries import LIBRARIES, each_module

from sdpa_xp import KVCache, PagedKVCache, masks, varlen_attention, varlen_attention_state
from sdpa_xp.positional import Rotary, RotaryTables

F, INT = np.float32, np.int64


def cache(**change: Any) -> KVCache[Any]:
    return KVCache(**({"key": ones(2, 2, 3, 8), "value": ones(2, 2, 3, 5)} | change))


def paged(**change: Any) -> PagedKVCache[Any]:
    pools = {"key_blocks": ones(4, 2, 4, 8), "value_blocks": ones(4, 2, 4, 5)}
    return PagedKVCache(**(pools | {"block_table": [[0, 1], [2, 3]], "lengths": [5, 4]} | change))


def append(make_cache: Any) -> Any:
    arrays = {"key": ones(2, 2, 1, 8), "value": ones(2, 2, 1, 5)}
    return lambda **change: make_cache().append(**(arrays | change))


def attend(make_cache: Any) -> Any:
    return lambda **change: make_cache().attend(**({"query": ones(2, 4, 1, 8)} | change))


def varlen(function: Any) -> Any:
    arrays = {"query": ones(5, 4, 8), "key": ones(7, 2, 8), "value": ones(7, 2, 6)}
    lengths = {"cu_seqlens_q": [0, 2, 5], "cu_seqlens_k": [0, 3, 7]}
    return lambda **change: function(**(arrays | lengths | change))


PACKED = {"query": ones(4, 3, 8), "cu_seqlens_q": [0, 1, 3]}
PACKED_NEW = {"key": ones(2, 3, 8), "value": ones(2, 3, 5), "cu_seqlens_k": [0, 1, 3]}
METHODS = {"packed attend": "PagedKVCache.attend", "packed append": "PagedKVCache.append"}

CALLS: dict[str, Any] = {
    "KVCache": cache,
    "KVCache.append": append(cache),
    "KVCache.attend": attend(cache),
    "PagedKVCache": paged,
    "PagedKVCache.append": append(paged),
    "PagedKVCache.attend": attend(paged),
    "PagedKVCache.attend_state": lambda **change: paged().attend_state(
        **({"query": ones(2, 4, 1, 8)} | change)
    ),
    "packed attend": lambda **change: paged().attend(**(PACKED | change)),
    "packed append": lambda **change: paged().append(**(PACKED_NEW | change)),
    "varlen_attention": varlen(varlen_attention),
    "varlen_attention_state": varlen(varlen_attention_state),
}


def refused(function: str, change: dict[str, Any], error: type[Exception], words: str) -> None:
    CALLS[function]()
    with pytest.raises(error, match=f"^{METHODS.get(function, function)}: {words}"):
        CALLS[function](**change)


@pytest.mark.parametrize(
    ("function", "change", "error", "words"),
    [
        ("KVCache", {"key": ones(3, 8), "value": ones(3, 5)}, ValueError, r"`key` and `value` must have at least 3 axes; got key.shape=\(3, 8\)"),
        ("KVCache", {"value": ones(2, 2, 4, 5)}, ValueError, r"`key` and `value` must have the same shape, except for the width .*3, 8\).*4, 5\)"),
        ("KVCache", {"value": ones(2, 2, 3, 5, dtype=INT)}, TypeError, "`value` must be one of float16.*value.dtype=int64"),
        ("KVCache", {"value": ones(2, 2, 3, 5, dtype=float)}, TypeError, "`key` and `value` must have one dtype.*float32.*float64"),
        ("KVCache", {"capacity": 2}, ValueError, "`capacity` must be at least 3; got capacity=2"),
        ("KVCache", {"capacity": 4.0}, TypeError, r"`capacity` must be an integer; got capacity=4.0 \(float\)"),
        ("KVCache", {"capacity": 2**40}, ValueError, "`capacity` must be at most"),
        ("KVCache", {"rotated": 1}, TypeError, "`rotated` must be True or False; got rotated=1"),
        ("KVCache", {"rotated": True, "rotary": Rotary(10)}, ValueError, "`key` must have at least 2 axes, and a width"),
        ("KVCache", {"layout": "BSHD"}, ValueError, r"`layout` must be '...HLE' or '...LHE'; got layout='BSHD'"),
        ("KVCache.append", {"key": ones(2, 2, 1, 8, dtype=float), "value": ones(2, 2, 1, 5, dtype=float)}, TypeError, r"`key` and `cache.key` must have one dtype; got key.dtype=float64, cache.key.dtype=float32\. Convert the new tokens: key\.astype\(cache\.key\.dtype\)\.$"),
        ("KVCache.append", {"value": ones(2, 2, 1, 5, dtype=float)}, TypeError, r"`key` and `value` must have one dtype.* Convert one: value\.astype\(key\.dtype\)\.$"),
        ("KVCache.append", {"value": ones(2, 2, 2, 5)}, ValueError, r"`key` and `value` must have the same shape, except.*1, 8\).*2, 5\)"),
        ("KVCache.append", {"in_place": 1}, TypeError, "`in_place` must be True or False; got in_place=1"),
        ("KVCache.append", {"in_place": True}, ValueError, "the tokens must fit into the capacity of the cache; got tokens=4, capacity=3"),
        ("KVCache.attend", {"query": ones(8)}, ValueError, r"`query` must have at least 2 axes.*\(8,\)"),
        ("KVCache.attend", {"query": ones(2, 3, 1, 8)}, ValueError, r"the heads of `query` \(axis -3, Hq\) must be a multiple"),
        ("KVCache.attend", {"query": ones(2, 4, 1, 8, dtype=float)}, TypeError, r"`query` and `cache.key` must have one dtype.*float64.*float32\. Convert the new tokens: query\.astype\(cache\.key\.dtype\)\.$"),
        ("PagedKVCache", {"key_blocks": ones(4, 2, 4)}, ValueError, r"`key_blocks` must have 4 axes; got key_blocks.shape=\(4, 2, 4\)"),
        ("PagedKVCache", {"value_blocks": ones(3, 2, 4, 5)}, ValueError, "`key_blocks` and `value_blocks` must have the same shape, except for"),
        ("PagedKVCache", {"value_blocks": ones(4, 2, 4, 5, dtype=float)}, TypeError, "`key_blocks` and `value_blocks` must have one dtype"),
        ("PagedKVCache", {"key_blocks": ones(4, 2, 4, 8, dtype=INT)}, TypeError, "`key_blocks` must be one of float16.*int64"),
        ("PagedKVCache", {"key_blocks": ones(4, 2, 0, 8), "value_blocks": ones(4, 2, 0, 5)}, ValueError, "a block of `key_blocks` must hold at least one token; got .*0"),
        ("PagedKVCache", {"layout": None}, ValueError, "`layout` must be '...HLE' or '...LHE'; got layout=None"),
        ("PagedKVCache", {"block_table": [[0, 4], [2, 3]]}, ValueError, r"`block_table\[0\]\[1\]` must be one of the 4 blocks; got block=4"),
        ("PagedKVCache", {"block_table": [[0], [2, 3]]}, ValueError, r"`block_table\[0\]` must have a block for each 4 tokens; got tokens=5, blocks=1"),
        ("PagedKVCache", {"block_table": [[0, 1.0], [2, 3]]}, TypeError, r"`block_table\[0\]\[1\]` must be an integer; got .*=1.0"),
        ("PagedKVCache", {"block_table": ones(2, 2)}, TypeError, "`block_table` must hold integers; got block_table.dtype=float32"),
        ("PagedKVCache", {"block_table": [0, 1]}, TypeError, r"`block_table\[0\]` must be a list or an integer array; got block_table\[0\]=0"),
        ("PagedKVCache", {"block_table": None}, TypeError, "`block_table` must be a list or an integer array; got block_table=None"),
        ("PagedKVCache", {"block_table": [[0, 1]]}, ValueError, r"`block_table` and `lengths` must have the same length; got len\(block_table\)=1, len\(lengths\)=2"),
        ("PagedKVCache", {"lengths": ones(2, dtype=bool)}, TypeError, "`lengths` must hold integers; got lengths.dtype=bool"),
        ("PagedKVCache", {"lengths": np.ma.MaskedArray([5, 4], [0, 1])}, TypeError, "`lengths` must be a plain array.*MaskedArray"),
        ("PagedKVCache.append", {"key": ones(2, 2, 1, 8, dtype=float), "value": ones(2, 2, 1, 5, dtype=float)}, TypeError, r"`key` and `cache.key_blocks` must have one dtype.* Convert the new tokens: key\.astype\(cache\.key_blocks\.dtype\)\.$"),
        ("PagedKVCache.append", {"value": ones(2, 2, 2, 5)}, ValueError, "`key` and `value` must have the same shape, except for"),
        ("PagedKVCache.append", {"key": ones(2, 2, 4, 8), "value": ones(2, 2, 4, 5)}, ValueError, r"`block_table\[0\]` must have a block for each 4 tokens; got tokens=9, blocks=2"),
        ("PagedKVCache.append", {"in_place": "yes"}, TypeError, "`in_place` must be True or False; got in_place='yes'"),
        ("PagedKVCache.attend", {"query": ones(4, 1, 8)}, ValueError, r"`query` must have an entry for each sequence of the cache, \(N, Hq, L, E\); got query.shape=\(4, 1, 8\), N=2"),
        ("PagedKVCache.attend", {"query": ones(2, 4, 1, 8, dtype=float)}, TypeError, r"`query` and `cache.key_blocks` must have one dtype.* Convert the new tokens: query\.astype\(cache\.key_blocks\.dtype\)\.$"),
        ("PagedKVCache.attend", {"attn_mask": ones(2, 1, 1, 5, dtype=bool)}, ValueError, r"`attn_mask` must broadcast to \(N, Hq, L, 1\), since sequences may have different S; got attn_mask.shape=\(2, 1, 1, 5\), \(N, Hq, L, 1\)=\(2, 4, 1, 1\). `masks.from_function`"),
        ("PagedKVCache.attend", {"bias": ones(2, 1, 1, 5)}, ValueError, r"`bias` must broadcast to \(N, Hq, L, 1\), since sequences may have different S; got .*\(2, 1, 1, 5\).* `biases.from_function`"),
        ("PagedKVCache.attend", {"cu_seqlens_q": [0, 1, 1]}, ValueError, r"`query` must have 3 axes; got query.shape=\(2, 4, 1, 8\)"),
        ("PagedKVCache.attend_state", {"query": ones(1, 4, 1, 8)}, ValueError, "`query` must have an entry for each sequence"),
        ("PagedKVCache.attend_state", {"lse_base": 3}, ValueError, "`lse_base` must be None"),
        ("packed attend", {"cu_seqlens_q": [0, 1, 2]}, ValueError, r"`cu_seqlens_q` must begin with 0 and end .*Slice off the rows after the last sequence: query\[:, :2\]\.$"),
        ("packed attend", {"cu_seqlens_q": [0, 3]}, ValueError, r"`cu_seqlens_q` must have N \+ 1 integers for the N sequences of the cache; got len\(cu_seqlens_q\)=2, N=2"),
        ("packed attend", {"cu_seqlens_q": [0, 2, 1]}, ValueError, "`cu_seqlens_q` must "),
        ("packed attend", {"query": ones(4, 7, 8), "cu_seqlens_q": [0, 1, 7]}, ValueError, r"`query` must have at most as many tokens \(L\) as sequence 1 of the cache; got L=6, tokens=4"),
        ("packed attend", {"attn_mask": ones(2, 1, 2, 1, dtype=bool)}, ValueError, r"`attn_mask` must broadcast to \(N, Hq, 1, 1\), since sequences may have different L and S; got attn_mask.shape=\(2, 1, 2, 1\), \(N, Hq, 1, 1\)=\(2, 4, 1, 1\)"),
        ("packed attend", {"attn_mask": masks.causal([0, 1, 2])}, ValueError, r"`attn_mask.offset` must broadcast.*\(3,\).*\(2,\)"),
        ("packed attend", {"positions": [0, 1]}, ValueError, r"`positions` must have one integer for each token of each sequence; got integers=\[2\], tokens=\[3\]"),
        ("packed append", {"cu_seqlens_k": [0, 1, 2]}, ValueError, r"`cu_seqlens_k` must begin with 0 .*key\[:, :2\] and value\[:, :2\]\.$"),
        ("packed append", {"cu_seqlens_k": [0, 3]}, ValueError, r"`cu_seqlens_k` must have N \+ 1 integers for the N sequences of the cache; got len\(cu_seqlens_k\)=2, N=2"),
        ("varlen_attention", {"cu_seqlens_q": [1, 2, 5]}, ValueError, r"`cu_seqlens_q` must begin with 0 and end with the length of `query`; got cu_seqlens_q=\[1, 2, 5\], length of `query`=5"),
        ("varlen_attention", {"cu_seqlens_q": [0, 2, 4]}, ValueError, r"`cu_seqlens_q` must begin with 0 and end with .*\. Slice off the rows after the last sequence: query\[:4\]\.$"),
        ("varlen_attention", {"cu_seqlens_k": [0, 3, 6]}, ValueError, r"`cu_seqlens_k` must begin.*Slice off the rows after the last sequence: key\[:6\] and value\[:6\]\.$"),
        ("varlen_attention", {"cu_seqlens_k": [0, 3, 8]}, ValueError, r"`cu_seqlens_k` must begin with 0 and end with the length of `key`; got .*`key`=7\.$"),
        ("varlen_attention_state", {"cu_seqlens_q": [0, 2, 4]}, ValueError, r"`cu_seqlens_q` must begin.*query\[:4\]\.$"),
        ("varlen_attention_state", {"query": ones(4, 5, 8), "key": ones(2, 7, 8), "value": ones(2, 7, 6), "layout": "...HLE", "cu_seqlens_q": [0, 2, 4]}, ValueError, r"`cu_seqlens_q` must begin.*query\[:, :4\]\.$"),
        ("varlen_attention_state", {"query": ones(1, 5, 4, 8)}, ValueError, r"`query` must have 3 axes; got query.shape=\(1, 5, 4, 8\)"),
        ("varlen_attention_state", {"lse_base": 1}, ValueError, "`lse_base`"),
        ("varlen_attention", {"cu_seqlens_q": [0, 6, 5]}, ValueError, r"`cu_seqlens_q` must not decrease; got cu_seqlens_q=\[0, 6, 5\]"),
        ("varlen_attention", {"cu_seqlens_q": [0, 1, 2, 5]}, ValueError, r"`cu_seqlens_q` and `cu_seqlens_k` must have the same length; got len\(cu_seqlens_q\)=4, len\(cu_seqlens_k\)=3"),
        ("varlen_attention", {"query": ones(1, 5, 4, 8)}, ValueError, r"`query` must have 3 axes; got query.shape=\(1, 5, 4, 8\)"),
    ],
)  # fmt: skip
def test_refused(function: str, change: dict[str, Any], error: type[Exception], words: str) -> None:
    refused(function, change, error, words)


TOKENS_AND_POSITIONS: dict[str, tuple[Any, type[Exception], str]] = {
    "too many dropped": (lambda c, p: c.drop_first(13), ValueError, "KVCache.drop_first: `count` must be at most 12"),
    "a negative count": (lambda c, p: c.drop_last(-1), ValueError, "KVCache.drop_last: `count` must be at least 0"),
    "a slot beyond": (lambda c, p: c.take_tokens([0, 12]), ValueError, "KVCache.take_tokens: `slots` must be from 0 to S - 1; got slots=12, S=12"),
    "slots of other entries": (lambda c, p: c.take_tokens([[0], [1], [2]]), ValueError, "KVCache.take_tokens: `slots` must be (n,), or (B, n) with one row for each entry of one batch axis; got"),
    "an entry beyond": (lambda c, p: c.take_entries([2]), ValueError, "KVCache.take_entries: `entries` must be from 0 to B - 1"),
    "entries of two axes": (lambda c, p: c.take_entries([[0, 1]]), ValueError, "KVCache.take_entries: `entries` must have one axis; got entries.shape=(1, 2)"),
    "entries without a batch": (lambda c, p: KVCache(ones(2, 3, 8), ones(2, 3, 5)).take_entries([0]), ValueError, "KVCache.take_entries: the cache must have batch entries, on an axis before the heads"),
    "positions of another length": (lambda c, p: c.append(ones(2, 2, 2, 8), ones(2, 2, 2, 5), positions=[3]), ValueError, "KVCache.append: `positions` must have one integer for each token, (..., n); got positions.shape=(1,)"),
    "positions that are no integers": (lambda c, p: c.attend(ones(2, 4, 1, 8), positions=[1.5]), TypeError, "KVCache.attend: `positions[0]` must be an integer"),
    "rows of several lengths": (lambda c, p: c.append(ones(2, 2, 2, 8), ones(2, 2, 2, 5), positions=[[3], [3, 4]]), ValueError, "KVCache.append: the rows of `positions` must have one length; got lengths=[1, 2]"),
    "two starts": (lambda c, p: KVCache(c.key, c.value, first_position=1, positions=range(12)), ValueError, "KVCache: `first_position` and `positions` must not both be given; got first_position=1"),
    "starts of other entries": (lambda c, p: KVCache(c.key, c.value, first_position=[1, 2, 3]), ValueError, "KVCache: `first_position` must broadcast to"),
    "starts of other sequences": (lambda c, p: PagedKVCache(p.key_blocks, p.value_blocks, p.block_table, p.lengths, first_position=[1, 2, 3]), ValueError, "PagedKVCache: `lengths` and `first_position` must have the same length"),
    "queries before the first position": (lambda c, p: c.take_tokens([0, 3]).attend(ones(2, 4, 3, 8), masks.causal(), is_causal=False), ValueError, "KVCache.attend: queries that are not the last tokens of the cache need `positions`; got L=3, tokens=2"),
    "tables of other sequences": (lambda c, p: PagedKVCache(p.key_blocks, p.value_blocks, p.block_table, p.lengths, rotary=RotaryTables(ones(9, 20, 4), ones(9, 20, 4))).attend(ones(4, 2, 8), cu_seqlens_q=[0, 1, 2]), ValueError, "PagedKVCache.attend: `rotary.cos` must broadcast to the batch"),
    "a rotary of two tables": (lambda c, p: KVCache(c.key, c.value, rotary=(np.ones((9, 4)), np.ones((9, 4)))), TypeError, "KVCache: `rotary` must be a Rotary or None; got rotary=a tuple of length 2. A `RotaryTables` takes your own"),
    "tables of two shapes": (lambda c, p: RotaryTables(ones(9, 4), ones(9, 3)), ValueError, "RotaryTables: `cos` and `sin` must have one shape, (P, width / 2) or (..., P, width / 2); got cos.shape"),
    "a position beyond the tables": (lambda c, p: RotaryTables(ones(9, 4), ones(9, 4)).apply(c.key, [*range(11), 3]), ValueError, "RotaryTables.apply: the tables of the rotary must have a row for each position; got positions=0 to 10, rows=9"),
    "a position before the tables": (lambda c, p: KVCache(c.key, c.value, rotary=RotaryTables(ones(9, 4), ones(9, 4)), first_position=-4), ValueError, "KVCache: the tables of the rotary must have a row for each position; got positions=-4 to 7, rows=9. Scores"),
    "a position that would wrap": (lambda c, p: KVCache(c.key, c.value, first_position=np.asarray([2**40, 0])), ValueError, "KVCache: `first_position` must be at most 536870912; got first_position=1099511627776"),
    "positions between the rows of tables": (lambda c, p: RotaryTables(ones(20, 4), ones(20, 4)).apply(c.key, np.arange(12.0)), TypeError, "RotaryTables.apply: `positions` must hold integers; got positions.dtype=float64"),
    "tables of the whole width": (lambda c, p: RotaryTables(ones(20, 8), ones(20, 8)).apply(c.key, 0), ValueError, "RotaryTables.apply: `x` must have at least 2 axes, and a width (axis -1, E) of at least `rotary.width`; got x.shape=(2, 2, 12, 8), rotary.width=16. If tables have each number twice"),
    "a part of a block": (lambda c, p: p.drop_first([0, 3]), ValueError, "PagedKVCache.drop_first: `count` must be a multiple of the block size; got count=3, block size=4"),
    "more than a sequence has": (lambda c, p: p.drop_last([0, 5]), ValueError, "PagedKVCache.drop_last: `count` must be at most the tokens of sequence 1; got count=5, tokens=4"),
    "counts of other sequences": (lambda c, p: p.drop_last([1]), ValueError, "PagedKVCache.drop_last: `count` and `cache.lengths` must have the same length"),
    "no sequences": (lambda c, p: p.take_entries([]), ValueError, "PagedKVCache.take_entries: `entries` must have a row"),
    "a sequence beyond": (lambda c, p: p.take_entries([2]), ValueError, "PagedKVCache.take_entries: `entries[0]` must be at most 1"),
    "positions of other sequences": (lambda c, p: p.append(ones(2, 2, 1, 8), ones(2, 2, 1, 5), positions=[[3], [3, 4]]), ValueError, "PagedKVCache.append: `positions` must have one integer for each token of each sequence; got integers=[1, 2]"),
    "more queries than tokens": (lambda c, p: c.attend(ones(2, 4, 13, 8)), ValueError, "KVCache.attend: `query` must have at most as many tokens (L) as the cache; got L=13, tokens=12"),
}  # fmt: skip


@pytest.mark.parametrize(("call", "error", "words"), TOKENS_AND_POSITIONS.values(), ids=TOKENS_AND_POSITIONS)
def test_tokens_and_positions(call: Callable[..., Any], error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=f"^{re.escape(words)}"):
        call(cache(key=ones(2, 2, 12, 8), value=ones(2, 2, 12, 5)), paged())


ARRAYS = [
    ("KVCache", "key", "value"),
    ("KVCache.append", "key", "value"),
    ("KVCache.append", "value", "key"),
    ("KVCache.attend", "query", "cache.key"),
    ("PagedKVCache", "key_blocks", "value_blocks"),
    ("PagedKVCache.append", "value", "key"),
    ("PagedKVCache.attend", "query", "cache.key_blocks"),
    ("varlen_attention", "key", "query"),
    ("varlen_attention", "value", "query"),
]
SHAPES = {
    "KVCache": {"key": (2, 2, 3, 8)},
    "PagedKVCache": {"key_blocks": (4, 2, 4, 8)},
    "varlen_attention": {"key": (7, 2, 8), "value": (7, 2, 6)},
    "append": {"key": (2, 2, 1, 8), "value": (2, 2, 1, 5)},
    "attend": {"query": (2, 4, 1, 8)},
}


@pytest.mark.needs("torch")
@pytest.mark.parametrize(("function", "name", "other"), ARRAYS)
def test_an_array_of_another_library(function: str, name: str, other: str) -> None:
    x = ones(*SHAPES[function.rpartition(".")[2]][name])
    words = f"(`{name}` and `{other}`|`{other}` and `{name}`) must be arrays of one library.*"
    refused(function, {name: LIBRARIES["torch"][1]().put(x)}, TypeError, words + f"{name}=torch.Tensor")


@pytest.mark.needs("array_api_strict")
def test_several_devices() -> None:
    here, there = (LIBRARIES[f"strict-{device}"][1]() for device in ("CPU_DEVICE", "device1"))
    k, v, q = ones(2, 2, 3, 8), ones(2, 2, 3, 5), ones(2, 4, 1, 8)
    rule = "must be on one device; got .*CPU_DEVICE.*device1|must be on one device; got .*device1.*CPU_DEVICE"
    with pytest.raises(ValueError, match=rf"^KVCache: `key` and `value` ({rule})"):
        KVCache(here.put(k), there.put(v))
    with pytest.raises(ValueError, match=rf"^PagedKVCache: `key_blocks` and `value_blocks` ({rule})"):
        PagedKVCache(here.put(k), there.put(v), [[0]], [1])
    cache = KVCache(here.put(k), here.put(v))
    with pytest.raises(ValueError, match=rf"^KVCache.append: `key` and `cache.key` ({rule})"):
        cache.append(there.put(k), there.put(v))
    with pytest.raises(ValueError, match=rf"^KVCache.attend: `query` and `cache.key` ({rule})"):
        cache.attend(there.put(q))
    blocks = PagedKVCache(here.put(k), here.put(v), [[0], [1]], [1, 1])
    with pytest.raises(ValueError, match=rf"^PagedKVCache.attend: `query` and `cache.key_blocks` ({rule})"):
        blocks.attend(there.put(q))
    with pytest.raises(ValueError, match=rf"^varlen_attention: `query` and `value` ({rule})"):
        varlen_attention(here.put(k[0]), here.put(k[0]), there.put(v[0]), [0, 2], [0, 2])


def test_a_message_has_the_shape_that_came() -> None:
    """Also where the heads stand behind the length, so that what is computed with is another."""
    swapped = {"key_blocks": ones(4, 4, 2, 8), "value_blocks": ones(4, 4, 2, 5), "layout": "...LHE"}
    with pytest.raises(ValueError, match=r"`query` must have an entry.*query.shape=\(1, 3, 4, 8\)"):
        paged(**swapped).attend(ones(1, 3, 4, 8))
    with pytest.raises(ValueError, match=r"`key` must have the shape.*axis -3.*key.shape=\(2, 1, 3, 8\)"):
        paged(**swapped).append(ones(2, 1, 3, 8), ones(2, 1, 3, 5))
    longer = cache(capacity=9)
    with pytest.raises(ValueError, match=r"cache.key.shape=\(2, 2, 3, 8\)"):
        longer.append(ones(2, 1, 1, 8), ones(2, 1, 1, 5))


def outcome(call: Callable[[], Any]) -> str:
    """The shape of the result, or the message where there is none."""
    try:
        return str(tuple(call().shape))
    except (TypeError, ValueError) as error:
        return str(error)


@pytest.mark.parametrize("in_place", [False, True])
def test_a_block_that_a_sequence_has_twice_is_not_written(in_place: bool) -> None:
    """Its later tokens would take the place of the earlier ones."""
    cache = PagedKVCache(ones(4, 1, 2, 1), ones(4, 1, 2, 1), [[3, 3]], [0])
    with pytest.raises(
        ValueError, match=r"^PagedKVCache.append: a block that is written to must.*block=3, seq"
    ):
        cache.append(ones(1, 1, 4, 1), ones(1, 1, 4, 1), in_place=in_place)


def test_no_sequence() -> None:
    refused(
        "PagedKVCache",
        {"block_table": [], "lengths": []},
        ValueError,
        "`block_table` must have a row for at least one sequence",
    )


@pytest.mark.needs("dask")
def test_unknown_lengths() -> None:
    import dask.array

    x = dask.array.ones((4, 2, 8), chunks=2, dtype=F)
    unknown = x[x[:, 0, 0] > 0]
    with pytest.raises(ValueError, match=r"^KVCache: the lengths of `key` must be known.*compute_chunk_sizes"):
        KVCache(unknown, unknown, layout="...LHE")


STATIC = r"must be static inside a jit.*got {0}=a traced array.*Pass a tuple of ints"


@pytest.mark.parametrize("inside", ["an argument", "made there", "a constant"])
@pytest.mark.parametrize("name", ["cu_seqlens_q", "block_table", "lengths"])
@pytest.mark.needs("jax")
def test_traced_by_jax(name: str, inside: str) -> None:
    """An array that is held outside may be read or refused, but not fail by another's message."""
    import jax
    import jax.numpy as jnp

    numbers = {"cu_seqlens_q": [0, 2, 5], "block_table": [[0, 1], [2, 3]], "lengths": [5, 4]}[name]
    constant = jnp.asarray(numbers)

    def call(x: Any) -> Any:
        x = {"an argument": x, "made there": jnp.asarray(numbers), "a constant": constant}[inside]
        if name == "cu_seqlens_q":
            row = jnp.ones((5, 2, 8))
            return varlen_attention(row, row, row, x, [0, 2, 5])
        pool = jnp.ones((4, 2, 4, 8))
        rules = {"block_table": [[0, 1], [2, 3]], "lengths": [5, 4]} | {name: x}
        return PagedKVCache(pool, pool, **rules).attend(jnp.ones((2, 4, 1, 8)))

    if inside == "a constant":
        message = outcome(lambda: jax.jit(call)(constant))
        assert re.match(r"\(.*\b8\)$|(varlen_attention|PagedKVCache): .*must be static", message)
        return
    with pytest.raises(TypeError, match=rf"(varlen_attention|PagedKVCache): `{name}` {STATIC.format(name)}"):
        jax.jit(call)(constant)


@pytest.mark.sampled(3)
@pytest.mark.filterwarnings("ignore:Dynamo detected a call to a `functools.lru_cache`")
@pytest.mark.parametrize("name", ["cu_seqlens_q", "block_table", "lengths"])
@pytest.mark.needs("torch")
@pytest.mark.slow
def test_traced_by_torch(name: str) -> None:
    import torch

    def call(x: Any) -> Any:
        if name == "cu_seqlens_q":
            row = torch.ones((5, 2, 8))
            return varlen_attention(row, row, row, x, [0, 2, 5])
        pool = torch.ones((4, 2, 4, 8))
        rules = {"block_table": [[0, 1], [2, 3]], "lengths": [5, 4]} | {name: x}
        return PagedKVCache(pool, pool, **rules).attend(torch.ones((2, 4, 1, 8)))

    numbers = {"cu_seqlens_q": [0, 2, 5], "block_table": [[0, 1], [2, 3]], "lengths": [5, 4]}[name]
    torch.compiler.reset()
    compiled = torch.compile(call, fullgraph=True, backend="eager")
    with pytest.raises(Exception, match=f"`{name}` must be static inside a jit"):
        compiled(torch.asarray(numbers))


@pytest.mark.parametrize(
    "module",
    [
        *each_module("numpy", "torch", "array_api_strict"),
        pytest.param("mlx.core", marks=pytest.mark.needs("mlx")),
    ],
)
def test_one_pool_for_keys_and_values_is_not_written_in_place(module: str) -> None:
    xp = importlib.import_module(module)
    pool, token = xp.zeros((5, 2, 4, 4), dtype=xp.float32), xp.ones((1, 2, 1, 4), dtype=xp.float32)
    cache = PagedKVCache(pool, pool, [range(2)], [0])
    with pytest.raises(
        ValueError, match=r"do not share memory; got value_blocks=key_blocks\. Copy one of them"
    ):
        cache.append(token, token, in_place=True)
    copied = cache.append(token, 2 * token)  # a copy keeps keys and values apart
    assert (float(copied.key_blocks[0, 0, 0, 0]), float(copied.value_blocks[0, 0, 0, 0])) == (1, 2)
    assert not xp.any(pool)


@pytest.mark.parametrize("module", each_module("numpy", "torch", "array_api_strict"))
def test_overlapping_pools_are_not_written_in_place(module: str) -> None:
    """Views of the same numbers; those that interleave share none, as the two halves of one pool."""
    xp = importlib.import_module(module)
    both = xp.zeros((5, 2, 4, 4), dtype=xp.float32)
    token = xp.ones((1, 2, 1, 2), dtype=xp.float32)
    overlapping = [
        (both[:4, ..., :2], both[1:, ..., :2]),
        (both[..., :3, :2], both[..., 1:, :2]),
        (both[..., :2], both[..., 1:3]),
    ]
    for key_blocks, value_blocks in overlapping:
        cache = PagedKVCache(key_blocks, value_blocks, [range(2)], [0])
        with pytest.raises(
            ValueError, match=r"do not share memory; got value_blocks=a view of the same numbers"
        ):
            cache.append(token, token, in_place=True)
    assert not xp.any(both)
    for key_blocks, value_blocks in ((both[..., :2], both[..., 2:]), (both[..., 0::2], both[..., 1::2])):
        PagedKVCache(key_blocks, value_blocks, [range(2)], [0]).append(token, 2 * token, in_place=True)
    np.testing.assert_array_equal(np.asarray(both[0, 0, 0, :]), [1, 2, 1, 2])


def test_at_least_one_sequence() -> None:
    row = ones(0, 2, 4)
    with pytest.raises(ValueError, match=r"`cu_seqlens_q` must have N \+ 1 integers for N >= 1 sequences"):
        varlen_attention(row, row, row, [0], [0])
    assert varlen_attention(row, row, row, [0, 0], [0, 0]).shape == (0, 2, 4)


REPEATED: dict[str, tuple[tuple[int, ...], tuple[int, ...]]] = {
    "blocks": ((3, 2, 4, 8), (0, 32, 8, 1)),
    "heads": ((3, 2, 4, 8), (32, 0, 8, 1)),
    "tokens": ((3, 2, 4, 8), (16, 8, 0, 1)),
    "widths": ((3, 2, 4, 8), (8, 4, 1, 0)),
    "blocks that overlap": ((3, 2, 4, 8), (16, 64, 8, 1)),
    "windows": ((3, 2, 4, 8), (64, 32, 1, 1)),
    "last and first widths": ((3, 2, 4, 8), (64, 32, 7, 1)),
    "nothing": ((3, 2, 4, 8), (64, 8, 16, 1)),
    "nothing, every second": ((3, 2, 4, 8), (128, 64, 16, 2)),
    "nothing, one block": ((1, 2, 4, 8), (0, 32, 8, 1)),
}
"""Shapes and strides of pools, in elements, by what stands in one place of memory."""


@pytest.mark.parametrize("module", each_module("numpy", "torch", "cupy"))
@pytest.mark.parametrize("repeated", REPEATED)
def test_a_pool_of_repeated_elements_is_not_written_in_place(module: str, repeated: str) -> None:
    """One token would stand in several places. Only NumPy makes broadcast views read-only."""
    xp = importlib.import_module(module)
    shape, strides = REPEATED[repeated]
    memory, token = xp.zeros((512,), dtype=xp.float32), xp.ones((1, 2, 1, 8), dtype=xp.float32)
    if module == "torch":
        pool = memory.as_strided(shape, strides)
    else:
        tricks = importlib.import_module(f"{module}.lib.stride_tricks")
        pool = tricks.as_strided(memory, shape, tuple(4 * step for step in strides))
    for pools in ((pool, xp.zeros(shape, dtype=xp.float32)), (xp.zeros(shape, dtype=xp.float32), pool)):
        cache = PagedKVCache(*pools, [[0]], [0])
        assert cache.append(token, token).lengths == (1,)
        if repeated.startswith("nothing"):
            cache.append(token, token, in_place=True)
            assert float(pool[0, 0, 0, 0]) == 1
            assert float(xp.sum(pool)) == 16
            continue
        with pytest.raises(
            TypeError, match=r"`in_place=True` needs arrays that can be.*a read-only or broadcast"
        ):
            cache.append(token, token, in_place=True)
        assert not xp.any(pool)


@pytest.mark.needs("torch")
def test_a_pool_that_requires_a_gradient_is_not_written_in_place() -> None:
    import torch

    pools = torch.zeros(3, 2, 4, 8, requires_grad=True), torch.zeros(3, 2, 4, 8)
    token, cache = torch.ones(1, 2, 1, 8), PagedKVCache(*pools, [[0]], [0])
    with pytest.raises(TypeError, match=r"`in_place=True` needs arrays that can be written to"):
        cache.append(token, token, in_place=True)
    assert cache.append(token, token).lengths == (1,)
