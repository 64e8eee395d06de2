"""Sinks: a logit of each head that joins the sum of the softmax and has no value."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from agreement import assert_call_agrees
from calls import draw_named, gradients
from internals import reference
from libraries import Library

from sdpa_xp import attention_state, attention_weights, masks, merge_states, scaled_dot_product_attention

F = np.float32
Call = dict[str, np.ndarray]


@pytest.fixture
def call(rng: np.random.Generator) -> Call:
    """Four query heads over two key heads, 7 queries, 11 keys; query 1 has no key."""
    shapes = {"query": (2, 4, 7, 8), "key": (2, 2, 11, 8), "value": (2, 2, 11, 5)}
    arrays = draw_named(rng, shapes)
    mask = rng.random((7, 11)) < 0.7
    mask[1] = False
    return arrays | {"attn_mask": mask}


SINKS = np.asarray([0.5, -3.0, 4.0, 20.0], F)


def test_the_reference_takes_a_sink_as_a_key_without_value(call: Call) -> None:
    """It is neither scaled nor capped: only the scores are. Keys of 0 have the score of the bias."""
    sinks = np.stack([SINKS, -SINKS])
    longer = {name: np.pad(call[name], [(0, 0), (0, 0), (0, 1), (0, 0)]) for name in ("key", "value")}
    bias = np.zeros((2, 4, 1, 12))
    bias[..., 0, 11] = sinks
    mask = np.pad(call["attn_mask"], [(0, 0), (0, 1)], constant_values=True)
    rules: Any = {"softcap": 3.0, "scale": 2.0}
    output, lse, weights = reference.attention(**(call | longer | {"attn_mask": mask}), bias=bias, **rules)
    told = reference.attention(**call, sinks=sinks, **rules)
    for result, expected in zip(told, (output, lse, weights[..., :-1]), strict=True):
        np.testing.assert_allclose(result, expected, rtol=0, atol=1e-12)


@pytest.mark.rule("R21")
@pytest.mark.sampled(0, on="EAGER_JAX")
@pytest.mark.usefixtures("small_tiles")
@pytest.mark.parametrize("sinks", [SINKS, np.stack([SINKS, -SINKS]), np.full(4, 1.5, F)[0]], ids=np.ndim)
@pytest.mark.parametrize("rules", [{}, {"softcap": 3.0, "scale": 2.0}], ids=["plain", "softcap, scale"])
def test_sinks(library: Library, call: Call, sinks: Any, rules: Any) -> None:
    """One of each head, of each entry and head, and one for all."""
    sinks = np.asarray(sinks)
    meaning = {"sinks": np.broadcast_to(sinks, (*sinks.shape[:-1], 4))}
    assert_call_agrees(library, call, rules | {"sinks": sinks}, rules | meaning)


@pytest.mark.rule("R21")
def test_row_with_only_its_sink_is_0(library: Library, call: Call) -> None:
    state = library.call(attention_state, **call, sinks=SINKS)
    np.testing.assert_array_equal(library.get(state.output)[:, :, 1], 0)
    np.testing.assert_array_equal(library.get(state.lse)[:, :, 1], np.stack([SINKS, SINKS]))


def test_sink_of_minus_infinity_is_none(library: Library, call: Call) -> None:
    none = np.full(4, -math.inf, F)
    state, plain = library.call(attention_state, **call, sinks=none), library.call(attention_state, **call)
    for result, expected in zip(state, plain, strict=True):
        np.testing.assert_array_equal(library.get(result), library.get(expected))


def test_a_sink_far_above_the_scores_and_far_below(library: Library, call: Call) -> None:
    """exp would overflow or vanish: the output is 0, or as without a sink."""
    high = library.call(scaled_dot_product_attention, **call, sinks=np.full(4, 1e4, F))
    np.testing.assert_array_equal(library.get(high), 0)
    low = library.call(scaled_dot_product_attention, **call, sinks=np.full(4, -1e4, F))
    plain = library.call(scaled_dot_product_attention, **call, implementation="xp")  # no kernel takes sinks
    np.testing.assert_array_equal(library.get(low), library.get(plain))


@pytest.mark.sampled(0, on="EAGER_JAX")
def test_states_merge_when_one_of_them_has_the_sinks(library: Library, call: Call) -> None:
    def part(keys: slice, **rules: Any) -> Any:
        cut = {"attn_mask": call["attn_mask"][:, keys]}
        cut |= {name: call[name][..., keys, :] for name in ("key", "value")}
        return library.call(attention_state, **(call | cut), **rules)

    states = [part(slice(0, 4), sinks=SINKS), part(slice(4, 11))]
    whole = library.call(attention_state, **call, sinks=SINKS)
    with library.guard():
        merged = merge_states(states)
    for result, expected in zip(merged, whole, strict=True):
        np.testing.assert_allclose(library.get(result), library.get(expected), rtol=2e-7, atol=2e-6)


NO_PAIR: dict[str, dict[str, Any]] = {
    "an array": {"attn_mask": np.zeros((7, 11), bool)},
    "a formula": {"attn_mask": masks.causal(-100)},
    "padding": {"attn_mask": masks.padding(0)},
    "a bias": {"attn_mask": None, "bias": np.full((7, 11), -math.inf, F)},
}


@pytest.mark.sampled(0, on="EAGER_JAX")
@pytest.mark.leaves_out("torch-inference")
@pytest.mark.parametrize("result", ["lse", "output", "weights"])
@pytest.mark.parametrize("name", NO_PAIR)
def test_where_no_pair_may_attend(library: Library, call: Call, name: str, result: str) -> None:
    """The lse is the sink. All other gradients are 0, and torch finds each input in the graph."""
    learned = ("query", "key", "sinks") if result == "weights" else ("query", "key", "value", "sinks")
    rules = call | NO_PAIR[name] | {"sinks": SINKS}
    rest = {key: x for key, x in rules.items() if key != "value" or result != "weights"}

    def computed(*arrays: Any) -> Any:
        arguments = placed | dict(zip(learned, arrays, strict=True))
        if result == "weights":
            return attention_weights(**arguments)
        return getattr(attention_state(**arguments), result)

    with library.guard():
        placed = {key: library.put(x) if isinstance(x, np.ndarray) else x for key, x in rest.items()}
        value = library.get(computed(*(placed[key] for key in learned)))
    np.testing.assert_array_equal(value, SINKS[:, None] + np.zeros((2, 4, 7)) if result == "lse" else 0 * value)
    assert not np.isnan(value).any()
    if library.name.startswith(("torch", "jax", "mlx")):
        arrays = [rest[key] for key in learned]
        computed_gradients = gradients(library, lambda *arrays: computed(*arrays).sum(), *arrays)
        for key, array, gradient in zip(learned, arrays, computed_gradients, strict=True):
            expected = 14.0 if (key, result) == ("sinks", "lse") else 0.0
            np.testing.assert_array_equal(gradient, np.full(array.shape, expected))
