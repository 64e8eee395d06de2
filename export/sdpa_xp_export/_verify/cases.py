"""A case: one run of a model, in every verification. Here they run in an engine, and are judged together."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Literal, NamedTuple, TypeVar

from .._call.call import ExportCall
from .._files.model import StatedModel
from .._runtime.defects import defect_notes
from .._runtime.limits import ModelFailedError, check_time, paused
from .._runtime.process import RemoteSession, RuntimeProcess, runtime_process
from .._runtime.releases import (
    ENGINES,
    EngineName,
    ProviderName,
    Runtime,
    runtime_notes,
    short_provider,
    stated_runtimes,
)
from ..report import LayerReport, Run
from .case_lengths import Lengths, shown_lengths
from .expected import Arrays
from .inputs import LARGE, OperandChoice
from .judging import Compared, ExpectedRows, judge_outputs
from .model import computed_dtype

R = TypeVar("R", bound=LayerReport)
MANY_SCORES = 2**22
"""Runs with more scores than that give their memory back."""


@dataclass(frozen=True, slots=True)
class Case:
    """A row of the table of what a model is tried with; then its inputs too, and what they should give."""

    lengths: Lengths
    size: float = 1.0
    """The size of the scores."""
    operands: OperandChoice = "drawn"
    nan_in: Literal["", "query", "key", "value"] = ""
    """The input with a NaN: a query, or a key or value that some query attends to."""
    extreme: str = ""
    """What is special about the values, as large tokens; cases of one kind have a bound of their own."""
    most_rows: int | None = None
    """The most rows that are compared, if they are fewer than in other runs."""
    inputs: Arrays = field(default_factory=dict)
    expected: Mapping[str, ExpectedRows] = field(default_factory=dict)
    """What each output should be; a cache that is returned is a copy, bit for bit."""
    read: Callable[..., Compared] = Compared
    """The case, the name of an output and its result -> what is compared of it."""
    shapes: str = "fixed"
    """What a report shows in place of lengths if all are fixed."""
    scores: int = 0
    is_own: bool = False
    """Whether the reference is a layer in the dtype of its inputs."""

    @property
    def exact(self) -> Arrays:
        """The reference of each output."""
        return {name: rows.reference for name, rows in self.expected.items()}

    @property
    def direct(self) -> Arrays:
        """What the textbook formula, or the layer, gives in the dtype of the run."""
        return {name: rows.textbook for name, rows in self.expected.items()}

    @property
    def special(self) -> str:
        """What is special about the inputs, as a report shows it behind the lengths."""
        scores = {1.0: "", LARGE: "large scores"}.get(self.size, "huge scores")
        operands = "" if self.operands == "drawn" else self.operands
        nan = f"NaN in a {self.nan_in}" if self.nan_in else ""
        return "".join(f", {part}" for part in (scores, operands, nan, self.extreme) if part)

    @property
    def shown(self) -> str:
        """The case as a report shows it."""
        return (shown_lengths(self.lengths) or self.shapes) + self.special

    def compared(self, results: Arrays) -> dict[str, Compared]:
        """Take what is compared from the outputs of a run, so that the whole need not be kept."""
        return {name: self.read(self, name, results[name]) for name in self.expected}


class Outcome(NamedTuple):
    """What is compared of the outputs of one run, by name, its seconds, and its peak of memory in bytes."""

    shown: str
    outputs: Mapping[str, Compared]
    seconds: float
    peak_bytes: int | None
    is_plain: bool


class RunningModel(NamedTuple):
    """A model, the runtimes that it is for, the process of the engine that runs it, and the providers."""

    stated: StatedModel
    runtimes: Collection[Runtime]
    process: RuntimeProcess
    providers: Sequence[str]
    """By their full names."""
    computed_in: str
    """The dtype of the scores and sums of a call; a layer has none."""

    @contextmanager
    def failures_noted(self, provider: str) -> Iterator[None]:
        """Let the error of the model say how its runtimes differ from this one."""
        try:
            yield
        except ModelFailedError as error:
            if notes := runtime_notes(self.runtimes, self.process.version, [provider], self.process.engine):
                raise ModelFailedError(f"{error} {'; '.join(notes)}.") from error
            raise

    def run(
        self,
        report: Callable[..., R],
        cases: Callable[[], Iterable[Case]],
        judge: Callable[[list[Outcome], str], Iterable[Run]],
        done: Callable[[str], object] = str,
    ) -> R:
        """Run the model on each provider, and return the report.

        Args:
            report: The class of the report, with the fields that do not follow from the model and the runs.
            cases: Returns the cases, which are the same for each provider.
            judge: Returns the runs of the outcomes on a provider.
            done: A function that is told of each run.
        """
        stated, runtimes, process, providers, _ = self
        runs, sessions = list[Run](), dict[str, RemoteSession]()
        for name in providers:
            outcomes = []
            with self.failures_noted(name), process.session(stated.model, name) as session:
                sessions[name] = session
                for case in cases():
                    # To free memory takes time, so runs with few scores keep it for the next.
                    run = session.timed(case.inputs, frees=case.scores > MANY_SCORES)
                    done(f"{case.shown} on {name}")
                    compared, is_plain = case.compared(run.outputs), not case.special
                    outcomes.append(Outcome(case.shown, compared, run.seconds, run.peak_bytes, is_plain))
            check_time()
            runs += judge(outcomes, name)
        chosen = [choice for part in stated.parts for choice in part.chosen]
        forms, reasons = (dict.fromkeys(choice[part] for choice in chosen) for part in (0, 1))
        notes = runtime_notes(runtimes, process.version, sessions, process.engine, is_finished=True)
        for name in dict.fromkeys(run.provider for run in runs if not run.agreement.agrees):
            kernels = process.engine if process.engine != "onnxruntime" else short_provider(name) or ""
            notes += defect_notes(stated.operators, stated.dtypes, kernels, process.version)
        return report(
            form=", ".join(forms),
            reason="; ".join(reasons),
            onnxruntime=process.version if process.engine == "onnxruntime" else "",
            notes=(*process.notes, *notes, *filter(None, [stated.verdict])),
            runs=tuple(runs),
            placements=tuple(placed for session in sessions.values() for placed in session.placements),
            engine=f"{ENGINES[process.engine]} {process.version}",
            runtime=", ".join(map(str, runtimes)),
            math_mode=" and ".join(dict.fromkeys(session.math_mode for session in sessions.values())),
        )


@contextmanager
def running_model(
    stated: StatedModel,
    provider: ProviderName | None,
    engine: EngineName,
    timeout: float,
    memory: int | None,
    *,
    scores: int = 0,
    call: ExportCall | None = None,
) -> Iterator[RunningModel]:
    """Start the engine, and end it when the block ends. The largest run has that many `scores`."""
    with runtime_process(stated.model, timeout, memory, scores=scores, engine=engine) as process:
        with paused():  # the start of Python is no fault of the model
            providers = process.providers(provider)
        # The process infers types, as a file may lie.
        computed_in = computed_dtype(stated.model, call, process.element_types) if call else ""
        yield RunningModel(stated, stated_runtimes(stated.parts), process, providers, computed_in)


def judged(outcomes: Sequence[Outcome], provider: str, computed_in: str | None = None) -> Iterator[Run]:
    """Yield a run for each output and case, by one bound for all cases of an output."""
    for name, agreements in judge_outputs([case.outputs for case in outcomes], computed_in).items():
        for case, agreement in zip(outcomes, agreements, strict=True):
            compared = case.outputs[name]
            measures = (case.seconds, case.peak_bytes, *compared.counts, compared.where(agreement.index))
            yield Run(case.shown, provider, name, agreement, *measures, case.is_plain)
