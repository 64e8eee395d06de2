"""From a call to a checked ONNX model: check, choose, write."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import onnx
from onnx import helper

import sdpa_xp
from sdpa_xp._checks.keywords import explains_keywords
from sdpa_xp.biases import Bias
from sdpa_xp.masks import Mask

from . import _arrays
from ._call.call import ExportCall, FormChoice, Layout, OutputName, WideDtype, checked_call
from ._call.text import digest, to_json
from ._files.model import Metadata, Model, with_weights, without_numbers
from ._graph import CONTRIB, Graph, GraphSettings, GraphValue, value_info
from ._runtime.releases import DEFAULT_RUNTIME, Runtime
from .forms.choice import FORMS, check_tensors, choose
from .forms.traced_attention import write_call
from .spec import TensorSpec

MATH_MODE = "no TF32 (CUDA: use_tf32=0)"
"""The math mode in which a model's numbers hold, and the option that a session on CUDA needs for it."""


@explains_keywords
def export_attention(
    query: TensorSpec,
    key: TensorSpec,
    value: TensorSpec,
    attn_mask: Mask | TensorSpec | None = None,
    *,
    bias: Bias | TensorSpec | None = None,
    is_causal: bool = False,
    scale: float | TensorSpec | Any | None = None,
    softcap: float | None = None,
    sinks: TensorSpec | Any | None = None,
    dropout_p: float = 0.0,
    softmax_dtype: WideDtype | None = None,
    layout: Layout = "...HLE",
    past_key: TensorSpec | None = None,
    past_value: TensorSpec | None = None,
    past_lengths: TensorSpec | None = None,
    outputs: Sequence[OutputName] = ("output",),
    form: FormChoice = "auto",
    opset: int | None = None,
    runtime: str = DEFAULT_RUNTIME,
) -> Model:
    """Return the ONNX graph that computes `sdpa_xp.scaled_dot_product_attention` of the same arguments.

    The inputs of the graph have the names of the arguments, and its output is `output`. It follows the contract
    of the library, as inside a jit: a NaN that any query attends to may reach all rows of its head and batch
    entry. Heads and widths are integers; any other length may be a name. Letters are those of the library; `P`
    is the length of a cache.

    Args:
        query: float16, bfloat16, float32 or float64, (..., Hq, L, E).
        key: The same dtype, (..., H, S, E).
        value: The same dtype, (..., H, S, Ev).
        attn_mask: A mask of `sdpa_xp.masks`, with specs instead of arrays, which become inputs with the names
            of its arguments; or a spec that broadcasts to (..., Hq, L, S), "bool" or of the query's dtype.
        bias: A bias of `sdpa_xp.biases`, likewise; or a spec that broadcasts to (..., Hq, L, S).
        is_causal: Query i attends to key j only if j <= i; with a cache, j <= i + S - L; with `past_lengths`,
            j <= i + past_lengths[b].
        scale: A finite number, default 1 / sqrt(E); or a spec that broadcasts to (..., Hq, L, 1).
        softcap: A positive number; None or 0 turns it off.
        sinks: A spec of (..., Hq).
        dropout_p: Must be 0, since a graph draws no random numbers.
        softmax_dtype: None, or "float64" to compute float32 inputs in float64.
        layout: "...HLE", or "...LHE" with the head axis after the length.
        past_key: A cache, (..., H, P, E), to which the new keys are appended; the graph returns both as
            `present_key`. S is then "P+L", and the queries are the last L tokens. P may be 0 in a run.
        past_value: (..., H, P, Ev), likewise, with `present_value`.
        past_lengths: An integer spec, (B,), for a cache with free space: the number of tokens in it. S is then
            P, the capacity, and `present_key` has P rows, with the new tokens after those in the cache. After a
            run, add the number of new real tokens. On the CPU, a run fails if the new tokens do not fit; a
            negative length may give a wrong result.
        outputs: The outputs of the graph: some of "output", "lse", "weights", "scores", and of the statistics
            "row_max", "entropy" and "key_sums" of `attention_statistics`.
        form: The operators of the graph. "auto" chooses the best form for the call among those that are correct
            on the runtime and on every later release that was tried. "attention" is ai.onnx Attention;
            "multi_head" and "grouped_query" are operators of com.microsoft; "primitive" is MatMul and Softmax;
            "tiled" puts these into a Loop, in memory linear in S.
        opset: 23 to 27 for "attention", by default 23, or 24 with key lengths; 17 to 27 for the others, by
            default 18. 25 needs onnxruntime 1.32; windows are then attributes of Attention.
        runtime: The oldest onnxruntime that will run the file, from 1.23 on, and its provider, such as
            "onnxruntime>=1.28;cpu": cpu, cuda (where no graph was run; open a session with {"use_tf32": "0"}),
            or in a browser, without bfloat16, wasm (WebAssembly), webgpu, or web, which is correct on both;
            also onnxruntime's own names. Releases after 1.32.0 were not tried, and are assumed to compute the
            same. "openvino>=2026.4;cpu" is for OpenVINO, without float64 and with
            INFERENCE_PRECISION_HINT="f32". "onnx" is for any other program, without operators of com.microsoft;
            not each is right: onnxruntime computes a float64 Attention in float32.

    Returns:
        The model, which has passed the full onnx.checker; a `LargeModel` with more than 1.75 GiB of
            initializers. The metadata contain the call, the form with the reason, and the runtime.

    Raises:
        TypeError: An argument has a wrong type or dtype, or a function of the indices cannot be traced to ONNX.
        ValueError: Shapes do not fit, or the form, the opset or the runtime cannot compute the call. The
            message names the form or release that can.

    Examples:
        >>> from sdpa_xp import masks
        >>> qkv = TensorSpec("float32", ("B", 8, "L", 64))
        >>> lengths = masks.padding(TensorSpec("int64", ("B",)))
        >>> model = export_attention(qkv, qkv, qkv, lengths, is_causal=True)
        >>> [value.name for value in model.graph.input]
        ['query', 'key', 'value', 'key_lengths']

    References:
        ONNX operators, Attention-23 to Attention-25; onnxruntime, ContribOperators.md.
    """
    others = softcap, sinks, dropout_p, softmax_dtype, layout, past_key, past_value, past_lengths, outputs
    call = checked_call("export_attention", query, key, value, attn_mask, bias, is_causal, scale, *others)
    return export_call(call, form=form, opset=opset, runtime=runtime)


def export_call(
    call: ExportCall, *, form: FormChoice = "auto", opset: int | None = None, runtime: str = DEFAULT_RUNTIME
) -> Model:
    """Return the model of a call that has been checked."""
    function = "export_attention"
    parsed = Runtime.parse(function, runtime)
    check_tensors(function, call, parsed)
    name, reason = choose(function, call, form, opset, parsed)
    written = FORMS[name]
    if opset is None:
        opset = written.opset_of(call) if written.opset_of else written.default_opset
    graph = Graph(GraphSettings(opset=opset, runtime=parsed, namespace=_arrays))
    outputs, text = write_call(graph, call, name), to_json(call)
    stated = {"call": text, "digest": digest(text, call.initializers), "form": name, "reason": reason}
    return finished_model(graph, outputs, stated)


def finished_model(graph: Graph, outputs: Mapping[str, GraphValue], stated: Mapping[str, str]) -> Model:
    """Return the model, which has passed onnx.checker, with what is stated of it in its metadata.

    Its outputs get the names that they stand under.
    """
    names, written = {}, graph.written
    graph.prune(outputs.values())
    for name, value in outputs.items():
        computed = any(value.name in node.output for node in written.nodes)
        # An output of the graph must be an output of a node, and an input cannot be renamed.
        output = value if computed else graph.copy(value)
        names[output.name] = name
    _rename(written.nodes, names)
    infos = [value_info(name, value) for name, value in outputs.items()]
    constants = written.used_constants()
    proto = helper.make_graph(written.nodes, "attention", written.inputs, infos, constants)
    opsets = [helper.make_opsetid("", graph.settings.opset)]
    ir_version = helper.find_min_ir_version_for(opsets)  # onnx knows none for the opset of another domain
    if any(node.domain == CONTRIB for node in written.nodes):
        opsets.append(helper.make_opsetid(CONTRIB, 1))
    model = helper.make_model(proto, opset_imports=opsets, producer_name="sdpa_xp")
    model.ir_version = ir_version
    finished = with_weights(model, written.weights, graph.function)
    bare = without_numbers(finished)
    onnx.checker.check_model(bare, full_check=True)  # the checker takes at most 2 GiB
    facts = {"version": sdpa_xp.__version__, "runtime": str(graph.runtime), "math": MATH_MODE}
    Metadata(**facts, **stated).write(model, bare)
    return finished


def _rename(nodes: list[onnx.NodeProto], names: Mapping[str, str]) -> None:
    """Rename values, also where the body of a loop refers to them."""
    for node in nodes:
        node.input[:] = [names.get(name, name) for name in node.input]
        node.output[:] = [names.get(name, name) for name in node.output]
        for attribute in node.attribute:
            if attribute.type == onnx.AttributeProto.GRAPH:
                _rename(list(attribute.g.node), names)
