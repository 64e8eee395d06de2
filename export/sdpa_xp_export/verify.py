"""Run a model in onnxruntime, and compare it with the float64 reference of its call."""

from __future__ import annotations

import itertools
import math
import os
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from sdpa_xp._checks.keywords import check_flag, check_function, check_instance, explains_keywords
from sdpa_xp.biases import Bias
from sdpa_xp.errors import ArgumentValueError
from sdpa_xp.masks import Mask
from sdpa_xp_export._call.call import ExportCall
from sdpa_xp_export._call.numbers import constants
from sdpa_xp_export._model.entries import exported_models
from sdpa_xp_export._model.large_model import Model
from sdpa_xp_export._runtime.limits import TIMEOUT, check_limits, check_time, deadline
from sdpa_xp_export._runtime.process import RuntimeProcess, runtime_process
from sdpa_xp_export._runtime.releases import ProviderName
from sdpa_xp_export._runtime.session import runtime_notes, stated_runtime
from sdpa_xp_export._verify.left_out import left_out
from sdpa_xp_export._verify.loaded import blocks_of, loaded_model
from sdpa_xp_export._verify.row_sample import DEFAULT_ROWS, THOROUGH_ROWS
from sdpa_xp_export._verify.seeds import seed_of
from sdpa_xp_export._verify.stated_call import (
    check_interface,
    computed_dtype,
    of_metadata,
    other_call_note,
    stated_call,
    written_call,
)
from sdpa_xp_export._verify.trial_lengths import OF_A_NUMBER, check_size, numbers_within
from sdpa_xp_export._verify.trial_settings import Setting, trial_settings
from sdpa_xp_export._verify.trials import TrialOutcome, judge, outcome, trials
from sdpa_xp_export.report import Placement, Report, Run
from sdpa_xp_export.spec import evaluated

MANY_SCORES = 2**22
"""Runs with more scores than that give their memory back."""


@explains_keywords
def verify(
    model: Model | str | os.PathLike[str],
    *,
    call: Mapping[str, Any] | None = None,
    provider: ProviderName | None = None,
    seed: int | None = None,
    attn_mask: Mask | None = None,
    bias: Bias | None = None,
    thorough: bool = False,
    watch: Callable[[int, int, str], None] | None = None,
    timeout: float = TIMEOUT,
    memory: int | None = None,
) -> Report:
    """Run `model` in onnxruntime, and compare its outputs with the float64 reference.

    The inputs are random. Lengths and batches are 1 to 9; the lengths on both sides of each number in a mask or
    a bias and of each block of the graph; and longer ones of up to 2,053 tokens, if a run has at most 38
    million scores. The past of a cache may be empty. Integers are random, or all have their smallest or largest
    allowed value. In some runs the scores are some hundreds, and in some they are some ten thousands. In others
    a score, all scores or the biases of a row are beyond each finite number that a kernel takes for -inf. Masks
    have rows without keys, batch entries have different lengths, and keys that no query attends to are NaN. In
    some runs a query, or a key or value that some queries attend to, is NaN.

    In a long run, only a sample of the rows is compared: the first, the last, the rows next to each number and
    each block boundary, and some random ones.

    Each verification also tries 34 random lengths of up to 2,053 tokens, others than the one before, so
    verifications that are repeated, as in CI, can find a fault at a single length.

    Args:
        model: The result of `export_attention`, or the path of its file, which may have external data.
        call: The arguments of `export_attention` that you expect the model to compute, by name. By default the
            call is read from the model's metadata, which may describe a different call. With `call`, the
            metadata are not used.
        provider: `"cpu"`, `"cuda"`, or onnxruntime's own name of the provider. By default, the CPU, and also
            CUDA if it starts on this machine. On CUDA the session has `use_tf32=0`.
        seed: The seed of the random inputs and of the random lengths. By default, each verification draws one,
            and the report names it. Pass it to repeat these runs.
        attn_mask: The mask that the model was exported with. Pass it if it contains a `from_function` or
            a class of your own, which cannot be written to the metadata.
        bias: The bias that the model was exported with. Likewise.
        thorough: If True, `verify` takes minutes: it tries every length up to 17, five lengths around each
            number, large scores at all of them, longer runs, and more rows of each run.
        watch: A function to show the progress. It is called after each run with the number of runs so far, the
            number of all runs, and the lengths and the provider of the run.
        timeout: The most seconds that `verify` may take, all runs together: to read the call, to compute the
            inputs and the reference, and for onnxruntime to load and to run the model. The start of Python and
            onnxruntime does not count. The model runs in a process of its own, which ends when it meets a
            limit, or with Ctrl-C. The reference is computed in yours, which asks for the time between small
            steps, so it may end some seconds late.
        memory: The most bytes that the model may take there. By default, 8 GiB and four times the model, and
            more if a run has more than 117 million scores. The inputs and the reference are in your process.
            If you pass `memory`, they stay below it too, unless it is less than 100 MB or the lengths of the
            call are fixed: no run has more scores, or numbers in an input, than `memory` / 40 or a million. A
            call is refused if its smallest run has more than `memory` / 4 numbers. Without `memory`, a file may
            make your process take some GB. It does not limit the memory of a GPU.

    Returns:
        A report. Each output of each run has its error, the bound, the rows that were compared, the time and
            the peak of memory (not on CUDA). Each node has the provider that it ran on, from the profile of
            the run. The
            report also lists the numbers of the call that were not tested, because a longer run would have too
            many scores.

    Raises:
        TypeError: An argument has a wrong type. The message names the argument.
        ValueError: The file is not an ONNX model; the model has no metadata or those of several that were
            merged, or its numbers have changed since the export; its inputs or outputs do not fit its call,
            or have more than 268 million numbers in the smallest run; a model in memory refers to external
            data; or onnxruntime does not offer the provider, or cannot start it here. Also if onnxruntime
            cannot load or run the model, or if the model meets a limit or crashes its process; the message says
            which.
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
    _check_arguments(call, functions, thorough, watch)
    check_limits("verify", timeout, memory)
    seed = seed_of("verify", seed)
    with deadline(float(timeout)) as limit:
        loaded = loaded_model("verify", model, "`model` must be an ONNX model, or the path of its file")
        stated = stated_call(loaded, functions) if call is None else written_call(call)
        check_interface(loaded, stated)
        check_size("verify", stated, numbers_within(memory, OF_A_NUMBER))
        blocks = blocks_of(loaded)
        settings = trial_settings(stated, blocks, thorough=thorough, seed=seed, memory=memory)
        scores = max(_scores(stated, setting) for setting in settings)
        with runtime_process(loaded, timeout, memory, scores=scores) as runtime:
            with limit.paused():  # the start of Python is no fault of the model
                on_providers = runtime.providers(provider)
            report = verified(
                runtime,
                loaded,
                stated,
                settings,
                blocks,
                on_providers,
                seed=seed,
                rows=THOROUGH_ROWS if thorough else DEFAULT_ROWS,
                from_metadata=call is None,
                watch=watch,
                memory=memory,
            )
    if call is not None and not report.agrees and (note := other_call_note(loaded, stated)):
        return replace(report, notes=(*report.notes, note))
    return report


def verified(
    runtime: RuntimeProcess,
    model: Model,
    call: ExportCall,
    settings: list[Setting],
    blocks: list[int],
    on_providers: list[str],
    *,
    seed: int = 0,
    rows: int = DEFAULT_ROWS,
    from_metadata: bool = True,
    watch: Callable[[int, int, str], None] | None = None,
    memory: int | None = None,
) -> Report:
    """Run a model, which cuts its queries into `blocks`, with each of `settings` on each provider."""
    computed_in, borders = computed_dtype(model, call, runtime.element_types), [*constants(call), *blocks]
    done, total = itertools.count(1), len(on_providers) * len(settings)
    runs: list[Run] = []
    placements: list[Placement] = []
    modes: list[str] = []
    for provider in on_providers:
        drawn = trials(
            call, settings, np.random.default_rng(seed), computed_in=computed_in, borders=borders, rows=rows
        )
        drawn = of_metadata(call, drawn) if from_metadata else drawn
        outcomes: list[TrialOutcome] = []
        measured: list[tuple[float, int | None]] = []
        with runtime.session(model, provider) as session:
            for trial in drawn:
                run = session.timed(trial.inputs, frees=math.prod(trial.pairs) > MANY_SCORES)
                outcomes.append(outcome(call, trial, run.outputs))
                measured.append((run.seconds, run.peak_bytes))
                if watch is not None:
                    watch(next(done), total, f"{trial.shown} on {provider}")
        placements += session.placements
        modes.append(session.math_mode)
        check_time()
        for name, agreements in judge(call, outcomes, computed_in).items():
            for judged, agreement, (seconds, peak) in zip(outcomes, agreements, measured, strict=True):
                longest, compared, whole = judged.counts
                measures = (seconds, peak, longest, compared, whole, judged.where(name, agreement))
                runs.append(Run(judged.shown, provider, name, agreement, *measures))
    form, reason = (
        ", ".join(dict.fromkeys(exported[name] for exported in exported_models(model) if name in exported))
        for name in ("sdpa_xp.form", "sdpa_xp.reason")
    )
    return Report(
        form or "unknown",
        reason or "unknown",
        runtime.version,
        (*runtime.notes, *runtime_notes(model, runtime.version, on_providers)),
        tuple(runs),
        tuple(placements),
        left_out(call, blocks, settings, memory),
        call,
        from_metadata,
        computed_in,
        runtime=str(stated_runtime(model) or ""),
        seed=seed,
        math_mode=" and ".join(dict.fromkeys(modes)),
    )


def _scores(call: ExportCall, setting: Setting) -> int:
    return math.prod(evaluated(length, setting.lengths) for length in call.sizes.scores_shape)


def _check_arguments(
    call: object,
    functions: Mapping[str, object],
    thorough: object,
    watch: object,
) -> None:
    check_flag("verify", "thorough", thorough)
    for name, value in functions.items():
        check_instance("verify", name, value, Mask if name == "attn_mask" else Bias)
        if call is not None:
            rule = f"`{name}` must be among the arguments in `call` if that is given"
            raise ArgumentValueError("verify", rule, {name: value})
    if watch is not None:
        check_function("verify", "watch", watch, ("done", "total", "shown"))
