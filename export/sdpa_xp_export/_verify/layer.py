"""A layer in float64 and in the dtype of its inputs, and what both compute of the inputs of a run."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, Literal, TypeAlias

import numpy as np
from numpy.typing import NDArray

from sdpa_xp.errors import ArgumentValueError, message_of

from .._layer.held_arrays import ArrayChange, Way, ways_to_copy
from .._layer.layer import named_outputs, with_arrays
from ..spec import TensorSpec
from .case_lengths import shown_shapes
from .cases import Case
from .expected import Arrays
from .judging import EPS, Compared, ExpectedRows, apart, with_error_of_float64

Outputs: TypeAlias = dict[str, NDArray[Any]]
"""What a layer returns, by name."""

LARGE_TOKENS = "large tokens"
"""What a report says of inputs in which some tokens are very large."""
MOST_DISTANCE = 8
"""The most that results in float64 and in the dtype of the inputs may differ, in units of what rounding errors
in inputs and weights change. In layers that are one function in both it is about 1."""
FLIPS = 0.005
"""The fraction of integers that rounding errors may decide, beside those that are measured."""
OWN_ERROR = 2.0
"""The distance from a reference in the dtype of the inputs is multiplied by that: it has an error itself."""
DRAWS_AGAIN = 8
"""How often a layer is called again, with other rounding errors, if a result is a little beyond its bound."""
WHOLE = 256
"""The whole numbers up to this one are exact in every dtype."""


def with_results(case: Case, exact: Outputs, direct: Outputs, *, is_own: bool = False) -> Case:
    """Return the case with what a layer computes of its inputs.

    Args:
        case: The case.
        exact: The results in float64.
        direct: The results in the dtype of the inputs; of several, for each element the one with the largest
            error.
        is_own: Whether `exact` is the layer in the dtype of the inputs.
    """
    # The most terms that a sum over tokens may have: the longest axis of an input that is not a width.
    shapes = [x.shape[: -1 if x.dtype.name in EPS and x.ndim > 1 else None] for x in case.inputs.values()]
    terms = max(itertools.chain(*shapes), default=0)
    expected = {name: ExpectedRows(x, direct[name], longest_sum=terms) for name, x in exact.items()}
    shown = shown_shapes(case.inputs)
    return replace(case, expected=expected, read=_compared, shapes=shown, is_own=is_own)


def _compared(case: Case, name: str, result: NDArray[Any]) -> Compared:
    """Return an output of a run beside what the layer computes."""
    rows = case.expected[name]
    exact, direct = rows.reference, rows.textbook
    # The dtype of the layer's output sets the bound. If NumPy converts integers to float64, the graph may
    # use another dtype: then the graph's dtype counts.
    has_float64 = any(x.dtype == np.float64 for x in case.inputs.values())
    stated = (result if direct.dtype == np.float64 and not has_float64 else direct).dtype.name
    dtype = stated if stated in EPS else "float64"
    is_measured = not np.array_equal(direct, exact, equal_nan=direct.dtype.kind not in "iub") or not (
        case.is_own or direct.dtype.name != dtype
    )
    count = math.prod(exact.shape[:-1])
    counts = max(case.lengths.values(), default=0), count, count

    def where(index: tuple[int, ...]) -> str:
        if result.shape != exact.shape:
            return f"{name}.shape {result.shape} instead of {exact.shape}"
        return f"{name}{list(index)}" if index else ""

    expected = replace(rows, is_measured=is_measured)
    return Compared(result, expected, 1.0, case.extreme, dtype, counts, where)


class BothLayers:
    """A layer with its keyword arguments, and the same with its weights in float64.

    Attributes:
        why_not_wide: Why the reference is the layer in its own dtype; empty if it is the layer in float64.
        is_settled: Whether all ordinary inputs were tried, which decide on the reference.
        triples: Their results in float64, in the dtype of the inputs, and there with rounding errors.
    """

    def __init__(
        self, layer: Callable[..., Any], keywords: Mapping[str, Any], rng: np.random.Generator, *, double: bool
    ) -> None:
        self.double, self.why_not_wide, self.is_settled = double, "", False
        self.triples: list[tuple[Outputs, Outputs, Outputs]] = []
        self.called, self.rng = partial(layer, **keywords), rng
        self.ways = [*ways_to_copy(self.called)]
        self._copy(self.ways[0])

    def choose_copies(self, arrays: Arrays) -> None:
        """Copy the layer in the first way in which it accepts these inputs."""
        for way in self.ways if len(self.ways) > 1 else ():
            self._copy(way)
            try:
                self._called(self.layer, arrays)
            except Exception:  # an error of a copy, or of the layer, which is anyone's function
                continue
            return
        self._copy(self.ways[0])

    def results(self, arrays: Arrays) -> tuple[Outputs, Outputs]:
        """Return what both compute."""
        direct = self._called(self.layer, arrays)
        exact = self._exact(arrays, direct)
        if self.double and not self.why_not_wide:
            direct = self._double_precision(exact, _converted(_narrowed, arrays))
        return exact, direct

    def _exact(self, arrays: Arrays, direct: Outputs) -> Outputs:
        """Return the result in float64, or in the layer's own dtype if it has no other."""
        refused = self.why_not_wide
        if not refused:
            try:
                exact = self._called(self.wide, _converted(_widened, arrays))
                shapes, wanted = ({name: x.shape for name, x in part.items()} for part in (exact, direct))
                if shapes == wanted:
                    return exact
                refused = "it returns outputs of other names or shapes there"
            except Exception as error:  # the layer is anyone's function, and it accepts its own dtype
                refused = f"it raises an error there, {words_of(error)}"
        if not self.is_settled:  # later, it concerns special inputs alone
            self.why_not_wide = refused
        return _converted(_widened, direct)

    def ordinary_case(self, case: Case, rng: np.random.Generator) -> Case:
        """Return the case with what both compute, and the error that another order of the sums may have."""
        exact, direct = self.results(case.inputs)
        if not self.double:  # else its error is estimated already
            off = self._called(self.moved, _perturbed(case.inputs, rng))
            if not self.is_settled:
                self.triples.append((exact, direct, off))
            direct = _furthest(exact, direct, off)
        return with_results(case, exact, direct)

    def check_repeats(self, cases: Sequence[Case]) -> None:
        """Refuse a layer that returns something else if it is called again, beyond rounding errors."""
        for case in cases:
            first, second = (self._called(self.layer, case.inputs) for _ in range(2))
            for name in first:
                if not _is_repeated(first[name], second.get(name)):
                    rule = "`layer` must return the same for the same inputs"
                    got = {name: "other values at the second call"}
                    hint = "Switch off dropout, or pass a fixed mask or a generator that the layer makes anew."
                    raise ArgumentValueError("verify_layer", rule, got, hint)

    def judged_as_own(self, cases: Sequence[Case], rng: np.random.Generator) -> list[Case]:
        """Return ordinary cases whose reference is the layer in its own dtype, if float64 is not to be had."""
        self.why_not_wide = self.why_not_wide or _why_not_wide([case.exact for case in cases], self.triples)
        self.is_settled = True
        return [self._own_case(case, rng) for case in cases] if self.why_not_wide else list(cases)

    def integer_case(self, case: Case, rng: np.random.Generator) -> Case:
        """Return the case with what both compute of special integers.

        Raises:
            FloatingPointError: The layer converts a float to an integer dtype that does not hold it.
        """
        self._called(self.layer, case.inputs, invalid="raise")  # NumPy and onnxruntime convert inf differently
        computed = self.ordinary_case(case, rng)
        return self._own_case(computed, rng) if self.why_not_wide else computed

    def large_case(self, case: Case, larger: Iterator[Arrays], rng: np.random.Generator) -> Case | None:
        """Return the case with the first inputs in `larger` with which the layer does not overflow."""
        ordinary, _ = self.results(case.inputs)
        for large in larger:
            exact, direct = self.results(large)
            # Three draws: one alone may leave a tie of two large scores as it is.
            off = [self.results(_perturbed(large, rng))[1] for _ in range(3)]
            if not _overflows(ordinary, exact, direct, *off):
                return with_results(replace(case, inputs=large), exact, _furthest(exact, direct, *off))
        return None

    def with_more_errors(self, case: Case) -> Case:
        """Return the case with the largest errors of several more calls: those so far may be small by luck."""
        drawn = (self._with_other_errors(case) for _ in range(DRAWS_AGAIN))
        usable = [off for off in drawn if not _overflows(case.exact, off)]
        furthest = _furthest(case.exact, case.direct, *usable)
        # Each call flips other integers: those of all calls together are more than rounding errors decide.
        direct = {name: x if x.dtype.kind in "iub" else furthest[name] for name, x in case.direct.items()}
        return with_results(case, case.exact, direct, is_own=case.is_own)

    def _with_other_errors(self, case: Case) -> Outputs:
        """Return the results with rounding errors in the inputs and weights, other ones at each call."""
        if self.double:
            return self._double_precision(case.exact, _perturbed(_converted(_narrowed, case.inputs), self.rng))
        off = self._called(self.moved_again(), _perturbed(case.inputs, self.rng))
        return {name: _further(x, off[name]) for name, x in case.exact.items()} if case.is_own else off

    def _copy(self, way: Way) -> None:
        copy, self.context = way
        # The first copy changes no number: it only has arrays of NumPy, where the original may have others.
        self.layer, self.wide, self.narrow = (
            copy(self.called, change) for change in (lambda x: x, _widened, _narrowed)
        )
        self.moved_again = partial(copy, self.called, lambda x: _moved(x, self.rng))
        self.moved = self.moved_again()

    def _own_case(self, case: Case, rng: np.random.Generator) -> Case:
        exact = _converted(_widened, self._called(self.layer, case.inputs))
        off = _furthest(exact, *(self._called(self.moved, _perturbed(case.inputs, rng)) for _ in range(3)))
        direct = {name: _further(x, off[name]) for name, x in exact.items()}
        return with_results(case, exact, direct, is_own=True)

    def _called(
        self, layer: partial[Any], arrays: Arrays, *, invalid: Literal["ignore", "raise"] = "ignore"
    ) -> Outputs:
        left = dict(arrays)

        def array_of(name: str, _: TensorSpec) -> NDArray[Any]:
            array: NDArray[Any] = left.pop(name)
            return array

        keywords = {name: with_arrays(value, name, array_of) for name, value in layer.keywords.items()}
        with np.errstate(all="ignore", invalid=invalid), self.context():
            outputs = named_outputs(layer.func(*layer.args, **left, **keywords))
            return {name: np.asarray(x) for name, x in outputs.items()}

    def _double_precision(self, exact: Outputs, single: Arrays) -> Outputs:
        """Return `exact` with the error that float64 has, by what the layer computes of the inputs `single`."""
        right = self._called(self.wide, _converted(_widened, single))
        off = self._called(self.narrow, single)
        return {
            name: x if x.dtype.kind in "iub" else with_error_of_float64(x, right[name], off[name])
            for name, x in exact.items()
        }


def words_of(error: Exception) -> str:
    """Return the first line of an error, after its type if it is not one of ours, which names a function."""
    kind = [] if message_of(error) else [type(error).__name__]
    return ": ".join([*kind, *str(error).splitlines()[:1]])


def _why_not_wide(exact: Sequence[Outputs], both: Sequence[tuple[Outputs, Outputs, Outputs]]) -> str:
    """Return why the results in float64 are no reference for a layer; empty if they are."""
    for name, x in (output for outputs in exact for output in outputs.items()):
        if x.dtype.name in EPS and x.dtype != np.float64:  # such a layer names its dtype, as with xp.float32
            return f"it computes {name} in {x.dtype.name} there too"
    for name in both[0][0] if both else ():
        triples = [(exact[name], narrow[name], off[name]) for exact, narrow, off in both]
        if any(_is_elsewhere_finite(*triple) for triple in triples):
            return f"{name} has inf or NaN at other places there"
        error = apart([(exact, narrow) for exact, narrow, _ in triples])
        noise = apart([(narrow, off) for _, narrow, off in triples])
        least = EPS.get(triples[0][1].dtype.name, FLIPS)
        if error > MOST_DISTANCE * (noise + least):
            return f"{name} is another there, by more than rounding errors explain"
    return ""


def _is_repeated(first: NDArray[Any], second: NDArray[Any] | None) -> bool:
    """Return whether two results of the same inputs are the same, but for other orders of additions."""
    if second is None or second.shape != first.shape or second.dtype != first.dtype:
        return False
    if np.array_equal(first, second, equal_nan=first.dtype.kind not in "iub"):
        return True
    if first.dtype.name not in EPS:
        return False
    error = apart([(first, second)])
    return not _overflows({"": first}, {"": second}) and error <= MOST_DISTANCE * EPS[first.dtype.name]


def _is_elsewhere_finite(exact: NDArray[Any], narrow: NDArray[Any], off: NDArray[Any]) -> bool:
    """Return whether a result has inf or NaN at other places than in float64, also if its inputs are moved."""
    if exact.dtype.kind in "iub" or narrow.dtype.kind in "iub":
        return exact.dtype.kind != narrow.dtype.kind
    finite = [np.isfinite(x.astype(np.float64)) for x in (exact, narrow, off)]
    return bool(np.any((finite[0] != finite[1]) & (finite[1] == finite[2])))


def _perturbed(arrays: Arrays, rng: np.random.Generator) -> Arrays:
    """Return inputs with each number changed by at most two rounding errors.

    The change of the result shows how much rounding errors of that size may change it, in any order of
    operations.
    """
    return _converted(lambda x: _moved(x, rng), arrays)


def _moved(x: NDArray[Any], rng: np.random.Generator) -> NDArray[Any]:
    """Return floats with each number changed by at most two rounding errors; other arrays stay.

    Small whole numbers stay too: no rounding changes them, and they may be positions that are compared.
    """
    if x.dtype.name not in EPS:
        return x
    wide = x.astype(np.float64)
    step = 2 * EPS[x.dtype.name] * rng.uniform(-1, 1, x.shape)
    with np.errstate(invalid="ignore"):
        is_small_and_whole = (wide == np.rint(wide)) & (np.abs(wide) <= WHOLE)
        return np.asarray(wide * (1 + np.where(is_small_and_whole, 0.0, step))).astype(x.dtype)


def _furthest(exact: Outputs, *candidates: Outputs) -> Outputs:
    """Return for each element of each output the candidate with the largest error."""
    worst = dict(candidates[0])
    for candidate in candidates[1:]:
        for name, right in exact.items():
            other = candidate[name]
            with np.errstate(invalid="ignore"):
                is_float = right.dtype.kind not in "iub"  # booleans have no difference, and unsigned ones wrap
                further = np.abs(other - right) > np.abs(worst[name] - right) if is_float else other != right
            worst[name] = np.where(further, other, worst[name])
    return worst


def _overflows(ordinary: Outputs, *large: Outputs) -> bool:
    """Return whether an output has inf or NaN in other places than with ordinary inputs."""
    pairs = ((ordinary[name], x) for outputs in large for name, x in outputs.items())
    return any(not np.array_equal(np.isfinite(one), np.isfinite(other)) for one, other in pairs)


def _widened(x: NDArray[Any]) -> NDArray[Any]:
    """Return floats as float64, and integers and booleans unchanged."""
    return x.astype(np.float64) if x.dtype.name in EPS and x.dtype != np.float64 else x


def _narrowed(x: NDArray[Any]) -> NDArray[Any]:
    """Return float64 as float32, and any other array unchanged."""
    return x.astype(np.float32) if x.dtype == np.float64 else x


def _further(exact: NDArray[Any], direct: NDArray[Any]) -> NDArray[Any]:
    """Return `direct` with its distance from `exact` increased by the error of `exact` itself."""
    if direct.dtype.name not in EPS:
        return direct
    with np.errstate(invalid="ignore", over="ignore"):
        further = exact + OWN_ERROR * (direct - exact)
        return np.where(np.isfinite(exact), further, direct).astype(direct.dtype)


def _converted(change: ArrayChange, arrays: Outputs) -> Outputs:
    return {name: change(x) for name, x in arrays.items()}
