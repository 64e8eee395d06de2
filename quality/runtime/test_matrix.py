"""Every call in several releases of onnxruntime; and that the results of all releases are those of this code.

`--runtimes=1.24.4,1.26.0` chooses the releases. One that is not installed fails the run: `make runtimes`
installs all, `make test` those that it needs.
"""

from __future__ import annotations

import json
import sys
from collections import Counter
from collections.abc import Mapping
from functools import cache
from pathlib import Path

import numpy as np
import onnx
import pytest

from quality.runtime.arrays import load, save
from quality.runtime.jobs import Job, jobs
from quality.runtime.matrix import RESULTS
from quality.runtime.outcomes import Exported, choices, exports, faults, number, refusals, wrong
from quality.runtime.releases import INSTALLED, NEWEST, REDUCED, RELEASES, Graph, run_graphs
from sdpa_xp_export.forms import contrib
from sdpa_xp_export.forms.choice import FORMS


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "release" in metafunc.fixturenames:
        names = metafunc.config.getoption("--runtimes")
        metafunc.parametrize("release", names.split(",") if names else REDUCED)


@cache
def all_jobs() -> list[Job]:
    return jobs()


OTHERS = {"float16": 6, "bfloat16": 6, "float64": 3}
"""With `--thin`, one of so many calls of a dtype is run."""


@cache
def run_jobs(thin: bool) -> list[Job]:
    """The calls that are run: with `--thin`, all of float32, and a part of the others.

    What that leaves out: a kernel of a release that is wrong in another dtype for one feature alone. Most
    graphs in half precision cast to float32, and compute as that of float32 does. `make test THIN=` runs all.
    """
    numbers: Counter[str] = Counter()
    kept = []
    for job in all_jobs():
        dtype = job.call.query.dtype
        if not thin or numbers[dtype] % OTHERS.get(dtype, 1) == 0:
            kept.append(job)
        numbers[dtype] += 1
    return kept


@cache
def exported(release: str, thin: bool) -> Mapping[str, Exported]:
    """The graphs of all calls for a release, by form: they run in each later release as well."""
    return exports([release], list(FORMS), run_jobs(thin))[release]


@pytest.mark.slow
def test_a_release_computes_its_own_graphs_and_those_of_older_ones(
    release: str, pytestconfig: pytest.Config
) -> None:
    """In every form that is not refused, among them whichever the exporter chooses."""
    thin = bool(pytestconfig.getoption("--thin"))
    calls, targets = run_jobs(thin), [older for older in REDUCED if number(older) <= number(release)]
    graphs = {target: exported(target, thin) for target in targets or [release]}
    faulty = wrong(graphs, {release: faults(release, graphs)})
    assert {target: forms for target, forms in faulty.items() if any(forms.values())} == {}
    for target, of_target in graphs.items():
        written = {(graph.job.name, form) for form, of_form in of_target.items() for graph in of_form.graphs}
        assert choices(target, calls).items() <= written
        assert len(of_target["primitive"].graphs) == len(calls)


def test_a_graph_that_a_later_release_computes_otherwise_is_wrong_for_its_own(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A window of GroupQueryAttention as onnxruntime 1.23 counts its keys, which is one key more since 1.24."""
    monkeypatch.setattr(contrib, "WINDOW_COUNTS_ITSELF", (1, 23))
    monkeypatch.setattr(contrib, "key_window", lambda masks: (40 - 1, 0))
    calls = [job for job in all_jobs() if job.name == "long, of itself, window (float32)"]
    graphs = exports(["1.23.2", INSTALLED], ["grouped_query"], calls)
    faulty = {release: faults(release, graphs) for release in ("1.23.2", INSTALLED)}
    assert not faulty["1.23.2"]
    (fault,) = wrong(graphs, faulty)["1.23.2"]["grouped_query"].values()
    assert fault.startswith(f"{INSTALLED}: output is off by")
    # One graph is wrong, although it is exported for two releases.
    assert {release: len(graphs) for release, graphs in faulty.items()} == {"1.23.2": 0, INSTALLED: 1}


def test_the_results_are_of_all_releases_and_of_this_code() -> None:
    """Whoever adds a call or a form, or changes what is refused or chosen, runs `make runtimes` again."""
    results = json.loads(RESULTS.read_text())
    calls = all_jobs()
    assert results["calls"] == len(calls)
    assert list(results["releases"]) == list(RELEASES)
    for release, results_of in results["releases"].items():
        assert {form: count for form, count in results_of["auto"].items() if count} == Counter(
            choices(release, calls).values()
        )
        assert list(results_of["forms"]) == list(FORMS)
        for form, outcome in results_of["forms"].items():
            assert outcome["refused"] == refusals(release, form, calls)
            assert not outcome["wrong"]
            assert outcome["right"] == len(calls) - sum(outcome["refused"].values())


def test_make_installs_them() -> None:
    """The Makefile says once more which releases are to be installed beside the one that is."""
    makefile = (Path(__file__).parents[2] / "Makefile").read_text()
    for name, releases in (("RELEASES", RELEASES), ("REDUCED", REDUCED), ("NEWEST", [NEWEST])):
        others = " ".join(release for release in releases if release != INSTALLED)
        assert f"\n{name} := {others}\n" in makefile


def test_a_graph_that_ends_the_process_is_told_from_the_others(tmp_path: Path) -> None:
    """And what onnxruntime refuses to load, from both."""
    graphs = {"first": _graph(1), "none": _graph(1, "NoSuchOperator"), "deadly": _graph(0), "last": _graph(1)}
    results = run_graphs(INSTALLED, graphs, tmp_path)
    for name in ("first", "last"):
        (outputs,) = results[name]
        np.testing.assert_array_equal(outputs["output"], np.ones((1, 1, 2, 4), np.float32))
    assert results["deadly"] == "the process died: SIGFPE"
    assert "NoSuchOperator" in results["none"]


@pytest.mark.slow
def test_only_a_graph_that_hangs_is_stopped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """However long all graphs take together: six times a third of the limit, then one without an end."""
    fake = tmp_path / "python"
    fake.write_text(
        f"#!{sys.executable}\n"
        "import sys, time\n"
        f"print({INSTALLED!r}, flush=True)\n"
        "for name in sys.argv[4:]:\n"
        "    print(name, flush=True)\n"
        "    time.sleep(1 if name < '0006' else 600)\n"
    )
    fake.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(fake))
    monkeypatch.setattr("quality.runtime.releases.SECONDS", 3)
    graphs = {name: (onnx.ModelProto(), []) for name in range(7)}
    folder = tmp_path / "jobs"
    folder.mkdir()
    results = run_graphs(INSTALLED, graphs, folder)
    assert results == {**{name: [] for name in range(6)}, 6: "the process hung for 3 s"}


def test_a_release_that_is_not_installed_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"onnxruntime 0.0.0 is not in .* `make runtimes`"):
        run_graphs("0.0.0", {"any": _graph(1)}, tmp_path)


def test_a_release_that_is_another_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As when a folder holds something else than its name says."""
    monkeypatch.setattr("quality.runtime.releases.path_of", lambda release: None)
    with pytest.raises(RuntimeError, match=r"onnxruntime 1.23.2 did not start"):
        run_graphs("1.23.2", {"any": _graph(1)}, tmp_path)


def test_bfloat16_is_kept_in_a_file(tmp_path: Path) -> None:
    arrays = {name: np.arange(3.0).astype(name) for name in ("bfloat16", "float16", "float64")}
    save(tmp_path / "arrays", arrays)
    for name, array in load(tmp_path / "arrays").items():
        np.testing.assert_array_equal(array, arrays[name], strict=True)


def _graph(heads: int, operator: str = "Attention") -> Graph:
    """Attention of ones; without key heads, it divides by their number."""
    shape = (1, heads, 2, 4)
    values = [
        onnx.helper.make_tensor_value_info(
            name, onnx.TensorProto.FLOAT, shape if name in "kv" else (1, 1, 2, 4)
        )
        for name in ("q", "k", "v", "output")
    ]
    node = onnx.helper.make_node(operator, ["q", "k", "v"], ["output"])
    graph = onnx.helper.make_graph([node], "graph", values[:3], values[3:])
    model = onnx.helper.make_model(graph, opset_imports=[onnx.helper.make_opsetid("", 23)], ir_version=11)
    ones = {name: np.ones(shape if name in "kv" else (1, 1, 2, 4), np.float32) for name in "qkv"}
    return model, [ones]
