"""Compare every array library and every exported graph with the reference, on the same inputs."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

import sdpa_xp
from sdpa_xp.biases import Bias
from sdpa_xp.errors import ArgumentTypeError, ArgumentValueError
from sdpa_xp.masks import Mask

from .._backends import Backend
from .._call.call import OPTIONS, ExportCall, FormName
from .._call.operands import with_operands
from .._runtime import session
from .._runtime.releases import Runtime, runtime_text
from .._verify.call_cases import filled_case
from .._verify.cases import Case
from .._verify.expected import Arrays, numbers, reference_inputs
from .._verify.judging import ExpectedRows, judge_rows
from .._verify.reference import stages
from ..export import export_call
from ..forms.choice import FORMS, unsupported_reason
from ..report import Agreement

Compute: TypeAlias = Callable[[Any, ExportCall, Mapping[str, Any]], Any]
"""A namespace, a call, and its inputs as arrays of that namespace -> the one output of the call."""
# Vendors' kernels round in their own way, and a CPU has few of them; their tests are apart.
PORTABLE: dict[str, Any] = {"implementation": "xp"}


def attention(_xp: Any, call: ExportCall, arrays: Mapping[str, Any]) -> Any:
    """Compute a call as a user does."""
    return sdpa_xp.scaled_dot_product_attention(**library_arguments(call, arrays), **PORTABLE)


def library_arguments(call: ExportCall, arrays: Mapping[str, Any]) -> Arrays:
    """Convert inputs of the graph to keywords of `sdpa_xp.scaled_dot_product_attention`, without the cache."""
    tokens = {name: arrays[name] for name in ("query", "key", "value")}
    names = (name for name, option in OPTIONS.items() if option.kind not in (None, "spec", "names"))
    return tokens | {name: with_inputs(getattr(call, name), arrays) for name in names}


def with_inputs(value: Any, arrays: Mapping[str, Any]) -> Any:
    """Return a mask or a bias with the arrays of a run instead of its inputs, and an operand as its array."""
    if isinstance(value, Mask | Bias):
        return with_operands(value, lambda _, operand: with_inputs(operand, arrays))
    return numbers(value, arrays)


@dataclass(frozen=True, slots=True)
class Feature:
    """A call, and how sdpa_xp computes its one output."""

    call: ExportCall
    compute: Compute = attention
    no_graph: str = ""
    """Why no graph computes the call; empty if one does."""
    inputs: tuple[Arrays, ...] = ()
    """The inputs that it is compared on, of several lengths; the first are timed."""


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
    """The time of all jobs together, with the way of the arrays; each is timed once, after an untimed run."""

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


class Way(NamedTuple):
    """One way of computing: a library, or a form of a graph."""

    labels: tuple[str, str, str, str]
    """The backend, what computes there, the dtype and the device."""
    prepare: Callable[[Feature], Callable[[Arrays], NDArray[Any]] | str]
    """A job -> inputs -> its output, or why it is refused."""
    textbook: Callable[[Feature, Arrays], NDArray[Any]] | None = None
    """A job and its inputs -> the output of the textbook formula in the same library; by default NumPy's."""


def compare(
    jobs: Mapping[str, Feature],
    dtype: str,
    backends: Iterable[Backend],
    providers: Sequence[str],
    begin: Callable[[str], object] = lambda _: None,
) -> Iterator[Row]:
    """Yield a row for each backend that holds `dtype`, then one for each exported form and provider.

    `begin` is called with the name of what is computed next.
    """
    begin(f"reference {dtype}")
    tried = {n: [filled_case(job.call, Case({}), x, dtype) for x in job.inputs] for n, job in jobs.items()}
    ways = [_on_backend(backend, dtype) for backend in backends if backend.holds(dtype)]
    ways += [_on_runtime(form, provider, dtype) for provider in providers for form in FORMS]
    for way in ways:
        begin(" ".join(way.labels))
        yield _row(way, jobs, tried)


def _on_backend(backend: Backend, dtype: str) -> Way:
    xp = backend.namespace()

    def put(value: Any) -> Any:
        if isinstance(value, tuple):  # several biases
            return tuple(map(put, value))
        return backend.put(value) if isinstance(value, np.ndarray) else value

    def prepare(job: Feature) -> Callable[[Arrays], NDArray[Any]]:
        return lambda arrays: backend.get(
            job.compute(xp, job.call, {name: put(x) for name, x in arrays.items()})
        )

    def textbook(job: Feature, arrays: Arrays) -> NDArray[Any]:
        (output,) = job.call.outputs
        arguments = reference_inputs(job.call, arrays)
        return backend.get(stages(xp, **{name: put(x) for name, x in arguments.items()})[output])

    return Way((backend.name, "xp", dtype, backend.device), prepare, textbook)


def _on_runtime(form: FormName, provider: str, dtype: str) -> Way:
    runtime = runtime_text(provider, session.version())
    parsed = Runtime.parse("demo", runtime)

    def prepare(job: Feature) -> Callable[[Arrays], NDArray[Any]] | str:
        if why := job.no_graph or unsupported_reason(form, job.call, parsed):
            return why
        opened = session.open_session(export_call(job.call, form=form, runtime=runtime), provider)
        return lambda arrays: session.run_session(opened, arrays)[job.call.outputs[0]]

    return Way(("onnxruntime", form, dtype, provider.removesuffix("ExecutionProvider").lower()), prepare)


def _row(way: Way, jobs: Mapping[str, Feature], tried: Mapping[str, Sequence[Case]]) -> Row:
    """Run the first inputs of each job twice, once timed, and the others once."""
    results, seconds = [], 0.0
    for name, job in jobs.items():
        compute = way.prepare(job)
        if isinstance(compute, str):
            results.append(JobResult(name, None, compute))
            continue
        agreements: list[Agreement] = []
        try:
            for inputs, case in zip(job.inputs, tried[name], strict=True):
                result = compute(case.inputs)  # compiles, and fills caches: the next run is timed
                if not agreements:
                    start = time.perf_counter()
                    result = compute(case.inputs)
                    seconds += time.perf_counter() - start
                # Of the inputs without NaN: the textbook formula multiplies 0 by a hidden one.
                agreements.append(_judged(case, result, way.textbook and way.textbook(job, inputs)))
        except (ArgumentTypeError, ArgumentValueError) as error:  # the library refuses the call
            results.append(JobResult(name, None, error.message.statement))
            continue
        results.append(JobResult(name, max(agreements, key=lambda agreement: agreement.share)))
    return Row(*way.labels, tuple(results), seconds)


def _judged(case: Case, result: NDArray[Any], textbook: NDArray[Any] | None) -> Agreement:
    """Compare an output by the textbook formula of the same library."""
    output, known = next(iter(case.expected.items()))
    compared = case.read(case, output, result)
    textbook = known.textbook if textbook is None else textbook
    expected = ExpectedRows(known.reference, textbook, terms=known.terms)  # of libraries, one bound for all
    return judge_rows([replace(compared, expected=expected)], compared.dtype)[0]
