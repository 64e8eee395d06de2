"""Run the model of a layer in onnxruntime, and compare it with the layer itself in float64 NumPy."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx
from numpy.typing import NDArray

from sdpa_xp import _checks as checks
from sdpa_xp._checks import message
from sdpa_xp_export._dtypes.conversion import ONNX_DTYPE
from sdpa_xp_export._layer import named_outputs, with_parameters
from sdpa_xp_export._model.external_data import check_holds_data
from sdpa_xp_export._model.large_model import LargeModel, Model
from sdpa_xp_export._runtime.releases import ProviderName
from sdpa_xp_export._runtime.session import TimedRun, profiled_session, providers, version
from sdpa_xp_export._verify.agreement import EPS, judge_together
from sdpa_xp_export._verify.layer_trials import (
    Draw,
    drawn_inputs,
    first_lengths,
    input_specs,
    more_lengths,
    table_rows,
)
from sdpa_xp_export._verify.pair_terms import Arrays
from sdpa_xp_export._verify.trial_lengths import Lengths, shown_lengths
from sdpa_xp_export.report import LayerReport, Placement, Run


def verify_layer(
    model: Model,
    layer: Callable[..., Any],
    *,
    draw: Mapping[str, Draw] | None = None,
    provider: ProviderName | None = None,
    seed: int = 0,
    thorough: bool = False,
) -> LayerReport:
    """Run the model that `to_onnx` made of `layer` against what `layer` computes in float64.

    The layer is called with NumPy arrays under the names of the model's inputs: in float64, and in their own
    dtypes for the bound, which is twice the error of that call. Each named length is tried with each number up
    to 9, with 33, and together with each other name with 130; a length that only inputs with "past" in their
    name have is tried with 0. The layer has to take the lengths of the first three runs, which are at most 9.
    The report names the other lengths that the layer, or `draw`, refuses.

    Args:
        model: What `to_onnx` returned.
        layer: The layer that the model was made of, with weights that NumPy computes with. The weights of a
            `sdpa_xp.layers.Layer`, of a dataclass with a field `parameters`, or of a method of one, are widened
            too; those that a function closes over are not. Use `functools.partial` for arguments that the model
            has no input for.
        draw: By the name of an input, `draw(rng, shape)`, which returns what the input is fed with. By default
            floats are normal, and three of four booleans are True. Integers that number the rows of a table in
            the model are any of its rows, and others are from 0 to the longest length.
        provider: As for `verify`.
        seed: Of the random inputs.
        thorough: Whether to try each length up to 17, and up to 1,030 with each other name.

    Returns:
        For each output of each run its worst error and the bound, the time and the peak of memory; for each
            node the provider that it ran on; and the lengths that were refused, with the words of the error.

    Raises:
        TypeError: A model of another type.
        ValueError: A provider that onnxruntime does not offer here, a name in `draw` that is no input, or a
            model that refers to external data.

    Examples:
        >>> from sdpa_xp import scaled_dot_product_attention
        >>> from sdpa_xp_export import TensorSpec, to_onnx
        >>> def layer(x):
        ...     return scaled_dot_product_attention(x, x, x, is_causal=True)
        >>> verify_layer(to_onnx(layer, TensorSpec("float32", ("B", 2, "L", 8))), layer).agrees
        True
    """
    if isinstance(model, onnx.ModelProto):
        check_holds_data("verify_layer", model)
    elif not isinstance(model, LargeModel):
        rule = "`model` must be what to_onnx returned"
        raise TypeError(message("verify_layer", rule, {"type": type(model).__name__}))
    checks.flag("verify_layer", "thorough", thorough)
    specs = input_specs(model, {number: name for name, number in ONNX_DTYPE.items()})
    draws = dict(draw or {})
    for name in draws.keys() - specs.keys():
        rule = "`draw` must name inputs of the model"
        raise ValueError(message("verify_layer", rule, {"draw": name, "inputs": ", ".join(specs)}))

    rng, rows = np.random.default_rng(seed), table_rows(model)

    def inputs(lengths: Lengths) -> Arrays:
        return drawn_inputs(specs, lengths, draws, rows, rng)

    both = _BothLayers(layer)
    cases = [both.case(lengths, inputs(lengths)) for lengths in first_lengths(specs)]
    left_out: list[str] = []
    for lengths in more_lengths(specs, thorough=thorough):
        try:
            cases.append(both.case(lengths, inputs(lengths)))
        except Exception as error:  # the layer and `draw` are anyone's functions, and raise what they like
            left_out.append(f"{shown_lengths(lengths)}: {_words_of(error)}")
    runs: list[Run] = []
    placements: list[Placement] = []
    for name in providers(provider):
        with profiled_session(model, name) as session:
            timed = [session.timed(case.inputs) for case in cases]
        placements += session.placements
        runs += _judged(cases, timed, name)
    form, reason = _forms(model)
    return LayerReport(form, reason, version(), tuple(runs), tuple(placements), tuple(left_out))


def _judged(cases: Sequence[_LayerCase], timed: Sequence[TimedRun], provider: str) -> Iterator[Run]:
    """Yield a run for each output and case, by one bound for all cases of an output."""
    for output in cases[0].exact:
        results = [run.outputs[output] for run in timed]
        dtype = _judged_dtype(results[0], cases[0].direct[output], cases[0].inputs)
        triples = [
            (result, case.exact[output], case.direct[output])
            for result, case in zip(results, cases, strict=True)
        ]
        for case, run, agreement in zip(cases, timed, judge_together(triples, dtype), strict=True):
            longest = max(case.lengths.values(), default=0)
            count = math.prod(case.exact[output].shape[:-1])
            shown = shown_lengths(case.lengths)
            yield Run(shown, provider, output, agreement, run.seconds, run.peak_bytes, longest, count, count)


@dataclass(frozen=True, slots=True)
class _LayerCase:
    """Inputs, and what the layer computes of them: in float64, and in the dtype of the inputs."""

    lengths: Lengths
    inputs: Arrays
    exact: dict[str, NDArray[np.float64]]
    direct: dict[str, NDArray[Any]]


class _BothLayers:
    """A layer, and the same with its weights in float64."""

    def __init__(self, layer: Callable[..., Any]) -> None:
        self.layer, self.wide = layer, with_parameters(layer, lambda _, x: _widened(np.asarray(x)), fields=True)

    def case(self, lengths: Lengths, arrays: Arrays) -> _LayerCase:
        """Return what both compute."""
        exact, direct = self._exact_and_direct(self.layer, arrays)
        if any(x.dtype == np.float64 for x in arrays.values()):
            direct = self._double_precision(exact, arrays)
        return _LayerCase(lengths, arrays, exact, direct)

    def _exact_and_direct(
        self, layer: Callable[..., Any], arrays: Arrays
    ) -> tuple[dict[str, NDArray[np.float64]], dict[str, NDArray[Any]]]:
        wide = {name: _widened(x) for name, x in arrays.items()}
        with np.errstate(all="ignore"):
            exact, direct = named_outputs(self.wide(**wide)), named_outputs(layer(**arrays))
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


def _words_of(error: Exception) -> str:
    """Return the type of an error and the first line of its message."""
    return ": ".join([type(error).__name__, *str(error).splitlines()[:1]])


def _judged_dtype(result: NDArray[Any], direct: NDArray[Any], inputs: Arrays) -> str:
    """Return the dtype that sets the bound: that of the layer's output in the dtype of its inputs.

    NumPy makes float64 of integers, for which the graph has a dtype of its own: then the graph's dtype counts.
    """
    kinds = {x.dtype.name for x in inputs.values()}
    stated = direct if direct.dtype.name != "float64" or "float64" in kinds else result
    return stated.dtype.name if stated.dtype.name in EPS else "float64"


def _widened(x: NDArray[Any]) -> NDArray[Any]:
    """Return floats as float64, and integers and booleans unchanged."""
    return x.astype(np.float64) if x.dtype.name in EPS else x


def _narrowed(x: NDArray[Any]) -> NDArray[Any]:
    """Return float64 as float32, and any other array unchanged."""
    return x.astype(np.float32) if x.dtype == np.float64 else x


def _forms(model: Model) -> tuple[str, str]:
    metadata = {entry.key: entry.value for entry in model.metadata_props}
    chosen = json.loads(metadata.get("sdpa_xp.forms", "[]"))
    forms, reasons = (dict.fromkeys(choice[key] for choice in chosen) for key in ("form", "reason"))
    return ", ".join(forms) or "no attention", "; ".join(reasons)
