"""What the layers of Flax, Equinox and Keras share: arrays (..., L, H, E), and masks for (..., Hq, L, S)."""

from __future__ import annotations

from typing import Any

from .. import biases, masks
from .._attention import scaled_dot_product_attention


def fits(query: Any, key: Any, value: Any) -> bool:
    """Return whether the shapes are those of a call. If not, the framework computes or refuses it."""
    ranks = {array.ndim for array in (query, key, value)}
    batches = {tuple(array.shape[:-3]) for array in (query, key, value)}
    if len(ranks) > 1 or min(ranks) < 3 or len(batches) > 1 or len({x.dtype for x in (query, key, value)}) > 1:
        return False
    (keys, heads, width), query_heads = key.shape[-3:], query.shape[-2]
    return bool(
        tuple(value.shape[-3:-1]) == (keys, heads)
        and width == query.shape[-1]
        and keys > 0
        and heads > 0
        and query_heads % heads == 0
    )


def scores_shape(query: Any, key: Any) -> tuple[int, ...]:
    """Return the shape of the scores, (..., Hq, L, S)."""
    return (*query.shape[:-3], query.shape[-2], query.shape[-3], key.shape[-3])


def broadcasts(array: Any, shape: tuple[int, ...]) -> bool:
    """Return whether `array` is an array that broadcasts to `shape` and does not enlarge it."""
    lengths = tuple(getattr(array, "shape", (None,)))
    tail = shape[len(shape) - len(lengths) :]
    return len(lengths) <= len(shape) and all(n in (1, m) for n, m in zip(lengths, tail, strict=True))


def with_rank(xp: Any, array: Any, rank: int) -> Any:
    """Return an array with leading axes of length 1. JAX can be set to refuse to broadcast without them."""
    return xp.reshape(array, (1,) * (rank - array.ndim) + tuple(array.shape))


def as_array(value: Any, shape: tuple[int, ...], like: Any) -> Any:
    """Return a mask or a bias of sdpa_xp as an array, as a framework takes it; others unchanged."""
    if isinstance(value, masks.Mask):
        return masks.to_array(value, shape, like=like)
    return biases.to_array(value, shape, like=like) if isinstance(value, biases.Bias) else value


def attend(
    xp: Any,
    query: Any,
    key: Any,
    value: Any,
    mask: Any,
    *,
    bias: Any = None,
    is_causal: bool = False,
    has_means: bool = True,
) -> Any:
    """Return the output, with the mean of all values where an array as `mask` leaves a query without keys.

    The frameworks give a masked pair the most negative number as its score, so that the weights of such a query
    are equal. sdpa_xp returns 0 for it, also here for its own masks, and without `has_means`.
    """
    is_array = mask is not None and not isinstance(mask, masks.Mask)
    allowed = with_rank(xp, mask, query.ndim) if is_array else mask
    output = scaled_dot_product_attention(
        query, key, value, allowed, bias=bias, is_causal=is_causal, layout="...LHE"
    )
    if not (is_array and has_means):
        return output
    has_key = xp.any(allowed, axis=-1)  # (..., H, L)
    if is_causal:  # the first allowed key may stand after the query
        rows = with_rank(xp, xp.arange(query.shape[-3]), has_key.ndim)
        has_key = xp.logical_and(has_key, xp.argmax(allowed, axis=-1) <= rows)
    mean = xp.mean(value, axis=-3, keepdims=True)
    mean = xp.repeat(mean, query.shape[-2] // value.shape[-2], axis=-2)
    return xp.where(xp.expand_dims(xp.swapaxes(has_key, -1, -2), -1), output, mean)
