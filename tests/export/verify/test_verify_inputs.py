"""The inputs that `verify` tries a model with, each by what its docstring promises."""

from __future__ import annotations

import math
from typing import Any

import internals
import numpy as np
import pytest
from internals import CallLengths, Case, ExportCall, checked_call, poison, random_inputs, with_nan
from short_runs import short_settings

from sdpa_xp import biases, masks
from sdpa_xp_export import TensorSpec

LENGTHS = {"B": 3, "L": 7, "S": 11, "P": 5, "T": 2}


def spec(*shape: int | str, dtype: str = "float32") -> TensorSpec:
    return TensorSpec(dtype, shape)


def ints(*shape: int | str) -> TensorSpec:
    return TensorSpec("int64", shape)


def call(*, layout: str = "...HLE", dtype: str = "float32", **rules: Any) -> ExportCall:
    """4 query heads, 2 key heads, widths 16 and 5."""
    shapes = {"query": ("B", 4, "L", 16), "key": ("B", 2, "S", 16), "value": ("B", 2, "S", 5)}
    if layout == "...LHE":
        shapes = {name: (b, length, h, width) for name, (b, h, length, width) in shapes.items()}
    specs = [TensorSpec(dtype, shape) for shape in shapes.values()]
    return checked_call("test", *specs, layout=layout, **rules)


def drawn(export_call: ExportCall, size: float = 1.0, seed: int = 0, **lengths: int) -> dict[str, Any]:
    return random_inputs(export_call, LENGTHS | lengths, np.random.default_rng(seed), size)


def test_shapes_and_dtypes() -> None:
    export_call = call(dtype="float16", attn_mask=spec("B", 1, "L", "S", dtype="bool"), sinks=spec(4))
    arrays = drawn(export_call)
    assert {name: (x.dtype.name, x.shape) for name, x in arrays.items()} == {
        "query": ("float16", (3, 4, 7, 16)),
        "key": ("float16", (3, 2, 11, 16)),
        "value": ("float16", (3, 2, 11, 5)),
        "attn_mask": ("bool", (3, 1, 7, 11)),
        "sinks": ("float32", (4,)),
    }


def test_one_seed_draws_one_sample() -> None:
    one, same, other = (drawn(call(), seed=seed)["query"] for seed in (3, 3, 4))
    np.testing.assert_array_equal(one, same)
    assert not np.array_equal(one, other)


@pytest.mark.parametrize("scale", [None, 3.0, -0.02, 40.0])
@pytest.mark.parametrize("size", [1.0, internals.LARGE])
def test_scores_are_of_the_size_that_is_asked_for(scale: float | None, size: float) -> None:
    export_call = call(scale=scale)
    arrays = drawn(export_call, size, B=30, L=40)
    key = np.repeat(arrays["key"], 2, axis=1)
    scores = arrays["query"] @ key.swapaxes(-1, -2) * export_call.scale
    assert np.std(scores) == pytest.approx(size, rel=0.1)


@pytest.mark.parametrize(("scale", "factor"), [(0.0, 1.0), (spec(4, 1, 1), 4.0)])
def test_a_scale_that_is_0_or_an_input_counts_for_1(scale: Any, factor: float) -> None:
    arrays = drawn(call(scale=scale), B=30, L=40)
    assert np.std(arrays["query"]) == pytest.approx(1 / factor, rel=0.1)


class TestMasksOfPairs:
    """A last key that no query attends, and a first query that attends none."""

    def test_boolean(self) -> None:
        mask = drawn(call(attn_mask=spec("B", 1, "L", "S", dtype="bool")), B=40)["attn_mask"]
        assert not mask[..., -1].any()
        assert not mask[..., 0, :].any()
        assert mask[..., 1:, :-1].mean() == pytest.approx(0.75, abs=0.05)

    @pytest.mark.parametrize("shape", [("B", 1, 1, "S"), ("S",)])
    def test_without_a_row_for_each_query_only_the_last_key_is_hidden(self, shape: Any) -> None:
        mask = drawn(call(attn_mask=TensorSpec("bool", shape)), S=40)["attn_mask"]
        assert not mask[..., -1].any()
        assert mask[..., :-1].mean() > 0.5

    def test_with_one_key_it_is_not_hidden(self) -> None:
        mask = drawn(call(attn_mask=spec("B", 1, "L", "S", dtype="bool")), B=50, S=1)["attn_mask"]
        assert mask[..., 1:, :].mean() == pytest.approx(0.75, abs=0.1)
        assert not mask[..., 0, :].any()

    def test_with_one_query_it_attends(self) -> None:
        mask = drawn(call(attn_mask=spec("B", 1, "L", "S", dtype="bool")), B=50, L=1)["attn_mask"]
        assert mask[..., :-1].mean() == pytest.approx(0.75, abs=0.1)

    @pytest.mark.parametrize("argument", ["attn_mask", "bias"])
    def test_floating(self, argument: str) -> None:
        added = drawn(call(**{argument: spec("B", 1, "L", "S")}), S=40)[argument]
        assert np.isneginf(added[..., -1]).all()
        assert np.isneginf(added[..., 0, :]).all()
        last = added[-1, 0, -1]
        least = np.finfo(np.float32).min
        assert set(last) == {-np.inf, least}
        others = added[:, :, :-1][np.isfinite(added[:, :, :-1])]
        assert np.abs(others).max() < 10
        assert 0.6 < np.isfinite(added[:-1, :, 1:, :-1]).mean() < 0.9

    @pytest.mark.parametrize(
        "rules", [{"dtype": "float16", "bias": spec("L", "S", dtype="float16")}, {"attn_mask": spec("L", "S")}]
    )
    def test_the_smallest_number_stands_where_a_bound_bears_it(self, rules: dict[str, Any]) -> None:
        added = drawn(call(**({"bias": spec("L", "S")} | rules)))["bias"]
        assert np.abs(added[np.isfinite(added)]).max() < 10

    def test_two_rows_keep_their_numbers(self) -> None:
        added = drawn(call(bias=spec("L", "S")), L=2)["bias"]
        assert np.abs(added[np.isfinite(added)]).max() < 10


class TestIntegers:
    def test_lengths_are_ragged(self) -> None:
        arrays = drawn(call(attn_mask=masks.padding(ints("B"), ints("B"))), B=60)
        for name, most in (("key_lengths", 11), ("query_lengths", 7)):
            lengths = arrays[name]
            assert (lengths[0], lengths[-1]) == (0, most)
            assert set(lengths) == set(range(most + 1))

    def test_one_length_for_all(self) -> None:
        result = {int(drawn(call(attn_mask=masks.prefix(ints())), seed=seed)["length"]) for seed in range(60)}
        assert result == set(range(12))

    def test_offsets_reach_beyond_both_ends(self) -> None:
        rules = {"attn_mask": masks.causal(ints("B"))}
        assert set(drawn(call(**rules), B=200)["offset"]) == set(range(-2, 11 - 7 + 3))
        assert set(drawn(call(**rules), B=200, L=30)["offset"]) == set(range(-2, 3))

    def test_ids_rise(self) -> None:
        arrays = drawn(call(attn_mask=masks.document(ints("B", "L"), ints("B", "S"))), B=20)
        for name in ("query_ids", "key_ids"):
            assert (np.diff(arrays[name], axis=-1) >= 0).all()
            assert set(arrays[name].ravel()) == {0, 1, 2}

    def test_numbered_inputs_are_drawn_by_their_stem(self) -> None:
        mask = masks.padding(ints("B")) | masks.padding(ints("B"))
        arrays = drawn(call(attn_mask=mask), B=9)
        assert arrays["key_lengths_2"][-1] == 11

    def test_slopes_are_positive(self) -> None:
        slopes = drawn(call(bias=biases.alibi(spec("B", 4))), B=50)["slopes"]
        assert slopes.min() >= 0
        assert slopes.max() < 1


def cached(*, layout: str = "...HLE", padded: bool = True) -> ExportCall:
    """New tokens beside a cache of P with 2 key heads; padded, it is filled up to `past_lengths`."""
    shapes = {"query": ("B", 4, "L", 16), "key": ("B", 2, "T", 16), "value": ("B", 2, "T", 5)}
    shapes |= {"past_key": ("B", 2, "P", 16), "past_value": ("B", 2, "P", 5)}
    if layout == "...LHE":
        shapes = {name: (b, length, h, width) for name, (b, h, length, width) in shapes.items()}
    specs = {name: TensorSpec("float32", shape) for name, shape in shapes.items()}
    more = {"past_lengths": ints("B")} if padded else {}
    query, key, value = (specs.pop(name) for name in ("query", "key", "value"))
    return checked_call("test", query, key, value, layout=layout, **specs, **more)


@pytest.mark.parametrize("layout", ["...HLE", "...LHE"])
def test_a_padded_cache_has_no_number_where_no_token_is(layout: str) -> None:
    arrays = drawn(cached(layout=layout), B=8, P=9)
    filled = arrays["past_lengths"]
    assert (filled[0], filled[-1], filled.max()) == (0, 9 - 2, 9 - 2)
    for name in ("past_key", "past_value"):
        past = arrays[name] if layout == "...HLE" else arrays[name].swapaxes(1, 2)
        for entry, real in enumerate(filled):
            assert np.isfinite(past[entry, :, :real]).all()
            assert np.isnan(past[entry, :, real:]).all()


J = np.arange(11)
LENGTHS_OF_KEYS = np.asarray([4, 0, 11])
OF_HEADS = np.zeros((4, 7, 11), bool)
OF_HEADS[1, 2, 5], OF_HEADS[2, :, 6] = True, True
ADDED = np.where(J == 1, -np.inf, np.where(J == 10, np.finfo(np.float32).min, 0)).astype(np.float32)
PADDED: dict[str, Any] = {"attn_mask": masks.padding(ints("B"))}
ONE_BATCH = spec("B", 4, "L", 16), spec(1, 2, "S", 16), spec(2, "S", 5)
POISONED: dict[str, tuple[ExportCall, dict[str, Any], Any]] = {
    "padding": (call(**PADDED), {"key_lengths": LENGTHS_OF_KEYS}, LENGTHS_OF_KEYS[:, None, None] > J),
    "heads behind": (
        call(layout="...LHE", **PADDED), {"key_lengths": LENGTHS_OF_KEYS}, LENGTHS_OF_KEYS[:, None, None] > J
    ),
    "one head of a group": (
        call(attn_mask=spec(4, "L", "S", dtype="bool")), {"attn_mask": OF_HEADS}, np.asarray([[5], [6]]) == J
    ),
    "a bias": (call(bias=spec("S")), {"bias": ADDED}, J != 1),
    "both": (
        call(attn_mask=spec("S", dtype="bool"), bias=spec("S")),
        {"attn_mask": J < 6, "bias": np.where(J > 3, 0, -np.inf).astype(np.float32)},
        (J > 3) & (J < 6),
    ),
    "one batch": (checked_call("test", *ONE_BATCH, **PADDED), {"key_lengths": np.asarray([4, 8, 2])}, J < 8),
    "two axes": (
        checked_call("test", spec("L", 16), spec("S", 16), spec("S", 5), attn_mask=masks.padding(4)), {}, J < 4
    ),
}  # fmt: skip
"""A call, its operands, and the keys that a query of a group attends, (..., H, S)."""


@pytest.mark.parametrize("name", POISONED)
def test_poison(name: str) -> None:
    """NaN in the keys and values that no query of their group attends, and in no other."""
    export_call, operands, attended = POISONED[name]
    arrays = drawn(export_call) | operands
    poisoned = poison(export_call, arrays)
    assert np.isfinite(poisoned["query"]).all()
    for tokens in ("key", "value"):
        array = poisoned[tokens] if name != "heads behind" else poisoned[tokens].swapaxes(1, 2)
        np.testing.assert_array_equal(np.isnan(array), np.broadcast_to(~attended[..., None], array.shape))
        assert np.isfinite(arrays[tokens]).all()


def test_a_cache_is_not_poisoned() -> None:
    arrays = drawn(cached())
    assert poison(cached(), arrays) is arrays


class TestLengths:
    def test_several(self) -> None:
        one, reversed_, ones = CallLengths.for_call(call()).small()
        assert one == {"B": 2, "L": 5, "S": 9}
        assert reversed_ == {"B": 9, "L": 5, "S": 2}
        assert ones == {"B": 1, "L": 1, "S": 1}

    def test_fixed_lengths_are_run_three_times_too(self) -> None:
        export_call = checked_call("test", *[spec(2, 3, 4)] * 3)
        assert CallLengths.for_call(export_call).small() == [{}, {}, {}]

    def test_a_padded_cache_has_room(self) -> None:
        for lengths in CallLengths.for_call(cached()).small():
            arrays = random_inputs(cached(), lengths, np.random.default_rng(0))
            assert arrays["past_key"].shape[2] >= lengths["T"] + 3 + 1

    def test_a_cache_that_is_joined_needs_none(self) -> None:
        for lengths in CallLengths.for_call(cached(padded=False)).small():
            assert set(lengths.values()) <= {1, 2, 3, 5, 7, 9}


def tried(export_call: ExportCall) -> list[Case]:
    rng = np.random.default_rng(0)
    return list(
        internals.trials(
            export_call, short_settings(export_call), rng, computed_in=export_call.accumulation_dtype
        )
    )


def test_inputs_are_poisoned_and_what_is_expected_is_not() -> None:
    for trial in tried(call(attn_mask=masks.padding(ints("B")))):
        if trial.inputs["key_lengths"].min() < trial.inputs["key"].shape[-2]:
            assert np.isnan(trial.inputs["value"]).any()
        for expected in trial.expected.values():
            assert np.isfinite(expected.reference).all()


def test_large_scores_have_no_exponential_in_float32() -> None:
    first = next(trial for trial in tried(call()) if trial.size == internals.LARGE)
    key = np.repeat(first.inputs["key"], 2, axis=1)
    scores = first.inputs["query"] @ key.swapaxes(-1, -2) / 4
    assert np.abs(scores).max() > math.log(np.finfo(np.float32).max)


def test_magnitudes_are_no_smaller_than_what_they_belong_to() -> None:
    """Else a rounding of the largest term would not be covered."""
    export_call = call(bias=spec("L", "S"), outputs=("output", "weights", "scores"))
    for trial in tried(export_call):
        for expected in trial.expected.values():
            known = np.isfinite(expected.reference)
            assert (expected.magnitude[known] >= np.abs(expected.reference[known]) * (1 - 1e-9)).all()


@pytest.mark.parametrize("end", ["least integers", "most integers"])
def test_integers_at_their_ends(end: Any) -> None:
    export_call = call(attn_mask=masks.padding(ints("B")) & masks.causal(ints("B")) & masks.prefix(ints("B")))
    arrays = random_inputs(export_call, LENGTHS, np.random.default_rng(0), operands=end)
    numbers = [set(arrays[name].tolist()) for name in ("key_lengths", "offset", "length")]
    assert numbers == ([{0}, {-(2**29)}, {0}] if end == "least integers" else [{11}, {2**29}, {2**29}])


@pytest.mark.parametrize("dtype", ["int8", "int32", "int64", "uint8", "uint64"])
def test_documents_at_the_end_of_their_dtype(dtype: str) -> None:
    """Each token of the most is a document of its own; a narrower dtype would mix them up."""
    ids = masks.document(TensorSpec(dtype, ("B", "L")), TensorSpec(dtype, ("B", "S")))
    rng = np.random.default_rng(0)
    least, most = (
        random_inputs(call(attn_mask=ids), LENGTHS, rng, operands=end)["key_ids"]
        for end in ("least integers", "most integers")
    )
    assert least.dtype == most.dtype == dtype
    assert set(least.flat) == {np.iinfo(dtype).min}
    assert all(len(set(row)) == len(row) for row in most.tolist())
    assert most.max() == min(np.iinfo(dtype).max, 2**62)
    if dtype == "int64":
        assert len(set(most[0].astype(np.float32))) < len(most[0]) > len(set(most[0].astype(np.int32)))


@pytest.mark.parametrize("allowed", [False, True])
def test_a_mask_of_one_value(allowed: bool) -> None:
    export_call = call(attn_mask=TensorSpec("bool", ("L", "S")))
    arrays = random_inputs(export_call, LENGTHS, np.random.default_rng(0), operands=f"mask of {allowed}")
    assert (arrays["attn_mask"] == allowed).all()


def test_values_biases_and_sinks_grow_with_the_scores() -> None:
    """And keys, beside the largest; what is infinite, or the smallest number, stays."""
    export_call = call(bias=spec("L", "S"), sinks=spec(4))
    plain, large, huge = (
        random_inputs(export_call, LENGTHS, np.random.default_rng(0), size) for size in (1, 100, 3e4)
    )
    for name in ("value", "bias", "sinks"):
        ordinary = np.abs(plain[name]) < 1e4
        np.testing.assert_allclose(large[name][ordinary], 100 * plain[name][ordinary], rtol=1e-6)
        np.testing.assert_array_equal(large[name][~ordinary], plain[name][~ordinary])
        np.testing.assert_array_equal(large[name], huge[name])
    np.testing.assert_array_equal(large["key"], plain["key"])
    np.testing.assert_array_equal(huge["key"], 16 * plain["key"])


@pytest.mark.parametrize("name", ["query", "key", "value"])
def test_a_nan_that_is_attended_stands_in_the_middle(name: str) -> None:
    arrays = random_inputs(call(), LENGTHS, np.random.default_rng(0))
    poisoned = with_nan(call(), arrays, name)
    ((*_, head, row, _),) = np.argwhere(np.isnan(poisoned[name]))
    assert (head, row) == (arrays[name].shape[1] - 1, arrays[name].shape[2] // 2)
    assert not np.isnan(arrays[name]).any()
