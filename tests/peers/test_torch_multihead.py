"""Side by side with torch.nn.MultiheadAttention, whose boolean masks mean the opposite: True = masked."""

from __future__ import annotations

import math
from typing import Any

import array_api_compat.torch as xp
import numpy as np
import pytest
import torch
from peers.judged import CLOSE, assert_agree

from sdpa_xp import attention_weights, scaled_dot_product_attention

BATCH, HEADS, QUERIES, KEYS, WIDTH = 3, 2, 4, 6, 5
EMBED = HEADS * WIDTH


def bare(**rules: Any) -> Any:
    """The module with projections that change nothing, so that attention alone is left."""
    module = torch.nn.MultiheadAttention(EMBED, HEADS, bias=False, batch_first=True, **rules).eval()
    with torch.no_grad():
        module.in_proj_weight.copy_(torch.eye(EMBED).repeat(3, 1))
        module.out_proj.weight.copy_(torch.eye(EMBED))
    return module.requires_grad_(False)


def draw(rng: np.random.Generator) -> dict[str, Any]:
    shapes = dict.fromkeys(("key", "value"), (BATCH, KEYS, EMBED)) | {"query": (BATCH, QUERIES, EMBED)}
    return {name: torch.asarray(rng.standard_normal(s), dtype=torch.float32) for name, s in shapes.items()}


def split(x: Any) -> Any:
    """(B, L, heads * E) -> (B, heads, L, E)."""
    return x.reshape(BATCH, -1, HEADS, WIDTH).transpose(1, 2)


def join(x: Any) -> Any:
    return x.transpose(1, 2).reshape(BATCH, -1, EMBED)


@pytest.mark.parametrize("weights", [True, False])
def test_inverted_boolean_masks_differ(rng: np.random.Generator, weights: bool) -> None:
    """`~mask` is ours, of `attn_mask` as of `key_padding_mask`; the mask as it is means something else."""
    arrays = draw(rng)
    masked = torch.asarray(rng.random((QUERIES, KEYS)) < 0.4)
    padding = torch.arange(KEYS) >= torch.tensor([[2], [6], [4]])
    masked[:, 0] = False
    theirs, _ = bare()(**arrays, attn_mask=masked, key_padding_mask=padding, need_weights=weights)
    allowed = ~masked & ~padding[:, None, None]
    split_arrays = {name: split(x) for name, x in arrays.items()}
    ours = scaled_dot_product_attention(**split_arrays, attn_mask=allowed)
    assert_agree(xp, {"torch": split(theirs), "ours": ours}, split_arrays | {"attn_mask": allowed})
    unturned = scaled_dot_product_attention(**split_arrays, attn_mask=masked)
    assert torch.max(torch.abs(join(unturned) - theirs)) > 0.1


def test_mask_of_each_head(rng: np.random.Generator) -> None:
    """A mask of three axes is (batch * heads, L, S) there."""
    arrays = draw(rng)
    masked = torch.asarray(rng.random((BATCH, HEADS, QUERIES, KEYS)) < 0.4)
    masked[..., 0] = False
    theirs, _ = bare()(**arrays, attn_mask=masked.flatten(0, 1), need_weights=False)
    split_arrays = {name: split(x) for name, x in arrays.items()}
    ours = scaled_dot_product_attention(**split_arrays, attn_mask=~masked)
    assert_agree(xp, {"torch": split(theirs), "ours": ours}, split_arrays | {"attn_mask": ~masked})


@pytest.mark.parametrize("average", [True, False])
def test_weights(rng: np.random.Generator, average: bool) -> None:
    """`need_weights=True` is another function here; the mean over heads is the caller's."""
    arrays = draw(rng)
    floating = torch.asarray(rng.standard_normal((QUERIES, KEYS)), dtype=torch.float32)
    _, theirs = bare()(**arrays, attn_mask=floating, average_attn_weights=average)
    ours = attention_weights(split(arrays["query"]), split(arrays["key"]), attn_mask=floating)
    assert theirs.ndim == (3 if average else 4)
    assert torch.max(torch.abs((ours.mean(dim=1) if average else ours) - theirs)) <= CLOSE


def test_add_zero_attn_is_a_sink_of_0(rng: np.random.Generator) -> None:
    """A key of zeros scores 0, and its value adds nothing: `sinks` of zeros says so."""
    arrays = draw(rng)
    theirs, _ = bare(add_zero_attn=True)(**arrays, need_weights=False)
    ours = scaled_dot_product_attention(
        *(split(arrays[x]) for x in ("query", "key", "value")), sinks=torch.zeros(2)
    )
    assert torch.max(torch.abs(join(ours) - theirs)) <= CLOSE
    plain = scaled_dot_product_attention(*(split(arrays[x]) for x in ("query", "key", "value")))
    assert torch.max(torch.abs(join(plain) - theirs)) > 0.01


def test_row_without_a_key_differs(rng: np.random.Generator) -> None:
    """NaN if the weights are asked for, 0 if not; here 0 in both functions."""
    arrays = draw(rng)
    padding = torch.zeros(BATCH, KEYS, dtype=torch.bool)
    padding[1] = True
    for weights, expected in ((True, math.nan), (False, 0.0)):
        theirs, _ = bare()(**arrays, key_padding_mask=padding, need_weights=weights)
        torch.testing.assert_close(theirs[1], torch.full((QUERIES, EMBED), expected), equal_nan=True)
    query, key, value = (split(arrays[name]) for name in ("query", "key", "value"))
    allowed = ~padding[:, None, None]
    assert not torch.any(scaled_dot_product_attention(query, key, value, allowed)[1])
    assert not torch.any(attention_weights(query, key, attn_mask=allowed)[1])


def test_is_causal_alone_differs(rng: np.random.Generator) -> None:
    """There it is a hint that stands beside a mask; here it is the mask."""
    arrays = draw(rng)
    with pytest.raises(RuntimeError, match="Need attn_mask"):
        bare()(**arrays, is_causal=True)
    split_arrays = {name: split(x) for name, x in arrays.items()}
    ours = scaled_dot_product_attention(**split_arrays, is_causal=True)
    later = torch.ones(QUERIES, KEYS, dtype=torch.bool).triu(1)
    theirs, _ = bare()(**arrays, attn_mask=later, is_causal=True, need_weights=False)
    assert_agree(xp, {"torch": split(theirs), "ours": ours}, split_arrays, is_causal=True)
