"""Run the model of a layer in onnxruntime, and compare it with the layer itself in float64 NumPy."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

import numpy as np
import onnx
from numpy.typing import NDArray

from sdpa_xp._checks import message
from sdpa_xp_export._dtypes.conversion import ONNX_DTYPE, numpy_dtype
from sdpa_xp_export._dtypes.promotion import INTEGERS
from sdpa_xp_export._layer import named_outputs, with_parameters
from sdpa_xp_export._model.external_data import check_holds_data
from sdpa_xp_export._model.large_model import LargeModel, Model
from sdpa_xp_export._runtime.releases import ProviderName
from sdpa_xp_export._runtime.session import profiled_session, providers, version
from sdpa_xp_export._verify.agreement import EPS, judge_together
from sdpa_xp_export._verify.reference_inputs import Arrays
from sdpa_xp_export._verify.trial_lengths import shown_lengths, small_lengths
from sdpa_xp_export.report import LayerReport, Placement, Run
from sdpa_xp_export.spec import TensorSpec, addends, evaluated

Draw: TypeAlias = Callable[[np.random.Generator, tuple[int, ...]], NDArray[Any]]


def verify_layer(
    model: Model,
    layer: Callable[..., Any],
    *,
    draw: Mapping[str, Draw] | None = None,
    provider: ProviderName | None = None,
    seed: int = 0,
) -> LayerReport:
    """Run the model that `to_onnx` made of `layer` against what `layer` computes in float64.

    The layer is called with NumPy arrays under the names of the model's inputs: in float64, and in their own
    dtypes for the bound, which is twice the error of that call. Named lengths are tried with several numbers,
    also with all of them 1.

    Args:
        model: What `to_onnx` returned.
        layer: The layer that the model was made of, with weights that NumPy computes with. The weights of a
            `sdpa_xp.layers.Layer`, or of a method of one, are widened too; those that a function closes over
            are not. Use `functools.partial` for arguments that the model has no input for.
        draw: By the name of an input, `draw(rng, shape)`, which returns what the input is fed with. By default
            floats are normal, three of four booleans are True, and integers are 0 and 1.
        provider: As for `verify`.
        seed: Of the random inputs.

    Returns:
        For each output of each run its worst error and the bound, the time and the peak of memory; and for each
            node the provider that it ran on.

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
    specs, draws = _inputs(model), dict(draw or {})
    for name in draws.keys() - specs.keys():
        rule = "`draw` must name inputs of the model"
        raise ValueError(message("verify_layer", rule, {"draw": name, "inputs": ", ".join(specs)}))
    rng = np.random.default_rng(seed)
    cases = [(lengths, _drawn(specs, lengths, draws, rng)) for lengths in _several_lengths(specs)]
    expected = [_expected(layer, arrays) for _, arrays in cases]
    runs: list[Run] = []
    placements: list[Placement] = []
    for name in providers(provider):
        with profiled_session(model, name) as session:
            timed = [session.timed(arrays) for _, arrays in cases]
        placements += session.placements
        for output in expected[0]:
            results = [run.outputs[output] for run in timed]
            dtype = _judged_dtype(results[0], expected[0][output][1], cases[0][1])
            triples = [(result, *both[output]) for result, both in zip(results, expected, strict=True)]
            agreements = judge_together(triples, dtype)
            runs += [
                Run(shown_lengths(lengths), name, output, agreement, run.seconds, run.peak_bytes)
                for (lengths, _), run, agreement in zip(cases, timed, agreements, strict=True)
            ]
    form, reason = _forms(model)
    return LayerReport(form, reason, version(), tuple(runs), tuple(placements))


def _inputs(model: Model) -> dict[str, TensorSpec]:
    names = {number: name for name, number in ONNX_DTYPE.items()}
    specs = {}
    for value in model.graph.input:
        tensor = value.type.tensor_type
        shape = tuple(dim.dim_param or dim.dim_value for dim in tensor.shape.dim)
        specs[value.name] = TensorSpec(names[tensor.elem_type], shape)
    return specs


def _several_lengths(specs: Mapping[str, TensorSpec]) -> list[dict[str, int]]:
    parts = [part for spec in specs.values() for length in spec.shape for part in addends(str(length))]
    return [*small_lengths([name for name in dict.fromkeys(parts) if not name.isdecimal()])]


def _drawn(
    specs: Mapping[str, TensorSpec],
    lengths: Mapping[str, int],
    draws: Mapping[str, Draw],
    rng: np.random.Generator,
) -> Arrays:
    arrays = {}
    for name, spec in specs.items():
        shape = tuple(evaluated(length, lengths) for length in spec.shape)
        drawn = draws.get(name, _DEFAULT.get(spec.dtype, _normal))(rng, shape)
        arrays[name] = np.asarray(drawn, numpy_dtype(spec.dtype)).reshape(shape)
    return arrays


def _normal(rng: np.random.Generator, shape: tuple[int, ...]) -> NDArray[Any]:
    return np.asarray(rng.standard_normal(shape))


def _zeros_and_ones(rng: np.random.Generator, shape: tuple[int, ...]) -> NDArray[Any]:
    return np.asarray(rng.integers(0, 2, shape))


def _mostly_true(rng: np.random.Generator, shape: tuple[int, ...]) -> NDArray[Any]:
    return np.asarray(rng.random(shape) < 0.75)


_DEFAULT: dict[str, Draw] = {**dict.fromkeys(INTEGERS, _zeros_and_ones), "bool": _mostly_true}


def _expected(layer: Callable[..., Any], arrays: Arrays) -> dict[str, tuple[NDArray[Any], NDArray[Any]]]:
    """Return for each output what the layer computes in float64, and in the dtype of the inputs."""
    wide = {name: _widened(x) for name, x in arrays.items()}
    with np.errstate(all="ignore"):
        wide_layer = with_parameters(layer, lambda _, x: _widened(np.asarray(x)))
        exact, direct = named_outputs(wide_layer(**wide)), named_outputs(layer(**arrays))
    return {name: (np.asarray(exact[name], np.float64), np.asarray(direct[name])) for name in exact}


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


def _forms(model: Model) -> tuple[str, str]:
    metadata = {entry.key: entry.value for entry in model.metadata_props}
    chosen = json.loads(metadata.get("sdpa_xp.forms", "[]"))
    forms, reasons = (dict.fromkeys(choice[key] for choice in chosen) for key in ("form", "reason"))
    return ", ".join(forms) or "no attention", "; ".join(reasons)
