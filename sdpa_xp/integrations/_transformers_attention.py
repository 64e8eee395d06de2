"""The attention function that models of transformers call."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from sdpa_xp import attention_weights, scaled_dot_product_attention
from sdpa_xp._checks.messages import type_name
from sdpa_xp.errors import ArgumentValueError
from sdpa_xp.integrations._mask_tensor import MaskTensor
from sdpa_xp.integrations._transformers_masks import EVERY_PAIR
from sdpa_xp.integrations.transformers import NAME

UNSUPPORTED = {
    "cache": ("the cache of continuous batching", "Use `generate`, whose caches are supported."),
    "sinks": ("sinks that differ between tokens", 'Use `attn_implementation="eager"` for this model.'),
    "block_indices": ("lists of blocks", 'Use `attn_implementation="eager"` for this model.'),
}
"""Keywords of transformers' attention functions that change the result, and that sdpa_xp does not compute."""


def attend(
    module: Any,
    query: Any,
    key: Any,
    value: Any,
    attention_mask: Any,
    dropout: float = 0.0,
    scaling: float | None = None,
    softcap: float | None = None,
    s_aux: Any = None,
    position_bias: Any = None,
    is_causal: bool | None = None,
    output_attentions: bool = False,
    **keywords: Any,
) -> tuple[Any, Any]:
    """Return the output, (B, L, Hq, Ev), and the weights, (B, Hq, L, S), if they are asked for.

    Without a mask every pair may attend, as in eager attention; `create_mask` makes the mask of a causal model.
    """
    _refuse_keywords(keywords)
    query, key, value = _of_one_dtype(query, key, value)
    options = {
        "attn_mask": _mask(attention_mask, query.dtype),
        "bias": position_bias,
        "is_causal": bool(is_causal) and attention_mask is None and query.shape[-2] > 1,
        "scale": scaling,
        "softcap": softcap,
        "sinks": s_aux,
    }
    drop = _dropout(dropout if module.training else 0.0, query.device)
    output = scaled_dot_product_attention(query, key, value, **options, **drop())
    weights = attention_weights(query, key, **options, **drop()) if output_attentions else None
    return output.transpose(1, 2).contiguous(), weights


def _mask(attention_mask: Any, dtype: Any) -> Any:
    """Return the mask for a call of arrays in `dtype`."""
    if isinstance(attention_mask, MaskTensor):
        return None if attention_mask.mask is EVERY_PAIR else attention_mask.mask
    if attention_mask is None or not attention_mask.is_floating_point():
        return attention_mask
    return attention_mask.to(torch.promote_types(attention_mask.dtype, dtype))


def _dropout(p: float, device: Any) -> Callable[[], dict[str, Any]]:
    """Return a function whose results drop the same weights each time; torch's generator of the CPU seeds them.

    Checkpointing restores that generator, so that a recomputed layer drops the same weights again.
    """
    if not p:
        return dict
    seed = int(torch.randint(2**63 - 1, ()))
    return lambda: {"dropout_p": p, "rng": torch.Generator(device).manual_seed(seed)}


def _of_one_dtype(*arrays: Any) -> tuple[Any, ...]:
    """Return the arrays in the dtype of autocast if they differ, as some layers leave them inside of it."""
    kind = arrays[0].device.type
    if len({array.dtype for array in arrays}) > 1 and torch.is_autocast_enabled(kind):
        return tuple(array.to(torch.get_autocast_dtype(kind)) for array in arrays)
    return arrays


def _refuse_keywords(keywords: Mapping[str, object]) -> None:
    """Refuse keywords that would change the result and are not computed."""
    for name, (rule, hint) in UNSUPPORTED.items():
        if keywords.get(name) is not None:
            got = {name: f"<{type_name(keywords[name])}>"}
            raise ArgumentValueError(NAME, f"sdpa_xp does not support {rule} (`{name}`)", got, hint)
