"""Hold every array library and every exported graph against the reference, on the same inputs."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import array_api_compat.numpy as numpy_namespace
import numpy as np
from numpy.typing import NDArray

import sdpa_xp
from sdpa_xp_export import cases
from sdpa_xp_export.agreement import Agreement, judge
from sdpa_xp_export.backends import Backend
from sdpa_xp_export.call import Call
from sdpa_xp_export.choice import FORMS, refusal
from sdpa_xp_export.export import export_call
from sdpa_xp_export.plain import Arrays, library_arguments, plain
from sdpa_xp_export.reference import attention as reference
from sdpa_xp_export.runtime import Runtime, runtime_of
from sdpa_xp_export.samples import poison, sample
from sdpa_xp_export.session import open_session
from sdpa_xp_export.textbook import textbook


@dataclass(frozen=True, slots=True)
class Job:
    """A call with inputs for it. `hidden` are the same inputs with NaN where no query attends."""

    call: Call
    inputs: Arrays
    hidden: Arrays


@dataclass(frozen=True, slots=True)
class Row:
    """One line of the table: how one way of computing did over all jobs of one dtype."""

    backend: str
    implementation: str
    dtype: str
    device: str
    worst: Agreement
    """Of the job that came nearest to its bound, or went furthest beyond."""
    jobs: int
    disagreeing: tuple[str, ...]
    seconds: float
    """All jobs together, each timed once after a run that was not."""

    @property
    def agrees(self) -> bool:
        return not self.disagreeing


def feature_jobs(dtype: str, seed: int = 0) -> dict[str, Job]:
    """A job for each of `cases.calls`."""
    rng = np.random.default_rng(seed)
    jobs = {}
    for name, call in cases.calls(dtype).items():
        inputs = sample(call, cases.LENGTHS, rng)
        jobs[name] = Job(call, inputs, poison(call, inputs))
    return jobs


def compare(
    jobs: Mapping[str, Job], dtype: str, backends: Iterable[Backend], providers: Sequence[str]
) -> Iterator[Row]:
    """A row for each backend that holds `dtype`, then one for each exported form and provider."""
    exact = {name: reference(**plain(job.call, job.inputs))[0] for name, job in jobs.items()}
    for backend in backends:
        if not backend.holds(dtype):
            continue
        xp = backend.namespace()

        def on_backend(job: Job, backend: Backend = backend) -> Callable[[], NDArray[Any]]:
            arrays = {name: backend.put(x) for name, x in job.hidden.items()}
            arguments = library_arguments(job.call, arrays)
            return lambda: backend.get(sdpa_xp.scaled_dot_product_attention(**arguments, implementation="xp"))

        def own(job: Job, backend: Backend = backend, xp: Any = xp) -> NDArray[Any]:
            return backend.get(textbook(xp, **_put(plain(job.call, job.inputs), backend)))

        yield _row((backend.name, "xp", dtype, backend.device), jobs, exact, own, on_backend)
    for provider in providers:
        for form in FORMS:
            target = Runtime.parse("agree", runtime_of(provider))
            stated = {name: job for name, job in jobs.items() if refusal(form, job.call, target) is None}
            if stated:
                device = provider.removesuffix("ExecutionProvider").lower()
                labels = ("onnxruntime", form, dtype, device)
                yield _row(labels, stated, exact, _numpy_textbook, _on_runtime(form, provider))


def _on_runtime(form: str, provider: str) -> Callable[[Job], Callable[[], NDArray[Any]]]:
    def prepare(job: Job) -> Callable[[], NDArray[Any]]:
        model = export_call(job.call, form=form, runtime=runtime_of(provider))
        session = open_session(model, provider)

        def run() -> NDArray[Any]:
            output: NDArray[Any] = session.run(None, job.hidden)[0]
            return output

        return run

    return prepare


def _numpy_textbook(job: Job) -> NDArray[Any]:
    own: NDArray[Any] = textbook(numpy_namespace, **plain(job.call, job.inputs))
    return own


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
    exact: Mapping[str, NDArray[np.float64]],
    own: Callable[[Job], NDArray[Any]],
    prepare: Callable[[Job], Callable[[], NDArray[Any]]],
) -> Row:
    seen: dict[str, Agreement] = {}
    seconds = 0.0
    for name, job in jobs.items():
        run = prepare(job)
        run()
        start = time.perf_counter()
        result = run()
        seconds += time.perf_counter() - start
        seen[name] = judge(result, exact[name], own(job), labels[2])
    worst = max(seen.values(), key=lambda agreement: agreement.share)
    disagreeing = tuple(name for name, agreement in seen.items() if not agreement.agrees)
    return Row(*labels, worst, len(jobs), disagreeing, seconds)
