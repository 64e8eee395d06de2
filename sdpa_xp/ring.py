"""Attention over keys that are divided among the devices of a JAX mesh."""

from __future__ import annotations

from typing import TypeVar, cast

from sdpa_xp import _checks as checks
from sdpa_xp import _ring
from sdpa_xp._call.options import CallOptions
from sdpa_xp._call.prepare import prepare
from sdpa_xp._checks import Implementation
from sdpa_xp._libraries import library_of
from sdpa_xp._libraries.protocols import AnyArray, Dtype, Rng
from sdpa_xp._tiles.layout import Layout
from sdpa_xp.biases import Bias
from sdpa_xp.masks import Mask

A = TypeVar("A", bound=AnyArray)


def ring_attention(
    query: A,
    key: AnyArray,
    value: AnyArray,
    attn_mask: Mask | AnyArray | None = None,
    *,
    mesh: object,
    axis_name: str,
    bias: Bias | AnyArray | None = None,
    is_causal: bool = False,
    scale: float | AnyArray | None = None,
    softcap: float | None = None,
    sinks: AnyArray | None = None,
    dropout_p: float = 0.0,
    rng: Rng | None = None,
    softmax_dtype: Dtype | None = None,
    layout: Layout = "...HLE",
    implementation: Implementation | None = None,
) -> A:
    r"""Compute `scaled_dot_product_attention` of sequences that are divided among the devices of a JAX mesh.

    Each of the n devices along `axis_name` holds L / n queries and S / n keys and values, in the order of the
    sequence. Keys and values travel around the ring of devices, and each device merges the attention states of
    its queries. No device ever holds more than two parts of the keys. Call it inside of `jax.jit`.

    Steps in which a mask lets no device attend are left out: with a sliding window, keys travel only as far as
    the window reaches. With a causal mask the devices would not have equally much to do. The call then moves
    queries, keys and values to zig-zag order first, and moves the output back: the sequence is cut into 2 n
    pieces, and device d gets the pieces d and 2 n - 1 - d. You see the plain order, and i and j of masks and
    biases count in it too.

    Shapes:
        As for `scaled_dot_product_attention`. L and S are multiples of n, and for zig-zag order of 2 n.

    Args:
        query: (..., Hq, L, E), arrays of JAX. Its parts along L lie on the devices along `axis_name`; arrays
            that lie otherwise are moved there. Batch and heads may lie along other axes of the mesh, and stay
            so.
        key: (..., H, S, E), divided along S.
        value: (..., H, S, Ev), divided along S.
        attn_mask: A mask, or an array that broadcasts to (..., Hq, L, S). Each device needs the rows of its
            queries. The masks of `sdpa_xp.masks` need no array. They also tell which steps to leave out, if
            their arrays are no inputs of the `jit`.
        mesh: A jax.sharding.Mesh.
        axis_name: The axis of `mesh` along which the keys are divided.
        bias: A bias, or an array that broadcasts to (..., Hq, L, S), divided as `attn_mask`.
        is_causal: Query i attends to key j only if j <= i.
        scale: A number, or an array that broadcasts to (..., Hq, L, 1).
        softcap: A positive number, or None.
        sinks: (..., Hq).
        dropout_p: From 0 to 1. The same weights are dropped as without a mesh.
        rng: A key of JAX, required if dropout_p > 0.
        softmax_dtype: float32, float64 or None.
        layout: "...HLE" or "...LHE".
        implementation: `"xp"` or None.

    Returns:
        (..., Hq, L, Ev), divided as `query`, with its dtype. A row whose keys are all masked is 0.

    Raises:
        TypeError: As for `scaled_dot_product_attention`; or the arrays are not of JAX, or `mesh` is no mesh.
        ValueError: As for `scaled_dot_product_attention`; or `mesh` has no such axis, or L or S is not a
            multiple of its length.

    Numerics:
        Keys and values travel in their dtype. Scores, states and sums of gradients have the accumulation dtype.
        Reverse-mode gradients (jax.grad) go around the ring a second time, and compute scores again, so that no
        device keeps the keys of others. Forward-mode (jax.jvp) is not available.

    Examples:
        >>> import jax
        >>> mesh = jax.make_mesh((1,), ("keys",))  # (8,) on eight devices
        >>> x = jax.numpy.ones((2, 4, 8))
        >>> ring_attention(x, x, x, is_causal=True, mesh=mesh, axis_name="keys").shape
        (2, 4, 8)

    References:
        Liu, Zaharia and Abbeel, "Ring Attention with Blockwise Transformers", arXiv 2310.01889, section 3.
        Dubey et al., "The Llama 3 Herd of Models", arXiv 2407.21783, section 3.3.2, for zig-zag order.
    """
    function = "ring_attention"
    options = CallOptions(
        attn_mask, bias, is_causal, scale, softcap, sinks, dropout_p, rng, softmax_dtype, layout, implementation
    )
    ring = checks.ring(function, library_of(query), query, mesh, axis_name)
    call = prepare(function, {"query": query, "key": key, "value": value}, options)
    checks.divided(function, {"query": call.sizes.queries, "key": call.sizes.keys}, axis_name, ring.size)
    return cast(A, call.result(_ring.attend(call, ring)))
