"""Hold every array library and every exported graph against the reference, on the same inputs."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

import sdpa_xp
from sdpa_xp_export._agree import library_calls as library
from sdpa_xp_export._agree.backends import Backend
from sdpa_xp_export._agree.features import LENGTHS, features
from sdpa_xp_export._call.call import ExportCall
from sdpa_xp_export._runtime import session
from sdpa_xp_export._runtime.releases import Runtime, runtime_text
from sdpa_xp_export._verify.agreement import judge
from sdpa_xp_export._verify.random_inputs import poison, random_inputs
from sdpa_xp_export._verify.reference_inputs import Arrays, reference_inputs
from sdpa_xp_export._verify.textbook import stages
from sdpa_xp_export._verify.verification_inputs import as_returned, expected_outputs
from sdpa_xp_export.export import export_call
from sdpa_xp_export.forms.choice import FORMS, unsupported_reason
from sdpa_xp_export.report import Agreement

Expected = Mapping[str, tuple[NDArray[np.float64], NDArray[Any]]]
"""By job: the output of the reference, and that of the textbook formula in NumPy."""


@dataclass(frozen=True, slots=True)
class Job:
    """A call with inputs for it. `hidden` are the same inputs with NaN where no query attends."""

    call: ExportCall
    inputs: Arrays
    hidden: Arrays
    compute: library.Compute = library.attention
    no_graph: str = ""


@dataclass(frozen=True, slots=True)
class JobResult:
    """How one job went; without an agreement it was refused."""

    feature: str
    agreement: Agreement | None
    refused: str = ""
    """Why, in the words of the message."""

    @property
    def agrees(self) -> bool:
        return self.agreement is None or self.agreement.agrees


@dataclass(frozen=True, slots=True)
class Row:
    """One line of the table: how one way of computing did over all jobs of one dtype."""

    backend: str
    implementation: str
    dtype: str
    device: str
    results: tuple[JobResult, ...]
    seconds: float
    """All jobs together, each timed once after a run that was not."""

    @property
    def ran(self) -> dict[str, Agreement]:
        """What was not refused."""
        return {each.feature: each.agreement for each in self.results if each.agreement is not None}

    @property
    def worst(self) -> Agreement | None:
        """Of the job that came nearest to its bound, or went furthest beyond."""
        return max(self.ran.values(), key=lambda agreement: agreement.share, default=None)

    @property
    def disagreeing(self) -> tuple[str, ...]:
        return tuple(each.feature for each in self.results if not each.agrees)

    @property
    def agrees(self) -> bool:
        """Whether each job that ran agrees; a library has to run some, and a form may have no graph for any."""
        return not self.disagreeing and (bool(self.ran) or self.backend == "onnxruntime")

    def as_json(self) -> dict[str, Any]:
        """The row and what follows from its results, with each of them."""
        worst = None if self.worst is None else asdict(self.worst)
        results = [asdict(each) | {"agrees": each.agrees} for each in self.results]
        return {
            "backend": self.backend,
            "implementation": self.implementation,
            "dtype": self.dtype,
            "device": self.device,
            "agrees": self.agrees,
            "jobs": len(self.ran),
            "disagreeing": list(self.disagreeing),
            "worst": worst,
            "seconds": self.seconds,
            "features": results,
        }


def feature_jobs(dtype: str, seed: int = 0) -> dict[str, Job]:
    """A job for each of `features`."""
    rng = np.random.default_rng(seed)
    jobs = {}
    for name, feature in features(dtype).items():
        inputs = random_inputs(feature.call, LENGTHS, rng)
        hidden = poison(feature.call, inputs)
        jobs[name] = Job(feature.call, inputs, hidden, feature.compute, feature.no_graph)
    return jobs


def compare(
    jobs: Mapping[str, Job], dtype: str, backends: Iterable[Backend], providers: Sequence[str]
) -> Iterator[Row]:
    """A row for each backend that holds `dtype`, then one for each exported form and provider."""
    exact: Expected = {
        name: expected_outputs(job.call, job.inputs)[job.call.outputs[0]] for name, job in jobs.items()
    }
    for backend in backends:
        if backend.holds(dtype):
            labels = (backend.name, "xp", dtype, backend.device)
            yield _row(labels, jobs, exact, *_on_backend(backend))
    for provider in providers:
        for form in FORMS:
            device = provider.removesuffix("ExecutionProvider").lower()
            labels = ("onnxruntime", form, dtype, device)
            yield _row(labels, jobs, exact, None, _on_runtime(form, provider))


Run = Callable[[], NDArray[Any]]
Prepare = Callable[[Job], Run | str]
"""A job -> what runs it, or why it is refused."""
TextbookOf = Callable[[Job], NDArray[Any]]
"""A job -> the output of the textbook formula, in the same library."""


def _on_backend(backend: Backend) -> tuple[TextbookOf, Prepare]:
    xp = backend.namespace()

    def own(job: Job) -> NDArray[Any]:
        (output,) = job.call.outputs
        made = stages(xp, **_put(reference_inputs(job.call, job.inputs), backend))[output]
        return as_returned(job.call, output, backend.get(made))

    def prepare(job: Job) -> Run:
        arrays = {name: backend.put(x) for name, x in job.hidden.items()}
        return lambda: backend.get(job.compute(xp, job.call, arrays))

    return own, prepare


def _on_runtime(form: str, provider: str) -> Prepare:
    runtime = runtime_text(provider, session.version())
    target = Runtime.parse("agree", runtime)

    def prepare(job: Job) -> Run | str:
        if why := job.no_graph or unsupported_reason(form, job.call, target):
            return why
        opened = session.open_session(export_call(job.call, form=form, runtime=runtime), provider)
        return lambda: session.run(opened, job.hidden)[job.call.outputs[0]]

    return prepare


def _put(arguments: Arrays, backend: Backend) -> Arrays:
    """NumPy arrays, also those of several biases, on the backend."""

    def put(value: Any) -> Any:
        if isinstance(value, tuple):
            return tuple(put(each) for each in value)
        return backend.put(value) if isinstance(value, np.ndarray) else value

    return {name: put(value) for name, value in arguments.items()}


def _row(
    labels: tuple[str, str, str, str],
    jobs: Mapping[str, Job],
    exact: Expected,
    own: TextbookOf | None,
    prepare: Prepare,
) -> Row:
    """Each job run twice, once timed; without `own` the bound is that of NumPy's textbook."""
    results, seconds = [], 0.0
    for name, job in jobs.items():
        run = prepare(job)
        if isinstance(run, str):
            results.append(JobResult(name, None, run))
            continue
        try:
            run()
        except (TypeError, ValueError) as error:
            results.append(JobResult(name, None, _as_refusal(error)))
            continue
        start = time.perf_counter()
        result = run()
        seconds += time.perf_counter() - start
        reference, by_numpy = exact[name]
        dtype = job.call.accumulation_dtype if job.call.outputs == ("lse",) else labels[2]
        textbook = by_numpy if own is None else own(job)
        as_stated = result.shape == reference.shape and result.dtype.name == dtype
        found = result if as_stated else np.full(reference.shape, np.nan)
        results.append(JobResult(name, judge(found, reference, textbook, dtype)))
    return Row(*labels, tuple(results), seconds)


def _as_refusal(error: Exception) -> str:
    """What a function of the library says that it does not compute; any other error is one."""
    function, _, rule = str(error).partition(": ")
    if function.partition(".")[0] not in sdpa_xp.__all__:
        raise error
    return rule
