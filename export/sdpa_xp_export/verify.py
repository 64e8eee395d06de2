"""Run a model in onnxruntime and hold it against the float64 reference of the call it was written for."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from numpy.typing import NDArray

from sdpa_xp import checks
from sdpa_xp.biases import Bias
from sdpa_xp.checks import message
from sdpa_xp.masks import Mask
from sdpa_xp_export._call.call import ExportCall
from sdpa_xp_export._call.metadata import from_json
from sdpa_xp_export._call.operands import Initializer
from sdpa_xp_export._files.loading import load
from sdpa_xp_export._model.external_data import check_holds_data, initializers
from sdpa_xp_export._model.large_model import LargeModel, Model
from sdpa_xp_export._runtime.memory import peak_above
from sdpa_xp_export._runtime.releases import ProviderName
from sdpa_xp_export._runtime.session import open_session, placements, providers, run, version
from sdpa_xp_export._verify.random_inputs import LARGE
from sdpa_xp_export._verify.trial_lengths import check_size
from sdpa_xp_export._verify.verification_inputs import Trial, judge_output, verification_inputs
from sdpa_xp_export.forms import tiled
from sdpa_xp_export.report import Placement, Report, Run


def verify(
    model: Model | str | Path,
    *,
    provider: ProviderName | None = None,
    seed: int = 0,
    attn_mask: Mask | None = None,
    bias: Bias | None = None,
    watch: Callable[[str], None] | None = None,
) -> Report:
    """Run `model` in onnxruntime against the float64 reference.

    The call is read from the model's metadata, where `export_attention` left it. The inputs are random, of
    several lengths, all of them 1 among these, and once with scores of some hundreds; masks have rows without
    a key, lengths are ragged, and keys that no query attends hold NaN. If a mask or a bias holds a number, as
    the width of a window, one run is longer than it, unless that takes more than 8 million scores.

    Args:
        model: What `export_attention` returned, or the path of its file, where also its data may be.
        provider: `"cpu"` or `"cuda"`. Default: CUDA where onnxruntime offers it, and the CPU always.
        seed: Of the random inputs.
        attn_mask: The mask that the model was exported with, if it holds a `from_function`, which cannot be
            written to the metadata.
        bias: Likewise the bias.
        watch: Called after each run with its lengths and provider, for those who show how far it is.

    Returns:
        For each output of each run its worst error and the bound, the time and the peak of memory, and for each
            node the provider that it ran on, as the profile of the run has it.

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
    _checked(model, seed, attn_mask, bias, watch)
    loaded = _loaded(model)
    functions = {name: each for name, each in (("attn_mask", attn_mask), ("bias", bias)) if each is not None}
    call, metadata = _stated(loaded, functions)
    check_size("verify", call)
    runs: list[Run] = []
    placed: list[Placement] = []
    for name in providers(provider):
        ran, where = _run_on(loaded, call, name, seed, watch)
        runs += ran
        placed += where
    form, reason = (metadata.get(f"sdpa_xp.{key}", "unknown") for key in ("form", "reason"))
    return Report(form, reason, version(), tuple(runs), tuple(placed), call)


def _checked(model: object, seed: object, attn_mask: object, bias: object, watch: object) -> None:
    """The arguments are of the types that they are stated to be."""
    if not isinstance(model, onnx.ModelProto | LargeModel | str | Path):
        rule = "`model` must be an ONNX model, or the path of its file"
        raise TypeError(message("verify", rule, {"model": type(model).__name__}))
    checks.integer("verify", "seed", seed, least=0)
    checks.instance("verify", "attn_mask", attn_mask, Mask)
    checks.instance("verify", "bias", bias, Bias)
    if watch is not None:
        checks.function("verify", "watch", watch, ("shown",))


def _loaded(model: Model | str | Path) -> Model:
    if isinstance(model, LargeModel):
        return model
    if isinstance(model, onnx.ModelProto):
        check_holds_data("verify", model)
        return model
    return load("verify", model)


def _run_on(
    model: Model, call: ExportCall, provider: str, seed: int, watch: Callable[[str], None] | None
) -> tuple[list[Run], list[Placement]]:
    seen: list[tuple[Trial, dict[str, NDArray[Any]], float, int | None]] = []
    rows = tiled.ROWS if any(node.op_type == "Scan" for node in model.graph.node) else None
    with tempfile.TemporaryDirectory() as folder:
        session = open_session(model, provider, Path(folder) / "profile")
        for case in verification_inputs(call, np.random.default_rng(seed), rows):
            _, peak = peak_above(partial(run, session, case.inputs))
            start = time.perf_counter()
            outputs = run(session, case.inputs)
            seen.append((case, outputs, time.perf_counter() - start, peak))
            if watch is not None:
                watch(f"{case.shown} on {provider}")
        where = placements(Path(session.end_profiling()), provider)
    runs = []
    for size in (1.0, LARGE):  # one bound for all runs of a size
        alike = [each for each in seen if each[0].size == size]
        for name in alike[0][0].expected if alike else ():
            agreements = judge_output(
                call, name, [(case, outputs[name]) for case, outputs, _, _ in alike], size
            )
            runs += [
                Run(case.shown, provider, name, agreement, seconds, peak)
                for (case, _, seconds, peak), agreement in zip(alike, agreements, strict=True)
            ]
    return runs, where


def _stated(model: Model, functions: Mapping[str, Any]) -> tuple[ExportCall, dict[str, str]]:
    """The call that the metadata state, and the metadata; the graph must have its inputs and outputs."""
    metadata = {entry.key: entry.value for entry in model.metadata_props}
    weights = {name: Initializer(name, numbers) for name, numbers in initializers(model)}
    try:
        call = from_json(metadata["sdpa_xp.call"], weights, functions)
    except (KeyError, TypeError, ValueError, OverflowError, RecursionError) as error:
        rule = f"`model` must be one that export_attention wrote ({error})"
        raise ValueError(message("verify", rule, {"metadata": sorted(metadata)})) from error
    names = [value.name for value in model.graph.input]
    wanted = [*call.outputs, *(["present_key", "present_value"] if call.cached else [])]
    outputs = [value.name for value in model.graph.output]
    if names != list(call.inputs) or outputs != wanted:
        rule = "`model` must have the inputs and outputs of its call"
        got = {"inputs": names, "outputs": outputs, "call": metadata["sdpa_xp.call"]}
        raise ValueError(message("verify", rule, got))
    return call, metadata
