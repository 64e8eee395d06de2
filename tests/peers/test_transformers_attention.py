"""The function that models of transformers call: dropout, dtypes, and what it refuses."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from sdpa_xp import scaled_dot_product_attention

pytest.importorskip("torch")
pytest.importorskip("transformers")
import torch
from internals import transformers_attention

pytestmark = [pytest.mark.needs("torch", "transformers"), pytest.mark.slow]


def arrays(*dtypes: str, length: int = 6) -> list[Any]:
    generator = torch.Generator().manual_seed(0)
    return [
        torch.randn(2, 4, length, 8, generator=generator).to(getattr(torch, dtype))
        for dtype in dtypes or ("float32",) * 3
    ]


def attend(*inputs: Any, training: bool = False, mask: Any = None, **keywords: Any) -> Any:
    return transformers_attention.attend(SimpleNamespace(training=training), *inputs, mask, **keywords)


def test_a_causal_call_without_a_mask() -> None:
    """Models say so by `is_causal`; one query attends all keys."""

    query, key, value = arrays()
    for rows in (6, 1):
        output, weights = attend(query[:, :, :rows], key, value, is_causal=True)
        expected = scaled_dot_product_attention(query[:, :, :rows], key, value, is_causal=rows > 1)
        assert torch.equal(output, expected.transpose(1, 2))
        assert weights is None
        assert output.is_contiguous()


def test_dropout_drops_as_many_as_asked_for() -> None:
    """Kept weights are divided by 1 - p. The output is of the weights that are returned; both are seeded."""
    query, key, value = arrays(length=64)
    call = {"dropout": 0.25, "output_attentions": True}
    _, plain = attend(query, key, value, **call)
    torch.manual_seed(0)
    output, weights = attend(query, key, value, training=True, **call)
    kept = weights != 0
    torch.testing.assert_close(weights[kept], plain[kept] / 0.75, rtol=1e-5, atol=0)
    number = kept.numel()  # five standard deviations
    assert abs(int(kept.sum()) - 0.75 * number) < 5 * (number * 0.25 * 0.75) ** 0.5
    torch.testing.assert_close(output, (weights @ value).transpose(1, 2), rtol=0, atol=1e-5)
    again, _ = attend(query, key, value, training=True, **call)
    assert not torch.equal(output, again)
    torch.manual_seed(0)
    same, _ = attend(query, key, value, training=True, **call)
    assert torch.equal(output, same)


def test_dtypes_that_autocast_mixes() -> None:
    """A model that normalises its queries and keys has them in float32, and its values in bfloat16."""
    mixed = arrays("float32", "float32", "bfloat16")
    with torch.autocast("cpu", dtype=torch.bfloat16):
        output, _ = attend(*mixed)
    expected, _ = attend(*(x.to(torch.bfloat16) for x in mixed))
    assert output.dtype == torch.bfloat16
    np.testing.assert_array_equal(output.float().numpy(), expected.float().numpy())
    with pytest.raises(TypeError, match=r"^scaled_dot_product_attention: .*dtype"):
        attend(*mixed)


def test_masks_of_other_dtypes() -> None:
    """A model in half precision makes masks of halves; some compute their attention in float32."""
    added = torch.zeros(2, 1, 6, 6, dtype=torch.bfloat16)
    added[..., 4:] = torch.finfo(torch.bfloat16).min
    for dtype in ("bfloat16", "float32", "float64"):
        query, key, value = arrays(*[dtype] * 3)
        output, _ = attend(query, key, value, mask=added)
        expected, _ = attend(query, key[:, :, :4], value[:, :, :4])
        np.testing.assert_allclose(output.double().numpy(), expected.double().numpy(), rtol=1e-2, atol=1e-6)


SAID = {
    "cache": "the cache of continuous batching",
    "sinks": "sinks that differ between tokens",
    "block_indices": "lists of blocks",
    "reproducible": "reproducible calls",
}


@pytest.mark.parametrize("keyword", SAID)
def test_what_cannot_be_computed_is_refused(keyword: str) -> None:
    words = rf"does not support {SAID[keyword]} \(`{keyword}`\); got {keyword}=<.*object>\. Use"
    with pytest.raises(ValueError, match=f"^xp_attention: sdpa_xp {words}"):
        attend(*arrays(), **{keyword: object()})
    attend(*arrays(), **{keyword: None})
    attend(*arrays(), reproducible=False)


def test_layers_drop_other_weights() -> None:
    """Of 200 layers no two have one seed."""
    inputs, drawn = arrays(), list[int]()

    class Noted(torch.Generator):
        def manual_seed(self, seed: int) -> torch.Generator:
            drawn.append(seed)
            return super().manual_seed(seed)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch, "Generator", Noted)
        for _ in range(200):
            attend(*inputs, training=True, dropout=0.5)
    assert len({*drawn}) == 200
