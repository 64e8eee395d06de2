"""The calls of Flax's layers: what sdpa_xp computes of them, and Flax's own attention for the rest."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import jax.numpy as jnp
from flax import linen, nnx
from flax.linen.dtypes import promote_dtype as promote_in_linen
from flax.nnx.nn.dtypes import promote_dtype as promote_in_nnx

from sdpa_xp import biases, masks, scaled_dot_product_attention
from sdpa_xp.integrations._framework_call import broadcasts, fits, scores_shape, with_mean_of_values, with_rank

EINSUMS = ("einsum_dot_general", "qk_attn_weights_einsum", "attn_weights_value_einsum")


def attend_as_nnx(query: Any, key: Any, value: Any, bias: Any, mask: Any, options: dict[str, Any]) -> Any:
    """Return what `nnx.dot_product_attention` returns."""
    promote = options.get("promote_dtype", promote_in_nnx)
    promoted = promote((query, key, value), dtype=options["dtype"])
    if _is_plain(options):
        output = _attend(promoted, bias, mask, is_causal=options["is_causal"])
        if output is not None:
            return output
    bias, mask = _arrays(promoted[0], promoted[1], bias, mask)
    return nnx.dot_product_attention(query, key, value, bias=bias, mask=mask, **options)


def attend_as_linen(query: Any, key: Any, value: Any, bias: Any, mask: Any, options: dict[str, Any]) -> Any:
    """Return what `linen.dot_product_attention` returns."""
    promoted = promote_in_linen(query, key, value, dtype=options["dtype"])
    has_one_head_each = promoted[0].shape[-2:-1] == promoted[1].shape[-2:-1]
    if _is_plain(options) and has_one_head_each:
        if options["force_fp32_for_softmax"]:  # Flax multiplies weights in float32 by the values
            promoted = [x.astype(jnp.promote_types(x.dtype, jnp.float32)) for x in promoted]
        if (output := _attend(promoted, bias, mask)) is not None:
            return output
    bias, mask = _arrays(promoted[0], promoted[1], bias, mask)
    return linen.dot_product_attention(query, key, value, bias=bias, mask=mask, **options)


def _is_plain(options: dict[str, Any]) -> bool:
    """Return whether a call has neither dropout nor weights to sow, and leaves the products to JAX's settings.

    A precision would have to hold in the backward pass too, which is computed after this function has returned.
    """
    drops = not options["deterministic"] and options["dropout_rate"] > 0
    has_products = options["precision"] is not None or any(options.get(name) is not None for name in EINSUMS)
    return not (drops or has_products or options["module"] is not None)


def _attend(arrays: Iterable[Any], bias: Any, mask: Any, *, is_causal: bool = False) -> Any:
    """Return the output, or None if Flax has to compute or to refuse the call."""
    query, key, value = arrays
    if not (jnp.issubdtype(query.dtype, jnp.floating) and fits(query, key, value)):
        return None
    shape = scores_shape(query, key)
    allowed = None
    if mask is not None and not isinstance(mask, masks.Mask):
        if not broadcasts(mask, shape):
            return None
        mask = allowed = with_rank(jnp, jnp.asarray(mask) != 0, len(shape))
    if bias is not None and not isinstance(bias, biases.Bias):
        if not broadcasts(bias, shape):
            return None
        bias = with_rank(jnp, jnp.asarray(bias, jnp.promote_types(query.dtype, jnp.float32)), len(shape))
    output = scaled_dot_product_attention(
        query, key, value, mask, bias=bias, is_causal=is_causal, layout="...LHE"
    )
    if allowed is None:
        return output
    return with_mean_of_values(jnp, output, value, allowed, queries=query.shape[-3], is_causal=is_causal)


def _arrays(query: Any, key: Any, bias: Any, mask: Any) -> tuple[Any, Any]:
    """Return a bias and a mask of sdpa_xp as arrays, for Flax."""
    if isinstance(mask, masks.Mask):
        mask = masks.to_array(mask, scores_shape(query, key), like=query)
    if isinstance(bias, biases.Bias):
        bias = biases.to_array(bias, scores_shape(query, key), like=query)
    return bias, mask
