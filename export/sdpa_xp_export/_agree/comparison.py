"""Compare every array library and every exported graph with the reference, on the same inputs."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from sdpa_xp.errors import ArgumentTypeError, ArgumentValueError

from .._call.call import ExportCall, FormName
from .._runtime import session
from .._runtime.releases import Runtime, runtime_text
from .._verify.expected import Arrays, heads_first, reference_inputs
from .._verify.inputs import random_inputs
from .._verify.judging import ExpectedRows, judge_rows
from .._verify.reference import stages
from .._verify.settings import Setting
from .._verify.trials import Trial, trial_of
from ..export import export_call
from ..forms.choice import FORMS, unsupported_reason
from ..report import Agreement
from .backends import Backend
from .features import LENGTHS, LONGER, features
from .library_calls import Compute, attention


@dataclass(frozen=True, slots=True)
class Job:
    """A call with inputs of several lengths."""

    call: ExportCall
    inputs: tuple[Arrays, ...]
    """Those that are timed come first."""
    compute: Compute = attention
    no_graph: str = ""
    """Why no graph computes the call; empty if one does."""


@dataclass(frozen=True, slots=True)
class JobResult:
    """The result of one job: its agreement, or why it was refused."""

    feature: str
    agreement: Agreement | None
    refused: str = ""
    """Why, in the words of the message."""

    @property
    def agrees(self) -> bool:
        return self.agreement is None or self.agreement.agrees


@dataclass(frozen=True, slots=True)
class Row:
    """One line of the table: the results of one way of computing, over all jobs of one dtype."""

    backend: str
    implementation: str
    dtype: str
    device: str
    results: tuple[JobResult, ...]
    seconds: float
    """The time of all jobs together; each is timed once, after a run that is not timed."""

    @property
    def name(self) -> str:
        return f"{self.backend} {self.implementation} {self.dtype} {self.device}"

    @property
    def ran(self) -> dict[str, Agreement]:
        """The agreement of each job that was not refused."""
        return {result.feature: result.agreement for result in self.results if result.agreement is not None}

    @property
    def worst(self) -> Agreement | None:
        """The agreement with the largest error relative to its bound."""
        return max(self.ran.values(), key=lambda agreement: agreement.share, default=None)

    @property
    def disagreeing(self) -> tuple[str, ...]:
        return tuple(result.feature for result in self.results if not result.agrees)

    @property
    def agrees(self) -> bool:
        """Whether each job that ran agrees; a library has to run some, and a form may have no graph for any."""
        return not self.disagreeing and (bool(self.ran) or self.backend == "onnxruntime")

    def as_json(self) -> dict[str, Any]:
        """Return the row, what follows from its results, and each result."""
        names = ("backend", "implementation", "dtype", "device", "agrees")
        return {name: getattr(self, name) for name in names} | {
            "jobs": len(self.ran),
            "disagreeing": list(self.disagreeing),
            "worst": None if self.worst is None else asdict(self.worst),
            "seconds": self.seconds,
            "features": [asdict(result) | {"agrees": result.agrees} for result in self.results],
        }


def feature_jobs(dtype: str, seed: int = 0) -> dict[str, Job]:
    """Return a job for each of `features`."""
    rng = np.random.default_rng(seed)
    jobs = {}
    for name, feature in features(dtype).items():
        several = (LENGTHS, *LONGER) if {"L", "S"} & {*feature.call.symbols} else (LENGTHS,)
        inputs = tuple(feature.adapt(random_inputs(feature.call, lengths, rng)) for lengths in several)
        jobs[name] = Job(feature.call, inputs, feature.compute, feature.no_graph)
    return jobs


def compare(
    jobs: Mapping[str, Job],
    dtype: str,
    backends: Iterable[Backend],
    providers: Sequence[str],
    begin: Callable[[str], object] = lambda _: None,
) -> Iterator[Row]:
    """Yield a row for each backend that holds `dtype`, then one for each exported form and provider.

    `begin` is called with the name of what is computed next.
    """
    begin(f"reference {dtype}")
    tried = {name: [_trial(job.call, inputs, dtype) for inputs in job.inputs] for name, job in jobs.items()}
    for backend in backends:
        if backend.holds(dtype):
            labels = (backend.name, "xp", dtype, backend.device)
            begin(" ".join(labels))
            yield _row(labels, jobs, tried, _on_backend(backend), _textbook_on(backend))
    for provider in providers:
        for form in FORMS:
            device = provider.removesuffix("ExecutionProvider").lower()
            labels = ("onnxruntime", form, dtype, device)
            begin(" ".join(labels))
            yield _row(labels, jobs, tried, _on_runtime(form, provider))


RunJob: TypeAlias = Callable[[], NDArray[Any]]
Prepare: TypeAlias = Callable[[Job], Callable[[Arrays], RunJob] | str]
"""A job -> what makes a run of inputs, or why it is refused."""
TextbookOf: TypeAlias = Callable[[Job, Arrays], NDArray[Any]]
"""A job and its inputs -> the output of the textbook formula, in the same library."""


def _on_backend(backend: Backend) -> Prepare:
    xp = backend.namespace()

    def prepare(job: Job) -> Callable[[Arrays], RunJob]:
        def put(hidden: Arrays) -> RunJob:
            arrays = {name: backend.put(x) for name, x in hidden.items()}
            return lambda: backend.get(job.compute(xp, job.call, arrays))

        return put

    return prepare


def _textbook_on(backend: Backend) -> TextbookOf:
    xp = backend.namespace()

    def textbook(job: Job, plain: Arrays) -> NDArray[Any]:
        (output,) = job.call.outputs
        arguments = _put(reference_inputs(job.call, plain), backend)
        return backend.get(stages(xp, **arguments)[output])

    return textbook


def _on_runtime(form: FormName, provider: str) -> Prepare:
    runtime = runtime_text(provider, session.version())
    target = Runtime.parse("agree", runtime)

    def prepare(job: Job) -> Callable[[Arrays], RunJob] | str:
        if why := job.no_graph or unsupported_reason(form, job.call, target):
            return why
        opened = session.open_session(export_call(job.call, form=form, runtime=runtime), provider)
        return lambda hidden: lambda: session.run(opened, hidden)[job.call.outputs[0]]

    return prepare


def _trial(call: ExportCall, inputs: Arrays, dtype: str) -> Trial:
    """Return a trial that compares all rows."""
    rows = np.arange(heads_first(call, inputs["query"]).shape[-2])
    return trial_of(call, Setting({}), inputs, rows, dtype)


def _put(arguments: Arrays, backend: Backend) -> Arrays:
    """Move NumPy arrays, also those of several biases, to the backend."""

    def put(value: Any) -> Any:
        if isinstance(value, tuple):
            return tuple(map(put, value))
        return backend.put(value) if isinstance(value, np.ndarray) else value

    return {name: put(value) for name, value in arguments.items()}


def _row(
    labels: tuple[str, str, str, str],
    jobs: Mapping[str, Job],
    tried: Mapping[str, Sequence[Trial]],
    prepare: Prepare,
    textbook_of: TextbookOf | None = None,
) -> Row:
    """Run the first inputs of each job twice, once timed, and the others once.

    Without `textbook_of` the bound follows from NumPy's textbook formula.
    """
    results, seconds = [], 0.0
    for name, job in jobs.items():
        make = prepare(job)
        if isinstance(make, str):
            results.append(JobResult(name, None, make))
            continue
        agreements: list[Agreement] = []
        try:
            for inputs, trial in zip(job.inputs, tried[name], strict=True):
                run = make(trial.inputs)
                result = run()  # compiles, and fills caches: the next run is timed
                if not agreements:
                    start = time.perf_counter()
                    result = run()
                    seconds += time.perf_counter() - start
                # Of the inputs without NaN: the textbook formula multiplies 0 by a hidden one.
                agreements.append(_judged(trial, result, textbook_of and textbook_of(job, inputs)))
        except (ArgumentTypeError, ArgumentValueError) as error:  # the library refuses the call
            results.append(JobResult(name, None, error.message.statement))
            continue
        results.append(JobResult(name, max(agreements, key=lambda agreement: agreement.share)))
    return Row(*labels, tuple(results), seconds)


def _judged(trial: Trial, result: NDArray[Any], textbook: NDArray[Any] | None) -> Agreement:
    """Compare an output by the textbook formula of the same library."""
    (output,) = trial.call.outputs
    compared, known = trial.compared({output: result} | trial.copies)[output], trial.expected[output]
    textbook = known.textbook if textbook is None else textbook
    expected = ExpectedRows(known.reference, textbook, terms=known.terms)  # of libraries, one bound for all
    return judge_rows([replace(compared, expected=expected)], compared.dtype)[0]
