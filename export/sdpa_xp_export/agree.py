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
from sdpa_xp_export.agreement import Agreement, judge, textbook
from sdpa_xp_export.backends import Backend
from sdpa_xp_export.call import Call
from sdpa_xp_export.export import FORMS, export_attention
from sdpa_xp_export.reference import attention as reference
from sdpa_xp_export.runtime import PROVIDERS
from sdpa_xp_export.verify import Arrays, open_session, poison, sample


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
    exact = {name: reference(**job.inputs, **job.call.rules)[0] for name, job in jobs.items()}
    for backend in backends:
        if not backend.holds(dtype):
            continue
        xp = backend.namespace()

        def on_backend(job: Job, backend: Backend = backend) -> Callable[[], NDArray[Any]]:
            arrays = {name: backend.put(x) for name, x in job.hidden.items()}
            return lambda: backend.get(
                sdpa_xp.scaled_dot_product_attention(**arrays, **job.call.rules, implementation="xp")
            )

        def plain(job: Job, backend: Backend = backend, xp: Any = xp) -> NDArray[Any]:
            arrays = {name: backend.put(x) for name, x in job.inputs.items()}
            return backend.get(textbook(xp, **arrays, **job.call.rules))

        yield _row((backend.name, "xp", dtype, backend.device), jobs, exact, plain, on_backend)
    for provider in providers:
        for form in FORMS:
            stated = {name: job for name, job in jobs.items() if FORMS[form].refusal(job.call) is None}
            if stated:
                device = provider.removesuffix("ExecutionProvider").lower()
                labels = ("onnxruntime", form, dtype, device)
                yield _row(labels, stated, exact, _numpy_textbook, _on_runtime(form, provider))


def _on_runtime(form: str, provider: str) -> Callable[[Job], Callable[[], NDArray[Any]]]:
    def prepare(job: Job) -> Callable[[], NDArray[Any]]:
        (short,) = (name for name, full in PROVIDERS.items() if full == provider)
        arguments: dict[str, Any] = {**job.call.inputs, **job.call.rules}
        model = export_attention(**arguments, form=form, runtime=f"onnxruntime>=1.28;{short}")
        session = open_session(model, provider)

        def run() -> NDArray[Any]:
            output: NDArray[Any] = session.run(None, job.hidden)[0]
            return output

        return run

    return prepare


def _numpy_textbook(job: Job) -> NDArray[Any]:
    plain: NDArray[Any] = textbook(numpy_namespace, **job.inputs, **job.call.rules)
    return plain


def _row(
    labels: tuple[str, str, str, str],
    jobs: Mapping[str, Job],
    exact: Mapping[str, NDArray[np.float64]],
    plain: Callable[[Job], NDArray[Any]],
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
        seen[name] = judge(result, exact[name], plain(job), labels[2])
    worst = max(seen.values(), key=lambda agreement: agreement.share)
    disagreeing = tuple(name for name, agreement in seen.items() if not agreement.agrees)
    return Row(*labels, worst, len(jobs), disagreeing, seconds)
