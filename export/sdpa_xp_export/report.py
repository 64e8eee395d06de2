"""The report of a verification: the error of each run, its time and memory, and where each node ran."""

from __future__ import annotations

import math
import textwrap
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from sdpa_xp._checks import Immutable
from sdpa_xp._display import folded, table

if TYPE_CHECKING:  # it needs onnx, and `Agreement` does not: `make test-fast` runs without
    from ._call.call import ExportCall

SHOWN = 3
"""The most things that were not tried that a printed report names; it counts the others."""
CLOSEST = 5
"""The number of runs that a notebook shows: the runs that came closest to their bounds."""
WIDTH = 76
"""The most characters in a line of a printed report; a longer word is not cut."""


@dataclass(frozen=True, slots=True)
class Agreement(Immutable):
    """The error of a result against the float64 reference, and its bound.

    In `verify` they belong to the element that is closest to its bound, or furthest beyond it.
    """

    absolute: float
    """The absolute error; inf if NaN or inf is in other places than in the reference."""
    relative: float
    """The absolute error divided by the largest absolute value of the reference."""
    bound: float
    """The largest accepted value of `absolute`."""
    index: tuple[int, ...] = ()
    """The index of that element among those that were compared."""

    @property
    def agrees(self) -> bool:
        return self.absolute <= self.bound

    @property
    def share(self) -> float:
        """The error divided by the bound; the result agrees if it is at most 1."""
        if self.absolute == 0:
            return 0.0
        return self.absolute / self.bound if self.bound else math.inf


@dataclass(frozen=True, slots=True)
class Placement(Immutable):
    """A node that ran, after the optimisation of the engine, and the provider that it ran on."""

    node: str
    op: str
    provider: str
    requested: str
    """The provider that was requested; a node that ran on another one has fallen back."""

    @property
    def fell_back(self) -> bool:
        return self.provider != self.requested


@dataclass(frozen=True, slots=True)
class Run(Immutable):
    """One output of one run: its lengths and scores, the requested provider, and its agreement."""

    inputs: str
    """The lengths, and the size of the scores if it is not 1."""
    provider: str
    output: str
    agreement: Agreement
    seconds: float
    """The time of the run. If it is short, another one warms up first."""
    peak_bytes: int | None
    """Memory of the process above that before the first run; None on CUDA, or if the system does not report
    it."""
    longest: int
    """The larger of the numbers of queries and keys; for a layer, the largest of all lengths."""
    compared: int
    """The number of rows that were compared; each query of each head and batch entry is a row."""
    rows: int
    """The number of rows of the output."""
    where: str = ""
    """The element that is closest to its bound, such as `batch 0, head 2, query 19`."""
    is_plain: bool = True
    """Whether the inputs are ordinary: no large numbers, no NaN, and random integers."""


def described_failure(run: Run) -> str:
    """Return the inputs of a run, the place of its worst error, and the size of this error."""
    where = f", {run.where}" if run.where else ""
    return f"{run.inputs}{where} (error {run.agreement.absolute:.2g})"


def described_error(run: Run) -> str:
    """Return the error and the bound of a run, and of special inputs, which may be large, the largest value."""
    agreement, size = run.agreement, _largest_value(run)
    values = f" on values up to {size}" if size and not run.is_plain else ""
    return f"error {agreement.absolute:.2g}{values}, bound {agreement.bound:.2g}"


def in_column(error: float) -> str:
    """Return an error or a bound for a column of a table, each with two digits."""
    return f"{error:.1e}" if error else "0"


def verdict(report: LayerReport) -> str:
    """Return whether a report agrees, in how many runs, and what ran them."""
    return f"{'agrees' if report.agrees else 'DISAGREES'} in {len(report.runs)} runs on {report.engine}"


def compared_rows(report: LayerReport) -> str:
    """Return how many rows of all outputs were compared, and how many there are."""
    return f"{sum(run.compared for run in report.runs):,} of {sum(run.rows for run in report.runs):,}"


def shown_math_mode(report: LayerReport) -> list[str]:
    """Return the math mode of a report, if the engine and the provider have a choice of several."""
    on_cuda = any("CUDA" in run.provider for run in report.runs)
    return [report.math_mode] if on_cuda or report.math_mode != "no TF32" else []


def _largest_value(run: Run) -> str:
    """Return the largest value of the reference, as a report shows it; empty if there is no finite error."""
    agreement = run.agreement
    is_finite = 0 < agreement.relative < math.inf
    return f"{agreement.absolute / agreement.relative:.2g}" if is_finite else ""


def closest_runs(report: LayerReport) -> dict[str, Run]:
    """Return the run that is closest to its bound, or furthest beyond it, by what a report calls it.

    If all agree, it is one with ordinary inputs, and a second one has special inputs if that is closer.
    """
    worst = report.worst
    if not report.agrees:
        return {"furthest beyond its bound": worst}
    ordinary = max((run for run in report.runs if run.is_plain), key=_share, default=worst)
    closer = {"with special inputs": worst} if worst.agreement.share > ordinary.agreement.share else {}
    return {"closest to its bound": ordinary, **closer}


def _share(run: Run) -> float:
    return run.agreement.share


@dataclass(frozen=True, slots=True, repr=False)
class LayerReport(Immutable):
    """The report of `verify_layer`; `print` shows it in lines of at most 76 characters."""

    form: str
    """The form of attention; for a layer, the forms of all its calls."""
    reason: str
    """Why the exporter chose that form."""
    onnxruntime: str
    """The release of onnxruntime that ran the model; empty if another engine ran it."""
    notes: tuple[str, ...]
    """What may explain a failure, such as a known defect of an operator, another engine, release or call than
    the model's, why the reference is not in float64, a provider that was left out, or an earlier verdict."""
    runs: tuple[Run, ...]
    """One entry for each output of each run."""
    placements: tuple[Placement, ...]
    """The nodes that ran."""
    left_out: tuple[str, ...]
    """What was not tested, with the reason, such as lengths for which a layer raised an error."""
    engine: str = field(default="", kw_only=True)
    """What ran the model, and its release, such as `onnxruntime 1.31.1`."""
    runtime: str = field(default="", kw_only=True)
    """The runtime that the model is for, from its metadata; several if models were merged; empty if they
    have none."""
    seed: int = field(default=0, kw_only=True)
    """The seed of the random inputs and lengths, to repeat these runs."""
    reference: str = field(default="float64", kw_only=True)
    """The dtype of the reference: float64, or the dtype of a layer that has no other."""
    math_mode: str = field(default="no TF32", kw_only=True)
    """How products of float32 were computed: `no TF32`, or `TF32`, which rounds their factors to 10 bits; for
    OpenVINO, its precision, and the default on this CPU."""

    @property
    def agrees(self) -> bool:
        """Whether every run stayed within its bound, and there was at least one run."""
        # A report without a run has shown nothing.
        return bool(self.runs) and all(run.agreement.agrees for run in self.runs)

    @property
    def worst(self) -> Run:
        """The run that came closest to its bound or went furthest beyond it."""
        return max(self.runs, key=_share)

    @property
    def failing(self) -> tuple[Run, ...]:
        """The runs that do not agree: those with ordinary inputs first, and of them the smallest."""
        failing = (run for run in self.runs if not run.agreement.agrees)
        return tuple(sorted(failing, key=lambda run: (not run.is_plain, run.longest, run.rows)))

    @property
    def smallest_failure(self) -> str:
        """The first of `failing`, with the place and the size of its error; empty if all agree."""
        return f"smallest failing run: {described_failure(self.failing[0])}" if self.failing else ""

    @property
    def fell_back(self) -> tuple[Placement, ...]:
        """Nodes that ran on another provider than the requested one."""
        return tuple(placement for placement in self.placements if placement.fell_back)

    @property
    def nodes(self) -> str:
        """The number of nodes that ran, and where."""
        count = len(self.placements)
        where = sorted({placement.provider for placement in self.placements})
        if len(where) > 1:
            return f"{count} nodes, on {' and '.join(where)}"
        return f"{count} nodes, all on {where[0]}" if count > 1 else f"{count} node, on {''.join(where)}"

    def __repr__(self) -> str:
        return f"<{type(self).__name__}: {self.form} {verdict(self)}, seed={self.seed}>"

    def __str__(self) -> str:
        fallen, more = ", ".join(placed.node for placed in self.fell_back), len(self.left_out) - SHOWN
        left_out = [*self.left_out[:SHOWN], *([f"and {more} more"] if more > 0 else [])]
        facts = [
            f"{self.form}: {verdict(self)} ({compared_rows(self)} rows compared)",
            *self.notes,
            self.smallest_failure,
            *(
                f"{which}: {run.output} of {run.inputs}, {described_error(run)}"
                for which, run in closest_runs(self).items()
            ),
            self.nodes,
            *(f"math mode: {mode}" for mode in shown_math_mode(self)),
            f"seed={self.seed}",
            f"fell back: {fallen}" if fallen else "",
            f"not tried: {'; '.join(left_out)}" if left_out else "",
        ]
        text = "; ".join(filter(None, facts))
        return textwrap.fill(
            text, WIDTH, subsequent_indent="  ", break_long_words=False, break_on_hyphens=False
        )

    def _repr_html_(self) -> str:
        """Return the verdict and the runs closest to their bounds, as a notebook shows them."""
        facts = [
            ("form", self.form),
            ("why this form", self.reason),
            ("runs", f"{len(self.runs)}, in {sum(run.seconds for run in self.runs):.2g} s"),
            ("rows", f"{compared_rows(self)} compared"),
            ("ran on", f"{self.engine}: {self.nodes}"),
            *[("math mode", mode) for mode in shown_math_mode(self)],
            ("seed", str(self.seed)),
            *[("note", note) for note in self.notes],
            *[("smallest failing run", described_failure(run)) for run in self.failing[:1]],
            *[("fell back", placed.node) for placed in self.fell_back],
            *[("not tried", line) for line in self.left_out],
        ]
        closest = sorted(self.runs, key=_share, reverse=True)[:CLOSEST]
        is_one = len({run.output for run in self.runs}) == 1
        runs = [
            (
                run.inputs,
                *([] if is_one else [run.output]),
                in_column(run.agreement.absolute),
                in_column(run.agreement.bound),
                _largest_value(run),
            )
            for run in closest
        ]
        title = f"The {len(runs)} runs closest to their bounds"
        header = ("inputs", *([] if is_one else ["output"]), "error", "bound", "values up to")
        return folded(f"{type(self).__name__}: {verdict(self)}", table("", facts) + table(title, runs, header))


@dataclass(frozen=True, slots=True, repr=False)
class Report(LayerReport):
    """The report of `verify`; `print` shows it in lines of at most 76 characters."""

    call: ExportCall
    """The call that the model was compared with."""
    from_metadata: bool
    """Whether the model states the call in its metadata; False if the caller wrote it down."""
    computed_in: str
    """The dtype of the textbook formula that sets the bound."""
