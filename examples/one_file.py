"""Attention in one file, to copy: NumPy, torch, JAX or another library of the array API, in linear memory.

It keeps the contract of sdpa_xp: grouped heads, masks, biases, rows that may attend to no key (0, not NaN), and
padding that holds NaN. It is eager. sdpa_xp also has tiles that a mask skips, threads, vendors' kernels,
gradients, caches, statistics and ONNX.

Run it: python examples/one_file.py
"""

from __future__ import annotations

import math
from typing import Any

from array_api_compat import array_namespace, device


def attention(
    query: Any,
    key: Any,
    value: Any,
    attn_mask: Any = None,
    *,
    bias: Any = None,
    is_causal: bool = False,
    scale: float | None = None,
    softcap: float | None = None,
    tile: int = 512,
) -> Any:
    """Return the attention of each query, (..., Hq, L, Ev), as `scaled_dot_product_attention` does.

    Args:
        query: (..., Hq, L, E), or (L, E) for one head.
        key: (..., H, S, E); query head h attends to key head h // (Hq // H).
        value: (..., H, S, Ev).
        attn_mask: Boolean, True where a query may attend; broadcasts to (..., Hq, L, S).
        bias: Floating, added to the scores; broadcasts likewise. -inf masks.
        is_causal: Whether query i attends to the keys j <= i alone.
        scale: What the scores are multiplied by; None is 1 / sqrt(E).
        softcap: The scores become `softcap * tanh(scores / softcap)`.
        tile: How many queries, and how many keys, are computed at once.
    """
    xp, has_heads = array_namespace(query, key, value), query.ndim > 2
    if not has_heads:
        query, key, value = (x[None, ...] for x in (query, key, value))
    dtype = xp.float64 if query.dtype == xp.float64 else xp.float32  # halves are computed in float32
    (heads, queries, width), (kv_heads, keys) = query.shape[-3:], key.shape[-3:-1]

    def split(x: Any) -> Any:
        """(..., Hq, M, N) -> (..., H, Hq // H, M, N), so that the queries of a group meet one key head."""
        if x.ndim < 3:
            return x
        groups = (1, 1) if x.shape[-3] == 1 else (kv_heads, heads // kv_heads)
        return xp.reshape(x, (*x.shape[:-3], *groups, *x.shape[-2:]))

    def part(x: Any, rows: slice, columns: slice) -> Any:
        """The tile of what broadcasts to the scores."""
        x = xp.reshape(x, (*(1,) * (2 - x.ndim), *x.shape))
        x = x if x.shape[-2] == 1 else x[..., rows, :]
        return split(x if x.shape[-1] == 1 else x[..., columns])

    def place(indices: slice) -> Any:
        return xp.arange(indices.start, indices.stop, device=device(query))

    scale = 1 / math.sqrt(width) if scale is None else scale
    outputs = []
    for first in range(0, max(queries, 1), tile):
        rows = slice(first, min(first + tile, queries))
        q = split(xp.astype(query[..., rows, :], dtype)) * scale
        m = xp.full((*q.shape[:-1], 1), -xp.inf, dtype=dtype, device=device(query))  # the largest score so far
        l = xp.zeros_like(m)  # the sum of exp(score - m)
        o = xp.zeros((*q.shape[:-1], value.shape[-1]), dtype=dtype, device=device(query))
        for start in range(0, keys, tile):
            columns = slice(start, min(start + tile, keys))
            k, v = (xp.astype(x[..., None, columns, :], dtype) for x in (key, value))
            s = q @ xp.matrix_transpose(k)
            if softcap:
                s = softcap * xp.tanh(s / softcap)
            allowed = xp.ones((1, 1), dtype=xp.bool, device=device(query))
            if bias is not None:
                s, allowed = s + part(bias, rows, columns), part(bias, rows, columns) != -xp.inf
            if attn_mask is not None:
                allowed = allowed & part(attn_mask, rows, columns)
            if is_causal:
                allowed = allowed & (place(columns)[None, :] <= place(rows)[:, None])
            s = xp.where(allowed, s, -xp.inf)
            new = xp.maximum(m, xp.max(s, axis=-1, keepdims=True))
            shift = xp.where(new == -xp.inf, 0.0, new)  # a row without a key: exp(-inf - 0) is 0, not NaN
            p, keep = xp.exp(s - shift), xp.exp(m - shift)
            l = l * keep + xp.sum(p, axis=-1, keepdims=True)
            o = o * keep + weighted(p, v, allowed)
            m = new
        o = o / xp.where(l == 0.0, 1.0, l)
        outputs.append(xp.reshape(o, (*o.shape[:-4], heads, *o.shape[-2:])))
    output = xp.astype(xp.concat(outputs, axis=-2), query.dtype)
    return output if has_heads else output[0, ...]


def weighted(p: Any, v: Any, allowed: Any) -> Any:
    """Return p @ v, to which a value adds nothing where it is not `allowed`: 0 * NaN would be NaN."""
    xp = array_namespace(p, v)
    total = p @ xp.where(xp.isfinite(v), v, 0.0)
    for number, places in ((xp.nan, xp.isnan(v)), (xp.inf, v == xp.inf), (-xp.inf, v == -xp.inf)):
        if bool(xp.any(places)):
            reads = xp.where(allowed, xp.ones_like(p), 0.0) @ xp.astype(places, p.dtype)
            total = xp.where(reads > 0.0, total + number, total)
    return total


def main() -> None:
    """Compare it with the library."""
    import numpy as np

    from sdpa_xp import scaled_dot_product_attention

    rng = np.random.default_rng(0)
    query = rng.standard_normal((2, 8, 1000, 64), np.float32)
    key, value = (rng.standard_normal((2, 2, 1000, 64), np.float32) for _ in range(2))
    output = attention(query, key, value, is_causal=True)
    expected = scaled_dot_product_attention(query, key, value, is_causal=True)
    print(f"attention of 1,000 causal queries, 8 heads over 2 key heads, has the shape {output.shape}.")
    print(
        f"It differs from what sdpa_xp returns for the call by at most {np.abs(output - expected).max():.0e}."
    )


if __name__ == "__main__":
    main()
