"""From a call to a checked ONNX model: check, choose, write."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import onnx

import sdpa_xp
from sdpa_xp.biases import Bias
from sdpa_xp.checks import message
from sdpa_xp.masks import Mask
from sdpa_xp_export.call import Arguments, Call
from sdpa_xp_export.checking import checked
from sdpa_xp_export.choice import FORMS, choose
from sdpa_xp_export.graph import Graph
from sdpa_xp_export.metadata import to_json
from sdpa_xp_export.runtime import DEFAULT_OPSET, DEFAULT_RUNTIME, OPSETS, Runtime
from sdpa_xp_export.spec import TensorSpec
from sdpa_xp_export.structure import counts_real_keys


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
    softmax_dtype: str | None = None,
    layout: str = "...HLE",
    past_key: TensorSpec | None = None,
    past_value: TensorSpec | None = None,
    past_lengths: TensorSpec | None = None,
    outputs: Sequence[str] = ("output",),
    form: str = "auto",
    opset: int | None = None,
    runtime: str = DEFAULT_RUNTIME,
) -> onnx.ModelProto:
    """The ONNX graph that computes `sdpa_xp.scaled_dot_product_attention` of the same arguments.

    Its inputs are named as the arguments that are given, its output `output`. The semantics are those of the
    library: a row with no key to attend is 0, and a NaN or inf in a key that no query attends adds nothing.

    Shapes:
        `L` queries, `S` keys, `E` width of a query or key, `Ev` width of a value, `Hq` query heads,
        `H` key heads, `...` leading axes. Heads and widths are ints; any other length may be a name.

    Args:
        query: float16, float32 or float64, (..., Hq, L, E).
        key: The same dtype, (..., H, S, E).
        value: The same dtype, (..., H, S, Ev).
        attn_mask: "bool" (True = may attend) or the query's dtype (added); broadcasts to (..., Hq, L, S).
        bias: The query's dtype; broadcasts to (..., Hq, L, S).
        is_causal: Query i attends key j only if j <= i.
        scale: A finite number; default 1 / sqrt(E).
        softcap: A positive number; None or 0 is off.
        form: `"attention"` is ai.onnx Attention, `"primitive"` is MatMul and Softmax, `"auto"` the first of
            these that computes the call right on the runtime.
        opset: 23 or 24 for `"attention"`, 17 to 24 for `"primitive"`. Default 23 and 17; with `"auto"` an
            opset below 23 asks for `"primitive"`.
        runtime: The oldest release that has to compute it right and the provider it is meant for, as
            `"onnxruntime>=1.28;cpu"`; the provider is `cpu` or `cuda`. A half dtype is computed in float32
            for `cpu`, and by the kernel's own accumulation for `cuda` in the form `"attention"`.

    Returns:
        The model, which has passed onnx.checker in full. Its metadata holds the call, the form, the reason
            for the form, and the runtime, from which `verify` knows what it has to compute.

    Raises:
        TypeError: An argument of a wrong type or dtype; names the argument.
        ValueError: Shapes that do not fit, or a form, an opset or a runtime that cannot compute the call;
            names the argument, and the form or release that can.

    Examples:
        >>> qkv = TensorSpec("float32", ("B", 8, "L", 64))
        >>> model = export_attention(qkv, qkv, qkv, is_causal=True)
        >>> [node.op_type for node in model.graph.node]
        ['Attention']

    References:
        ONNX operators, Attention-23 and Attention-24.
    """
    function = "export_attention"
    given = Arguments(
        attn_mask,
        bias,
        is_causal,
        scale,
        softcap,
        sinks,
        softmax_dtype,
        layout,
        past_key,
        past_value,
        past_lengths,
        outputs,
    )
    call = checked(function, query, key, value, given)
    return export_call(call, form=form, opset=opset, runtime=runtime, function=function)


def export_call(
    call: Call,
    *,
    form: str = "auto",
    opset: int | None = None,
    runtime: str = DEFAULT_RUNTIME,
    function: str = "export_attention",
) -> onnx.ModelProto:
    """The model of a call that has been checked."""
    target = Runtime.parse(function, runtime)
    name, reason = choose(function, call, form, opset, target)
    graph = Graph(_opset(function, name, opset, call), call.held)
    metadata = {
        "sdpa_xp.version": sdpa_xp.__version__,
        "sdpa_xp.call": to_json(call),
        "sdpa_xp.form": name,
        "sdpa_xp.reason": reason,
        "sdpa_xp.runtime": str(target),
    }
    model = graph.model(FORMS[name].write(graph, call, target), metadata)
    onnx.checker.check_model(model, full_check=True)
    return model


def _opset(function: str, form: str, opset: int | None, call: Call) -> int:
    allowed = OPSETS[form]
    if opset is None:
        return allowed[-1] if form == "attention" and counts_real_keys(call) else DEFAULT_OPSET[form]
    if opset not in allowed:
        rule = f"`opset` must be {allowed[0]} to {allowed[-1]} for form {form!r}"
        raise ValueError(message(function, rule, {"opset": repr(opset)}))
    return opset
