"""Long calls inside a jit: loops over the queries, with the numbers of the call that is computed at once."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import autograd
import numpy as np
import pytest
from calls import draw_named, sloping
from differentiable_calls import CALLS, calls
from internals import TileSize, override
from libraries import Library

from sdpa_xp import attention_state, biases, masks, scaled_dot_product_attention
from sdpa_xp import scaled_dot_product_attention_vjp as vjp

F = np.float32
Arrays = dict[str, np.ndarray]


@pytest.fixture(autouse=True)
def _of_jax(library: Library) -> None:
    if library.name.split("-")[0] != "jax":
        pytest.skip("only JAX's compiler has loops")


@pytest.fixture
def short_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of 2 or 3 queries each, wherever there are 6 scores."""
    override(monkeypatch, "DEVICE", TileSize(4, 6, 5))
    override(monkeypatch, "SMALLEST_SIDE", 3)


@pytest.fixture
def arrays(rng: np.random.Generator) -> Arrays:
    """8 queries, in grouped heads."""
    shapes = {"query": (2, 4, 8, 8), "key": (2, 2, 12, 8), "value": (2, 2, 12, 5)}
    inputs = draw_named(rng, shapes)
    allowed = rng.random((2, 4, 8, 12)) < 0.6
    allowed[:, :, 6], allowed[..., 9] = False, False
    bias = rng.standard_normal((4, 8, 12)).astype(F)
    learned = {"scale": (2, 1, 8, 1), "sinks": (4,), "table": (8, 4), "slopes": (4,)}
    return inputs | {
        "allowed": allowed,
        "bias": np.where(allowed[0], bias, -np.inf).astype(F),
        **draw_named(rng, learned),
        "lengths": np.asarray([5, 12], np.int32),
        "rows": np.asarray([7, 2], np.int32),
        "ids": np.asarray([[0, 0, 1, 1, 1, 2, 2, 2], [0] * 8], np.int32),
        "key_ids": np.asarray([[0] * 6 + [1] * 6, [0] * 11 + [2]], np.int32),
    }


Rules = Callable[..., dict[str, Any]]
RULES: dict[str, Rules] = {
    "plain": lambda **_: {},
    "causal": lambda **_: {"is_causal": True},
    "an array a pair": lambda allowed, **_: {"attn_mask": allowed, "is_causal": True},
    "an array a key": lambda allowed, **_: {"attn_mask": allowed[0, 0, 0, :]},
    "an array a query": lambda allowed, **_: {"attn_mask": allowed[:, :, :, :1]},
    "a band": lambda lengths, **_: {"attn_mask": masks.sliding_window(3, 1, offset=lengths)},
    "lower right": lambda **_: {"attn_mask": masks.causal("lower_right")},
    "static padding": lambda **_: {"attn_mask": masks.padding([4, 12], [7, 2])},
    "padding": lambda lengths, rows, **_: {"attn_mask": masks.padding(lengths, rows)},
    "documents": lambda ids, key_ids, **_: {"attn_mask": masks.document(ids, key_ids)},
    "prefix, chunks, dilation": lambda lengths, **_: {
        "attn_mask": (masks.causal() | masks.prefix(lengths)) & ~(masks.chunked(4) & masks.dilated(2))
    },
    "one chunk": lambda **_: {"attn_mask": masks.chunked(5)},
    "mask function": lambda **_: {
        "attn_mask": masks.from_function(lambda b, h, i, j: (i * j + h + b) % 3 != 1)
    },
    "bias": lambda bias, **_: {"bias": bias, "softcap": 2.0},
    "alibi": lambda slopes, lengths, **_: {"bias": biases.alibi(slopes, offset=lengths)},
    "relative": lambda table, **_: {"bias": biases.relative(table, max_distance=6)},
    "score function": lambda **_: {"bias": biases.from_function(sloping)},
    "scale and sinks": lambda scale, sinks, **_: {"scale": scale, "sinks": sinks, "is_causal": True},
}


def state(rules: Rules, arrays: dict[str, Any], **more: Any) -> Any:
    return attention_state(*(arrays[name] for name in ("query", "key", "value")), **rules(**arrays), **more)


@pytest.mark.leaves_out("jax-debug")
@pytest.mark.usefixtures("short_blocks")
@pytest.mark.parametrize("rules", RULES.values(), ids=RULES)
def test_same_numbers(library: Library, arrays: Arrays, rules: Rules) -> None:
    import jax

    traced = jax.jit(lambda **arrays: tuple(state(rules, arrays)))
    expected = state(rules, arrays)
    output, lse = (library.get(x) for x in library.call(traced, **arrays))
    np.testing.assert_allclose(output, expected.output, rtol=0, atol=4e-6)
    np.testing.assert_allclose(lse, expected.lse, rtol=0, atol=4e-6)
    assert "while" in library.call(traced.lower, **arrays).as_text()


@pytest.mark.parametrize("name", ["an array a pair", "bias", "alibi", "relative", "scale and sinks"])
def test_same_gradients(library: Library, arrays: Arrays, name: str, request: pytest.FixtureRequest) -> None:
    """As of one tile, of whatever is floating; lse joins in, without what is -inf."""
    import jax

    rules, learned = RULES[name], [key for key, x in arrays.items() if x.dtype == F]

    def loss(learned: Any, arrays: Any) -> Any:
        output, lse = state(rules, arrays | learned)
        return (output**2).sum() + jax.numpy.where(lse > -math.inf, lse, 0).sum()

    def gradients() -> Any:
        return library.call(
            jax.jit(lambda **arrays: jax.grad(loss)({x: arrays[x] for x in learned}, arrays)), **arrays
        )

    expected = gradients()
    request.getfixturevalue("short_blocks")
    for key, gradient in gradients().items():
        wanted = library.get(expected[key])
        bound = 1e-6 * max(1, np.abs(wanted).max())
        np.testing.assert_allclose(library.get(gradient), wanted, rtol=0, atol=bound)


EVEN = calls(8, 17)
"""Here blocks have equally many queries, and each has some from everywhere; those of `CALLS` repeat some."""


@pytest.mark.leaves_out("jax-debug")
@pytest.mark.parametrize(
    "call",
    [EVEN["relative"], CALLS["relative, lower right"], CALLS["window of each entry"], CALLS["all"]],
    ids=["relative", "relative, repeated", "empty bands", "all"],
)
def test_gradients_without_a_framework(
    library: Library, rng: np.random.Generator, call: autograd.Call, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The sums of a pullback, and of its derivative along a direction, are carried by the loops."""
    import jax

    def computed(arrays: Any, tangents: Any, first: Any, second: Any) -> Any:
        xp = jax.numpy if isinstance(first, jax.Array) else np
        rules = autograd.keywords(call, arrays)
        rules |= {name: xp.asarray(x) for name, x in rules.items() if isinstance(x, np.ndarray)}
        _, pullback = vjp(*(arrays[name] for name in autograd.INPUTS), **rules)
        return pullback(first), *pullback.jvp(first, tangents, second)

    arrays, tangents = (autograd.arrays(call, rng, F) for _ in range(2))
    shape = vjp(*(arrays[name] for name in autograd.INPUTS))[0].shape
    cotangents = [rng.standard_normal(shape, F) for _ in range(2)]
    expected = computed(arrays, tangents, *cotangents)
    override(monkeypatch, "DEVICE", TileSize(4, 6, 5))
    override(monkeypatch, "SMALLEST_SIDE", 3)
    traced = jax.jit(lambda inputs: computed(inputs["arrays"], inputs["tangents"], *inputs["cotangents"]))
    with library.guard():
        placed = jax.tree.map(library.put, {"arrays": arrays, "tangents": tangents, "cotangents": cotangents})
        results = traced(placed)
        assert "while" in traced.lower(placed).as_text()
    for part, wanted in zip(results, expected, strict=True):
        for name, gradient in part.items():
            bound = 2e-5 * max(1, np.abs(wanted[name]).max())
            np.testing.assert_allclose(library.get(gradient), wanted[name], rtol=0, atol=bound, err_msg=name)


@pytest.mark.leaves_out("jax-debug")
@pytest.mark.usefixtures("short_blocks")
def test_same_pairs_are_dropped(library: Library, arrays: Arrays) -> None:
    """As by a call that is not traced."""
    import jax

    inputs = [arrays[name] for name in ("query", "key", "value")]

    def call(*inputs: Any) -> Any:
        return scaled_dot_product_attention(*inputs, dropout_p=0.5, rng=jax.random.key(3))

    output, expected = (library.get(library.call(function, *inputs)) for function in (jax.jit(call), call))
    np.testing.assert_allclose(output, expected, rtol=0, atol=2e-6)


BANDED: dict[str, Callable[[Any, int], dict[str, Any]]] = {
    "causal": lambda xp, length: {"is_causal": True},
    "lower right, a scale for each row": lambda xp, length: {
        "attn_mask": masks.causal("lower_right"),
        "scale": xp.linspace(0.1, 0.5, length, dtype=xp.float32)[:, None],
    },
    "a window and padding": lambda xp, length: {
        "attn_mask": masks.sliding_window(4, 0) & masks.padding([5, length])
    },
    "an array and slopes": lambda xp, length: {
        "attn_mask": masks.causal() & masks.from_array(xp.arange(length**2).reshape(length, length) % 3 > 0),
        "bias": biases.alibi(4),
    },
    "offsets": lambda xp, length: {"attn_mask": masks.causal([0, 3])},
}


@pytest.mark.usefixtures("short_blocks")
@pytest.mark.parametrize("rules", BANDED.values(), ids=BANDED)
@pytest.mark.parametrize("length", [7, 13, 24])
def test_bands_of_several_blocks(library: Library, rng: np.random.Generator, rules: Any, length: int) -> None:
    """Bands begin behind the first query, a last block begins early, and a last band is shorter."""
    import jax

    inputs = [rng.standard_normal((2, heads, length, 8), F) for heads in (4, 2, 2)]
    traced = jax.jit(lambda *inputs: scaled_dot_product_attention(*inputs, **rules(jax.numpy, length)))
    expected = scaled_dot_product_attention(*inputs, **rules(np, length))
    np.testing.assert_allclose(library.get(library.call(traced, *inputs)), expected, rtol=0, atol=2e-6)


@pytest.mark.usefixtures("short_blocks")
def test_padding_may_hold_nan(library: Library, arrays: Arrays) -> None:
    import jax

    expected = scaled_dot_product_attention(*(arrays[x] for x in ("query", "key", "value", "allowed")))
    for name in ("key", "value"):
        arrays[name][..., 9, :] = math.nan
    inputs = [arrays[x] for x in ("query", "key", "value", "allowed")]
    output = library.get(library.call(jax.jit(scaled_dot_product_attention), *inputs))
    np.testing.assert_allclose(output, expected, rtol=0, atol=2e-6)


def causal(x: Any) -> Any:
    return scaled_dot_product_attention(x, x, x, is_causal=True)


def slope(x: Any) -> Any:
    import jax

    return jax.grad(lambda x: causal(x).sum())(x)


@pytest.mark.parametrize("function", [causal, slope])
def test_the_program_does_not_grow_with_the_length(library: Library, function: Any) -> None:
    import jax

    def lines(length: int) -> int:
        x = jax.ShapeDtypeStruct((length, 8), np.float32)
        return str(jax.jit(function).lower(x).as_text()).count("\n")

    with library.guard():
        assert lines(8192) == lines(32768)


def pulled(x: Any) -> Any:
    output, pullback = vjp(x, x, x)
    return pullback.jvp(output, {"query": x, "key": x}, output)


@pytest.mark.parametrize("function", [causal, slope, pulled])
def test_memory_grows_with_the_length_alone(library: Library, function: Any) -> None:
    """4 times the length takes at most 5 times the memory, and less than a byte a pair."""
    import jax

    def memory_of(length: int) -> int:
        x = jax.ShapeDtypeStruct((length, 8), np.float32)
        return int(jax.jit(function).lower(x).compile().memory_analysis().temp_size_in_bytes)

    with library.guard():
        short, long = memory_of(8192), memory_of(32768)
    assert long < 5 * short
    assert long < 32768**2


@pytest.mark.slow
def test_reverse_mode_over_reverse_mode_keeps_no_scores(library: Library) -> None:
    """They would be the residuals of the loop of the first derivatives."""
    import jax

    def loss(x: Any) -> Any:
        return (scaled_dot_product_attention(x, x, x) ** 2).sum()

    x = jax.ShapeDtypeStruct((8192, 8), np.float32)
    second = jax.jit(jax.grad(lambda x: (jax.grad(loss)(x) ** 2).sum()))
    with library.guard():
        memory = second.lower(x).compile().memory_analysis().temp_size_in_bytes
    assert memory < 4 * 8192**2
