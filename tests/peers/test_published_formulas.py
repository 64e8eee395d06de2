"""Formulas of papers and of codes that are not installed here, written plainly, in float64 NumPy.

Each function is named for its source and states it; ours is computed in float32 and in float64.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from calls import draw
from numpy.typing import NDArray
from peers.judged import CLOSE

from sdpa_xp import (
    AttentionState,
    attention_state,
    attention_weights,
    biases,
    dot_product_attention,
    masks,
    merge_states,
    scaled_dot_product_attention,
)

Floats = NDArray[np.float64]
INF = math.inf


def wide(*arrays: Any) -> list[Floats]:
    return [np.asarray(x, np.float64) for x in arrays]


def softmax(scores: Floats) -> Floats:
    exponentials = np.exp(scores - scores.max(axis=-1, keepdims=True))
    return exponentials / exponentials.sum(axis=-1, keepdims=True)


def close(ours: Any, theirs: Any) -> None:
    """Of values of size 1: 2e-6 in float32, as many roundings in float64."""
    bound = CLOSE if ours.dtype == np.float32 else CLOSE * 2.0**-29
    np.testing.assert_allclose(ours, theirs, rtol=0, atol=bound)


def gpt_oss(query: Any, key: Any, sinks: Any, scale: float, window: int) -> Floats:
    """`sdpa` of openai/gpt-oss, gpt_oss/torch/model.py: (tokens, key heads, group, width). Weights.

    One more column, the sink, goes through the softmax and is dropped after it. A window of 0 is none.
    """
    tokens, heads, group, _ = query.shape
    mask = np.triu(np.full((tokens, tokens), -INF), 1)
    if window > 0:
        mask += np.tril(np.full((tokens, tokens), -INF), -window)
    scores = np.einsum("qhmd,khd->hmqk", query, key) * scale + mask
    column = np.broadcast_to(sinks.reshape(heads, group, 1, 1), (heads, group, tokens, 1))
    return softmax(np.concatenate([scores, column], axis=-1))[..., :-1]


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("window", [0, 3])
def test_sinks_of_gpt_oss(rng: np.random.Generator, window: int, dtype: Any) -> None:
    """Also the `learnable_sink` of flash-attention, and the `sinks` of MLX."""
    query, key, value = draw(rng, (9, 2, 3, 8), (9, 2, 8), (9, 2, 8), dtype=dtype)
    (sinks,) = draw(rng, (6,), dtype=dtype)
    theirs = gpt_oss(*wide(query, key, sinks), scale=0.3, window=window)
    mask = masks.sliding_window(window - 1, 0) if window else masks.causal()
    said: Any = {"attn_mask": mask, "sinks": sinks, "scale": 0.3, "layout": "...LHE"}
    heads = query.reshape(9, 6, 8)
    close(attention_weights(heads, key, **said), theirs.reshape(6, 9, 9))
    output = np.einsum("hmqk,khd->qhmd", theirs, value.astype(np.float64))
    close(scaled_dot_product_attention(heads, key, value, **said), output.reshape(9, 6, 8))


def gemma_2(query: Any, key: Any, value: Any, cap: float, scale: float, mask: Any) -> Floats:
    """`GemmaAttention.forward` of google/gemma_pytorch: scale, cap, then the mask."""
    scores = (query * scale) @ np.swapaxes(key, -1, -2)
    scores = np.tanh(scores / cap) * cap
    return softmax(scores + mask) @ value


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_softcap_of_gemma_2(rng: np.random.Generator, dtype: Any) -> None:
    query, key, value = draw(rng, (2, 4, 7, 8), (2, 4, 7, 8), (2, 4, 7, 8), dtype=dtype)
    mask = np.triu(np.full((7, 7), -INF), 1)
    theirs = gemma_2(*wide(query, key, value), cap=1.5, scale=0.9, mask=mask)
    close(scaled_dot_product_attention(query, key, value, is_causal=True, softcap=1.5, scale=0.9), theirs)


def flashinfer_state(query: Any, key: Any, value: Any) -> tuple[Floats, Floats]:
    """Ye et al., arXiv 2501.01005, section 2.2, in the base of the code: v (L, H, E) and s (L, H), base 2."""
    scores = np.einsum("qhd,khd->qhk", query, key) / math.sqrt(query.shape[-1])
    return np.einsum("qhk,khd->qhd", softmax(scores), value), np.log2(np.exp(scores).sum(axis=-1))


def flashinfer_merge(states: Sequence[tuple[Floats, Floats]]) -> tuple[Floats, Floats]:
    total = sum(2.0**s for _, s in states)
    return sum(2.0 ** s[..., None] * v for v, s in states) / total[..., None], np.log2(total)


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_states_of_flashinfer(rng: np.random.Generator, dtype: Any) -> None:
    """Ours has lse (H, L); base 2 is said."""
    query, key, value = draw(rng, (5, 2, 8), (12, 2, 8), (12, 2, 8), dtype=dtype)
    parts = [slice(0, 3), slice(3, 4), slice(4, 12)]
    theirs = [flashinfer_state(*wide(query, key[part], value[part])) for part in parts]
    ours = [attention_state(query, key[part], value[part], lse_base=2, layout="...LHE") for part in parts]
    for (v, s), state in zip(theirs, ours, strict=True):
        close(state.output, v)
        close(state.lse.T, s)
    v, s = flashinfer_merge(theirs)
    merged = merge_states([AttentionState(np.swapaxes(x.output, 0, 1), x.lse) for x in ours], lse_base=2)
    close(np.swapaxes(merged.output, 0, 1), v)
    close(merged.lse.T, s)
    close(v, flashinfer_state(*wide(query, key, value))[0])


def test_lse_of_flashinfer_differs() -> None:
    """Its base is 2; ours is e unless said: log(4) beside 2."""
    query, key = np.zeros((1, 1, 4)), np.ones((4, 1, 4))
    _, s = flashinfer_state(query, key, key)
    assert s.item() == 2
    assert attention_state(query, key, key, layout="...LHE").lse.item() == math.log(4)
    assert attention_state(query, key, key, layout="...LHE", lse_base=2).lse.item() == pytest.approx(
        2, abs=1e-15
    )


def slopes_of_the_authors(heads: int) -> list[float]:
    """`get_slopes` of ofirpress/attention_with_linear_biases: recursive where n is no power of two."""
    if math.log2(heads).is_integer():
        start = 2 ** (-(2 ** -(math.log2(heads) - 3)))
        return [start * start**head for head in range(heads)]
    lower = 2 ** math.floor(math.log2(heads))
    return slopes_of_the_authors(lower) + slopes_of_the_authors(2 * lower)[0::2][: heads - lower]


@pytest.mark.parametrize("heads", [1, 2, 3, 5, 6, 8, 12, 16, 20, 71])
def test_alibi_slopes(heads: int) -> None:
    expected = np.asarray(slopes_of_the_authors(heads))
    bias = biases.to_array(biases.alibi(heads), (heads, 3, 4))
    i, j = np.arange(3)[:, None], np.arange(4)
    np.testing.assert_allclose(bias, -expected[:, None, None] * abs(i - j), rtol=1e-14)


def test_alibi_of_flash_attention_differs(rng: np.random.Generator) -> None:
    """Its query i stands at i + S - L, ours at i unless said; behind a causal mask it is all the same."""
    query, key, value = draw(rng, (3, 4, 8), (3, 7, 8), (3, 7, 8), dtype=np.float64)
    slopes = np.asarray([1.0, 0.5, 0.25])
    i, j = np.arange(4)[:, None], np.arange(7)

    def formula(positions: Any, mask: Any = 0) -> Floats:
        scores = query @ np.swapaxes(key, -1, -2) / math.sqrt(8)
        return softmax(scores - slopes[:, None, None] * abs(positions - j) + mask) @ value

    theirs, upper = formula(i + 3), formula(i)
    assert np.max(np.abs(theirs - upper)) > 0.1
    said = biases.alibi(slopes, offset="lower_right")
    close(scaled_dot_product_attention(query, key, value, bias=said), theirs)
    close(scaled_dot_product_attention(query, key, value, bias=biases.alibi(slopes)), upper)
    earlier = np.where(j <= i, 0, -INF)
    close(formula(i + 3, earlier), formula(i, earlier))


KEEP = {  # the drawings of the docstring of flash_attn_func
    (2, 5): [[1, 1, 1, 1, 0], [1, 1, 1, 1, 1]],
    (5, 2): [[0, 0], [0, 0], [0, 0], [1, 0], [1, 1]],
}


@pytest.mark.parametrize(("queries", "keys"), KEEP)
def test_causal_of_flash_attention_and_mlx_differs(queries: int, keys: int) -> None:
    """Theirs is aligned lower right, `is_causal` upper left. In flash-attention a row of zeros is 0, too."""
    query, key, value = np.zeros((queries, 2)), np.ones((keys, 2)), np.eye(keys)
    keep = np.asarray(KEEP[queries, keys], np.float64)
    expected = keep / np.maximum(keep.sum(axis=-1, keepdims=True), 1)
    mask = masks.causal("lower_right")
    np.testing.assert_array_equal(masks.to_array(mask, (queries, keys)), keep.astype(bool))
    close(scaled_dot_product_attention(query, key, value, mask), expected)
    upper = np.tril(np.ones((queries, keys)))
    ours = scaled_dot_product_attention(query, key, value, is_causal=True)
    close(ours, upper / upper.sum(axis=-1, keepdims=True))
    assert np.max(np.abs(ours - expected)) > 0.2


def keras(query: Any, key: Any, value: Any, mask: Any = None, bias: Any = 0.0) -> Floats:
    """`keras.ops.dot_product_attention`, (B, T, N, H): masked scores become a large negative number."""
    scores = np.einsum("btnh,bsnh->bnts", query, key) / math.sqrt(query.shape[-1]) + bias
    if mask is not None:
        scores = np.where(mask, scores, -0.7 * np.finfo(np.float32).max)
    return np.einsum("bnts,bsnh->btnh", softmax(scores), value)


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_layout_of_keras(rng: np.random.Generator, dtype: Any) -> None:
    """`mask` and `bias` stay (B, N, T, S); a value may be of another width."""
    query, key, value, bias = draw(rng, (2, 5, 3, 8), (2, 7, 3, 8), (2, 7, 3, 4), (2, 3, 5, 7), dtype=dtype)
    mask = rng.random((2, 1, 5, 7)) < 0.6
    mask[..., 2] = True
    ours = dot_product_attention(query, key, value, bias=bias, mask=mask)
    close(ours, keras(*wide(query, key, value), mask, bias.astype(np.float64)))


def test_row_without_a_key_of_keras_differs(rng: np.random.Generator) -> None:
    """There it is the mean of all values, as in JAX and MLX."""
    query, key, value = draw(rng, (1, 2, 1, 4), (1, 3, 1, 4), (1, 3, 1, 4), dtype=np.float64)
    mask = np.asarray([[True] * 3, [False] * 3])
    theirs, ours = keras(query, key, value, mask), dot_product_attention(query, key, value, mask=mask)
    close(theirs[0, 1], value[0].mean(axis=0))
    assert not ours[0, 1].any()
    close(ours[0, 0], theirs[0, 0])
