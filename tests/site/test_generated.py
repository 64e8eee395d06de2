"""The pages that are made of results say what the results say, faults too."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

import pytest
from documented import PUBLIC
from internals import metadata_of

from sdpa_xp import masks
from sdpa_xp_export import TensorSpec, export_attention

ROOT = Path(__file__).parents[2]
sys.path += [str(ROOT / folder) for folder in ("docs/_site", "benchmarks")]

import benchmark_page  # noqa: E402
import derivative_table  # noqa: E402
import evidence  # noqa: E402
import form_table  # noqa: E402
import gpu_run  # noqa: E402
import linked as linked_names  # noqa: E402
import plots  # noqa: E402
import report  # noqa: E402
import support_matrix  # noqa: E402
from bars import BARS, Bar  # noqa: E402
from measuring import Row, Spread  # noqa: E402


def row(
    dtype: str, agreement: dict[str, float] | None = None, refused: str = "", **other: Any
) -> dict[str, Any]:
    """One row of results, of one feature."""
    agrees = agreement is None or agreement["absolute"] <= agreement["bound"]
    feature = {"feature": "plain", "agreement": agreement, "refused": refused, "agrees": agrees}
    names = {"backend": "numpy", "implementation": "xp", "device": "cpu"} | other
    return {
        **names,
        "dtype": dtype,
        "agrees": agrees,
        "jobs": int(agreement is not None),
        "features": [feature],
    }


RIGHT, WRONG = {"absolute": 1e-7, "bound": 2e-7}, {"absolute": 4e-7, "bound": 2e-7}


@pytest.fixture
def results(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Rows in place of those that were measured."""

    def put(*rows: dict[str, Any]) -> None:
        for module in (evidence, support_matrix):
            monkeypatch.setattr(module, "ROWS", list(rows))
        monkeypatch.setattr(support_matrix, "DTYPES", list(dict.fromkeys(row["dtype"] for row in rows)))
        monkeypatch.setattr(support_matrix, "FEATURES", [cell["feature"] for cell in rows[0]["features"]])

    return put


@pytest.mark.parametrize(
    ("rows", "table"),
    [
        ([row("float32", RIGHT), row("float16", RIGHT)], []),
        ([row("float32", RIGHT), row("float16", WRONG)], ["| NumPy | plain in float16 | **wrong** |"]),
        (
            [row("float32", RIGHT), row("float64", refused="only `float32` is <wide>")],
            ["| NumPy | `float64` | only <code>float32</code> is &lt;wide&gt; |"],
        ),
    ],
)
def test_an_exception_says_what_is_refused_or_wrong(
    results: Any, rows: list[dict[str, Any]], table: list[str]
) -> None:
    results(*rows)
    assert support_matrix.exceptions(["NumPy"]).splitlines()[2:] == table


def test_a_feature_that_one_dtype_refuses_is_an_exception(results: Any) -> None:
    other = {"feature": "sinks", "agreement": RIGHT, "refused": "", "agrees": True}
    one, two = row("float32", RIGHT), row("float16", refused="too wide")
    results(*(line | {"jobs": 1, "features": [*line["features"], other]} for line in (one, two)))
    assert support_matrix.exceptions(["NumPy"]).splitlines()[2:] == ["| NumPy | plain in float16 | too wide |"]


def test_what_computes_little_says_what_it_computes(results: Any) -> None:
    others = [
        {"feature": name, "agreement": None, "refused": "no", "agrees": True} for name in ("sinks", "scale")
    ]
    one = row("float32", RIGHT)
    results(one | {"features": [*one["features"], *others]})
    (line,) = support_matrix.exceptions(["NumPy"]).splitlines()[2:]
    assert line.startswith("| NumPy | all but plain |")


def test_the_table_of_forms_says_what_an_export_takes() -> None:
    """In each cell of a row, for each length; and what a provider cannot take is refused with its reason."""
    lines = [line.strip("| ").split(" | ") for line in form_table.page().splitlines() if line.startswith("|")]
    header, rows = lines[0], {name: line[1:] for line in lines[2:] for name in line[0].split("; ")}
    assert [cell.strip("`") for cell in header if cell] == [*form_table.RUNTIMES]
    assert rows.keys() == form_table.features(form_table.SIZES[0]).keys()
    windows = zip(rows["a window: `sliding_window(63, 0)`"], form_table.RUNTIMES, strict=True)
    for cell, runtime in windows:
        forms = []
        for size in form_table.SIZES:
            query, key = (TensorSpec("float32", (size.batch, heads, size.length, 64)) for heads in (8, 2))
            call: dict[str, Any] = {
                "runtime": form_table.written(runtime),
                "attn_mask": masks.sliding_window(63, 0),
            }
            forms.append(f"`{metadata_of(export_attention(query, key, key, **call))['sdpa_xp.form']}`")
        shown = cell.split(", ")
        assert shown + shown[-1:] * (len(forms) - len(shown)) == forms  # the last one is for the rest
        assert shown[-2:-1] != shown[-1:]
    for name, cells in rows.items():
        dtype = name.partition(",")[0]
        of_browsers, of_openvino = dtype == "bfloat16", dtype == "float64"
        assert ["refused" in cell for cell in cells] == [False] * 4 + [of_browsers] + [of_openvino, False]
    assert "<code>query</code> must not be bfloat16 for web" in form_table.page()


def test_the_worst_of_a_row_is_nearest_to_its_bound(results: Any) -> None:
    far = {"feature": "scale", "agreement": {"absolute": 1e-6, "bound": 1e-5}, "refused": "", "agrees": True}
    near = row("float32", RIGHT)
    results(near | {"jobs": 2, "features": [far, *near["features"]]})
    assert "| NumPy | 1.0e-07, 50% |" in support_matrix.errors(["NumPy"])


def test_a_bar_that_is_missed_is_shown_as_missed() -> None:
    bar: Bar = BARS[0]
    slow = Row(bar.cell, bar.length, bar.contender, {bar.quantity: Spread(9.0, 9.0, 9.0)})
    assert "| 9 | **no** |" in "\n".join(report.bars([slow]))
    near = Row(bar.cell, bar.length, bar.contender, {bar.quantity: Spread(*[bar.bound * 1.002] * 3)})
    assert f"| at most {bar.bound:g} | {bar.bound * 1.002:.4g} | **no** |" in "\n".join(report.bars([near]))
    missed = sum("**no**" in line for line in (ROOT / "results/attention.md").read_text().splitlines())
    assert f"of which {missed} of {len(BARS)} were missed" in "\n".join(benchmark_page.at_a_glance())


def test_no_two_lines_of_a_panel_look_alike() -> None:
    """They differ in colour, or one is solid and the other dashed."""
    facts = json.loads((ROOT / "results/attention.json").read_text())
    rows = [Row.read(row) for row in facts["rows"]]
    for plot in plots.PLOTS.values():
        figure = plots.figure(rows, plot)
        assert figure is not None
        for axes in figure.axes:
            lines = [bars.lines[0] for bars in axes.containers]
            looks = [(line.get_color(), line.get_linestyle()) for line in lines]
            assert len(set(looks)) == len(looks)


def test_every_contender_is_drawn() -> None:
    """Not only those of the recorded results: the plots are drawn when a run of half an hour ends."""
    for plot in plots.PLOTS.values():
        names = [name for name in plots.CONTENDERS if name not in plot.left_out]
        rows = [Row(plot.cells[0], 256, name, {plot.quantity: Spread(2.0, 1.0, 3.0)}) for name in names]
        drawn = plots.figure(rows, plot)
        assert drawn is not None
        assert len(drawn.axes[0].containers) == len(names)


@pytest.mark.needs("torch", "jax", "onnxruntime")
def test_a_partial_run_replaces_its_cells_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import attention

    def medians() -> dict[str, float]:
        rows = json.loads((tmp_path / "attention.json").read_text())["rows"]
        return {row["cell"]: row["numbers"]["milliseconds"]["median"] for row in rows}

    def measured(cell: str, median: float) -> Row:
        return Row(cell, 256, next(iter(plots.CONTENDERS)), {"milliseconds": Spread(median, median, median)})

    attention.write(tmp_path, [measured("all pairs", 1.0), measured("causal", 2.0)], is_partial=False)
    attention.write(tmp_path, [measured("causal", 3.0)], is_partial=True)
    assert medians() == {"all pairs": 1.0, "causal": 3.0}
    attention.write(tmp_path, [measured("causal", 4.0)], is_partial=False)
    assert medians() == {"causal": 4.0}
    monkeypatch.setattr(attention.machine, "numpy_kernels", lambda: "another BLAS")
    with pytest.raises(SystemExit, match="was measured with another numpy_blas: run all of it"):
        attention.write(tmp_path, [measured("all pairs", 5.0)], is_partial=True)
    assert medians() == {"causal": 4.0}


FROM_A_GPU = {
    "device": "cuda",
    "gpu": "NVIDIA H100",
    "python": "3.12",
    "date": "2026-12-01",
    "system": "Linux",
    "packages": {"torch": "torch 2.13.0", "onnx": "not installed"},
    "steps": {
        "core tests on cupy": {
            "outcome": "failed",
            "reason": "exit code 1",
            "passed": 7,
            "failed": [{"test": "tests/core/test_x.py::test_y", "message": "wrong"}],
            "skipped": {"no device": 2},
        },
        "exported graphs": {"outcome": "skipped", "reason": "onnx not installed"},
    },
}


def test_the_pages_say_what_was_run_on_a_gpu(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Nothing, until the file of results is there."""
    results = tmp_path / "results.json"
    monkeypatch.setattr(gpu_run, "RESULTS", results)
    pages = (gpu_run.sentence("exported graphs"), gpu_run.summary(), "\n".join(gpu_run.section()))
    assert all("Nothing has been run on a GPU yet." in page for page in pages)

    results.write_text(json.dumps(FROM_A_GPU))
    results.with_suffix(".md").write_text("# Title\n\n## Causal\n\n| a |\n")
    sentence, summary, section = (
        gpu_run.sentence("core tests on cupy", "exported graphs"),
        gpu_run.summary(),
        "\n".join(gpu_run.section()),
    )
    assert sentence == (
        "Run on NVIDIA H100, 2026-12-01: core tests on cupy: failed: exit code 1, 7 tests passed, 1 failed, "
        "2 were skipped; exported graphs: skipped: onnx not installed."
    )
    assert "NVIDIA H100, Linux, 2026-12-01. Python 3.12, torch 2.13.0." in summary
    assert "| core tests on cupy | failed: exit code 1 | 7 | 1 | 2 |" in summary
    assert "\n### Causal" in section
    assert "Nothing has been run" not in sentence + summary + section


@pytest.mark.parametrize("other", [{"device": "cpu"}, {"gpu": ""}])
def test_a_trial_is_not_shown_as_a_run_on_a_gpu(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, other: dict[str, str]
) -> None:
    monkeypatch.setattr(gpu_run, "RESULTS", tmp_path / "gpu.json")
    (tmp_path / "gpu.json").write_text(json.dumps(FROM_A_GPU | other))
    with pytest.raises(ValueError, match=r"gpu\.json must be from a GPU; got device="):
        gpu_run.summary()


def test_no_text_says_by_itself_that_nothing_ran_on_a_gpu() -> None:
    """The pages say what the results say. README and changelog are no pages, and must be changed with them."""
    denial = re.compile(
        r"(not|nothing has|none was|no graph has) been run (yet )?(on|with|there)", re.IGNORECASE
    )
    denials = {
        path.relative_to(ROOT).as_posix()
        for path in [*(ROOT / "docs").rglob("*.md"), *ROOT.glob("*.md")]
        if denial.search(" ".join(path.read_text().split()))
    }
    assert denials == (set() if gpu_run.RESULTS.exists() else {"README.md", "CHANGELOG.md"})


def test_whole_pages_are_made() -> None:
    support, benchmarks = support_matrix.page(), benchmark_page.page()
    assert [feature for feature in evidence.FEATURES if feature not in support] == []
    assert "Not run here" in support
    assert "**wrong**" not in support
    for page in (support, benchmarks):
        assert "Python 3." in page
        assert re.search(r"\d{4}-\d\d-\d\d", page)
    assert benchmarks.count("<svg") == 1
    assert "#7a7a7a" not in benchmarks


def test_names_in_text_lead_to_the_reference() -> None:
    linked = '<autoref identifier="sdpa_xp.masks.causal" optional><code>masks.causal</code></autoref>'
    assert linked_names.linked("<p>see <code>masks.causal</code></p>") == f"<p>see {linked}</p>"
    assert 'identifier="sdpa_xp.KVCache"' in linked_names.linked("<code>KVCache</code>")
    kept = (
        '<a href="#x"><code>masks.causal</code></a>',
        "<pre><code>KVCache</code></pre>",
        "<h2><code>KVCache</code></h2>",
        "<code>scale</code>",
        "<code>KVCache(key, value)</code>",
    )
    for html in kept:
        assert linked_names.linked(html) == html
    assert set(linked_names.PLACES.values()) == set(PUBLIC)


def test_each_derivative_that_is_not_computed_has_its_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    right = {"error": 1e-7, "bound": 2e-7}

    def rows(library: str, **outcomes: dict[str, Any]) -> list[dict[str, Any]]:
        features = {"plain": right, "scale": right, **outcomes}
        return [{"library": library, "derivative": name, "features": features} for name in ("a.b", "Hessian")]

    measured = [*rows("X", softcap={"refused": "no `f`"}), *rows("Y", softcap={"nan": "NaN"})]
    memory = {"X": {"a.b": [1, 2]}, "Y": {"a.b": [1, 1000], "Hessian": []}}
    monkeypatch.setattr(derivative_table, "RESULTS", {"rows": measured, "memory": memory})
    page = derivative_table.page()
    assert "X, Y" in page
    assert "| X | `a.b`, Hessian | softcap | no <code>f</code> |" in page
    assert "| Y | `a.b`, Hessian | softcap | NaN |" in page
    assert "except in Y (`a.b`)" in page


def test_the_table_of_derivatives_is_short_and_complete() -> None:
    page = derivative_table.page()
    words = re.sub("<.*?>", "", page).split()
    assert sum(bool(re.search(r"[^\W\d_]", word)) for word in words) < 300
    for row in derivative_table.RESULTS["rows"]:
        for outcome in row["features"].values():
            assert evidence.code(outcome.get("refused", "")) in page
    times = derivative_table.times()
    assert all(name in times for name in derivative_table.TIMED)
