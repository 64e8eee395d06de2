"""From a layer or a function in array-API code to a checked ONNX model, by calling it."""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from numbers import Number
from typing import Any

from sdpa_xp._checks import shown
from sdpa_xp.errors import ArgumentTypeError, ArgumentValueError

from . import _arrays
from ._call.call import FormChoice
from ._call.mask_analysis import CallNumbers, numbers_as_json, numbers_of
from ._dtypes.dtype import FLOATING, default_dtypes
from ._files.model import Model
from ._graph import Graph, GraphSettings, GraphValue, moved_inputs
from ._layer.call_signature import Caller
from ._layer.layer import (
    bound_arguments,
    foreign_errors_reworded,
    is_output,
    outputs_of,
    parameter_arrays,
    signature_of,
    with_arrays,
    with_parameters,
)
from ._layer.state import State
from ._runtime.releases import DEFAULT_RUNTIME, Runtime
from .export import finished_model
from .forms.choice import FORMS, check_loaded_opset, check_opset
from .forms.traced_attention import TracedAttention, operand_sources
from .spec import TensorSpec, array_spec_hint

FUNCTION = "to_onnx"
NOT_CALLABLE_HINT = "Pass a function or a layer. A model, or its file, is run by onnxruntime.InferenceSession."


def to_onnx(
    layer: Callable[..., Any],
    *inputs: Any,
    form: FormChoice = "auto",
    opset: int | None = None,
    runtime: str = DEFAULT_RUNTIME,
    **keywords: Any,
) -> Model:
    """Return the ONNX graph of a layer, or of any function in array-API code, with the attention that it calls.

    The layer is called once, with a value of the graph instead of each spec. Each operation on a value becomes
    a node, and an array of any library an initializer. Calls of sdpa_xp's attention functions are written as by
    `export_attention`. A `KVCache` of values supports `append` (not in place), `attend` and `attend_state`;
    return its `key` and `value`, or what is `stored`, for the next step. Derivatives (`jvp`,
    `scaled_dot_product_attention_vjp` and the functions beside it) are written in operators of the array API,
    whatever the `form`, and hold all L x S scores.

    A name in a spec is an entry of `x.shape`. You can use it in a shape, an index or a slice, and compute with
    it (`L // 2`, `x / L**0.5`). Python cannot use it as a number: `int()`, `range()` and comparisons refuse it.

    Args:
        layer: A function, a method or a layer. Its namespace is `x.__array_namespace__()`. If the layer has
            `parameters`, a mapping of arrays by name, the initializers have these names. If it also has
            `with_parameters`, like a `sdpa_xp.layers.Layer`, the file contains each array unchanged.
        inputs: The positional arguments of the layer, with a spec for each array, also within a mask or a bias.
            Arguments without specs are passed unchanged.
        form: The form of each attention, as in `export_attention`.
        opset: 17 to 27. The default is the newest before 25 in which the release supports every form.
        runtime: As in `export_attention`.
        keywords: The keyword arguments of the layer, with specs as in `inputs`.

    Returns:
        The model, as from `export_attention`. Its inputs have the names of the layer's arguments. Its output is
            `output`, or `output_0`, `output_1` and so on; a NamedTuple or a mapping gives their names.

    Raises:
        TypeError: The layer is not callable; it uses a function that is not in the array API (as a torch module
            does: use torch.onnx.export); or it needs a number that is known only in a run.
        ValueError: Shapes do not fit; the form, the opset or the runtime cannot compute a call; or the layer
            changes a large array after the graph has used it.

    Examples:
        >>> import numpy as np
        >>> from sdpa_xp import scaled_dot_product_attention
        >>> weight = np.eye(8, dtype="float32")
        >>> def layer(x):
        ...     return scaled_dot_product_attention(x @ weight, x, x, is_causal=True)
        >>> model = to_onnx(layer, TensorSpec("float32", ("B", 2, "L", 8)))
        >>> (
        ...     [value.name for value in model.graph.input],
        ...     [value.name for value in model.graph.output],
        ... )
        (['x'], ['output'])

    References:
        ONNX operators; the Python array API standard 2025.12.
    """
    if not callable(layer):
        got = {"layer": type(layer).__name__}
        raise ArgumentTypeError(FUNCTION, "`layer` must be callable", got, NOT_CALLABLE_HINT)
    parsed = Runtime.parse(FUNCTION, runtime)
    hint = "Pass a TensorSpec for each array, and the other arguments as they are."
    bound = bound_arguments(FUNCTION, layer, inputs, keywords, hint)
    return model_of_call(layer, bound, TracedAttention(form, parsed, opset))[0]


def model_of_call(
    layer: Callable[..., Any],
    bound: inspect.BoundArguments,
    attention: TracedAttention,
    caller: Caller | None = None,
    state: State | None = None,
) -> tuple[Model, Any]:
    """Return the model of a layer that is called with specs, and what the layer returned.

    Each attention is as `attention` writes it. With a caller, the results have the dtypes of its library, and
    may be numbers that are no outputs.
    """
    fixed, runtime = _fixed_names(bound), attention.runtime
    traced = _traced(layer, bound, attention, caller, state)
    check_loaded_opset(FUNCTION, attention.opset, runtime)  # a layer may call no attention, which checks it
    for name, value in traced.outputs.items():
        runtime.check_dtype(FUNCTION, f"{name}.dtype", value.elem_type)
    stated = {
        "forms": json.dumps([{"form": form, "reason": reason} for _, form, reason in attention.written]),
        "numbers": numbers_as_json(traced.numbers),
        "arguments": json.dumps(fixed),
    }
    return finished_model(traced.graph, traced.outputs, stated), traced.result


@dataclass(frozen=True, slots=True)
class _Traced:
    """The graph of a layer, and what its file says."""

    graph: Graph
    result: Any
    """What the layer returned."""
    outputs: dict[str, GraphValue]
    numbers: list[CallNumbers]
    """The numbers of each attention."""


def traced_numbers(layer: Callable[..., Any], arguments: Mapping[str, Any]) -> list[CallNumbers]:
    """Return the numbers of each attention that a layer calls with these arguments, of which some are specs."""
    attention = TracedAttention("auto", Runtime.parse(FUNCTION, DEFAULT_RUNTIME))
    return _traced(layer, signature_of(layer).bind(**arguments), attention).numbers


def _traced(
    layer: Callable[..., Any],
    bound: inspect.BoundArguments,
    attention: TracedAttention,
    caller: Caller | None = None,
    state: State | None = None,
) -> _Traced:
    """Call a layer with values of a graph instead of specs."""
    runtime = attention.runtime
    settings = GraphSettings(
        function=FUNCTION,
        opset=_opset(attention.opset, attention.form, runtime),
        runtime=runtime,
        namespace=_arrays,
        attend=attention,
        numpy_floats_promote=caller is not None and caller.is_numpy,
    )
    names = {id(array): name for name, array in parameter_arrays(layer).items()}
    graph = Graph(settings, array_names=names)

    def as_input(name: str, spec: TensorSpec) -> GraphValue:
        runtime.check_dtype(FUNCTION, f"{name}.dtype", spec.dtype)
        return graph.input(graph.free_name(name), spec.dtype, spec.shape)

    for name, argument in bound.arguments.items():
        bound.arguments[name] = with_arrays(argument, name, as_input)
    if not graph.written.inputs:
        rule = "there must be a TensorSpec among the arguments of `layer`"
        hint = array_spec_hint(bound.arguments)
        raise ArgumentTypeError(FUNCTION, rule, {"arguments": [*bound.arguments]}, hint)
    traced_layer = with_parameters(layer, lambda _, array: graph.from_array(array))
    # The floats that a layer itself makes are float64 if it takes no narrower ones.
    floats = {value.elem_type for value in graph.named.values()} & {*FLOATING}
    defaults = caller.dtypes if caller else ("float64" if floats == {"float64"} else "float32", "int64")
    with (
        foreign_errors_reworded(FUNCTION, layer, open_lengths=bool(graph.lengths.sources)),
        _no_value_kept(state or State(layer)),
        default_dtypes(*defaults),
    ):
        result = traced_layer(*bound.args, **bound.kwargs)
    outputs = _outputs(graph, result, numbers_stay=caller is not None)
    moved = moved_inputs(graph.written.nodes, [value.name for value in graph.written.inputs])
    numbers = [numbers_of(call, operand_sources(call, moved)) for call, *_ in attention.written]
    return _Traced(graph, result, outputs, numbers)


@contextmanager
def _no_value_kept(state: State) -> Iterator[None]:
    """Refuse a layer that keeps values of its graph, and let it hold what it held before."""
    rule = "`layer` must keep no value of a graph, which is no array in another call"
    hint = "Compute it in each call, or return it."
    if before := state.names_of_values():
        raise ArgumentValueError(FUNCTION, rule, {"kept by an earlier call": ", ".join(before)}, hint)
    try:
        yield
    finally:
        kept = state.put_back()
    if kept:
        raise ArgumentValueError(FUNCTION, rule, {"kept": ", ".join(kept)}, hint)


def _fixed_names(bound: inspect.BoundArguments) -> list[str]:
    """Return the names of the arguments that are not inputs of the graph; of `**keywords`, each name."""
    kinds = {name: parameter.kind for name, parameter in bound.signature.parameters.items()}
    named = {
        name: value for name, value in bound.arguments.items() if kinds[name] != inspect.Parameter.VAR_KEYWORD
    }
    for name in bound.arguments.keys() - named.keys():
        named |= bound.arguments[name]
    return [
        name
        for name, value in named.items()
        if not isinstance(value, TensorSpec) and kinds.get(name) != inspect.Parameter.VAR_POSITIONAL
    ]


def _opset(opset: int | None, form: str, runtime: Runtime) -> int:
    check_opset(FUNCTION, opset, runtime)
    if opset is not None:
        return opset
    newest = FORMS["attention"]  # the form that needs the newest opset; a graph has one for all of its calls
    may_choose_it = runtime.is_onnxruntime and not runtime.is_before(newest.since)
    return newest.auto_opsets[-1] if may_choose_it or form == newest.name else FORMS["primitive"].default_opset


def _outputs(graph: Graph, result: Any, *, numbers_stay: bool) -> dict[str, GraphValue]:
    """Return the outputs of the graph by name, each of which is a separate value."""
    outputs: dict[str, GraphValue] = {}
    used = graph.used_names
    for name, part in outputs_of(result):
        if not isinstance(name, str) or not name:
            rule = "the keys of the mapping that `layer` returns must be names of outputs, such as 'output'"
            error = ArgumentValueError if isinstance(name, str) else ArgumentTypeError
            raise error(FUNCTION, rule, {"key": repr(name)})
        if name in used or name in outputs:
            rule = "an output must not have the name of an argument, a parameter, or another value"
            hint = "Rename the argument, or return a mapping or a NamedTuple, whose names the outputs get."
            raise ArgumentValueError(FUNCTION, rule, {"output": repr(name)}, hint)
        if numbers_stay and isinstance(part, Number):
            continue
        if not is_output(part):
            rule = "`layer` must return arrays, also in tuples, lists, mappings and dataclasses"
            raise ArgumentTypeError(FUNCTION, rule, {name: type(part).__name__})
        value = graph.operand(part)
        value = graph.equal_values.get(value.name, value)
        used_values = {output.name for output in outputs.values()}
        copy = graph.copy(value)
        outputs[name] = copy if value.name in used_values else graph.here(value)
    if not outputs:
        raise ArgumentTypeError(FUNCTION, "`layer` must return an array", {"returned": shown(result)})
    return outputs
