"""`verify` takes calls with any number of scores: it computes a sample of them, in pieces."""

from __future__ import annotations

import tracemalloc
from typing import Any

import internals
import numpy as np
import pytest
from edits import changed_output
from internals import HUGE, LARGE, CallLengths, ExportCall, left_out, override, poison, trial_settings, trials
from short_runs import agreed

from sdpa_xp import masks, scaled_dot_product_attention
from sdpa_xp_export import TensorSpec, export_attention, to_onnx, verify, verify_layer


def call_of(*shape: int | str, **rules: Any) -> ExportCall:
    spec = TensorSpec("float32", shape)
    return internals.checked_call("test", spec, spec, spec, **rules)


@pytest.mark.slow
@pytest.mark.usefixtures("short_verify")
def test_fixed_lengths_with_very_many_scores(monkeypatch: pytest.MonkeyPatch) -> None:
    """67 million scores: `auto` writes GroupQueryAttention for them."""
    override(monkeypatch, "MOST_SAMPLED_SCORES", 2**18)
    x = TensorSpec("float32", (1, 1, 8200, 8))
    model = export_attention(x, x, x, is_causal=True)
    report = agreed(verify(model))
    assert report.form == "grouped_query"
    changed_output("Mul", 1.0001)(model)
    assert not verify(model).agrees


def test_what_is_drawn_and_computed_takes_little_memory() -> None:
    """64 heads of 2,048 tokens: all their scores have 268 million numbers, and a piece has 131,072."""
    call = call_of(1, 64, 2048, 4, attn_mask=masks.causal("lower_right"))
    tracemalloc.start()
    try:
        drawn = trials(call, trial_settings(call)[:1], np.random.default_rng(0), computed_in="float32")
        (trial,) = drawn
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert trial.expected["output"].reference.shape[-2] == 8
    assert peak < 1e8


def test_settings_of_long_fixed_lengths() -> None:
    """Every kind of inputs once; a batch that is open also has a length of 2."""
    for call in (call_of(1, 8, 4096, 64, is_causal=True), call_of(1, 1, 40000, 8)):
        settings = trial_settings(call)
        assert {setting.size for setting in settings} == {1.0, LARGE, HUGE["float32"]}
        assert {setting.nan_in for setting in settings} == {"", "query", "key", "value"}
        assert {setting.extreme for setting in settings} == {"", "one high score", "low scores"}
        assert len(settings) == 8
    settings = trial_settings(call_of("B", 8, 4096, 64))
    assert {setting.lengths["B"] for setting in settings if not setting.nan_in and setting.size == 1} == {1, 2}
    assert {setting.size for setting in settings} == {1.0, LARGE, HUGE["float32"]}
    assert {setting.nan_in for setting in settings} == {"", "query", "key", "value"}


@pytest.mark.parametrize("rules", [{}, {"outputs": ("weights",)}, {"outputs": ("output", "lse")}], ids=str)
def test_pieces_are_what_is_computed_at_once(rules: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    call = call_of("B", 2, "L", 8, attn_mask=masks.sliding_window(3, 0), **rules)
    settings = [setting for setting in trial_settings(call) if setting.lengths["L"] == 19 and setting.size == 1]

    def drawn() -> list[Any]:
        return list(trials(call, settings, np.random.default_rng(0), computed_in="float32"))

    whole = drawn()
    override(monkeypatch, "SAMPLED_SCORES_AT_ONCE", 500)
    for one, other in zip(whole, drawn(), strict=True):
        for name, expected in one.expected.items():
            for field in ("reference", "textbook", "magnitude", "terms", "spread"):
                same = getattr(expected, field), getattr(other.expected[name], field)
                np.testing.assert_allclose(*same, rtol=1e-5, atol=1e-5)  # BLAS sums in another order
            leaks = expected.leaks, other.expected[name].leaks
            assert (leaks[0] is None) == (leaks[1] is None) == (not one.nan_in)
            np.testing.assert_array_equal(*leaks)


def test_inputs_and_hidden_keys_do_not_depend_on_the_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    mask = masks.padding(TensorSpec("int64", ("B",))) & masks.causal(-2)
    call = call_of("B", 2, "L", 8, attn_mask=mask, bias=TensorSpec("float32", ("L", "L")))

    def drawn() -> dict[str, Any]:
        arrays = internals.random_inputs(call, {"B": 3, "L": 40}, np.random.default_rng(0), LARGE)
        return poison(call, arrays)

    whole = drawn()
    assert np.isnan(whole["key"]).any()
    for name in ("DRAWN_AT_ONCE", "DRAWN_SCORES_AT_ONCE"):
        override(monkeypatch, name, 100)
    for name, array in drawn().items():
        np.testing.assert_array_equal(array, whole[name])


@pytest.mark.parametrize(("memory", "most"), [(1, 2**20), (10**8, 2_500_000), (10**9, 25_000_000)])
@pytest.mark.parametrize("thorough", [False, True])
def test_a_limit_of_memory_bounds_the_runs(memory: int, most: int, thorough: bool) -> None:
    """The reference is computed in the process of the caller, so no run is longer than both can hold."""
    for call in (call_of("B", 8, "L", 16), call_of("B", 1, "L", 9000), call_of("B", 4, "L", 8, is_causal=True)):
        largest = CallLengths.for_call(call).largest
        settings = trial_settings(call, thorough=thorough, memory=memory)
        assert max(largest(setting.lengths) for setting in settings) <= most
        assert len(settings) > 20
        assert trial_settings(call, thorough=thorough, memory=2**35) == trial_settings(call, thorough=thorough)


def test_what_a_limit_of_memory_leaves_out() -> None:
    call = call_of("B", 8, "L", 16, attn_mask=masks.sliding_window(1000, 0) & masks.chunked(3000))
    settings = trial_settings(call, memory=10**8)
    window, chunks = left_out(call, (), settings, 10**8)
    assert window.startswith("sliding_window(left=1000): needs 1,002 queries and 1,002 keys, 8 million scores")
    assert window.endswith("; a larger `memory` tries it")
    assert chunks.endswith("72 million scores; a larger `memory` tries it, with `thorough=True`")
    (chunks,) = left_out(call, (), trial_settings(call), None)
    assert chunks.endswith("72 million scores; `thorough=True` tries it")


@pytest.mark.usefixtures("short_verify")
def test_a_limit_of_memory_of_a_verification() -> None:
    x = TensorSpec("float32", ("B", 8, "L", 16))
    report = agreed(verify(export_attention(x, x, x, masks.sliding_window(1000, 0)), memory=10**8))
    assert max(run.longest for run in report.runs) < 600
    assert "; a larger `memory` tries it" in report.left_out[0]
    long = TensorSpec("float32", (1, 1, 40000, 8))
    with pytest.raises(ValueError, match="at most 1048576 numbers"):
        verify(export_attention(long, long, long), memory=10**6)


@pytest.mark.usefixtures("short_verify")
def test_a_limit_of_memory_of_a_layer() -> None:
    def layer(x: Any) -> Any:
        return scaled_dot_product_attention(x, x, x, masks.sliding_window(1000, 0))

    report = verify_layer(to_onnx(layer, TensorSpec("float32", (8, "L", 16))), layer, memory=3 * 10**8)
    (line,) = (line for line in report.left_out if "sliding_window" in line)
    assert line.endswith("8 million scores; a larger `memory` tries it")
