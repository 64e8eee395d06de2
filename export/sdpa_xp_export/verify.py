"""Run a model in onnxruntime and hold it against the float64 reference of the call it was written for."""

from __future__ import annotations

import itertools
import json
import math
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

import array_api_compat.numpy as numpy_namespace
import numpy as np
import onnx
from google.protobuf.message import DecodeError
from numpy.typing import NDArray

from sdpa_xp.checks import message
from sdpa_xp_export import reference
from sdpa_xp_export.agreement import Agreement, judge_together, textbook
from sdpa_xp_export.call import Call
from sdpa_xp_export.runtime import PROVIDERS

Arrays: TypeAlias = dict[str, Any]
"""NumPy arrays by the name of the argument."""


@dataclass(frozen=True, slots=True)
class Run:
    """One run: the lengths it had, the provider it was asked of, how it did."""

    inputs: str
    provider: str
    agreement: Agreement
    seconds: float


@dataclass(frozen=True, slots=True)
class Placement:
    """A node that ran, after the runtime's own optimisation, and the provider that it ran on."""

    node: str
    op: str
    provider: str
    asked: str
    """The provider that the session was to run on; a node of another has fallen back."""


@dataclass(frozen=True, slots=True)
class Report:
    """What `verify` saw."""

    call: Call
    form: str
    runs: tuple[Run, ...]
    placements: tuple[Placement, ...]

    @property
    def agrees(self) -> bool:
        """Whether every run stayed within its bound."""
        return all(run.agreement.agrees for run in self.runs)

    @property
    def worst(self) -> Run:
        """The run that came nearest to its bound, or went furthest beyond."""
        return max(self.runs, key=lambda run: run.agreement.share)

    def __str__(self) -> str:
        worst = self.worst.agreement
        verdict = "agrees" if self.agrees else "DISAGREES"
        where = ", ".join(sorted({placement.provider for placement in self.placements}))
        fallen = [placed.node for placed in self.placements if placed.provider != placed.asked]
        fell_back = f"; fell back: {', '.join(fallen)}" if fallen else ""
        return (
            f"{self.form}: {verdict} in {len(self.runs)} runs, worst error {worst.absolute:.2g} "
            f"(bound {worst.bound:.2g}); its nodes ran on {where}{fell_back}"
        )


def verify(model: onnx.ModelProto | str | Path, *, provider: str | None = None, seed: int = 0) -> Report:
    """Run `model` in onnxruntime against the float64 reference.

    The call is read from the model's metadata, where `export_attention` left it. The inputs are random, of
    several lengths; masks have rows without a key, and keys that no query attends hold NaN.

    Args:
        model: What `export_attention` returned, or the path of its file.
        provider: `"cpu"` or `"cuda"`. Default: CUDA where onnxruntime offers it, and the CPU always.
        seed: Of the random inputs.

    Returns:
        For each run its worst error and the bound, and for each node the provider that it ran on, as the
            profile of the run has it.

    Raises:
        ValueError: A file that is no ONNX model, a model without the metadata, or a provider that
            onnxruntime does not offer here.
        FileNotFoundError: No such file.

    Examples:
        >>> from sdpa_xp_export import TensorSpec, export_attention
        >>> qkv = TensorSpec("float32", ("B", 2, "L", 16))
        >>> verify(export_attention(qkv, qkv, qkv, is_causal=True)).agrees
        True
    """
    loaded = model if isinstance(model, onnx.ModelProto) else _load(Path(model))
    call, form = _stated(loaded)
    runs: list[Run] = []
    placements: list[Placement] = []
    for name in providers(provider):
        ran, placed = _run_on(loaded, call, name, seed)
        runs += ran
        placements += placed
    return Report(call, form, tuple(runs), tuple(placements))


def _stated(model: onnx.ModelProto) -> tuple[Call, str]:
    """The call and the form that the metadata state; the graph must have its inputs and one output."""
    metadata = {entry.key: entry.value for entry in model.metadata_props}
    try:
        call = Call.from_json(metadata["sdpa_xp.call"])
    except (KeyError, TypeError, ValueError, RecursionError) as error:
        rule = "`model` must be one that export_attention wrote"
        raise ValueError(message("verify", rule, {"metadata": sorted(metadata)})) from error
    names = [value.name for value in model.graph.input]
    if names != list(call.inputs) or len(model.graph.output) != 1:
        rule = "`model` must have one output and the inputs of its call"
        raise ValueError(message("verify", rule, {"inputs": names, "call": call.to_json()}))
    return call, metadata.get("sdpa_xp.form", "unknown")


def _load(path: Path) -> onnx.ModelProto:
    if not path.is_file():
        raise FileNotFoundError(message("verify", "`model` must be a file", {"model": path}))
    try:
        return onnx.load(path, format="protobuf")
    except (DecodeError, onnx.checker.ValidationError) as error:
        rule = "`model` must be an ONNX model"
        raise ValueError(message("verify", rule, {"model": path})) from error


def expected(call: Call, inputs: Arrays) -> tuple[NDArray[np.float64], NDArray[Any]]:
    """The reference of a call on `inputs`, and the textbook formula in the dtype of the call."""
    with np.errstate(all="ignore"):
        exact, _, _ = reference.attention(**inputs, **call.rules)
        return exact, textbook(numpy_namespace, **inputs, **call.rules)


def sample(call: Call, lengths: Mapping[str, int], rng: np.random.Generator) -> Arrays:
    """Random inputs for a call whose symbols have `lengths`; scores are of size 1, whatever the scale.

    A boolean mask is True for three pairs of four, and False for the whole last key and, where it has a row
    for each query, the whole first query. A floating one is -inf there; but for float16 its last row has the
    smallest finite number throughout, which does not mask.
    """
    arrays: Arrays = {}
    for name, spec in call.inputs.items():
        shape = tuple(lengths[n] if isinstance(n, str) else n for n in spec.shape)
        if name in ("query", "key", "value"):
            arrays[name] = rng.standard_normal(shape).astype(spec.dtype)
            continue
        allowed = rng.random(shape) < 0.75
        if shape and shape[-1] > 1:
            allowed[..., -1] = False
        if len(shape) > 1 and shape[-2] > 1:
            allowed[..., 0, :] = False
        if spec.dtype == "bool":
            arrays[name] = allowed
            continue
        added = np.where(allowed, rng.standard_normal(shape), -np.inf).astype(spec.dtype)
        # Beside float16's smallest number the textbook formula loses the scores: its bound would allow all.
        rows = added.reshape(-1, shape[-1]) if shape else added.reshape(1, 1)
        if len(rows) > 2 and spec.dtype != "float16":
            rows[-1] = np.where(np.isneginf(rows[-1]), -np.inf, np.finfo(spec.dtype).min)
        arrays[name] = added
    size = abs(call.scale) * math.sqrt(arrays["query"].shape[-1])
    arrays["query"] = (arrays["query"] / (size or 1.0)).astype(call.query.dtype)
    return arrays


def poison(call: Call, arrays: Arrays) -> Arrays:
    """The inputs with NaN in every key and value that no query attends."""
    key, query = arrays["key"], arrays["query"]
    heads = key.shape[-3] if key.ndim > 2 else 1
    query_heads = query.shape[-3] if query.ndim > 2 else 1
    ranks = (x.shape[:-3] for x in (query, key, arrays["value"]))
    pairs = (*np.broadcast_shapes(*ranks), query_heads, query.shape[-2], key.shape[-2])
    allowed = np.ones(pairs, bool)
    for name in ("attn_mask", "bias"):
        if name in arrays:
            term = arrays[name]
            allowed &= term if term.dtype == bool else ~np.isneginf(term)
    if call.is_causal:
        allowed &= np.tril(np.ones(pairs[-2:], bool))
    by_group = allowed.reshape(*pairs[:-3], heads, -1, pairs[-1])  # its heads and their queries are rows
    hidden = np.asarray(~by_group.any(axis=-2))
    poisoned = {}
    for name in ("key", "value"):
        poisoned[name] = arrays[name].copy()
        poisoned[name][_for_all_that_share(hidden, arrays[name].shape[:-1])] = np.nan
    return arrays | poisoned


def _for_all_that_share(hidden: NDArray[np.bool_], shape: tuple[int, ...]) -> NDArray[np.bool_]:
    """`hidden` of the broadcast batch -> for an array of `shape`: is it for all entries that read it."""
    extra = tuple(range(hidden.ndim - len(shape)))
    broadcast = tuple(i for i, n in enumerate(shape) if n == 1)
    everywhere = np.all(np.all(hidden, axis=extra), axis=broadcast, keepdims=True)
    return np.broadcast_to(everywhere, shape)


def open_session(model: onnx.ModelProto, provider: str, profile: Path | None = None) -> Any:
    """An onnxruntime session of `model` on `provider`, which must really start there."""
    import onnxruntime

    if provider == PROVIDERS["cuda"] and hasattr(onnxruntime, "preload_dlls"):
        onnxruntime.preload_dlls()  # finds the CUDA libraries that pip installed
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3
    if profile is not None:
        options.enable_profiling = True
        options.profile_file_prefix = str(profile)
    wanted = list(dict.fromkeys([provider, PROVIDERS["cpu"]]))
    try:
        session = onnxruntime.InferenceSession(model.SerializeToString(), options, providers=wanted)
    except Exception as error:  # its errors have no common base
        reason = str(error).splitlines()[0]
        raise ValueError(message("verify", "onnxruntime must load `model`", {"its error": reason})) from error
    if provider not in session.get_providers():  # an absent provider is no more than a warning there
        rule = f"onnxruntime could not start {provider}"
        raise ValueError(message("verify", rule, {"providers": session.get_providers()}))
    return session


def _run_on(model: onnx.ModelProto, call: Call, provider: str, seed: int) -> tuple[list[Run], list[Placement]]:
    rng = np.random.default_rng(seed)
    shown, results, seconds = [], [], []
    with tempfile.TemporaryDirectory() as folder:
        session = open_session(model, provider, Path(folder) / "profile")
        for lengths in _lengths(call.symbols):
            arrays = sample(call, lengths, rng)
            exact, plain = expected(call, arrays)
            poisoned = poison(call, arrays)
            session.run(None, poisoned)
            start = time.perf_counter()
            (output,) = session.run(None, poisoned)
            seconds.append(time.perf_counter() - start)
            shown.append(" ".join(f"{name}={length}" for name, length in lengths.items()) or "fixed")
            as_stated = output.shape == exact.shape and output.dtype.name == call.query.dtype
            results.append((output if as_stated else np.full(exact.shape, np.nan), exact, plain))
        placements = _placements(Path(session.end_profiling()), provider)
    agreements = judge_together(results, call.query.dtype)
    runs = zip(shown, agreements, seconds, strict=True)
    return [Run(inputs, provider, agreement, time) for inputs, agreement, time in runs], placements


def _lengths(symbols: Sequence[str]) -> Iterator[dict[str, int]]:
    """Some lengths for each symbol: different ones, each way round, and all 1."""
    if not symbols:
        yield from ({}, {}, {})
        return
    several = [length for length, _ in zip(itertools.cycle([2, 5, 9, 7, 3]), symbols, strict=False)]
    yield dict(zip(symbols, several, strict=True))
    yield dict(zip(symbols, reversed(several), strict=True))
    yield dict.fromkeys(symbols, 1)


def _placements(profile: Path, asked: str) -> list[Placement]:
    """Each node that ran, once, in order; from the profile that the runtime wrote."""
    events = json.loads(profile.read_text())
    seen: dict[Placement, None] = {}
    for event in events:
        details = event.get("args", {})
        if event.get("cat") == "Node" and "provider" in details:
            name = event["name"].removesuffix("_kernel_time")
            seen[Placement(name, details["op_name"], details["provider"], asked)] = None
    return list(seen)


def providers(asked: str | None = None) -> list[str]:
    """The execution providers to run on: the one asked for, or CUDA where offered and the CPU."""
    import onnxruntime

    offered = onnxruntime.get_available_providers()
    if asked is None:
        return [name for name in (PROVIDERS["cuda"], PROVIDERS["cpu"]) if name in offered]
    if asked not in PROVIDERS or PROVIDERS[asked] not in offered:
        rule = "`provider` must be one that onnxruntime offers here"
        raise ValueError(message("verify", rule, {"provider": repr(asked), "offered": offered}))
    return [PROVIDERS[asked]]
