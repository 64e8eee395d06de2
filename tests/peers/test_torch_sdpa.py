"""Side by side with torch.nn.functional.scaled_dot_product_attention, on the CPU."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import array_api_compat.torch as xp
import numpy as np
import pytest
import torch
from internals import judge, textbook
from peers.judged import assert_agree
from torch.nn.attention.bias import causal_lower_right, causal_upper_left
from torch.nn.functional import scaled_dot_product_attention as torch_sdpa

from sdpa_xp import masks, scaled_dot_product_attention

DTYPES = [torch.float32, torch.float64]


def draw(rng: np.random.Generator, *shapes: tuple[int, ...], dtype: Any = torch.float32) -> dict[str, Any]:
    """Query, key, value, and a floating mask where there is a fourth shape."""
    names = ("query", "key", "value", "attn_mask")
    drawn = zip(names, shapes, strict=False)
    return {name: torch.asarray(rng.standard_normal(shape)).to(dtype) for name, shape in drawn}


# The shapes of query, key, value and a floating mask, and what both are told.
CALLS: dict[str, tuple[tuple[tuple[int, ...], ...], dict[str, Any]]] = {
    "2-D": (((7, 8), (11, 8), (11, 8)), {}),
    "3-D": (((4, 7, 8), (4, 11, 8), (4, 11, 8)), {}),
    "4-D": (((2, 4, 7, 8), (2, 4, 11, 8), (2, 4, 11, 8)), {}),
    "5-D": (((3, 2, 4, 7, 8), (3, 2, 4, 11, 8), (3, 2, 4, 11, 8)), {}),
    "Ev < E": (((2, 4, 7, 8), (2, 4, 11, 8), (2, 4, 11, 3)), {}),
    "Ev > E": (((2, 4, 7, 8), (2, 4, 11, 8), (2, 4, 11, 13)), {"is_causal": True}),
    "is_causal, L < S": (((2, 4, 7, 8), (2, 4, 11, 8), (2, 4, 11, 8)), {"is_causal": True}),
    "is_causal, L > S": (((2, 4, 11, 8), (2, 4, 7, 8), (2, 4, 7, 8)), {"is_causal": True}),
    "is_causal, L = S": (((2, 4, 9, 8), (2, 4, 9, 8), (2, 4, 9, 8)), {"is_causal": True}),
    "floating mask": (((2, 4, 7, 8), (2, 4, 11, 8), (2, 4, 11, 8), (2, 1, 7, 11)), {}),
    "floating mask of a column": (((2, 4, 7, 8), (2, 4, 11, 8), (2, 4, 11, 8), (7, 1)), {}),
    "scale": (((2, 4, 7, 8), (2, 4, 11, 8), (2, 4, 11, 8)), {"scale": 0.7}),
    "scale 0": (((2, 4, 7, 8), (2, 4, 11, 8), (2, 4, 11, 8)), {"scale": 0.0}),
    "scale < 0": (((2, 4, 7, 8), (2, 4, 11, 8), (2, 4, 11, 8)), {"scale": -0.4}),
    "scale < 0, is_causal": (((4, 7, 8), (4, 11, 8), (4, 11, 8)), {"scale": -0.4, "is_causal": True}),
    "grouped heads": (((2, 6, 7, 8), (2, 2, 11, 8), (2, 2, 11, 5)), {"is_causal": True}),
}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("shapes", "rules"), CALLS.values(), ids=CALLS)
def test_same_call(rng: np.random.Generator, shapes: Any, rules: dict[str, Any], dtype: Any) -> None:
    """torch groups heads when told to, we always."""
    arrays, grouped = draw(rng, *shapes, dtype=dtype), shapes[0][:-2] != shapes[1][:-2]
    theirs = torch_sdpa(**arrays, **rules, enable_gqa=grouped)
    results = {"torch": theirs, "ours": scaled_dot_product_attention(**arrays, **rules)}
    assert_agree(xp, results, arrays, **rules)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(7, 11), (1, 11), (7, 1), (4, 7, 11), (2, 1, 1, 11), (2, 4, 7, 11)])
def test_boolean_mask(rng: np.random.Generator, shape: tuple[int, ...], dtype: Any) -> None:
    """Rows without a key among them: both give 0 there."""
    arrays = draw(rng, (2, 4, 7, 8), (2, 4, 11, 8), (2, 4, 11, 8), dtype=dtype)
    arrays["attn_mask"] = torch.asarray(rng.random(shape) < 0.6)
    arrays["attn_mask"][..., 0, :] = shape[-2] == 1
    results = {"torch": torch_sdpa(**arrays), "ours": scaled_dot_product_attention(**arrays)}
    assert_agree(xp, results, arrays)
    for result in results.values():
        assert bool((result[..., 0, :] == 0).all()) == (shape[-2] > 1)


def test_infinite_mask_is_an_empty_row_and_the_smallest_number_is_none(rng: np.random.Generator) -> None:
    arrays = draw(rng, (4, 2, 8), (4, 11, 8), (4, 11, 8))
    arrays["attn_mask"] = torch.stack(
        [torch.full((11,), x) for x in (-math.inf, torch.finfo(torch.float32).min)]
    )
    for result in (torch_sdpa(**arrays), scaled_dot_product_attention(**arrays)):
        assert torch.all(result[:, 0] == 0)
        torch.testing.assert_close(result[:, 1], arrays["value"].mean(dim=1))


def test_gradients(rng: np.random.Generator) -> None:
    """Those of a row without a key are 0 in both; torch in float64 is the reference."""
    mask = torch.asarray(rng.random((7, 11)) < 0.6)
    mask[2] = False
    arrays = draw(rng, (2, 4, 7, 8), (2, 4, 11, 8), (2, 4, 11, 8))

    def gradients(function: Callable[..., Any], dtype: Any = torch.float32) -> list[np.ndarray]:
        inputs = [x.detach().to(dtype).requires_grad_() for x in arrays.values()]
        return [np.asarray(x) for x in torch.autograd.grad(function(*inputs, mask).square().sum(), inputs)]

    exact, plain = gradients(torch_sdpa, torch.float64), gradients(partial(textbook, xp))
    for function in (torch_sdpa, scaled_dot_product_attention):
        results = gradients(function)
        assert all(judge(*triple, "float32").agrees for triple in zip(results, exact, plain, strict=True))
        assert not results[0][:, :, 2].any()


@pytest.mark.filterwarnings("ignore:Lower right causal bias will produce NaNs:UserWarning")
@pytest.mark.parametrize(("queries", "keys"), [(7, 11), (11, 7), (5, 5)])
@pytest.mark.parametrize(
    ("theirs", "ours"), [(causal_lower_right, masks.causal("lower_right")), (causal_upper_left, masks.causal())]
)
def test_causal_bias(rng: np.random.Generator, theirs: Any, ours: masks.Mask, queries: int, keys: int) -> None:
    """torch.nn.attention.bias; what it warns of is no more: rows above the diagonal are 0."""
    arrays = draw(rng, (2, 4, queries, 8), (2, 4, keys, 8), (2, 4, keys, 8))
    shift = keys - queries if theirs is causal_lower_right else 0
    allowed = torch.arange(keys) <= torch.arange(queries)[:, None] + shift
    results = {
        "torch": torch_sdpa(**arrays, attn_mask=theirs(queries, keys)),
        "ours": scaled_dot_product_attention(**arrays, attn_mask=ours),
    }
    assert_agree(xp, results, arrays | {"attn_mask": allowed})


@pytest.mark.parametrize("batch", [(), (4,), (3, 2, 4)])
def test_mask_beside_is_causal_differs(rng: np.random.Generator, batch: tuple[int, ...]) -> None:
    """torch refuses the two together; here both hold."""
    arrays = draw(rng, (*batch, 7, 8), (*batch, 11, 8), (*batch, 11, 8))
    arrays["attn_mask"] = torch.asarray(rng.random((7, 11)) < 0.6)
    with pytest.raises(RuntimeError, match="attn_mask should not be set when is_causal=True"):
        torch_sdpa(**arrays, is_causal=True)
    ours = scaled_dot_product_attention(**arrays, is_causal=True)
    assert_agree(xp, {"ours": ours}, arrays, is_causal=True)


def test_mask_beside_is_causal_of_4_axes(rng: np.random.Generator) -> None:
    """With 4 axes torch's kernel for the CPU takes both, which its documentation rules out; it agrees."""
    arrays = draw(rng, (2, 4, 7, 8), (2, 4, 11, 8), (2, 4, 11, 8))
    arrays["attn_mask"] = torch.asarray(rng.random((7, 11)) < 0.6)
    results = {
        "torch": torch_sdpa(**arrays, is_causal=True),
        "ours": scaled_dot_product_attention(**arrays, is_causal=True),
    }
    assert_agree(xp, results, arrays, is_causal=True)


@pytest.mark.parametrize("scale", [0.0, -0.4])
def test_is_causal_beside_a_scale_that_is_not_positive_differs(rng: np.random.Generator, scale: float) -> None:
    """With 4 axes torch 2.13's kernel for the CPU masks before it scales: NaN. Here it is as any scale."""
    arrays = draw(rng, (2, 4, 7, 8), (2, 4, 11, 8), (2, 4, 11, 8))
    assert torch.all(torch.isnan(torch_sdpa(**arrays, is_causal=True, scale=scale)))
    ours = scaled_dot_product_attention(**arrays, is_causal=True, scale=scale)
    assert_agree(xp, {"ours": ours}, arrays, is_causal=True, scale=scale)


def test_mask_of_one_axis_differs(rng: np.random.Generator) -> None:
    """torch wants two axes or more; here a mask of the keys alone will do."""
    arrays = draw(rng, (2, 4, 7, 8), (2, 4, 11, 8), (2, 4, 11, 8))
    arrays["attn_mask"] = torch.arange(11) < 6
    with pytest.raises(IndexError):
        torch_sdpa(**arrays)
    assert_agree(xp, {"ours": scaled_dot_product_attention(**arrays)}, arrays)
