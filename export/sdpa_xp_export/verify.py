"""Run a model in onnxruntime and hold it against the float64 reference of the call it was written for."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import onnx

from sdpa_xp import _checks as checks
from sdpa_xp._checks import message
from sdpa_xp.biases import Bias
from sdpa_xp.masks import Mask
from sdpa_xp_export._call.call import ExportCall
from sdpa_xp_export._call.metadata import from_json
from sdpa_xp_export._call.operands import Initializer
from sdpa_xp_export._files.loading import load
from sdpa_xp_export._model.external_data import check_holds_data, initializers
from sdpa_xp_export._model.large_model import LargeModel, Model
from sdpa_xp_export._runtime.releases import ProviderName
from sdpa_xp_export._runtime.session import TimedRun, profiled_session, providers, version
from sdpa_xp_export._verify.random_inputs import LARGE
from sdpa_xp_export._verify.trial_lengths import check_size
from sdpa_xp_export._verify.verification_inputs import Trial, judge_output, verification_inputs
from sdpa_xp_export.forms import tiled
from sdpa_xp_export.report import Placement, Report, Run


def verify(
    model: Model | str | os.PathLike[str],
    *,
    provider: ProviderName | None = None,
    seed: int = 0,
    attn_mask: Mask | None = None,
    bias: Bias | None = None,
    watch: Callable[[str], None] | None = None,
) -> Report:
    """Run `model` in onnxruntime against the float64 reference.

    The call is read from the model's metadata, where `export_attention` left it. The inputs are random, of
    several lengths, also with all lengths 1, and once with scores of some hundreds. Masks have rows without a
    key, lengths are ragged, and keys that no query attends hold NaN. If a mask or a bias holds a number, as the
    width of a window, one run is longer than this number, unless that takes more than 8 million scores.

    Args:
        model: What `export_attention` returned, or the path of its file, which may have external data.
        provider: `"cpu"` or `"cuda"`. Default: CUDA if onnxruntime offers it, and the CPU always.
        seed: Of the random inputs.
        attn_mask: The mask that the model was exported with, if it holds a `from_function`, which cannot be
            written to the metadata.
        bias: The bias that the model was exported with, likewise.
        watch: Called after each run with its lengths and provider, to show the progress.

    Returns:
        For each output of each run its worst error and the bound, the time and the peak of memory; and for each
            node the provider that it ran on, as the profile of the run states it.

    Raises:
        TypeError: An argument of another type; names it.
        ValueError: A file that is no ONNX model, a model without the metadata or that refers to external data,
            or a provider that onnxruntime does not offer here.
        FileNotFoundError: No such file.

    Examples:
        >>> from sdpa_xp_export import TensorSpec, export_attention
        >>> qkv = TensorSpec("float32", ("B", 2, "L", 16))
        >>> verify(export_attention(qkv, qkv, qkv, is_causal=True)).agrees
        True
    """
    _check_arguments(model, seed, attn_mask, bias, watch)
    loaded = _loaded(model)
    functions = {name: value for name, value in (("attn_mask", attn_mask), ("bias", bias)) if value is not None}
    call, metadata = _stated_call(loaded, functions)
    check_size("verify", call)
    runs: list[Run] = []
    placements: list[Placement] = []
    for name in providers(provider):
        provider_runs, provider_placements = _run_on(loaded, call, name, seed, watch)
        runs += provider_runs
        placements += provider_placements
    form, reason = (metadata.get(f"sdpa_xp.{key}", "unknown") for key in ("form", "reason"))
    return Report(form, reason, version(), tuple(runs), tuple(placements), call)


def _check_arguments(model: object, seed: object, attn_mask: object, bias: object, watch: object) -> None:
    if not isinstance(model, onnx.ModelProto | LargeModel | str | os.PathLike):
        rule = "`model` must be an ONNX model, or the path of its file"
        raise TypeError(message("verify", rule, {"model": type(model).__name__}))
    checks.integer("verify", "seed", seed, least=0)
    checks.instance("verify", "attn_mask", attn_mask, Mask)
    checks.instance("verify", "bias", bias, Bias)
    if watch is not None:
        checks.function("verify", "watch", watch, ("shown",))


def _loaded(model: Model | str | os.PathLike[str]) -> Model:
    if isinstance(model, LargeModel):
        return model
    if isinstance(model, onnx.ModelProto):
        check_holds_data("verify", model)
        return model
    return load("verify", model)


def _run_on(
    model: Model, call: ExportCall, provider: str, seed: int, watch: Callable[[str], None] | None
) -> tuple[list[Run], list[Placement]]:
    # A tiled model is also tried with more queries than one of its blocks has.
    rows = tiled.ROWS if any(node.op_type == "Scan" for node in model.graph.node) else None
    trials: list[tuple[Trial, TimedRun]] = []
    with profiled_session(model, provider) as session:
        for trial in verification_inputs(call, np.random.default_rng(seed), rows):
            trials.append((trial, session.timed(trial.inputs)))
            if watch is not None:
                watch(f"{trial.shown} on {provider}")
    runs = []
    for size in (1.0, LARGE):  # all runs of a size share one bound
        alike = [(trial, run) for trial, run in trials if trial.size == size]
        for name in alike[0][0].expected if alike else ():
            agreements = judge_output(call, name, [(trial, run.outputs[name]) for trial, run in alike], size)
            runs += [
                Run(trial.shown, provider, name, agreement, run.seconds, run.peak_bytes)
                for (trial, run), agreement in zip(alike, agreements, strict=True)
            ]
    return runs, session.placements


def _stated_call(model: Model, functions: Mapping[str, Any]) -> tuple[ExportCall, dict[str, str]]:
    """Return the call that the metadata state, and the metadata; the graph must have its inputs and outputs."""
    metadata = {entry.key: entry.value for entry in model.metadata_props}
    weights = {name: Initializer(name, numbers) for name, numbers in initializers(model)}
    try:
        call = from_json(metadata["sdpa_xp.call"], weights, functions)
    except (KeyError, TypeError, ValueError, OverflowError, RecursionError) as error:
        rule = f"`model` must be one that export_attention wrote ({error})"
        raise ValueError(message("verify", rule, {"metadata": sorted(metadata)})) from error
    inputs = [value.name for value in model.graph.input]
    outputs = [value.name for value in model.graph.output]
    expected = [*call.outputs, *(["present_key", "present_value"] if call.cached else [])]
    if inputs != list(call.inputs) or outputs != expected:
        rule = "`model` must have the inputs and outputs of its call"
        got = {"inputs": inputs, "outputs": outputs, "call": metadata["sdpa_xp.call"]}
        raise ValueError(message("verify", rule, got))
    return call, metadata
