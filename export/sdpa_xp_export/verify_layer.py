"""Run the model of a layer in onnxruntime, and hold it against the layer itself in float64 NumPy."""

from __future__ import annotations

import json
import tempfile
import time
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import onnx
from numpy.typing import NDArray

from sdpa_xp.checks import message
from sdpa_xp_export._dtypes.conversion import ONNX_DTYPE, numpy_dtype
from sdpa_xp_export._dtypes.promotion import INTEGERS
from sdpa_xp_export._layer import named_outputs, with_parameters
from sdpa_xp_export._model.external_data import check_holds_data
from sdpa_xp_export._model.large_model import LargeModel, Model
from sdpa_xp_export._runtime.memory import peak_above
from sdpa_xp_export._runtime.releases import ProviderName
from sdpa_xp_export._runtime.session import open_session, placements, providers, run, version
from sdpa_xp_export._verify.agreement import EPS, judge_together
from sdpa_xp_export._verify.trial_lengths import small_lengths
from sdpa_xp_export.report import LayerReport, Placement, Run
from sdpa_xp_export.spec import TensorSpec, addends, evaluated

Draw: TypeAlias = Callable[[np.random.Generator, tuple[int, ...]], NDArray[Any]]
Arrays: TypeAlias = dict[str, NDArray[Any]]


def verify_layer(
    model: Model,
    layer: Callable[..., Any],
    *,
    draw: Mapping[str, Draw] | None = None,
    provider: ProviderName | None = None,
    seed: int = 0,
) -> LayerReport:
    """Run the model that `to_onnx` made of `layer` against what `layer` computes in float64.

    The layer is called with NumPy arrays under the names of the model's inputs: in float64, and as they are for
    the bound, which is twice what the layer is then off by. Lengths that are names are several, all of them 1
    among these.

    Args:
        model: What `to_onnx` returned.
        layer: What it was made of, with weights that NumPy computes with; those of a `sdpa_xp.layers.Layer`, or
            of a method of one, are widened too, and those that a function closes over are not.
            `functools.partial` gives it what the model has no input for.
        draw: By the name of an input, `draw(rng, shape)`, what it is to be fed. By default floats are normal,
            three of four booleans are True, and integers are 0 and 1.
        provider: As for `verify`.
        seed: Of the random inputs.

    Returns:
        For each output of each run its worst error and the bound, the time and the peak of memory, and for each
            node the provider that it ran on.

    Raises:
        TypeError: A model that is none.
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
    placed: list[Placement] = []
    for name in providers(provider):
        with tempfile.TemporaryDirectory() as folder:
            session = open_session(model, name, Path(folder) / "profile")
            seen = [_timed(session, arrays) for _, arrays in cases]
            placed += placements(Path(session.end_profiling()), name)
        for output in expected[0]:
            results = [found[output] for found, _, _ in seen]
            dtype = _judged_in(results[0], expected[0][output][1], cases[0][1])
            triples = [(each, *both[output]) for each, both in zip(results, expected, strict=True)]
            agreements = judge_together(triples, dtype)
            runs += [
                Run(_shown(lengths), name, output, agreement, seconds, peak)
                for (lengths, _), (_, seconds, peak), agreement in zip(cases, seen, agreements, strict=True)
            ]
    form, reason = _forms(model)
    return LayerReport(form, reason, version(), tuple(runs), tuple(placed))


def _inputs(model: Model) -> dict[str, TensorSpec]:
    names = {number: name for name, number in ONNX_DTYPE.items()}
    found = {}
    for each in model.graph.input:
        tensor = each.type.tensor_type
        shape = tuple(dim.dim_param or dim.dim_value for dim in tensor.shape.dim)
        found[each.name] = TensorSpec(names[tensor.elem_type], shape)
    return found


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
    """For each output: what the layer gives in float64, and in the dtype of the inputs."""
    wide = {name: _wide(x) for name, x in arrays.items()}
    with np.errstate(all="ignore"):
        widened = with_parameters(layer, lambda _, x: _wide(np.asarray(x)))
        exact, own = named_outputs(widened(**wide)), named_outputs(layer(**arrays))
    return {name: (np.asarray(exact[name], np.float64), np.asarray(own[name])) for name in exact}


def _judged_in(result: NDArray[Any], own: NDArray[Any], inputs: Arrays) -> str:
    """Whose bound holds: that of the layer's own output; for NumPy's float64 of integers the graph's."""
    kinds = {x.dtype.name for x in inputs.values()}
    stated = own if own.dtype.name != "float64" or "float64" in kinds else result
    return stated.dtype.name if stated.dtype.name in EPS else "float64"


def _wide(x: NDArray[Any]) -> NDArray[Any]:
    """Floats as float64; integers and booleans as they are."""
    return x.astype(np.float64) if x.dtype.name in EPS else x


def _timed(session: Any, arrays: Arrays) -> tuple[Arrays, float, int | None]:
    """A run, and the time and the peak of memory of one before it and after it."""
    _, peak = peak_above(partial(run, session, arrays))
    start = time.perf_counter()
    return run(session, arrays), time.perf_counter() - start, peak


def _shown(lengths: Mapping[str, int]) -> str:
    return " ".join(f"{name}={length}" for name, length in lengths.items()) or "fixed"


def _forms(model: Model) -> tuple[str, str]:
    metadata = {entry.key: entry.value for entry in model.metadata_props}
    chosen = json.loads(metadata.get("sdpa_xp.forms", "[]"))
    forms, reasons = (dict.fromkeys(each[key] for each in chosen) for key in ("form", "reason"))
    return ", ".join(forms) or "no attention", "; ".join(reasons)
