"""The cases that a layer is tried with: ordinary inputs at many lengths, special integers, and large tokens."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

import numpy as np

from sdpa_xp_export._verify.layer_cases import BothLayers, LayerCase, words_of
from sdpa_xp_export._verify.layer_inputs import IntegerChoice, LayerInputs
from sdpa_xp_export._verify.layer_lengths import LayerLengths
from sdpa_xp_export._verify.layer_trials import first_lengths, more_lengths
from sdpa_xp_export._verify.random_lengths import random_lengths_of_layer
from sdpa_xp_export._verify.trial_lengths import Lengths, shown_lengths

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

    def __init__(self, both: BothLayers, inputs: LayerInputs, seed: int) -> None:
        self.both, self.inputs, self.seed = both, inputs, seed
        self.rng, self.roundings = np.random.default_rng(seed), np.random.default_rng(seed)
        self.cases: list[LayerCase] = []
        self.left_out: list[str] = []

    def fill(self, chosen: LayerLengths, *, thorough: bool) -> None:
        """Make all cases; the layer must accept the first lengths, and may refuse the others."""
        first = first_lengths(self.inputs.specs)
        with self.inputs.hint_for_errors():
            self.both.choose_copies(self.inputs.drawn(first[-1], np.random.default_rng(self.seed)))
            self.cases = [self._ordinary(lengths) for lengths in first]
        more = [*more_lengths(self.inputs.specs, thorough=thorough)]
        more += [lengths for lengths in chosen.around() if lengths not in more]
        self._try_all(more)
        self.both.check_repeats(self.cases[:REPEATED])
        accepted = [case.lengths for case in self.cases]
        rng = np.random.default_rng([self.seed, 1])
        at_random = [*random_lengths_of_layer(accepted, rng, thorough=thorough)]
        self._try_all([lengths for lengths in at_random if lengths not in accepted])
        tried = [case.lengths for case in self.cases]
        self.left_out += chosen.left_out([*tried, *more])
        self.cases = self.both.judged_as_own(self.cases, self.roundings)
        self._try_integers([*first[:2], *(lengths for lengths in more if max(lengths.values()) >= BEYOND)][:3])
        self._try_large([lengths for lengths in [*first[:2], *chosen.longest()] if lengths in tried])

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
            try:
                self.cases += [*self._with_integers(many, choice, names)]
            except Exception as error:  # any of the layer's, of which one input alone may be the cause
                alone = [[name] for name in names] if len(names) > 1 else []
                if not alone:
                    self.left_out.append(f"{choice} in {names[0]}: {words_of(error)}")
                for one in alone:
                    try:
                        self.cases += [*self._with_integers(many, choice, one)]
                    except Exception as refused:  # the report says what was not tried
                        self.left_out.append(f"{choice} in {one[0]}: {words_of(refused)}")

    def _with_integers(
        self, many: Sequence[Lengths], choice: IntegerChoice, names: Sequence[str]
    ) -> Iterator[LayerCase]:
        for lengths in many:
            arrays = self.inputs.drawn(lengths, self.rng, choice, names)
            yield self.both.integer_case(f", {choice}", lengths, arrays, self.roundings)

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
