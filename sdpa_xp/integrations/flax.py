"""Compute the attention of Flax's layers: a function for `attention_fn`, for nnx and for linen.

Flax is imported by the functions, so that this file can be read without it, as the reference does.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from .. import biases, masks
from ._framework_call import as_array, attend, broadcasts, fits, scores_shape, with_rank

__all__ = ["linen_attention", "nnx_attention"]

ARRAYS = ("query", "key", "value", "bias", "mask")
"""The arguments of both functions that Flax is given in another form; all others pass on as they came."""
EINSUMS = ("einsum_dot_general", "qk_attn_weights_einsum", "attn_weights_value_einsum")


def nnx_attention(
    query: Any,
    key: Any,
    value: Any,
    bias: Any = None,
    mask: Any = None,
    broadcast_dropout: bool = True,
    dropout_rng: Any = None,
    dropout_rate: float = 0.0,
    deterministic: bool = False,
    dtype: Any = None,
    precision: Any = None,
    module: Any = None,
    promote_dtype: Any = None,
    is_causal: bool = False,
) -> Any:
    """Compute what `flax.nnx.dot_product_attention` computes, with memory linear in the length.

    Pass it to a layer, whose parameters do not change:

        nnx.MultiHeadAttention(..., attention_fn=nnx_attention)

    Args:
        query: (..., L, Hq, E). All other arguments and errors are as in Flax.
        key: (..., S, H, E).
        value: (..., S, H, Ev).
        bias: Broadcasts to (..., Hq, L, S) and is added to the scores; or a bias of `sdpa_xp.biases`.
        mask: An array of any dtype that broadcasts to (..., Hq, L, S): 0 masks, and any other number lets a
            query attend. Or a mask of `sdpa_xp.masks`.

    Returns:
        (..., L, Hq, Ev), in the dtype to which Flax promotes. If a mask that is an array leaves a query without
            keys, its row is the mean of the values, as in Flax.

    References:
        Flax, `flax.nnx.MultiHeadAttention`, https://flax.readthedocs.io.
    """
    options = {name: x for name, x in locals().items() if name not in ARRAYS}
    from flax import nnx
    from flax.nnx.nn import dtypes  # no public name: where nnx's own attention gets its default from

    if promote_dtype is None:  # Flax has no default to pass
        del options["promote_dtype"]
    promoted = (promote_dtype or dtypes.promote_dtype)((query, key, value), dtype=dtype)
    if _is_plain(options) and (output := _attend(promoted, bias, mask, is_causal=is_causal)) is not None:
        return output
    return nnx.dot_product_attention(query, key, value, **_arrays(promoted, bias, mask), **options)


def linen_attention(
    query: Any,
    key: Any,
    value: Any,
    bias: Any = None,
    mask: Any = None,
    broadcast_dropout: bool = True,
    dropout_rng: Any = None,
    dropout_rate: float = 0.0,
    deterministic: bool = False,
    dtype: Any = None,
    precision: Any = None,
    module: Any = None,
    force_fp32_for_softmax: bool = False,
    einsum_dot_general: Any = None,
    qk_attn_weights_einsum: Any = None,
    attn_weights_value_einsum: Any = None,
) -> Any:
    """Compute what `flax.linen.dot_product_attention` computes, as `nnx_attention` does.

        linen.MultiHeadDotProductAttention(..., attention_fn=linen_attention)

    Args:
        query: (..., L, H, E). All other arguments and errors are as in Flax.
        key: (..., S, H, E).
        value: (..., S, H, Ev).
        bias: As in `nnx_attention`.
        mask: As in `nnx_attention`.
        force_fp32_for_softmax: As in Flax: the result has at least the precision of float32.

    Returns:
        (..., L, H, Ev), as in `nnx_attention`.

    References:
        Flax, `flax.linen.MultiHeadDotProductAttention`, https://flax-linen.readthedocs.io.
    """
    options = {name: x for name, x in locals().items() if name not in ARRAYS}
    import jax.numpy as jnp
    from flax import linen
    from flax.linen.dtypes import promote_dtype

    promoted = promote_dtype(query, key, value, dtype=dtype)
    has_one_head_each = promoted[0].shape[-2:-1] == promoted[1].shape[-2:-1]
    if _is_plain(options) and has_one_head_each:
        if force_fp32_for_softmax:  # Flax multiplies weights in float32 by the values
            promoted = [x.astype(jnp.promote_types(x.dtype, jnp.float32)) for x in promoted]
        if (output := _attend(promoted, bias, mask)) is not None:
            return output
    return linen.dot_product_attention(query, key, value, **_arrays(promoted, bias, mask), **options)


def _is_plain(options: dict[str, Any]) -> bool:
    """Return whether a call has neither dropout nor weights to sow, and leaves the products to JAX's settings.

    A precision would have to hold in the backward pass too, which is computed after this function has returned.
    """
    drops = not options["deterministic"] and options["dropout_rate"] > 0
    has_products = options["precision"] is not None or any(options.get(name) is not None for name in EINSUMS)
    return not (drops or has_products or options["module"] is not None)


def _attend(arrays: Sequence[Any], bias: Any, mask: Any, *, is_causal: bool = False) -> Any:
    """Return the output, or None if Flax has to compute or to refuse the call."""
    import jax.numpy as jnp

    query, key, value = arrays
    if not (jnp.issubdtype(query.dtype, jnp.floating) and fits(query, key, value)):
        return None
    shape = scores_shape(query, key)
    if mask is not None and not isinstance(mask, masks.Mask):
        if not broadcasts(mask, shape):
            return None
        mask = jnp.asarray(mask) != 0
    if bias is not None and not isinstance(bias, biases.Bias):
        if not broadcasts(bias, shape):
            return None
        bias = with_rank(jnp, jnp.asarray(bias, jnp.promote_types(query.dtype, jnp.float32)), len(shape))
    return attend(jnp, query, key, value, mask, bias=bias, is_causal=is_causal)


def _arrays(promoted: Sequence[Any], bias: Any, mask: Any) -> dict[str, Any]:
    query, key, _ = promoted
    return {name: as_array(x, scores_shape(query, key), query) for name, x in (("bias", bias), ("mask", mask))}
