"""Side by side with the layers of Flax and Equinox, whose boolean masks mean what ours do."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from internals import judge, reference, textbook

from sdpa_xp.layers import Linear, MultiHeadAttention

jax = pytest.importorskip("jax")
EMBED, HEADS, QUERIES, KEYS = 12, 3, 4, 6


@pytest.fixture
def inputs(rng: np.random.Generator) -> list[Any]:
    return [jax.numpy.asarray(rng.standard_normal((n, EMBED), np.float32)) for n in (QUERIES, KEYS, KEYS)]


@pytest.fixture
def allowed(rng: np.random.Generator) -> Any:
    mask = rng.random((QUERIES, KEYS)) < 0.6
    mask[:, 0] = True
    return jax.numpy.asarray(mask)


def plainly(xp: Any, layer: MultiHeadAttention, attend: Any, inputs: list[Any], allowed: Any) -> Any:
    def linear(role: Any, x: Any) -> Any:
        return x @ role.weight.T + (0 if role.bias is None else role.bias)

    apart = [
        xp.moveaxis(xp.reshape(linear(role, x), (-1, HEADS, EMBED // HEADS)), 1, 0)
        for x, role in zip(inputs, (layer.query, layer.key, layer.value), strict=True)
    ]
    return linear(layer.out, xp.reshape(xp.moveaxis(attend(*apart, allowed), 0, 1), (-1, EMBED)))


def assert_agree(layer: MultiHeadAttention, inputs: list[Any], allowed: Any, results: dict[str, Any]) -> None:
    """Each of `results` is as near to float64 as the textbook's formula in float32."""
    wide = layer.with_parameters({name: np.asarray(x, np.float64) for name, x in layer.parameters.items()})
    numbers = [np.asarray(x, np.float64) for x in inputs]
    expected = plainly(np, wide, lambda *x: reference.attention(*x)[0], numbers, np.asarray(allowed))
    xp = jax.numpy
    plain = np.asarray(plainly(xp, layer, lambda *x: textbook(xp, *x), inputs, allowed))
    for name, output in results.items():
        agreement = judge(np.asarray(output), expected, plain, "float32")
        assert agreement.agrees, (name, agreement)


def test_flax(inputs: list[Any], allowed: Any) -> None:
    """Its kernels are (in, heads, width), and that of the output (heads, width, out)."""
    from flax import nnx

    init = nnx.initializers.normal()
    theirs = nnx.MultiHeadAttention(HEADS, EMBED, bias_init=init, decode=False, rngs=nnx.Rngs(0))
    maps = {
        role: Linear(part.kernel[...].reshape(EMBED, -1).T, part.bias[...].reshape(-1))
        for role, part in (("query", theirs.query), ("key", theirs.key), ("value", theirs.value))
    }
    out = Linear(theirs.out.kernel[...].reshape(-1, EMBED).T, theirs.out.bias[...])
    layer = MultiHeadAttention(**maps, out=out, num_heads=HEADS)
    results = {"flax": theirs(*inputs, mask=allowed), "ours": layer(*inputs, attn_mask=allowed)}
    assert_agree(layer, inputs, allowed, results)


def test_equinox(inputs: list[Any], allowed: Any) -> None:
    """Its weights are (out, in), as ours."""
    import equinox

    theirs = equinox.nn.MultiheadAttention(
        HEADS,
        EMBED,
        use_query_bias=True,
        use_key_bias=True,
        use_value_bias=True,
        use_output_bias=True,
        key=jax.random.key(0),
    )
    parts = {
        "query": theirs.query_proj,
        "key": theirs.key_proj,
        "value": theirs.value_proj,
        "out": theirs.output_proj,
    }
    maps: dict[str, Any] = {role: Linear(part.weight, part.bias) for role, part in parts.items()}
    layer = MultiHeadAttention(**maps, num_heads=HEADS)
    results = {"equinox": theirs(*inputs, mask=allowed), "ours": layer(*inputs, attn_mask=allowed)}
    assert_agree(layer, inputs, allowed, results)
