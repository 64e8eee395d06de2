"""Equinox's attention layer computed by sdpa_xp, beside the same layer of Equinox, over all its arguments."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from peers.same_layers import allowed, array, assert_all_named, assert_same, compared, epsilon

from sdpa_xp import masks
from sdpa_xp.integrations.equinox import replace_attention

pytest.importorskip("equinox")
import equinox as eqx
import jax
import jax.numpy as jnp

pytestmark = pytest.mark.needs("jax", "equinox")
LENGTH, KEYS, EMBED, HEADS = 5, 7, 12, 4

PAIRS, OF_HEADS, RANDOM = allowed(LENGTH, KEYS) != 0, allowed(HEADS, LENGTH, KEYS) != 0, jax.random.key(5)


def rotate(query: Any, key: Any, value: Any) -> Any:
    turn = jax.vmap(eqx.nn.RotaryPositionalEmbedding(query.shape[-1] + 1), in_axes=1, out_axes=1)
    wide = [jnp.pad(x, ((0, 0), (0, 0), (0, 1))) for x in (query, key)]
    return *(turn(x)[..., :-1] for x in wide), value


# (constructor, call, whether sdpa_xp computes it)
CASES: dict[str, tuple[dict[str, Any], dict[str, Any], bool]] = {
    "plain": ({}, {}, True),
    "sizes": ({"key_size": 6, "value_size": 5, "output_size": 9, "qk_size": 2, "vo_size": 4}, {}, True),
    "biases": ({f"use_{name}_bias": True for name in ("query", "key", "value", "output")}, {}, True),
    "half precision": ({"dtype": "bfloat16"}, {"mask": PAIRS}, True),
    "dropout": ({"dropout_p": 0.5}, {"key": RANDOM}, False),
    "dropout and a mask": ({"dropout_p": 0.5}, {"key": RANDOM, "mask": OF_HEADS}, False),
    "dropout of the call": ({"dropout_p": 0.5, "inference": True}, {"key": RANDOM, "inference": False}, False),
    "inference": ({"dropout_p": 0.5, "inference": True}, {"mask": OF_HEADS}, True),
    "inference of the call": ({"dropout_p": 0.5}, {"inference": True, "key": RANDOM}, True),
    "a key without dropout": ({}, {"key": RANDOM}, True),
    "deterministic": ({"dropout_p": 0.5}, {"deterministic": True}, False),
    "rotated heads": ({}, {"process_heads": rotate, "mask": PAIRS}, True),
}


def layer(**options: Any) -> Any:
    shapes = eqx.filter_eval_shape(eqx.nn.MultiheadAttention, HEADS, EMBED, **options, key=jax.random.key(0))
    return jax.tree.map(lambda x: array(*x.shape, seed=2).astype(x.dtype) if hasattr(x, "shape") else x, shapes)


def run(theirs: Any, call: dict[str, Any]) -> Callable[[Any], Any]:
    """A call of a layer as it is, and computed by sdpa_xp."""
    widths, dtype = (theirs.query_size, theirs.key_size, theirs.value_size), theirs.query_proj.weight.dtype
    lengths = (LENGTH, KEYS, KEYS)
    inputs = [array(n, w, seed=n).astype(dtype) for n, w in zip(lengths, widths, strict=True)]
    return lambda side: side(theirs)(*inputs, **call)


def counted(runs: dict[str, Any], calls: list[int]) -> dict[str, int]:
    return compared(runs, lambda layer: layer, replace_attention, calls, len(runs))


@pytest.mark.filterwarnings("ignore:MultiheadAttention..:UserWarning")
def test_the_layer(calls: list[int]) -> None:
    runs = {name: run(layer(**options), call) for name, (options, call, _) in CASES.items()}
    assert counted(runs, calls) == {name: by_us for name, (_, _, by_us) in CASES.items()}


def test_the_arguments() -> None:
    named = {name for options, call, _ in CASES.values() for name in (*options, *call)}
    original = eqx.nn.MultiheadAttention
    assert_all_named(
        [original.__init__, original.__call__], {"num_heads", "query_size", "query", "key_", "value", *named}
    )


def test_masks(calls: list[int]) -> None:
    """Of every dtype: 0 masks, and all other numbers do not. Also in rows without a key."""
    runs = {
        f"{dtype} {shape}": run(layer(), {"mask": jnp.asarray(allowed(*shape)).astype(dtype)})
        for shape in ((LENGTH, KEYS), (HEADS, LENGTH, KEYS))
        for dtype in ("bool", "int32", "uint8", "float32", "float16")
    }
    assert set(counted(runs, calls).values()) == {1}


@pytest.mark.sampled(2)
@pytest.mark.parametrize("dtype", ["float32", "bool"])
def test_masks_outside_a_jit(dtype: str) -> None:
    """Where sdpa_xp may choose the kernel of jax.nn."""
    words, keys, mask = array(LENGTH, EMBED), array(KEYS, EMBED), allowed(LENGTH, KEYS).astype(dtype)
    expected, output = (subject(words, keys, keys, mask) for subject in (layer(), replace_attention(layer())))
    assert_same(output, expected)


@pytest.mark.parametrize("p", [0.0, 0.5])
def test_masks_of_sdpa_xp(p: float) -> None:
    """Equinox, which computes dropout, gets their array."""
    words = array(LENGTH, EMBED)
    theirs = layer(dropout_p=p)
    expected = theirs(words, words, words, np.tri(LENGTH, dtype=bool), key=jax.random.key(1))
    output = replace_attention(theirs)(words, words, words, masks.causal(), key=jax.random.key(1))
    assert_same(output, expected)


def test_what_equinox_refuses_is_refused() -> None:
    ours, words, keys = replace_attention(layer()), array(LENGTH, EMBED), array(KEYS, EMBED)
    shapes = (1, KEYS), (1, LENGTH, KEYS), (2, 1, LENGTH, KEYS)
    for mask in (np.ones(shape, bool) for shape in shapes):
        for attention in (layer(), ours):
            with pytest.raises(ValueError, match=r"mask|vmap"):
                attention(words, keys, keys, mask)
    with pytest.raises(ValueError, match="equal length"):
        ours(words, keys, keys[:-1])
    with pytest.raises(ValueError, match="must not change the shape"):
        ours(words, keys, keys, process_heads=lambda *heads: [x[1:] for x in heads])
    with pytest.raises(RuntimeError, match="requires a key"):
        replace_attention(layer(dropout_p=0.5))(words, keys, keys)


def test_inside_of_a_model(calls: list[int]) -> None:
    """In a jit, over a batch with a mask for each entry, and with gradients; parameters are those of before."""
    model = {"norm": eqx.nn.LayerNorm(EMBED), "layers": [layer(), layer(use_output_bias=True)]}
    ours = replace_attention(replace_attention(model))
    assert [x is y for x, y in zip(*map(jax.tree.leaves, (model, ours)), strict=True)].count(False) == 0
    assert isinstance(ours["layers"][1], eqx.nn.MultiheadAttention)
    words, mask = array(2, LENGTH, EMBED), np.stack([np.tri(LENGTH), np.ones((LENGTH, LENGTH))])

    def loss(model: Any, words: Any) -> Any:
        for attention in model["layers"]:
            x = jax.vmap(jax.vmap(model["norm"]))(words)
            words = words + jax.vmap(attention)(x, x, x, mask)
        return (words**2).mean()

    (expected, slopes), (output, ours_slopes) = (
        eqx.filter_jit(eqx.filter_value_and_grad(loss))(subject, words) for subject in (model, ours)
    )
    assert calls == [2]
    assert abs(output - expected) < 16 * epsilon(expected) * abs(expected)
    leaves = [jax.tree.leaves(eqx.filter(x, eqx.is_array)) for x in (slopes, ours_slopes)]
    scale = max(float(abs(x).max()) for x in leaves[0])
    assert max(float(abs(x - y).max()) for x, y in zip(*leaves, strict=True)) < 64 * epsilon(expected) * scale


def test_a_model_without_such_a_layer_is_refused() -> None:
    class Own(eqx.nn.MultiheadAttention):
        pass

    for model in (eqx.nn.LayerNorm(3), Own(1, 2, key=jax.random.key(0))):
        with pytest.raises(ValueError, match=r"^replace_attention: `model` must have a layer equinox.nn.Multi"):
            replace_attention(model)
