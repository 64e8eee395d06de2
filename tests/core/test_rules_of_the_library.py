"""Messages of the library, each in the words of its rule."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from sdpa_xp import KVCache, PagedKVCache, attention_state, masks, merge_states, positional
from sdpa_xp import scaled_dot_product_attention as attend
from sdpa_xp.layers import Linear, MultiHeadAttention

F = np.float32
X, INTEGERS = np.ones((1, 2, 3, 8), F), np.ones((3, 3), int)
LINEAR = Linear(np.ones((8, 8), F))
LAYER = MultiHeadAttention(LINEAR, LINEAR, LINEAR, num_heads=2)
STATE = attention_state(X, X, X)

LAYOUT = "`layout` must be '...HLE' or '...LHE'; got layout='...HEL'"
REFUSED: dict[str, tuple[Callable[[], Any], type[Exception], str]] = {
    "layout of states": (lambda: merge_states([STATE], layout="...HEL"), ValueError, f"merge_states: {LAYOUT}"),
    "layout of a call": (
        lambda: attend(X, X, X, layout="...HEL"),
        ValueError,
        f"scaled_dot_product_attention: {LAYOUT}",
    ),
    "layout of a cache": (lambda: KVCache(X, X, layout="...HEL"), ValueError, f"KVCache: {LAYOUT}"),
    "layout of blocks": (
        lambda: PagedKVCache(X, X, [[0]], [1], layout="...HEL"),
        ValueError,
        f"PagedKVCache: {LAYOUT}",
    ),
    "layout of a rotation": (
        lambda: positional.Rotary(8).apply(X, 0, layout="...HEL"),
        ValueError,
        f"Rotary.apply: {LAYOUT}",
    ),
    "what is no state": (
        lambda: merge_states([STATE, X]),
        TypeError,
        "merge_states: `states[1]` must be an AttentionState, (output, lse); got states[1]=numpy.ndarray",
    ),
    "a state of three": (
        lambda: merge_states([(X, X, X)]),
        TypeError,
        "merge_states: `states[0]` must be an AttentionState, (output, lse); got states[0]=a tuple of length 3",
    ),
    "a mask of integers": (
        lambda: attend(X, X, X, INTEGERS),
        TypeError,
        "`attn_mask` must be boolean (True = may attend) or floating (added to the scores); "
        "got attn_mask.dtype=int64",
    ),
    "a mask of numbers": (
        lambda: masks.from_array(X),
        TypeError,
        "`boolean` must be boolean (True = may attend); got boolean.dtype=float32",
    ),
    "no sequence": (
        lambda: PagedKVCache(X, X, np.zeros((0, 1), int), []),
        ValueError,
        "`block_table` must have a row for at least one sequence",
    ),
    "one number for positions": (
        lambda: positional.Rotary(8).cos_sin(3),
        TypeError,
        "`positions` must be a range, a list or an array; got positions=3. "
        "For the first n positions, pass range(n).",
    ),
    "a scaling that is none": (
        lambda: positional.Rotary(8, scaling=2.0),
        TypeError,
        "`scaling` must be a Scaling or None; got scaling=2.0",
    ),
    "another module": (
        lambda: MultiHeadAttention.from_torch(LAYER),
        TypeError,
        "`module` must be a torch.nn.MultiheadAttention; got module=sdpa_xp.layers",
    ),
    "an input of another width": (
        lambda: LAYER(np.ones((3, 7), F)),
        ValueError,
        "`query` must have the width (axis -1) that the layer takes for `query`; "
        "got query.shape=(3, 7), width=8",
    ),
    "another map": (
        lambda: MultiHeadAttention(LINEAR, X, LINEAR, num_heads=2),
        TypeError,
        "MultiHeadAttention: `key` must be a Linear; got key=numpy.ndarray",
    ),
    "a list for a mapping": (
        lambda: Linear.from_mapping([X]),
        TypeError,
        "Linear.from_mapping: `mapping` must be a mapping of names; got mapping=a list of length 1",
    ),
    "a number for a prefix": (
        lambda: Linear.from_mapping({}, 3),
        TypeError,
        "Linear.from_mapping: `prefix` must be a string; got prefix=3",
    ),
    "more queries than tokens": (
        lambda: KVCache(X, X).attend(np.ones((1, 2, 4, 8), F)),
        ValueError,
        "KVCache.attend: `query` must have at most as many tokens (L) as the cache; got L=4, tokens=3",
    ),
    "a function with `and`": (
        lambda: attend(X, X, X, masks.from_function(lambda b, h, i, j: i > j and j > 1)),
        ValueError,
        "the function of `attn_mask` must compute with arrays of indices",
    ),
}


@pytest.mark.parametrize(("call", "error", "words"), REFUSED.values(), ids=REFUSED)
def test_refused(call: Callable[[], Any], error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=re.escape(words)):
        call()
