"""Each verification draws some lengths anew, so that repeated ones find a fault at a single length."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from command import run
from edits import changed_from
from internals import RANDOM_RANGES, Case, ExportCall, checked_call, override, trial_settings, verify_inputs
from short_runs import leave_out_long_runs

from sdpa_xp_export import TensorSpec, export_attention, save, to_onnx, verify, verify_layer

X = TensorSpec("float32", ("B", 1, "L", 4))


def call_of(query: tuple[int | str, ...], key: tuple[int | str, ...], **rules: Any) -> ExportCall:
    specs = [TensorSpec("float32", shape) for shape in (query, key)]
    return checked_call("test", specs[0], specs[1], specs[1], **rules)


def drawn(call: ExportCall, seed: int, **options: Any) -> list[Case]:
    return [setting for setting in trial_settings(call, seed=seed, **options) if setting.most_rows]


def test_each_seed_draws_others_in_every_range() -> None:
    call = call_of(("B", 2, "L", 8), ("B", 2, "S", 8))
    one, other, again = (drawn(call, seed) for seed in (0, 1, 0))
    assert one == again
    assert one != other
    assert trial_settings(call, seed=0)[:30] == trial_settings(call, seed=1)[:30]  # the rest stays
    for first, end, count in RANDOM_RANGES:
        for name in ("L", "S"):
            assert 0 < sum(first <= setting.lengths[name] < end for setting in one) <= count
    assert {setting.lengths["L"] == setting.lengths["S"] for setting in one} == {False, True}
    assert max(setting.lengths["B"] for setting in one) > 1
    assert len(drawn(call, 0, thorough=True)) > 5 * len(one)


@pytest.mark.parametrize(("length", "runs"), [(33, 40), (200, 200)])
def test_repeated_verifications_reach_a_length(length: int, runs: int) -> None:
    """A seed in 4 draws 33 queries, and one in 30 draws 200."""
    call = call_of(("B", 2, "L", 8), ("B", 2, "L", 8))
    reached = [any(setting.lengths["L"] == length for setting in drawn(call, seed)) for seed in range(runs)]
    assert 3 < sum(reached) < runs / 2


def test_a_past_and_a_batch_are_drawn_too_and_fixed_lengths_are_not() -> None:
    past = TensorSpec("float32", ("B", 2, "P", 8))
    new = ("B", 2, "L", 8)
    pasts = {s.lengths["P"] for s in drawn(call_of(new, new, past_key=past, past_value=past), 0)}
    assert len(pasts) > 5
    assert len({s.lengths["B"] for s in drawn(call_of(("B", 2, 9, 8), ("B", 2, 9, 8)), 0)}) > 3
    assert drawn(call_of((1, 2, 9, 8), (1, 2, 9, 8)), 0) == []


def test_a_fault_at_one_length_is_found_by_some_seeds_and_the_seed_repeats_it(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    leave_out_long_runs(monkeypatch)
    override(monkeypatch, "LONGEST_TRIAL", 140)
    override(monkeypatch, "RANDOM_RANGES", RANDOM_RANGES[:1])
    model = export_attention(X, X, X, is_causal=True, form="primitive")
    seed = next(n for n in range(99) if any(s.lengths["L"] == 33 for s in drawn(call_of(X.shape, X.shape), n)))
    other = next(n for n in range(99) if all(s.lengths["L"] != 33 for s in drawn(call_of(X.shape, X.shape), n)))
    changed_from("Mul", 1.5, "query", 2, "Equal", 33)(model)
    monkeypatch.setattr(verify_inputs, "new_seed", lambda: seed)
    report = verify(model)
    assert not report.agrees
    assert report.seed == seed
    assert f"seed={seed}" in str(report)
    assert f"<td>{seed}</td>" in report._repr_html_()
    assert {r.inputs for r in verify(model, seed=report.seed).runs} == {r.inputs for r in report.runs}
    path = save(model, tmp_path / "model.onnx")
    code, out, _ = run("verify", path, "--html", tmp_path / "report.html")
    assert code == 1
    assert f"seed: {seed} (--seed {seed} repeats these runs)" in out
    assert f"<dt>seed</dt><dd>{seed}</dd>" in (tmp_path / "report.html").read_text()
    _, out, _ = run("verify", path, "--json", "--seed", other)
    facts = json.loads(out)
    assert (facts["seed"], facts["agrees"]) == (other, True)


def test_without_a_seed_each_verification_has_its_own() -> None:
    spec = importlib.util.find_spec(verify_inputs.__name__)
    assert spec is not None
    assert spec.loader is not None
    fresh = importlib.util.module_from_spec(spec)  # the tests have replaced the function in the module
    spec.loader.exec_module(fresh)
    assert len({fresh.new_seed() for _ in range(9)}) > 1
    assert verify_inputs.seed_of("verify", np.int64(3)) == 3  # type: ignore[arg-type]
    drawn = verify_inputs.SEEDS - 1  # a report may name any seed that is drawn, and its reader passes it
    assert verify_inputs.seed_of("verify", drawn) == drawn


def test_a_layer_is_tried_at_random_lengths_that_it_accepts() -> None:
    def layer(x: Any) -> Any:
        if isinstance(x, np.ndarray) and x.shape[2] > 40:
            raise ValueError("at most 40 tokens")
        return x + x

    model = to_onnx(lambda x: x + x, X)
    one, other = (verify_layer(model, layer, seed=seed) for seed in (0, 1))
    assert (one.seed, other.seed) == (0, 1)
    lengths = [{one_run.inputs for one_run in report.runs} for report in (one, other)]
    assert lengths[0] != lengths[1]
    assert len(lengths[0] - lengths[1]) <= 6
    assert one.left_out == other.left_out == ("B=130 L=130: ValueError: at most 40 tokens",)
