"""The cases that a layer is tried with, and when the outputs of its model agree with them.

There are ordinary inputs at many lengths, special integers, and large tokens.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from sdpa_xp_export._runtime.engine import TimedRun
from sdpa_xp_export._verify.judging import EPS, judge_integers, judge_together
from sdpa_xp_export._verify.layer import BothLayers, LayerCase, words_of
from sdpa_xp_export._verify.layer_inputs import IntegerChoice, LayerInputs
from sdpa_xp_export._verify.lengths import LayerLengths, Lengths, shown_lengths, shown_shapes
from sdpa_xp_export.report import Run

UNMEASURED = 16.0
"""How many times as many rounding errors are allowed if there was nothing to measure them with: neither inputs
nor weights are floats that `verify_layer` finds."""
BEYOND = 33
"""Special integers are tried with the first lengths, and with some around this one."""
REPEATED = 12
"""The first cases, which have small lengths, are computed twice more: a layer has to return the same."""


class CaseList:
    """Draws the inputs of each case, and computes what the layer returns for them.

    Attributes:
        cases: The cases, those of each kind behind each other.
        left_out: A line for everything that was not tried.
    """

    def __init__(self, both: BothLayers, inputs: LayerInputs, chosen: LayerLengths, seed: int) -> None:
        self.both, self.inputs, self.chosen, self.seed = both, inputs, chosen, seed
        self.rng, self.roundings = np.random.default_rng(seed), np.random.default_rng(seed)
        self.cases: list[LayerCase] = []
        self.left_out: list[str] = []

    def fill(self) -> None:
        """Make all cases; the layer must accept the first lengths, and may refuse the others."""
        first, more = self.chosen.first(), self.chosen.more()
        with self.inputs.hint_for_errors():
            self.both.choose_copies(self.inputs.drawn(first[-1], np.random.default_rng(self.seed)))
            self.cases = [self._ordinary(lengths) for lengths in first]
        self._try_all(more)
        self.both.check_repeats(self.cases[:REPEATED])
        accepted = [case.lengths for case in self.cases]
        self._try_all([*self.chosen.at_random(accepted, np.random.default_rng([self.seed, 1]))])
        tried = [case.lengths for case in self.cases]
        self.left_out += self.chosen.left_out([*tried, *more])
        self.cases = self.both.judged_as_own(self.cases, self.roundings)
        self._try_integers([*first[:2], *(lengths for lengths in more if max(lengths.values()) >= BEYOND)][:3])
        self._try_large([lengths for lengths in [*first[:2], *self.chosen.longest()] if lengths in tried])

    def _ordinary(self, lengths: Lengths) -> LayerCase:
        return self.both.ordinary_case(lengths, self.inputs.drawn(lengths, self.rng), self.roundings)

    def _try_all(self, many: Iterable[Lengths]) -> None:
        for lengths in many:
            try:
                self.cases.append(self._ordinary(lengths))
            except Exception as error:  # the layer and `draw` are anyone's functions, and raise what they like
                self.left_out.append(f"{shown_lengths(lengths)}: {words_of(error)}")

    def _try_integers(self, many: Sequence[Lengths]) -> None:
        """Try special integers in all inputs together; if the layer refuses them, in one input at a time."""
        self.left_out += self.inputs.left_out()
        for choice, names in self.inputs.choices():
            refusal = self._refusal_of_integers(many, choice, names)
            for name in names if refusal else ():  # one of them alone may be the cause
                if refusal := refusal if len(names) == 1 else self._refusal_of_integers(many, choice, [name]):
                    self.left_out.append(f"{choice} in {name}: {refusal}")

    def _refusal_of_integers(self, many: Sequence[Lengths], choice: IntegerChoice, names: Sequence[str]) -> str:
        """Try integers in the inputs `names`; return the error of the layer, or an empty string."""
        cases = []
        try:
            for lengths in many:
                arrays = self.inputs.drawn(lengths, self.rng, choice, names)
                cases.append(self.both.integer_case(f", {choice}", lengths, arrays, self.roundings))
        except Exception as error:  # any of the layer's: the report says what was not tried
            return words_of(error)
        self.cases += cases
        return ""

    def _try_large(self, many: Sequence[Lengths]) -> None:
        drawn = [*self.inputs.draws]
        try:
            large = [
                self.both.large_case(lengths, self.inputs.drawn(lengths, self.rng), drawn, self.rng)
                for lengths in many
            ]
        except Exception as error:  # here too: the report says what was not tried, and the other runs count
            self.left_out.append(f"large tokens: {words_of(error)}")
            return
        self.cases += [case for case in large if case is not None]
        if None in large:
            self.left_out.append("large tokens: the outputs overflow, or no floating input has tokens to draw")


def judged_runs(pairs: Sequence[tuple[LayerCase, TimedRun]], provider: str) -> Iterator[Run]:
    """Yield a run for each output and case, by one bound for all cases of an output."""
    for output in pairs[0][0].exact:
        triples = [(run.outputs[output], case.exact[output], case.direct[output]) for case, run in pairs]
        if triples[0][1].dtype.kind in "iub":
            agreements = judge_integers(triples)
        else:
            dtype = judged_dtype(triples[0][0], pairs[0][0], output)
            errors = rounding_errors([case for case, _ in pairs], output, dtype)
            agreements = judge_together(triples, dtype, errors)
        for (case, run), agreement in zip(pairs, agreements, strict=True):
            longest = max(case.lengths.values(), default=0)
            count = math.prod(case.exact[output].shape[:-1])
            shown = (shown_lengths(case.lengths) if case.lengths else shown_shapes(case.inputs)) + case.kind
            where = f"{output}{list(agreement.index)}" if agreement.index else ""
            measured = (run.seconds, run.peak_bytes, longest, count, count, where)
            yield Run(shown, provider, output, agreement, *measured)


def judged_dtype(result: NDArray[Any], case: LayerCase, output: str) -> str:
    """Return the dtype that sets the bound: the dtype of the layer's output for its inputs.

    If NumPy converts integers to float64, the graph may use another dtype: then the graph's dtype counts.
    """
    kinds, direct = {x.dtype.name for x in case.inputs.values()}, case.direct[output]
    stated = direct if direct.dtype.name != "float64" or "float64" in kinds else result
    return stated.dtype.name if stated.dtype.name in EPS else "float64"


def rounding_errors(cases: Sequence[LayerCase], output: str, dtype: str) -> float:
    """Return how many times as many rounding errors an output may have as in other runs."""
    unmoved = all(np.array_equal(case.direct[output], case.exact[output], equal_nan=True) for case in cases)
    narrower = cases[0].direct[output].dtype.name != dtype  # NumPy computes in float64 what the graph does not
    return UNMEASURED if unmoved and (narrower or cases[0].is_own) else 1.0


def widest_dtype(cases: Sequence[LayerCase]) -> str:
    """Return the widest floating dtype that a layer computed in."""
    dtypes = {x.dtype.name for case in cases for x in case.direct.values()}
    return next((name for name in ("float64", "float32", "bfloat16", "float16") if name in dtypes), "float32")
