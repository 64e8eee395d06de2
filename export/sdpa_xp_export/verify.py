"""Run a model in an engine, such as onnxruntime, and compare it with the float64 reference of its call.

The model of a layer is compared with the layer itself in float64 NumPy.
"""

from __future__ import annotations

import itertools
import math
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from sdpa_xp._checks import shown
from sdpa_xp._checks.keywords import check_flag, check_function, check_instance, check_keys, explains_keywords
from sdpa_xp.biases import Bias
from sdpa_xp.errors import ArgumentTypeError, ArgumentValueError
from sdpa_xp.masks import Mask

from ._call.mask_analysis import CallNumbers, constants, numbers_from_json
from ._dtypes.dtype import ONNX_DTYPE
from ._files.loading import loaded_model
from ._files.model import Model
from ._files.paths import PathArgument, check_is_no_input, free_target, publish
from ._layer.layer import bound_arguments, with_arrays
from ._runtime.limits import TIMEOUT, check_limits, deadline
from ._runtime.releases import EngineName, ProviderName
from ._runtime.session import check_engine
from ._verify.call_cases import DEFAULT_ROWS, THOROUGH_ROWS, drawn_cases, left_out, planned_cases
from ._verify.case_lengths import LayerLengths, scores_shape
from ._verify.cases import Case, Outcome, RunningModel, judged, running_model
from ._verify.files import check_recordable, golden_file, read_golden, write_verdict
from ._verify.inputs import seed_of
from ._verify.layer import BothLayers, words_of
from ._verify.layer_cases import CaseList, Draw, LayerInputs
from ._verify.model import blocks_of, input_specs, missing_note, of_metadata, other_call_note, subject_of
from .report import LayerReport, Report, Run
from .spec import TensorSpec
from .to_onnx import traced_numbers

GOLDEN = PathArgument("verify_layer", "golden")
MOST_UNLUCKY = 3
"""The most runs that may be beyond a bound because it is small by luck; a fault concerns more of them."""
TIMES_AGAIN = 4
"""How often runs that are beyond their bounds are judged again: a bound of few roundings needs many calls."""


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
            and also CUDA, with `use_tf32=0`, if it starts on this machine.
        engine: What runs the model: "onnxruntime", "openvino" (in float32), or "reference", ONNX's own
            evaluator in NumPy, which computes what the standard says and is slow.
        seed: The seed of the random inputs and lengths, to repeat the runs of a report.
        attn_mask: The mask that the model was exported with, if it contains a `from_function` or a class of
            your own, which cannot be written to the metadata.
        bias: The bias, likewise.
        thorough: If True, try many more lengths, scores and rows, which takes minutes.
        watch: A function that is called after each run with the number of runs so far, that of all runs, and
            the lengths and provider of this one.
        timeout: The most seconds for all runs together. The model runs in a process of its own, which ends at a
            limit, or with Ctrl-C.
        memory: The most bytes that the model may take there, not on a GPU: by default 8 GiB and four times the
            model, and more for long calls. If you pass at least 100 MB, inputs and reference in your process
            stay below it too, unless the lengths of the call are fixed.
        record: Whether to write the verdict into the metadata of `model` or its file.

    Returns:
        The report.

    Raises:
        TypeError: An argument has a wrong type.
        ValueError: The file is not an ONNX model; the model has no metadata or those of several that were
            merged, or its numbers have changed since the export; its inputs or outputs do not fit its call,
            or have more than 268 million numbers in the smallest run, or more than memory / 4; a model in
            memory refers to external data; or the engine does not offer the provider, cannot load or run the
            model, or meets a limit.
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
        loaded = loaded_model("verify", model, "`model` must be an ONNX model, or the path of its file")
        stated, blocks, cut = subject_of(loaded, call, functions, memory)
        cases = planned_cases(stated, blocks, cut, thorough=thorough, seed=seed, memory=memory)
        scores = max(math.prod(scores_shape(stated, case.lengths)) for case in cases)
        with running_model(loaded, provider, engine, timeout, memory, scores=scores, call=stated) as running:
            computed_in = running.computed_in

            def drawn() -> Iterator[Case]:
                rng, borders = np.random.default_rng(seed), [*constants(stated), *blocks]
                rows = THOROUGH_ROWS if thorough else DEFAULT_ROWS
                several = drawn_cases(stated, cases, rng, computed_in=computed_in, borders=borders, rows=rows)
                return of_metadata(stated, several) if call is None else several

            number, total = itertools.count(1), len(running.providers) * len(cases)

            def done(shown: str) -> None:
                if watch is not None:
                    watch(next(number), total, shown)

            of_call = partial(Report, left_out=(), call=stated, from_metadata=call is None, seed=seed)
            of_call = partial(of_call, computed_in=computed_in)
            report = running.run(of_call, drawn, partial(judged, computed_in=computed_in), done)
    note = "" if call is None or report.agrees else other_call_note(loaded, stated)
    notes = (*report.notes, *filter(None, [note]))
    missing = left_out(stated, blocks, cases, memory)  # last: a file may state lengths that take long to try
    form, reason = report.form or "unknown", report.reason or "unknown"
    report = replace(report, form=form, reason=reason, notes=notes, left_out=missing)
    if record:
        write_verdict(model, loaded.model, report, call_from_metadata=call is None and not functions)
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


def verify_layer(
    model: Model | str | os.PathLike[str],
    layer: Callable[..., Any],
    *,
    draw: Mapping[str, Draw] | None = None,
    provider: ProviderName | None = None,
    engine: EngineName = "onnxruntime",
    seed: int | None = None,
    thorough: bool = False,
    timeout: float = TIMEOUT,
    memory: int | None = None,
    golden: str | os.PathLike[str] | None = None,
    overwrite: bool = False,
    **keywords: Any,
) -> LayerReport:
    """Run the model that `to_onnx` made of `layer`, and compare its outputs with `layer` in float64.

    The layer is called with NumPy arrays, in float64 and in the dtypes of the model's inputs. It must accept
    the lengths of the first three runs, which are at most 9; the report lists others for which it raised an
    error.

    Args:
        model: The result of `to_onnx`, or the path of its file. All other arguments and errors are as in
            `verify`.
        layer: The layer that the model was exported from: any function, method or object, with weights of any
            library, which are copied to float64. If the layer has no result in float64, the reference has its
            own dtype, and a note in the report says why.
        draw: Functions by the name of an input: `draw[name](rng, shape)`, or `draw[name](rng, shape, lengths)`
            with the lengths of the run by name, returns its values. By default floats are normal, three of four
            booleans are True, and integers fit their use, such as lengths that a mask accepts.
        timeout: The most seconds that the engine may take. The calls of the layer have no limit.
        memory: The most bytes, likewise.
        golden: A file to write if the model agrees, with the inputs of these runs and the results of the layer,
            of up to 16 MiB each. `sdpa-xp verify --golden` repeats them where the layer's code is not.
        overwrite: Whether an existing file `golden` may be replaced.
        keywords: The keyword arguments of the layer, as for `to_onnx`. If one has the name of an argument of
            `verify_layer`, use `functools.partial`.

    Returns:
        A report, as of `verify`.

    Raises:
        TypeError: `model` has a wrong type, or the inputs and keywords do not fit the layer.
        ValueError: `layer` returns something else if it is called again with the same inputs;
            or a name in `draw` or a spec in `keywords` is not an input; or outputs have other names.
        FileExistsError: `golden` exists and `overwrite` is False, or it is the file of the model.

    Examples:
        >>> from sdpa_xp import scaled_dot_product_attention
        >>> from sdpa_xp_export import TensorSpec, to_onnx
        >>> def layer(x, is_causal=False):
        ...     return scaled_dot_product_attention(x, x, x, is_causal=is_causal)
        >>> model = to_onnx(layer, TensorSpec("float32", ("B", 2, "L", 8)), is_causal=True)
        >>> verify_layer(model, layer, is_causal=True).agrees
        True
    """
    rule = "`model` must be what to_onnx returned, or the path of its file"
    loaded = loaded_model("verify_layer", model, rule)
    if len(loaded.parts) == 1 and loaded.parts[0].call:
        rule = "`model` is a call that export_attention wrote; use verify(model)"
        raise ArgumentValueError("verify_layer", rule, {"metadata": loaded.names})
    check_engine("verify_layer", engine, provider)
    check_flag("verify_layer", "thorough", thorough)
    check_limits("verify_layer", timeout, memory)
    if golden is not None:  # before the long work
        target = free_target(golden, GOLDEN, overwrite=check_flag("verify_layer", "overwrite", overwrite))
        check_is_no_input(
            GOLDEN, target, {Path(model): "the model"} if isinstance(model, str | os.PathLike) else {}
        )
    proto = loaded.model
    specs, draws = input_specs(proto), {} if draw is None else draw
    arguments = _checked_arguments(layer, specs, draws, keywords)
    seed = seed_of("verify_layer", seed)

    stated = [numbers for part in loaded.parts for numbers in numbers_from_json(part.numbers)]
    traced, left_out = _traced_numbers(layer, arguments)
    # Names for lengths that are computed may differ between the two; they are never chosen.
    calls = [*(traced or []), *stated]  # a file can state too few
    calls = [call for n, call in enumerate(calls) if call not in calls[:n]]
    chosen = LayerLengths(calls, specs, blocks_of(proto)[0], thorough=thorough, memory=memory)
    inputs = LayerInputs(proto, specs, draws, stated if traced is None else traced, engine)
    # A model that computes in float64 has no wider dtype to be compared in.
    types = {value.type.tensor_type.elem_type for value in (*proto.graph.input, *proto.graph.output)}
    rng, double = np.random.default_rng([seed, 2]), ONNX_DTYPE["float64"] in types
    both = BothLayers(layer, keywords, rng, double=double)
    tried = CaseList(both, inputs, chosen, seed)
    tried.fill()
    _check_outputs(proto, tried.cases[0].exact)

    scores = max((math.prod(call.sizes(case.lengths)) for call in calls for case in tried.cases), default=0)
    widths = ("float64", "float32", "bfloat16", "float16") if both.why_not_wide else ()
    dtypes = {x.dtype.name for case in tried.cases for x in case.direct.values()}
    reference = next((name for name in widths if name in dtypes), "float32" if widths else "float64")
    of_layer = partial(LayerReport, left_out=(*left_out, *tried.left_out), seed=seed, reference=reference)
    with running_model(loaded, provider, engine, timeout, memory, scores=scores) as running:
        report = _run(running, of_layer, tried.cases, both)
    notes = [*report.notes]
    if both.why_not_wide:
        notes.append(f"the reference is the layer in {reference}, not in float64: {both.why_not_wide}")
    if not report.agrees:
        notes.append(missing_note(loaded, layer, keywords))
        notes.append("the golden file was not written, since the model disagrees" if golden is not None else "")
    elif golden is not None:
        data = golden_file(proto, both, tried.cases, [seed, reference, *report.left_out])
        publish(data, target, GOLDEN, overwrite=overwrite)
    return replace(report, notes=tuple(filter(None, notes)))


def verify_golden(
    model: Path,
    golden: Path,
    provider: ProviderName | None,
    engine: EngineName,
    timeout: float,
    memory: int | None,
    record: bool = False,
) -> LayerReport:
    """Repeat the runs of a golden file, and compare the outputs of the model with those of the layer in it."""
    check_engine("verify", engine, provider)
    check_limits("verify", timeout, memory)
    if record:
        check_recordable(model)
    loaded = loaded_model("verify", model, "`model` must be the path of its file")
    cases, of_layer = read_golden(golden, loaded.model)
    with running_model(loaded, provider, engine, timeout, memory) as running:
        report = _run(running, of_layer, cases, None)
    if record:
        write_verdict(model, loaded.model, report)
    return report


def _run(
    running: RunningModel, of_layer: partial[LayerReport], cases: Sequence[Case], both: BothLayers | None
) -> LayerReport:
    """Run all cases on each provider, and return the report, of which `of_layer` has the other fields."""

    def judge(outcomes: Sequence[Outcome], name: str) -> Iterator[Run]:
        kinds: dict[str, list[tuple[Case, Outcome]]] = {}
        for case, outcome in zip(cases, outcomes, strict=True):
            kinds.setdefault(case.extreme, []).append((case, outcome))
        for pairs in kinds.values():
            yield from _judged_runs(pairs, name, both)

    report = running.run(of_layer, lambda: cases, judge)
    return replace(report, form=report.form or "no attention")


def _checked_arguments(
    layer: Callable[..., Any],
    specs: Mapping[str, TensorSpec],
    draws: Mapping[str, Draw],
    keywords: Mapping[str, Any],
) -> dict[str, Any]:
    """Return the arguments of the layer by name: specs for the inputs of the model, and `keywords`."""
    check_keys("verify_layer", "draw", draws, [*specs])
    for name, function in draws.items():
        if not callable(function):
            rule = f'`draw["{name}"]` must be a function of (rng, shape)'
            raise ArgumentTypeError("verify_layer", rule, {name: shown(function)})
    within: set[str] = set()

    def noted(name: str, spec: TensorSpec) -> TensorSpec:
        if name not in specs or name in within:
            rule = "each spec in the keyword arguments must be an input of the model, and each input only once"
            raise ArgumentValueError("verify_layer", rule, {"spec": name, "inputs": ", ".join(specs)})
        within.add(name)
        return spec

    for name, value in keywords.items():
        with_arrays(value, name, noted)
    arguments = {name: spec for name, spec in specs.items() if name not in within} | dict(keywords)
    hint = "Pass the keyword arguments that to_onnx got. The inputs of the model are passed by their names."
    bound_arguments("verify_layer", layer, (), arguments, hint)
    return arguments


def _check_outputs(model: Model, exact: Mapping[str, NDArray[Any]]) -> None:
    """Raise if the outputs of a model are not those of the layer: another exporter may name them."""
    names = [value.name for value in model.graph.output]
    if {*names} != {*exact}:
        rule = "`model` must name its outputs as to_onnx does"
        got = {"outputs": ", ".join(names), "layer": ", ".join(exact)}
        raise ArgumentValueError("verify_layer", rule, got)


def _traced_numbers(
    layer: Callable[..., Any], arguments: Mapping[str, Any]
) -> tuple[list[CallNumbers] | None, list[str]]:
    """Return the numbers of the calls in the layer, and what the report says if the layer cannot be traced.

    A layer that stands for the one that was exported need not be one that can be traced.
    """
    try:
        return traced_numbers(layer, arguments), []
    except Exception as error:  # the layer is anyone's function
        why = f"the layer cannot be traced, {words_of(error)}"
        return None, [f"numbers of the layer that the file does not state: {why}"]


def _judged_runs(pairs: Sequence[tuple[Case, Outcome]], provider: str, both: BothLayers | None) -> list[Run]:
    """Judge the runs; while a few are beyond their bound, judge again with more errors of the layer.

    Where the rounding of one number decides a result, some calls of the layer may be nearly exact by luck.
    """
    cases, outcomes = map(list, zip(*pairs, strict=True))
    for _ in range(TIMES_AGAIN):
        runs = [*judged(outcomes, provider)]
        beyond = {number % len(pairs) for number, run in enumerate(runs) if not run.agreement.agrees}
        if both is None or not 0 < len(beyond) <= MOST_UNLUCKY:
            return runs
        for number in beyond:
            cases[number] = both.with_more_errors(cases[number])
            results = {name: compared.result for name, compared in outcomes[number].outputs.items()}
            outcomes[number] = outcomes[number]._replace(outputs=cases[number].compared(results))
    return [*judged(outcomes, provider)]
