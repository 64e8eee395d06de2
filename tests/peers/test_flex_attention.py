"""Side by side with torch's FlexAttention, on the CPU and not compiled: the same functions go into both.

FlexAttention calls a function with one index of each kind (it is vmapped), we with arrays of a tile's.
"""

from __future__ import annotations

import importlib
import math
from collections.abc import Callable
from typing import Any

import array_api_compat.torch as xp
import numpy as np
import pytest
import torch
from peers.judged import assert_agree, assert_lse_agree
from torch.nn.attention.flex_attention import (
    AuxRequest,
    and_masks,
    create_block_mask,
    create_mask,
    flex_attention,
    or_masks,
)

from sdpa_xp import attention_state, biases, masks, scaled_dot_product_attention

BATCH, HEADS, QUERIES, KEYS = 2, 4, 9, 13
PAIRS = (BATCH, HEADS, QUERIES, KEYS)
DOCUMENTS = torch.tensor([[0] * 4 + [1] * 5 + [2] * 4, [0] * 1 + [1] * 2 + [2] * 10])
LENGTHS = torch.tensor([5, 12])
SLOPES = torch.tensor([0.5, 0.25, 0.125, 0.0625])
TABLE = torch.linspace(-1, 1, HEADS * (QUERIES + KEYS)).reshape(HEADS, -1).sin()
TEMPERATURES = torch.tensor([0.5, 2.0])

MASK_MODS: dict[str, Callable[..., Any]] = {
    "causal": lambda b, h, q_idx, kv_idx: q_idx >= kv_idx,
    "causal over a cache": lambda b, h, q_idx, kv_idx: q_idx + 4 >= kv_idx,
    "sliding window": lambda b, h, q_idx, kv_idx: (q_idx >= kv_idx) & (q_idx - kv_idx <= 3),
    "prefix LM": lambda b, h, q_idx, kv_idx: (kv_idx <= q_idx) | (kv_idx < 5),
    "documents": lambda b, h, q_idx, kv_idx: DOCUMENTS[b, q_idx] == DOCUMENTS[b, kv_idx],
    "padding": lambda b, h, q_idx, kv_idx: kv_idx < LENGTHS[b],
    "windows of each head": lambda b, h, q_idx, kv_idx: (q_idx - kv_idx).abs() <= 2 * h + 1,
    "rows without a key": lambda b, h, q_idx, kv_idx: (kv_idx <= q_idx) & (q_idx > 3) & (kv_idx > 0),
}
SAID: dict[str, masks.Mask] = {
    "causal": masks.causal(),
    "causal over a cache": masks.causal("lower_right"),
    "sliding window": masks.sliding_window(3, 0),
    "prefix LM": masks.causal() | masks.prefix(5),
    "documents": masks.document(DOCUMENTS[:, :QUERIES], DOCUMENTS),
    "padding": masks.padding(LENGTHS),
}
"""What the library has a value for."""

SCORE_MODS: dict[str, Callable[..., Any]] = {
    "alibi": lambda score, b, h, q_idx, kv_idx: score - SLOPES[h] * (q_idx - kv_idx).abs(),
    "relative": lambda score, b, h, q_idx, kv_idx: score + (q_idx - kv_idx),
    "relative by table": lambda score, b, h, q_idx, kv_idx: score + TABLE[h, kv_idx - q_idx + QUERIES],
    "softcap": lambda score, b, h, q_idx, kv_idx: 1.5 * torch.tanh(score / 1.5),
    "temperature of each entry": lambda score, b, h, q_idx, kv_idx: score * TEMPERATURES[b],
    "causal": lambda score, b, h, q_idx, kv_idx: torch.where(q_idx >= kv_idx, score, -math.inf),
}


@pytest.fixture(autouse=True)
def without_dynamo(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch traces each function by the bytecode of Python even where it does not compile it: a second each."""
    module = importlib.import_module("torch.nn.attention.flex_attention")
    monkeypatch.setattr(module, "_FLEX_ATTENTION_DISABLE_COMPILE_DEBUG", True)


def draw(rng: np.random.Generator, *, groups: int = HEADS, width: int = 8) -> dict[str, Any]:
    shapes = {
        "query": (BATCH, HEADS, QUERIES, 8),
        "key": (BATCH, groups, KEYS, 8),
        "value": (BATCH, groups, KEYS, width),
    }
    return {n: torch.asarray(rng.standard_normal(shape), dtype=torch.float32) for n, shape in shapes.items()}


def indices() -> tuple[Any, ...]:
    """b, h, i and j, which broadcast to all pairs."""
    counts = (torch.arange(n) for n in PAIRS)
    return tuple(x.reshape([-1 if axis == n else 1 for axis in range(4)]) for n, x in enumerate(counts))


def flex(arrays: dict[str, Any], mask_mod: Any = None, **rules: Any) -> Any:
    block_mask = None
    if mask_mod is not None:
        block_mask = create_block_mask(mask_mod, *PAIRS, device="cpu")
    return flex_attention(**arrays, block_mask=block_mask, enable_gqa=True, **rules)


@pytest.mark.sampled(3)
@pytest.mark.usefixtures("small_tiles")
@pytest.mark.parametrize("groups", [HEADS, 2])
@pytest.mark.parametrize("name", MASK_MODS)
def test_mask_mod(rng: np.random.Generator, name: str, groups: int) -> None:
    arrays, mask_mod = draw(rng, groups=groups), MASK_MODS[name]
    results = {
        "flex": flex(arrays, mask_mod),
        "ours": scaled_dot_product_attention(**arrays, attn_mask=masks.from_function(mask_mod)),
    }
    if name in SAID:
        results["said"] = scaled_dot_product_attention(**arrays, attn_mask=SAID[name])
    allowed = mask_mod(*indices()).expand(PAIRS)
    assert 0 < allowed.sum() < allowed.numel()
    assert_agree(xp, results, arrays | {"attn_mask": allowed})


def test_and_masks_or_masks() -> None:
    one, other, third = (MASK_MODS[name] for name in ("causal", "documents", "padding"))
    ours = [masks.from_function(mod) for mod in (one, other, third)]
    for theirs, joined in (
        (and_masks(one, other, third), ours[0] & ours[1] & ours[2]),
        (or_masks(one, other, third), ours[0] | ours[1] | ours[2]),
        (or_masks(and_masks(one, other), third), ours[0] & ours[1] | ours[2]),
    ):
        whole = masks.to_array(joined, PAIRS, like=torch.zeros(1))
        assert torch.equal(create_mask(theirs, *PAIRS, device="cpu"), whole)


def modified(arrays: dict[str, Any], score_mod: Any) -> Any:
    """The scores after `score_mod`, in float64: what is added to those before it is a bias."""
    query, key = (arrays[name].double() for name in ("query", "key"))
    key = key.repeat_interleave(HEADS // key.shape[1], dim=1)
    scores = query @ key.transpose(-2, -1) / math.sqrt(query.shape[-1])
    return score_mod(scores, *indices()) - scores


@pytest.mark.sampled(3)
@pytest.mark.usefixtures("small_tiles")
@pytest.mark.parametrize("groups", [HEADS, 2])
@pytest.mark.parametrize("mask", [None, "sliding window"])
@pytest.mark.parametrize("name", SCORE_MODS)
def test_score_mod(rng: np.random.Generator, name: str, mask: str | None, groups: int) -> None:
    arrays, score_mod = draw(rng, groups=groups), SCORE_MODS[name]
    mask_mod = None if mask is None else MASK_MODS[mask]
    rules = {} if mask_mod is None else {"attn_mask": masks.from_function(mask_mod)}
    results = {
        "flex": flex(arrays, mask_mod, score_mod=score_mod),
        "ours": scaled_dot_product_attention(**arrays, **rules, bias=biases.from_function(score_mod)),
    }
    whole = {} if mask_mod is None else {"attn_mask": mask_mod(*indices())}
    assert_agree(xp, results, arrays | whole | {"bias": modified(arrays, score_mod)})


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("alibi", {"bias": biases.alibi(SLOPES)}),
        ("softcap", {"softcap": 1.5}),
        ("causal", {"is_causal": True}),
        ("temperature of each entry", {"scale": TEMPERATURES.reshape(2, 1, 1, 1) / math.sqrt(8)}),
    ],
)
def test_score_mod_said_without_a_function(rng: np.random.Generator, name: str, said: dict[str, Any]) -> None:
    arrays = draw(rng)
    flexed = flex(arrays, score_mod=SCORE_MODS[name])
    results = {"flex": flexed, "ours": scaled_dot_product_attention(**arrays, **said)}
    assert_agree(xp, results, arrays | {"bias": modified(arrays, SCORE_MODS[name])})


@pytest.mark.parametrize("name", ["causal", "rows without a key"])
def test_lse(rng: np.random.Generator, name: str) -> None:
    """Natural logarithm, (B, Hq, L); -inf in a row without a key, whose output is 0."""
    arrays, mask_mod = draw(rng, groups=2, width=5), MASK_MODS[name]
    output, aux = flex(arrays, mask_mod, scale=0.6, return_aux=AuxRequest(lse=True))
    state = attention_state(**arrays, attn_mask=masks.from_function(mask_mod), scale=0.6)
    whole = arrays | {"attn_mask": mask_mod(*indices())}
    assert_agree(xp, {"flex": output, "ours": state.output}, whole, scale=0.6)
    assert_lse_agree({"flex": aux.lse, "ours": state.lse}, whole, scale=0.6)


def test_axes_and_groups_differ(rng: np.random.Generator) -> None:
    """FlexAttention wants 4 axes, and to be told of groups; here any number will do, and nothing is said."""
    arrays = draw(rng, groups=2)
    with pytest.raises(ValueError, match="enable_gqa"):
        flex_attention(**arrays)
    assert_agree(xp, {"ours": scaled_dot_product_attention(**arrays)}, arrays)
    one = {name: x[0] for name, x in arrays.items()}
    with pytest.raises(NotImplementedError, match="must be 4D"):
        flex_attention(**one, enable_gqa=True)
    assert_agree(xp, {"ours": scaled_dot_product_attention(**one)}, one)


def test_gradients_on_the_cpu(rng: np.random.Generator) -> None:
    """docs/how-to/named-models.md says that FlexAttention has none. If this fails, it says so no longer."""
    arrays = {name: x.requires_grad_() for name, x in draw(rng).items()}
    with pytest.raises(NotImplementedError, match="backward on CPU"):
        flex_attention(**arrays, score_mod=SCORE_MODS["alibi"])
    bias = biases.from_function(SCORE_MODS["alibi"])
    scaled_dot_product_attention(**arrays, bias=bias).sum().backward()
    assert all(bool(x.grad.abs().sum() > 0) for x in arrays.values())
