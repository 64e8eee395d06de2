"""Flax's layers computed by sdpa_xp, beside the same layers of Flax, over all their arguments."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from peers.same_layers import allowed, array, assert_all_named, assert_same, compared, epsilon

from sdpa_xp import biases, masks
from sdpa_xp.integrations.flax import linen_attention, nnx_attention

pytest.importorskip("flax")
import jax
import jax.numpy as jnp
from flax import linen, nnx
from flax.nnx.nn.dtypes import promote_dtype

pytestmark = pytest.mark.needs("jax", "flax")
BATCH, LENGTH, KEYS, EMBED, HEADS = 2, 5, 7, 12, 4
RANDOM = jax.random.key(3)


# What `attention_fn` gets beside query, key and value: (options, whether sdpa_xp computes it)
FUNCTION: dict[str, tuple[dict[str, Any], bool]] = {
    "plain": ({}, True),
    "bias": ({"bias": array(BATCH, HEADS, LENGTH, KEYS)}, True),
    "bias of integers": ({"bias": allowed(LENGTH, KEYS)}, True),
    "bias of sdpa_xp": ({"bias": biases.from_array(array(HEADS, 1, 1))}, True),
    "bias and mask": ({"bias": array(HEADS, 1, KEYS), "mask": allowed(LENGTH, KEYS)}, True),
    "rate without dropout": ({"dropout_rate": 0.5, "deterministic": True}, True),
    "dropout": ({"dropout_rate": 0.5, "dropout_rng": RANDOM}, False),
    "dropout by head": ({"dropout_rate": 0.5, "dropout_rng": RANDOM, "broadcast_dropout": False}, False),
    "dropout and mask": ({"dropout_rate": 0.5, "dropout_rng": RANDOM, "mask": masks.causal()}, False),
    "dropout and bias of sdpa_xp": (
        {"dropout_rate": 0.5, "dropout_rng": RANDOM, "bias": biases.from_array(array(HEADS, 1, 1))},
        False,
    ),
    "dtype": ({"dtype": "bfloat16"}, True),
    "precision": ({"precision": "highest"}, False),
    "module": ({"module": None}, True),
}
OF_NNX: dict[str, tuple[dict[str, Any], bool]] = {
    "causal": ({"is_causal": True}, True),
    "causal and a mask": ({"is_causal": True, "mask": allowed(BATCH, HEADS, LENGTH, KEYS)}, True),
    "promote_dtype": (
        {"promote_dtype": lambda arrays, dtype=None: tuple(x.astype("bfloat16") for x in arrays)},
        True,
    ),
}
OF_LINEN: dict[str, tuple[dict[str, Any], bool]] = {
    "a mask that enlarges": ({"mask": allowed(3, BATCH, 1, LENGTH, KEYS)}, False),
    "float32 softmax": ({"force_fp32_for_softmax": True, "dtype": "bfloat16"}, True),
    "einsum_dot_general": ({"einsum_dot_general": jax.lax.dot_general}, False),
    "einsums": ({"qk_attn_weights_einsum": jnp.einsum, "attn_weights_value_einsum": jnp.einsum}, False),
}


def as_flax_takes(options: dict[str, Any]) -> dict[str, Any]:
    """Flax has no masks and biases of sdpa_xp: it gets their arrays."""
    shape = (BATCH, HEADS, LENGTH, KEYS)
    mask, bias = options.get("mask"), options.get("bias")
    like = array(1)
    return (
        options
        | ({"mask": masks.to_array(mask, shape, like=like)} if isinstance(mask, masks.Mask) else {})
        | ({"bias": biases.to_array(bias, shape, like=like)} if isinstance(bias, biases.Bias) else {})
    )


def pair(api: str) -> tuple[Callable[..., Any], Callable[..., Any]]:
    if api == "nnx":
        return nnx.dot_product_attention, nnx_attention
    return linen.dot_product_attention, linen_attention


def inputs(*batch: int, heads: tuple[int, ...] = (HEADS, HEADS, HEADS)) -> list[Any]:
    lengths = (LENGTH, KEYS, KEYS)
    return [array(*batch, n, h, 3, seed=n) for n, h in zip(lengths, heads, strict=True)]


@pytest.mark.parametrize("api", ["nnx", "linen"])
def test_the_function(api: str, calls: list[int]) -> None:
    cases = FUNCTION | (OF_NNX if api == "nnx" else OF_LINEN)

    def run(name: str) -> Callable[[Callable[..., Any]], Any]:
        options = cases[name][0]
        theirs = as_flax_takes(options)
        return lambda attend: attend(*inputs(BATCH), **(theirs if attend is pair(api)[0] else options))

    counted = compared({name: run(name) for name in cases}, *pair(api), calls)
    assert counted == {name: by_us for name, (_, by_us) in cases.items()}


@pytest.mark.parametrize("api", ["nnx", "linen"])
def test_the_arguments_of_the_function(api: str) -> None:
    """Ours has the arguments of Flax's in the same order, and the sweep names each."""
    theirs, ours = pair(api)
    assert list(inspect.signature(ours).parameters) == list(inspect.signature(theirs).parameters)
    cases = FUNCTION | (OF_NNX if api == "nnx" else OF_LINEN)
    named = {name for options, _ in cases.values() for name in options}
    assert_all_named([theirs], {"query", "key", "value", "mask", "dropout_rng", "deterministic", *named})


@pytest.mark.sampled(2)
@pytest.mark.parametrize("api", ["nnx", "linen"])
def test_masks(api: str, calls: list[int]) -> None:
    """Of every dtype and rank: 0 masks, and all other numbers do not. Also in rows without a key."""
    shapes = [(KEYS,), (LENGTH, KEYS), (1, KEYS), (HEADS, LENGTH, KEYS), (BATCH, 1, 1, KEYS)]
    shapes += [(BATCH, 1, LENGTH, KEYS), (BATCH, HEADS, LENGTH, KEYS), (BATCH, HEADS, LENGTH, 1)]
    cases = [(dtype, shape) for dtype in ("bool", "int32", "float32") for shape in shapes]
    cases += [(dtype, (BATCH, 1, LENGTH, KEYS)) for dtype in ("uint8", "float16", "bfloat16")]
    arrays_of_masks = {f"{dtype} {shape}": jnp.asarray(allowed(*shape)).astype(dtype) for dtype, shape in cases}
    runs = {name: lambda attend, x=x: attend(*inputs(BATCH), mask=x) for name, x in arrays_of_masks.items()}
    assert set(compared(runs, *pair(api), calls).values()) == {1}


@pytest.mark.sampled(2)
@pytest.mark.parametrize("dtype", ["float32", "bool"])
def test_masks_outside_a_jit(dtype: str) -> None:
    """Where sdpa_xp may choose the kernel of jax.nn."""
    mask = allowed(BATCH, 1, LENGTH, KEYS).astype(dtype)
    output, expected = (attend(*inputs(BATCH), mask=mask) for attend in pair("nnx"))
    assert_same(output, expected)


@pytest.mark.parametrize(
    "setting", [{"jax_numpy_rank_promotion": "raise"}, {"jax_numpy_dtype_promotion": "strict"}], ids=str
)
def test_masks_under_strict_settings(setting: dict[str, str]) -> None:
    """Flax passes its masks to jax.nn, which takes any rank under each setting."""
    mask, bias = allowed(LENGTH, KEYS).astype("float32"), array(HEADS, 1, 1)
    before = {name: getattr(jax.config, name) for name in setting}
    try:
        for name, value in setting.items():
            jax.config.update(name, value)
        output, expected = (attend(*inputs(BATCH), mask=mask, bias=bias) for attend in pair("nnx"))
    finally:
        for name, value in before.items():
            jax.config.update(name, value)
    assert_same(output, expected)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("api", ["nnx", "linen"])
def test_several_batch_axes(api: str, calls: list[int]) -> None:
    runs = {}
    for batch in ((), (2,), (2, 3), (2, 1, 3)):
        for shape in ((), (*batch, 1, LENGTH, KEYS), (*(1 for _ in batch), HEADS, LENGTH, KEYS)):
            mask = allowed(*shape) != 0 if shape else None
            runs[f"{batch} {shape}"] = lambda attend, batch=batch, mask=mask: attend(*inputs(*batch), mask=mask)
    assert set(compared(runs, *pair(api), calls).values()) == {1}


def test_grouped_heads(calls: list[int]) -> None:
    """Flax repeats the heads of key and value; if there is a rate, each may have a number of its own."""
    runs = {
        f"{heads} {is_causal}": lambda attend, heads=heads, is_causal=is_causal: attend(
            *inputs(BATCH, heads=heads), is_causal=is_causal, dropout_rate=0.1, deterministic=True
        )
        for heads in ((4, 2, 2), (4, 1, 1), (4, 2, 1))
        for is_causal in (False, True)
    }
    counted = compared(runs, *pair("nnx"), calls)
    assert counted == {name: not name.startswith("(4, 2, 1)") for name in runs}


@pytest.mark.parametrize("api", ["nnx", "linen"])
def test_what_flax_refuses_is_refused(api: str) -> None:
    query, key, _ = inputs(BATCH)
    for arrays in ((query, key[:1], key[:1]), (query, key, key[:, :3]), (query, key[..., :2], key)):
        for function in pair(api):
            with pytest.raises((ValueError, AssertionError, TypeError)):
                function(*arrays)


def normal(_key: Any, shape: tuple[int, ...], dtype: Any) -> Any:
    return array(*shape, seed=len(shape)).astype(dtype) / 3


DRAWN = {"kernel_init": normal}
CAUSAL = nnx.make_causal_mask(jnp.ones((BATCH, LENGTH)))  # float32, as Flax makes it
PADDING = nnx.make_attention_mask(jnp.ones((BATCH, LENGTH)), jnp.arange(KEYS) < jnp.array([[3], [0]]))
OF_KEYS, OF_VALUES = array(BATCH, KEYS, EMBED, seed=1), array(BATCH, KEYS, EMBED, seed=2)
# Arguments of the layer: (constructor, call, whether sdpa_xp computes it)
LAYERS: dict[str, tuple[dict[str, Any], dict[str, Any], bool]] = {
    "plain": ({}, {}, True),
    "sizes": ({"qkv_features": 8, "out_features": 5}, {}, True),
    "dtype": ({"dtype": "bfloat16", "param_dtype": "float16"}, {"mask": CAUSAL}, True),
    "dropout": ({"dropout_rate": 0.5, "deterministic": False}, {"mask": CAUSAL}, False),
    "dropout by head": ({"dropout_rate": 0.5, "broadcast_dropout": False}, {"deterministic": False}, False),
    "no dropout": ({"dropout_rate": 0.5}, {"deterministic": True, "mask": CAUSAL}, True),
    "precision": ({"precision": "high"}, {}, False),
    "weights": ({}, {"sow_weights": True, "mask": CAUSAL}, False),
    "normalised": ({"normalize_qk": True, "use_bias": False}, {}, True),
    "initialised": (
        dict.fromkeys(("kernel_init", "out_kernel_init", "bias_init", "out_bias_init"), normal),
        {},
        True,
    ),
    "products": (
        dict.fromkeys(f"{name}_dot_general{kind}" for name in ("qkv", "out") for kind in ("", "_cls")),
        {},
        True,
    ),
    "other keys": ({}, {"inputs_k": OF_KEYS}, True),
    "other values": ({}, {"inputs_k": OF_KEYS, "inputs_v": OF_VALUES, "mask": PADDING}, True),
}  # fmt: skip
METADATA = ("kernel", "out_kernel", "bias", "out_bias", "query_ln_scale", "key_ln_scale")
NNX_LAYERS: dict[str, tuple[dict[str, Any], dict[str, Any], bool]] = {
    "grouped": ({"num_kv_heads": 2}, {"is_causal": True}, True),
    "key features": ({"in_kv_features": EMBED}, {"inputs_k": OF_KEYS, "decode": False}, True),
    "rngs of the call": (
        {"dropout_rate": 0.5, "deterministic": False, "keep_rngs": False},
        {"rngs": nnx.Rngs},
        False,
    ),
    "promotion": (
        {f"{name}_promote_dtype": promote_dtype for name in ("qkv", "out", "ln")} | {"normalize_qk": True},
        {},
        True,
    ),
    "metadata": (
        {f"{name}_metadata": {} for name in METADATA},
        {"out_sharding": None, "qkv_sharding": None},
        True,
    ),
}  # fmt: skip
LINEN_LAYERS: dict[str, tuple[dict[str, Any], dict[str, Any], bool]] = {
    "inputs_kv": ({}, {"inputs_kv": OF_KEYS}, True),
    "dropout_rng": ({"dropout_rate": 0.5, "deterministic": False}, {"dropout_rng": RANDOM}, False),
    "float32 softmax": ({"force_fp32_for_softmax": True, "dtype": "bfloat16"}, {}, True),
    "einsums": (
        {f"{name}_einsum_cls": lambda: jnp.einsum for name in ("qk_attn_weights", "attn_weights_value")},
        {},
        False,
    ),
}  # fmt: skip


def nnx_layer(by_us: bool, **options: Any) -> Any:
    attention = {"attention_fn": nnx_attention} if by_us else {}
    return nnx.MultiHeadAttention(
        HEADS, **({"in_features": EMBED, "decode": False, "rngs": nnx.Rngs(0)} | DRAWN | options | attention)
    )


@pytest.mark.filterwarnings("ignore:Using 'Module.sow:DeprecationWarning")
def test_layers_of_nnx(calls: list[int]) -> None:
    cases = LAYERS | NNX_LAYERS

    def run(options: dict[str, Any], call: dict[str, Any]) -> Callable[[Callable[..., Any]], Any]:
        def with_attention(attend: Callable[..., Any]) -> Any:
            layer = nnx_layer(attend is nnx_attention, **options)
            fresh = call | ({"rngs": nnx.Rngs(5)} if "rngs" in call else {})
            output = layer(array(BATCH, LENGTH, EMBED), **fresh)
            if "sow_weights" not in call:
                return output
            (weights,) = layer.attention_weights.get_value()
            return weights

        return with_attention

    counted = compared({name: run(*case[:2]) for name, case in cases.items()}, *pair("nnx"), calls)
    assert counted == {name: by_us for name, (_, _, by_us) in cases.items()}


@pytest.mark.filterwarnings("ignore:The inputs_kv arg will be deprecated:DeprecationWarning")
def test_layers_of_linen(calls: list[int]) -> None:
    cases = LAYERS | LINEN_LAYERS
    keys = {"params": jax.random.key(0), "dropout": jax.random.key(1)}

    def run(options: dict[str, Any], call: dict[str, Any]) -> Callable[[Callable[..., Any]], Any]:
        parameters: dict[str, Any] = {}

        def with_attention(attend: Callable[..., Any]) -> Any:
            attention = {"attention_fn": attend} if attend is linen_attention else {}
            layer = linen.MultiHeadDotProductAttention(HEADS, **(DRAWN | options | attention))
            words = array(BATCH, LENGTH, EMBED)
            if not parameters:  # by Flax's layer, which is the first
                parameters["params"] = layer.init(keys, words, **call)["params"]
            output, sown = layer.apply(parameters, words, **call, rngs=keys, mutable=["intermediates"])
            return sown["intermediates"]["attention_weights"][0] if "sow_weights" in call else output

        return with_attention

    counted = compared({name: run(*case[:2]) for name, case in cases.items()}, *pair("linen"), calls)
    assert counted == {name: by_us for name, (_, _, by_us) in cases.items()}


def test_the_arguments_of_the_layers() -> None:
    def named(*tables: dict[str, Any]) -> set[str]:
        return {name for table in tables for options, call, _ in table.values() for name in (*options, *call)}

    common = {"num_heads", "attention_fn", "decode", "inputs_q"}  # `decode` in a test below
    of_nnx = nnx.MultiHeadAttention
    assert_all_named(
        [of_nnx.__init__, of_nnx.__call__], common | {"in_features", "rngs"} | named(LAYERS, NNX_LAYERS)
    )
    of_linen = linen.MultiHeadDotProductAttention
    assert_all_named([of_linen, of_linen.__call__], common | {"parent", "name"} | named(LAYERS, LINEN_LAYERS))


@pytest.mark.parametrize("api", ["nnx", "linen"])
def test_decoding(api: str, calls: list[int]) -> None:
    """Flax masks what its cache does not hold yet by 0 and 1; a mask of the call is combined with them."""
    words = array(BATCH, LENGTH, EMBED)
    mask = jnp.asarray(allowed(BATCH, 1, 1, LENGTH), "float32")

    def with_nnx(by_us: bool) -> Any:
        layer = nnx_layer(by_us, decode=True)
        layer.init_cache(words.shape)
        return jnp.concatenate([layer(words[:, i : i + 1], mask=mask) for i in range(LENGTH)], 1)

    def with_linen(by_us: bool) -> Any:
        options = {"attention_fn": linen_attention} if by_us else {}
        layer = linen.MultiHeadDotProductAttention(HEADS, decode=True, **options)
        state, outputs = layer.init(jax.random.key(0), words), []
        for i in range(LENGTH):
            output, changed = layer.apply(state, words[:, i : i + 1], mask=mask, mutable=["cache"])
            state = state | changed
            outputs.append(output)
        return jnp.concatenate(outputs, 1)

    run = with_nnx if api == "nnx" else with_linen
    expected = run(False)
    assert calls == [0]
    output = run(True)
    assert calls[0] >= LENGTH
    assert_same(output, expected)


def test_a_future_token_is_not_seen() -> None:
    words = array(BATCH, LENGTH, EMBED)
    layer, mask = nnx_layer(True), CAUSAL
    np.testing.assert_array_equal(
        layer(words, mask=mask)[:, :3], layer(words.at[:, 3:].set(9.0), mask=mask)[:, :3]
    )


@pytest.mark.sampled(2)
@pytest.mark.parametrize("mask", ["float", "causal"])
def test_gradients_inside_a_jit(mask: str) -> None:
    words, numbers = array(BATCH, LENGTH, EMBED), allowed(BATCH, 1, LENGTH, LENGTH)
    ours, theirs = (masks.causal(), CAUSAL) if mask == "causal" else (numbers, numbers)

    def gradients(layer: Any, mask: Any) -> Any:
        return nnx.jit(nnx.grad(lambda layer, x: (layer(x, mask=mask) ** 2).sum()))(layer, words)

    expected = jax.tree.leaves(nnx.as_pure(gradients(nnx_layer(False), theirs)))
    results = jax.tree.leaves(nnx.as_pure(gradients(nnx_layer(True), ours)))
    scale = max(float(abs(x).max()) for x in expected)
    for result, x in zip(results, expected, strict=True):
        assert abs(result - x).max() <= 64 * epsilon(result) * scale
