"""Run a model in an engine, such as onnxruntime, and compare it with the float64 reference of its call."""

from __future__ import annotations

import itertools
import math
import os
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

import numpy as np

from sdpa_xp._checks.keywords import check_flag, check_function, check_instance, explains_keywords
from sdpa_xp.biases import Bias
from sdpa_xp.errors import ArgumentValueError
from sdpa_xp.masks import Mask

from ._call.mask_analysis import constants
from ._files.model import Model
from ._runtime.limits import TIMEOUT, check_limits, deadline
from ._runtime.releases import EngineName, ProviderName
from ._runtime.session import check_engine
from ._verify.call_cases import DEFAULT_ROWS, THOROUGH_ROWS, left_out, trial_settings, trials
from ._verify.cases import Case, judged, runner
from ._verify.inputs import seed_of
from ._verify.lengths import scores_shape
from ._verify.model import of_metadata, other_call_note, subject_of
from ._verify.record import check_recordable, write_verdict
from .report import Report


@explains_keywords
def verify(
    model: Model | str | os.PathLike[str],
    *,
    call: Mapping[str, Any] | None = None,
    provider: ProviderName | None = None,
    engine: EngineName = "onnxruntime",
    seed: int | None = None,
    attn_mask: Mask | None = None,
    bias: Bias | None = None,
    thorough: bool = False,
    watch: Callable[[int, int, str], None] | None = None,
    timeout: float = TIMEOUT,
    memory: int | None = None,
    record: bool = False,
) -> Report:
    """Run `model` in onnxruntime or another engine, and compare its outputs with the float64 reference.

    The inputs are random; some runs have large scores, extreme integers, rows without keys, or NaN. The guide
    to verifying a deployment has the whole list.

    Args:
        model: The result of `export_attention`, or the path of its file, which may have external data.
        call: The arguments of `export_attention` that you expect the model to compute, by name. By default they
            are read from the model's metadata.
        provider: "cpu", "cuda", "wasm", "webgpu", or the full name of a provider. By default, the CPU,
            and also CUDA, with `use_tf32=0`, if it starts on this machine. "wasm" runs onnxruntime-web in
            Node.js, "webgpu" the plugin `onnxruntime-ep-webgpu` on a GPU or a software adapter.
        engine: What runs the model: "onnxruntime", "openvino" (in float32; the report says which precision is
            its default on this CPU), or "reference", ONNX's own evaluator in NumPy, which computes what the
            standard says and is slow.
        seed: The seed of the random inputs and lengths, to repeat the runs of a report, which names it.
        attn_mask: The mask that the model was exported with. Pass it if it contains a `from_function` or
            a class of your own, which cannot be written to the metadata.
        bias: The bias that the model was exported with, likewise.
        thorough: If True, try many more lengths, scores and rows, which takes minutes.
        watch: A function to show the progress, called after each run with the numbers of runs so far and of all
            runs, and the lengths and the provider of the run.
        timeout: The most seconds for all runs together, beside the start of Python and the engine. The model
            runs in a process of its own, which ends at a limit, or with Ctrl-C.
        memory: The most bytes that the model may take there, not on a GPU: by default 8 GiB and four times the
            model, and more if a run has more than 117 million scores. If you pass at least 100 MB, inputs and
            reference in your process stay below it too, unless the lengths of the call are fixed, and a call
            whose smallest run has more than memory / 4 numbers is refused.
        record: Whether to write the verdict into the metadata of `model` or its file.

    Returns:
        A report, with the error and the bound of each output of each run, the provider that each node ran on,
            and what was not tested.

    Raises:
        TypeError: An argument has a wrong type.
        ValueError: The file is not an ONNX model; the model has no metadata or those of several that were
            merged, or its numbers have changed since the export; its inputs or outputs do not fit its call,
            or have more than 268 million numbers in the smallest run; a model in memory refers to external
            data; or the engine does not offer the provider, cannot load or run the model, or meets a limit.
        FileNotFoundError: The file does not exist.

    Examples:
        >>> from sdpa_xp_export import TensorSpec, export_attention
        >>> qkv = TensorSpec("float32", ("B", 2, "L", 16))
        >>> verify(export_attention(qkv, qkv, qkv, is_causal=True), seed=0).agrees
        True

    References:
        Higham, "Accuracy and Stability of Numerical Algorithms", 2nd ed., section 3.5: the error of a sum of
        products is bounded relative to the sum of their sizes.
    """
    functions = {name: value for name, value in (("attn_mask", attn_mask), ("bias", bias)) if value is not None}
    check_engine("verify", engine, provider)
    _check_arguments(call, functions, thorough, watch)
    if check_flag("verify", "record", record):
        check_recordable(model)
    check_limits("verify", timeout, memory)
    seed = seed_of("verify", seed)
    with deadline(float(timeout)):
        loaded, stated, blocks, cut = subject_of(model, call, functions, memory)
        settings = trial_settings(stated, blocks, cut, thorough=thorough, seed=seed, memory=memory)
        scores = max(math.prod(scores_shape(stated, setting.lengths)) for setting in settings)
        with runner(loaded, provider, engine, timeout, memory, scores=scores) as running:
            computed_in = running.computed_dtype(stated)

            def drawn() -> Iterator[Case]:
                rng, borders = np.random.default_rng(seed), [*constants(stated), *blocks]
                rows = THOROUGH_ROWS if thorough else DEFAULT_ROWS
                several = trials(stated, settings, rng, computed_in=computed_in, borders=borders, rows=rows)
                return of_metadata(stated, several) if call is None else several

            number, total = itertools.count(1), len(running.providers) * len(settings)

            def done(shown: str) -> None:
                if watch is not None:
                    watch(next(number), total, shown)

            runs, facts = running.run(drawn, partial(judged, computed_in=computed_in), done)
    facts |= {name: facts[name] or "unknown" for name in ("form", "reason")}
    if call is not None and not (runs and all(run.agreement.agrees for run in runs)):
        facts["notes"] += tuple(filter(None, (other_call_note(loaded, stated),)))
    report = Report(
        **facts,
        runs=runs,
        left_out=left_out(stated, blocks, settings, memory),
        call=stated,
        from_metadata=call is None,
        computed_in=computed_in,
        seed=seed,
    )
    if record:
        write_verdict(model, loaded, report, call_from_metadata=call is None and not functions)
    return report


def _check_arguments(call: object, functions: Mapping[str, object], thorough: object, watch: object) -> None:
    check_flag("verify", "thorough", thorough)
    for name, value in functions.items():
        check_instance("verify", name, value, Mask if name == "attn_mask" else Bias)
        if call is not None:
            rule = f"`{name}` must be among the arguments in `call` if that is given"
            raise ArgumentValueError("verify", rule, {name: value})
    if watch is not None:
        check_function("verify", "watch", watch, ("done", "total", "shown"))
