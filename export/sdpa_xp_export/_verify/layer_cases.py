"""What a layer computes of inputs: in float64, and in the dtype of the inputs."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from sdpa_xp_export._layer import named_outputs, with_arrays, with_parameters
from sdpa_xp_export._verify.agreement import EPS
from sdpa_xp_export._verify.large_inputs import factors, furthest, overflows, perturbed, with_large_tokens
from sdpa_xp_export._verify.pair_terms import Arrays
from sdpa_xp_export._verify.trial_lengths import Lengths
from sdpa_xp_export.spec import TensorSpec

LARGE = ", large tokens"
"""What a report says of inputs in which some tokens are very large."""


@dataclass(frozen=True, slots=True)
class LayerCase:
    """Inputs, and what the layer computes of them: in float64, and in the dtype of the inputs."""

    lengths: Lengths
    inputs: Arrays
    exact: dict[str, NDArray[np.float64]]
    direct: dict[str, NDArray[Any]]
    kind: str = ""
    """`LARGE`, or empty for ordinary inputs."""


class BothLayers:
    """A layer with its keyword arguments, and the same with its weights in float64."""

    def __init__(self, layer: Callable[..., Any], keywords: Mapping[str, Any]) -> None:
        self.layer, self.keywords = layer, keywords
        self.wide = with_parameters(layer, lambda _, x: _widened(np.asarray(x)), fields=True)

    def case(self, lengths: Lengths, arrays: Arrays) -> LayerCase:
        """Return what both compute."""
        exact, direct = self._exact_and_direct(self.layer, arrays)
        if any(x.dtype == np.float64 for x in arrays.values()):
            direct = self._double_precision(exact, arrays)
        return LayerCase(lengths, arrays, exact, direct)

    def ordinary_case(self, lengths: Lengths, arrays: Arrays, rng: np.random.Generator) -> LayerCase:
        """Return what both compute, with the error that another order of the sums may have."""
        computed = self.case(lengths, arrays)
        with np.errstate(all="ignore"):
            moved = self._called(self.layer, perturbed(arrays, rng))
        direct = {
            name: furthest(exact, [computed.direct[name], np.asarray(moved[name])])
            if computed.direct[name].dtype.name in EPS and computed.direct[name].dtype != np.float64
            else computed.direct[name]
            for name, exact in computed.exact.items()
        }
        return replace(computed, direct=direct)

    def large_case(
        self, lengths: Lengths, arrays: Arrays, drawn: Sequence[str], rng: np.random.Generator
    ) -> LayerCase | None:
        """Return what both compute if some tokens are very large; None if the layer overflows."""
        sizes = factors(arrays, drawn)
        ordinary = self.case(lengths, arrays) if sizes else None
        for factor in sizes:
            large = with_large_tokens(arrays, drawn, factor, rng)
            computed = self.case(lengths, large)
            moved = [self.case(lengths, perturbed(large, rng)).direct for _ in range(3)]
            if ordinary is not None and not overflows(ordinary.exact, computed.exact, computed.direct, *moved):
                direct = {
                    name: furthest(exact, [computed.direct[name], *(other[name] for other in moved)])
                    for name, exact in computed.exact.items()
                }
                return LayerCase(lengths, large, computed.exact, direct, LARGE)
        return None

    def _called(self, layer: Callable[..., Any], arrays: Arrays) -> dict[str, Any]:
        left = dict(arrays)

        def array_of(name: str, _: TensorSpec) -> NDArray[Any]:
            array: NDArray[Any] = left.pop(name)
            return array

        keywords = {name: with_arrays(value, name, array_of) for name, value in self.keywords.items()}
        return named_outputs(layer(**left, **keywords))

    def _exact_and_direct(
        self, layer: Callable[..., Any], arrays: Arrays
    ) -> tuple[dict[str, NDArray[np.float64]], dict[str, NDArray[Any]]]:
        wide = {name: _widened(x) for name, x in arrays.items()}
        with np.errstate(all="ignore"):
            exact, direct = self._called(self.wide, wide), self._called(layer, arrays)
        return (
            {name: np.asarray(x, np.float64) for name, x in exact.items()},
            {name: np.asarray(direct[name]) for name in exact},
        )

    def _double_precision(
        self, exact: dict[str, NDArray[np.float64]], arrays: Arrays
    ) -> dict[str, NDArray[Any]]:
        """Return `exact` with the error that float64 has.

        There is no wider dtype to measure it with. So it is the error of float32, 2**29 times smaller.
        """
        narrow = with_parameters(self.layer, lambda _, x: _narrowed(np.asarray(x)), fields=True)
        single = {name: _narrowed(x) for name, x in arrays.items()}
        right, off = self._exact_and_direct(narrow, single)
        return {name: exact[name] + (off[name] - right[name]) * 2.0**-29 for name in exact}


def judged_dtype(result: NDArray[Any], case: LayerCase, output: str) -> str:
    """Return the dtype that sets the bound: the dtype of the layer's output for its inputs.

    If NumPy converts integers to float64, the graph may use another dtype: then the graph's dtype counts.
    """
    kinds, direct = {x.dtype.name for x in case.inputs.values()}, case.direct[output]
    stated = direct if direct.dtype.name != "float64" or "float64" in kinds else result
    return stated.dtype.name if stated.dtype.name in EPS else "float64"


def _widened(x: NDArray[Any]) -> NDArray[Any]:
    """Return floats as float64, and integers and booleans unchanged."""
    return x.astype(np.float64) if x.dtype.name in EPS else x


def _narrowed(x: NDArray[Any]) -> NDArray[Any]:
    """Return float64 as float32, and any other array unchanged."""
    return x.astype(np.float32) if x.dtype == np.float64 else x
