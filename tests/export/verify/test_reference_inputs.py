"""What the inputs of a graph mean in the terms of the reference, each against a formula in NumPy."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from calls import draw_named
from internals import ExportCall, checked_call, expected_cache, library_arguments, reference_inputs, with_arrays

from sdpa_xp import biases, masks
from sdpa_xp_export import TensorSpec

B, HQ, H, E, EV = 3, 4, 2, 8, 5
NEW, ROOM = 2, 9
PAST = np.asarray([0, 3, 7])
F = np.float32
SHAPES = {"query": (B, HQ, NEW, E), "key": (B, H, NEW, E), "value": (B, H, NEW, EV)}
CACHE = {"past_key": (B, H, ROOM, E), "past_value": (B, H, ROOM, EV)}


def drawn(shapes: dict[str, tuple[int, ...]], layout: str = "...HLE") -> dict[str, Any]:
    rng = np.random.default_rng(11)
    arrays = draw_named(rng, shapes)
    return arrays if layout == "...HLE" else {name: x.swapaxes(-2, -3) for name, x in arrays.items()}


def call_of(arrays: dict[str, Any], layout: str = "...HLE", **rules: Any) -> ExportCall:
    specs = {name: TensorSpec(x.dtype.name, x.shape) for name, x in arrays.items()}
    query, key, value = (specs.pop(name) for name in ("query", "key", "value"))
    return checked_call("test", query, key, value, layout=layout, **specs, **rules)


class Cached:
    """A call beside a cache: `joined` whole, or `padded`, filled up to a length of each entry."""

    def __init__(self, kind: str, layout: str = "...HLE", **rules: Any) -> None:
        self.arrays = drawn(SHAPES | CACHE, layout)
        self.past = np.full(B, ROOM)
        if kind == "padded":
            self.arrays["past_lengths"] = self.past = PAST
        self.call = call_of(self.arrays, layout, **rules)
        self.tokens = (self.past + NEW).reshape(-1, 1, 1, 1)
        keys = ROOM + NEW if kind == "joined" else ROOM
        self.i = np.arange(NEW).reshape(-1, 1) + self.past.reshape(-1, 1, 1, 1)
        self.j = np.arange(keys).reshape(1, -1)
        self.real = self.j < self.tokens

    def plain(self, **more: Any) -> dict[str, Any]:
        return reference_inputs(self.call, self.arrays | more)


each_kind = pytest.mark.parametrize("kind", ["joined", "padded"])
each_layout = pytest.mark.parametrize("layout", ["...HLE", "...LHE"])


def test_a_bias_of_all_rows_gets_indices_of_any_library() -> None:
    """An array on a GPU cannot index one of NumPy."""
    arrays = drawn(SHAPES)
    call = call_of(arrays, bias=biases.from_function(lambda score, b, h, i, j: (score, i, j)))
    query, key = object(), object()
    (bias,) = reference_inputs(call, arrays)["bias"]
    assert bias(0, 0, 0, query, key) == (0, query, key)
    (bias,) = reference_inputs(call, arrays, rows=np.asarray([1]))["bias"]
    assert bias(0, 0, 0, 0, key) == (0, 1, key)


@each_layout
def test_heads_stand_before_lengths(layout: str) -> None:
    arrays = drawn(SHAPES, layout)
    inputs = reference_inputs(call_of(arrays, layout), arrays)
    for name, shape in SHAPES.items():
        assert inputs[name].shape == shape
    np.testing.assert_array_equal(inputs["query"], drawn(SHAPES)["query"])


def test_two_axes_are_left_as_they_are() -> None:
    arrays = drawn({"query": (7, E), "key": (3, E), "value": (3, EV)})
    inputs = reference_inputs(call_of(arrays, "...LHE", attn_mask=masks.padding(2)), arrays)
    assert [inputs[name].shape for name in ("query", "key", "value")] == [(7, E), (3, E), (3, EV)]
    np.testing.assert_array_equal(inputs["attn_mask"], np.broadcast_to(np.arange(3) < 2, (7, 3)))


def test_a_call_of_nothing_but_inputs() -> None:
    arrays = drawn(SHAPES)
    inputs = reference_inputs(call_of(arrays), arrays)
    assert inputs["attn_mask"] is None
    assert inputs["bias"] == ()
    assert (inputs["scale"], inputs["softcap"], inputs["sinks"]) == (1 / math.sqrt(E), None, None)


def test_numbers_and_operands() -> None:
    arrays = drawn(SHAPES)
    sinks, scale = np.arange(4, dtype=F), np.ones((HQ, 1, 1), F)
    call = call_of(arrays, softcap=3.0, sinks=TensorSpec("float32", (HQ,)), scale=scale)
    inputs = reference_inputs(call, arrays | {"sinks": sinks})
    assert inputs["softcap"] == 3.0
    np.testing.assert_array_equal(inputs["sinks"], sinks)
    np.testing.assert_array_equal(inputs["scale"], scale)


def test_all_masks_hold_and_all_biases_are_added() -> None:
    arrays = drawn(SHAPES | {"key": (B, H, 6, E), "value": (B, H, 6, EV)})
    added = np.arange(6, dtype=F)
    mask, bias = masks.sliding_window(None, 3) & masks.prefix(5), biases.alibi([1.0, 2, 3, 4]) + added
    inputs = reference_inputs(call_of(arrays, attn_mask=mask, bias=bias, is_causal=True), arrays)
    i, j = np.ogrid[:NEW, :6]
    np.testing.assert_array_equal(inputs["attn_mask"], np.broadcast_to((j <= i) & (j < 5), (B, HQ, NEW, 6)))
    slopes, array = inputs["bias"]
    distance = -np.asarray([1, 2, 3, 4]).reshape(-1, 1, 1) * np.abs(i - j)
    np.testing.assert_allclose(slopes, np.broadcast_to(distance, (B, HQ, NEW, 6)))
    np.testing.assert_array_equal(array, np.broadcast_to(added, (B, HQ, NEW, 6)))


def test_leading_axes_broadcast() -> None:
    arrays = drawn({"query": (HQ, 4, E), "key": (H, 6, E), "value": (2, 1, H, 6, EV)})
    inputs = reference_inputs(call_of(arrays, is_causal=True), arrays)
    assert inputs["attn_mask"].shape == (2, 1, HQ, 4, 6)


@each_layout
def test_a_joined_cache(layout: str) -> None:
    case = Cached("joined", layout)
    inputs, apart = case.plain(), drawn(SHAPES | CACHE)
    for name in ("key", "value"):
        np.testing.assert_array_equal(
            inputs[name], np.concatenate([apart[f"past_{name}"], apart[name]], axis=-2)
        )
    assert inputs["attn_mask"] is None


@each_layout
def test_a_padded_cache(layout: str) -> None:
    """New tokens behind those that are real, and 0 behind them; only what is real may be attended."""
    case = Cached("padded", layout)
    inputs, apart = case.plain(), drawn(SHAPES | CACHE)
    for name in ("key", "value"):
        for entry, past in enumerate(PAST):
            rows = inputs[name][entry]
            np.testing.assert_array_equal(rows[:, :past], apart[f"past_{name}"][entry, :, :past])
            np.testing.assert_array_equal(rows[:, past : past + NEW], apart[name][entry])
            assert not rows[:, past + NEW :].any()
    np.testing.assert_array_equal(inputs["attn_mask"], np.broadcast_to(case.real, (B, HQ, NEW, ROOM)))


@each_layout
@each_kind
def test_what_the_graph_returns_of_a_cache(kind: str, layout: str) -> None:
    case = Cached(kind, layout)
    inputs = case.plain()
    cache = expected_cache(case.call, inputs)
    assert list(cache) == ["present_key", "present_value"]
    for name in ("key", "value"):
        array = inputs[name] if layout == "...HLE" else inputs[name].swapaxes(-2, -3)
        np.testing.assert_array_equal(cache[f"present_{name}"], array)


def ints(*values: Any) -> np.ndarray:
    return np.asarray(values, np.int64)


QUERY_IDS = ints([0, 1], [1, 1], [2, 3])
DRAWN = np.random.default_rng(7).random((B, 1, NEW, 16)) < 0.6


MASKS: dict[str, tuple[Callable[[int], Any], Callable[[Any, Any, Any], Any]]] = {
    "causal": (lambda _: masks.causal(), lambda i, j, row: j <= i),
    "causal 1": (lambda _: masks.causal(-1), lambda i, j, row: j <= i - 1),
    "window": (lambda _: masks.sliding_window(2, 0), lambda i, j, row: (i - 2 <= j) & (j <= i)),
    "chunks": (lambda _: masks.chunked(3), lambda i, j, row: i // 3 == j // 3),
    "prefix": (lambda _: masks.prefix(4), lambda i, j, row: j < 4),
    "padding": (
        lambda _: masks.padding([8, 2, 5]),
        lambda i, j, row: j < ints(8, 2, 5).reshape(-1, 1, 1, 1),
    ),
    "padding of queries": (
        lambda _: masks.padding(None, [2, 1, 0]),
        lambda i, j, row: (row < ints(2, 1, 0).reshape(-1, 1, 1, 1)) & (j >= 0),
    ),
    "array": (lambda keys: masks.from_array(DRAWN[..., :keys]), lambda i, j, row: DRAWN[..., : j.size]),
    "array of keys": (
        lambda keys: masks.from_array(DRAWN[0, 0, 0, :keys]),
        lambda i, j, row: DRAWN[0, 0, 0, : j.size],
    ),
    "documents": (
        lambda keys: masks.document(QUERY_IDS, np.sort(np.arange(3 * keys).reshape(3, keys) % 4, axis=-1)),
        lambda i, j, row: (
            QUERY_IDS[:, None, :, None]
            == np.sort(np.arange(3 * j.size).reshape(3, j.size) % 4, axis=-1)[:, None, None, :]
        ),
    ),
    "function": (
        lambda _: masks.from_function(lambda b, h, i, j: (b + h + 2 * i + j) % 3 > 0),
        lambda i, j, row: (
            (np.arange(B).reshape(-1, 1, 1, 1) + np.arange(HQ).reshape(-1, 1, 1) + 2 * i + j) % 3 > 0
        ),
    ),
    "one of two": (
        lambda _: masks.causal(-3) | masks.prefix(1),
        lambda i, j, row: (j <= i - 3) | (j < 1),
    ),
    "not": (lambda _: ~masks.sliding_window(1, 0), lambda i, j, row: ~((i - 1 <= j) & (j <= i))),
}


@pytest.mark.parametrize("name", MASKS)
@each_kind
def test_masks_count_from_the_place_of_the_tokens(kind: str, name: str) -> None:
    make, allowed = MASKS[name]
    case = Cached(kind)
    case = Cached(kind, attn_mask=make(case.j.size))
    rows = np.arange(NEW).reshape(-1, 1)
    wanted = allowed(case.i, case.j, rows) & case.real
    np.testing.assert_array_equal(case.plain()["attn_mask"], np.broadcast_to(wanted, (B, HQ, NEW, case.j.size)))


@each_kind
def test_masks_of_inputs(kind: str) -> None:
    case = Cached(kind, attn_mask=masks.causal(TensorSpec("int64", (B,))))
    allowed = case.plain(offset=ints(0, -2, 1))["attn_mask"]
    wanted = (case.j <= case.i + ints(0, -2, 1).reshape(-1, 1, 1, 1)) & case.real
    np.testing.assert_array_equal(allowed, np.broadcast_to(wanted, allowed.shape))


BIASES: dict[str, tuple[Callable[[int], Any], Callable[[Any, Any], Any]]] = {
    "slopes": (
        lambda _: biases.alibi([1.0, 2, 3, 4]),
        lambda i, j: -np.asarray([1, 2, 3, 4]).reshape(-1, 1, 1) * np.abs(i - j),
    ),
    "array": (
        lambda keys: biases.from_array(DRAWN[..., :keys].astype(F) * 3),
        lambda i, j: DRAWN[..., : j.size] * 3.0,
    ),
    "one query row for all": (
        lambda keys: biases.from_array(np.arange(keys, dtype=F).reshape(1, -1)),
        lambda i, j: j.astype(F),
    ),
    "one number for all keys": (
        lambda _: biases.from_array(np.ones((HQ, 1, 1), F)),
        lambda i, j: np.ones((HQ, 1, 1)),
    ),
    "table": (
        lambda _: biases.relative(np.arange(32, dtype=F).reshape(8, 4), max_distance=3),
        lambda i, j: np.moveaxis(
            np.arange(32, dtype=F).reshape(8, 4)[
                (np.abs(j - i) >= 1).astype(int) + (np.abs(j - i) >= 2) + (np.abs(j - i) >= 3) + 4 * (j > i)
            ][:, 0],
            -1,
            1,
        ),
    ),
}


@pytest.mark.parametrize("name", BIASES)
@each_kind
def test_biases_count_from_the_place_of_the_tokens(kind: str, name: str) -> None:
    make, added = BIASES[name]
    case = Cached(kind)
    case = Cached(kind, bias=make(case.j.size))
    (bias,) = case.plain()["bias"]
    wanted = np.where(case.real, added(case.i, case.j), 0)
    np.testing.assert_allclose(bias, np.broadcast_to(wanted, (B, HQ, NEW, case.j.size)), rtol=1e-6)


@each_kind
def test_a_function_of_the_scores_counts_its_queries_from_there(kind: str) -> None:
    case = Cached(kind, bias=biases.from_function(lambda s, b, h, i, j: s + 10 * i + j + 100 * h))
    (function,) = case.plain()["bias"]
    for entry in range(B):
        result = function(np.zeros(1), np.asarray([entry]), 3, np.asarray([1]), np.asarray([4]))
        assert result == 10 * (case.past[entry] + 1) + 4 + 300


def test_arguments_of_the_library() -> None:
    arrays = drawn(SHAPES)
    mask = masks.padding(TensorSpec("int64", (B,)))
    call = call_of(
        arrays,
        attn_mask=mask,
        bias=TensorSpec("float32", (NEW,)),
        is_causal=True,
        softcap=2.0,
        softmax_dtype="float64",
    )
    lengths, bias = ints(1, 2, 0), np.ones(NEW, F)
    arguments = library_arguments(call, arrays | {"key_lengths": lengths, "bias": bias})
    padding = arguments.pop("attn_mask")
    np.testing.assert_array_equal(padding.key_lengths, lengths)
    np.testing.assert_array_equal(arguments.pop("bias"), bias)
    for name in ("query", "key", "value"):
        np.testing.assert_array_equal(arguments.pop(name), arrays[name])
    assert arguments == {
        "scale": 1 / math.sqrt(E),
        "sinks": None,
        "is_causal": True,
        "softcap": 2.0,
        "softmax_dtype": "float64",
        "layout": "...HLE",
    }


def test_inputs_within_a_mask_are_bound() -> None:
    arrays = drawn(SHAPES)
    call = call_of(arrays, attn_mask=masks.causal() | ~masks.padding(TensorSpec("int64", (B,))))
    bound_mask = with_arrays(call.attn_mask, arrays | {"key_lengths": ints(1, 2, 0)})
    i, j = np.ogrid[:NEW, :NEW]
    wanted = (j <= i) | (j >= ints(1, 2, 0).reshape(-1, 1, 1, 1))
    np.testing.assert_array_equal(
        masks.to_array(bound_mask, (B, HQ, NEW, NEW)), np.broadcast_to(wanted, (B, HQ, NEW, NEW))
    )
