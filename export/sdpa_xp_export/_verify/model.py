"""The model that is verified, and the call that it has to compute."""

from __future__ import annotations

import json
import math
import textwrap
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any, TypeVar, cast

import numpy as np
import onnx

from sdpa_xp._checks.keywords import check_keys
from sdpa_xp.errors import ArgumentValueError, summary

from .._call.call import OF_TRACED_CALLS, OPTIONS, ExportCall, checked_call
from .._call.operands import AXES, Initializer
from .._call.text import digest, from_json, to_json
from .._dtypes.dtype import ONNX_DTYPE
from .._files.model import Model, StatedModel, initializers, messages, without_numbers
from .._runtime.limits import ModelFailedError
from ..spec import TensorSpec
from .case_lengths import MOST_NUMBERS, OF_A_NUMBER, CallLengths, count_of, numbers_within
from .expected import stated_dtype

T = TypeVar("T")
FUSED = ("Attention", "MultiHeadAttention", "GroupQueryAttention")
HALVES = (onnx.TensorProto.FLOAT16, onnx.TensorProto.BFLOAT16)
_DTYPES: dict[int, str] = {number: name for name, number in ONNX_DTYPE.items()}
CUTTING = ("Min", "Div", "Mod", "Less", "LessOrEqual", "Greater", "GreaterOrEqual")
"""The operators by which a graph compares a length with a number, or divides it: a block may end there."""
SHORTEST_BLOCK, LONGEST_BLOCK, FEW = 33, 4096, 64
"""The lengths of blocks that are read from a file, and the most numbers of a tensor that may hold some. Shorter
blocks end within the lengths that are tried anyway."""
MOST_BLOCKS = 3
"""The lengths of blocks that a file may have: the longest, since a file may hold anything."""
HELD = 16
"""Arrays that the reference holds for the scores of a piece, with everything that sets the bound."""
HINT = "Pass `call` to say what the model should compute; `verify` then trusts nothing in the file."


def blocks_of(model: Model) -> tuple[list[int], int]:
    """Return the lengths of the blocks that a loop of a model may cut its queries into, from the file alone.

    Also the number of scores of a block from which on its heads may be cut; 0 if it has none.
    """
    parts = [*messages(model.graph)]
    nodes = [part for part in parts if isinstance(part, onnx.NodeProto)]
    if not any(node.op_type in ("Scan", "Loop") for node in nodes):
        return [], 0
    used = {name for node in nodes if node.op_type in CUTTING for name in node.input}
    tensors = (part for part in parts if isinstance(part, onnx.TensorProto) and part.name in used)
    numbers = sorted({number for tensor in tensors for number in _integers(tensor)})
    blocks = [number for number in numbers if SHORTEST_BLOCK <= number <= LONGEST_BLOCK]
    return blocks[-MOST_BLOCKS:], next((number for number in numbers if number > LONGEST_BLOCK), 0)


def _integers(tensor: onnx.TensorProto) -> list[int]:
    """Return the numbers of a small tensor of int64; of a wrong one, which no engine loads, those it has."""
    if tensor.data_type != onnx.TensorProto.INT64 or math.prod(tensor.dims) > FEW:
        return []
    whole = tensor.raw_data[: len(tensor.raw_data) // 8 * 8]
    return [*map(int, np.frombuffer(whole, "<i8")), *tensor.int64_data]


def stated_call(model: StatedModel, functions: Mapping[str, Any]) -> ExportCall:
    """Return the call in the metadata, if the numbers in the model have not changed since the export."""
    several = model.parts
    if len(several) > 1:
        rule = "`model` must be one exported model, but several exported models were merged"
        hint = (
            "Verify each before you merge them, or pass `call` to say what the whole should compute. "
            "If that is no single call, use verify_layer(model, function)."
        )
        raise ArgumentValueError("verify", rule, {"models": len(several)}, hint)
    stated = several[0] if several else None
    if stated and stated.forms and not stated.call:
        rule = "`model` is a layer that to_onnx wrote; use verify_layer(model, layer)"
        raise _no_call(model, rule, "Where the code of the layer is not, use sdpa-xp verify --golden.")
    if not stated or not stated.call:
        rule = "`model` must be one that export_attention wrote, since `call` is not given"
        hint = "Another program wrote the file, or a tool has dropped its metadata. "
        raise _no_call(model, rule, hint + "Pass `call` to say what it should compute.")
    numbers = {name: Initializer(name, array) for name, array in initializers(model.model)}
    try:  # anyone may have written the file, so each part of its text may be wrong
        call = from_json(stated.call, numbers, functions)
    except (KeyError, TypeError, ValueError, OverflowError, RecursionError) as error:
        rule = f"`model` must be one that export_attention wrote ({summary(error, 'verify')})"
        raise _no_call(model, rule, HINT) from error
    if digest(stated.call, call.initializers) != stated.digest:
        rule = (
            "`model` must contain the call and the numbers that export_attention wrote, "
            "but their digest differs"
        )
        raise ArgumentValueError("verify", rule, {"sdpa_xp.digest": stated.digest}, HINT)
    return call


def _no_call(model: StatedModel, rule: str, hint: str) -> ArgumentValueError:
    got = {"metadata": ", ".join(model.names) or "none"}
    return ArgumentValueError("verify", rule, got, hint)


def of_metadata(call: ExportCall, trials: Iterator[T]) -> Iterator[T]:
    """Yield the trials of a call in the metadata; what the library refuses in it is an error of the model."""
    try:
        yield from trials
    except ModelFailedError:  # the time is up
        raise
    except (TypeError, ValueError, OverflowError) as error:
        why = summary(error, "to_array")
        rule = f"`model` must state a call that the library computes ({why})"
        raise ArgumentValueError(
            "verify", rule, {"call": textwrap.shorten(to_json(call), 200)}, HINT
        ) from error


def other_call_note(model: StatedModel, call: ExportCall) -> str:
    """Return where the call in the metadata is not `call`; empty if it is the same, or if there is none."""
    stated = model.parts[0].options if len(model.parts) == 1 else {}
    if not stated:
        return ""
    wanted = json.loads(to_json(call))
    names = [name for name in OPTIONS if stated.get(name) != wanted.get(name)]
    if not names:
        return ""
    there, here = (
        ", ".join(f"{name}={textwrap.shorten(repr(arguments.get(name)), 60)}" for name in names)
        for arguments in (stated, wanted)
    )
    return f"the metadata of the model state {there}, and `call` has {here}"


def subject_of(
    model: StatedModel, arguments: object, functions: Mapping[str, Any], memory: int | None
) -> tuple[ExportCall, list[int], int]:
    """Return a model's own call, or the caller's `arguments` of `export_attention`, and its `blocks_of`."""
    if arguments is None:
        call = stated_call(model, functions)
    else:
        known = [name for name in OPTIONS if name not in OF_TRACED_CALLS]
        check_keys("verify", "call", arguments, known, ("query", "key", "value"))
        call = checked_call("verify", **cast(Mapping[str, Any], arguments))
    check_interface(model.model, call)
    check_size(call, numbers_within(memory, OF_A_NUMBER))
    return call, *blocks_of(model.model)


def check_interface(model: Model, call: ExportCall) -> None:
    """Refuse a model whose inputs or outputs differ from the call in name, dtype or shape."""
    inputs = {value.name: shown_type(value) for value in model.graph.input}
    wanted = {name: str(spec) for name, spec in call.inputs.items()}
    if [*inputs.items()] != [*wanted.items()]:
        raise _interface_error("inputs", inputs, wanted)
    names = [*call.outputs, *(["present_key", "present_value"] if call.cached else [])]
    outputs = {value.name: shown_type(value).partition("[")[0] for value in model.graph.output}
    stated = {name: stated_dtype(call, name) for name in names}
    if [*outputs.items()] != [*stated.items()]:
        raise _interface_error("outputs", outputs, stated)


def check_size(call: ExportCall, most: int = MOST_NUMBERS) -> None:
    """Refuse a call whose smallest run would hold more than `most` numbers."""
    lengths, scores = CallLengths.for_call(call).least(), call.sizes.scores_shape
    lengths_of = {"L": scores[-2], "S": scores[-1], "Ev": call.value.shape[-1]}
    shapes = [spec.shape for spec in call.inputs.values()]
    shapes += [(*scores[:-2], *(lengths_of[axis] for axis in AXES[name])) for name in call.outputs]
    of_one_query = count_of((*scores[:-2], 1, scores[-1]), lengths)
    numbers = sum(count_of(shape, lengths) for shape in shapes) + HELD * of_one_query
    if numbers > most:
        rule = f"the inputs and the outputs of `model` must have at most {most} numbers together"
        sizes = " ".join(map(str, (call.query, call.key, call.value)))
        got = {"numbers": f"{numbers:.3g}", "call": sizes[:200]}
        hint = "Export the call once more with a name for the batch or the lengths, and verify that model."
        if most < MOST_NUMBERS:
            hint += " Or pass a larger `memory`."
        raise ArgumentValueError("verify", rule, got, hint)


def computed_dtype(
    model: Model, call: ExportCall, types_of: Callable[[onnx.ModelProto], Mapping[str, int]]
) -> str:
    """Return the dtype of the scores and sums; `types_of` infers the types of values by their names.

    A fused operator with inputs in half precision has its own accumulation. It is judged as if it rounded each
    step to the dtype of its inputs.
    """
    # A graph of other operators has to sum in the accumulation dtype.
    queries = [node.input[0] for node in model.graph.node if node.op_type in FUSED and node.input]
    if call.accumulation_dtype == call.query.dtype or not queries:
        return call.accumulation_dtype
    types = types_of(without_numbers(model))
    return call.query.dtype if any(types.get(name) in HALVES for name in queries) else call.accumulation_dtype


def shown_type(value: onnx.ValueInfoProto) -> str:
    """Return the type of an input or an output in the notation of a spec, as `float32[B,8,L,64]`."""
    if not value.type.HasField("tensor_type"):
        return str(value.type.WhichOneof("value") or "no type").removesuffix("_type")
    tensor = value.type.tensor_type
    kinds = onnx.TensorProto.DataType
    known = tensor.elem_type in kinds.values()
    other = kinds.Name(tensor.elem_type).lower() if known else f"dtype {tensor.elem_type} of ONNX"
    dtype = _DTYPES.get(tensor.elem_type, other)
    if not tensor.HasField("shape"):
        return dtype
    lengths = (
        dim.dim_param or (str(dim.dim_value) if dim.HasField("dim_value") else "?") for dim in tensor.shape.dim
    )
    return f"{dtype}[{','.join(lengths)}]"


def _interface_error(kind: str, got: dict[str, str], wanted: dict[str, str]) -> ArgumentValueError:
    """Return the error with what the model and the call have and the other has not, as specs."""
    rule = f"`model` must have the {kind} of its call, by name, dtype and shape"
    unlike = got.items() ^ wanted.items() or got.items()  # if nothing is unlike, the order differs
    facts = {
        kind: ", ".join(f"{name}: {text}" for name, text in got.items() if (name, text) in unlike),
        "call": ", ".join(f"{name}: {text}" for name, text in wanted.items() if (name, text) in unlike),
        "missing": ", ".join(name for name in wanted if name not in got),
        "surplus": ", ".join(name for name in got if name not in wanted),
    }
    return ArgumentValueError("verify", rule, {name: text for name, text in facts.items() if text})


def missing_note(model: StatedModel, layer: Callable[..., Any], keywords: Mapping[str, Any]) -> str:
    """Return which arguments `to_onnx` was given, and `verify_layer` was not; empty if there are none."""
    recorded = dict.fromkeys(name for part in model.parts for name in part.fixed_arguments)
    known = {*keywords, *(layer.keywords if isinstance(layer, partial) else ())}
    missing = [name for name in recorded if name not in known]
    if not missing:
        return ""
    return f"to_onnx was called with {', '.join(missing)}, and verify_layer was not; pass the same arguments"


def input_specs(model: Model) -> dict[str, TensorSpec]:
    """Return the specs of the inputs of a model."""
    specs = {}
    for value in model.graph.input:
        tensor = value.type.tensor_type
        shape = tuple(dim.dim_param or dim.dim_value for dim in tensor.shape.dim)
        specs[value.name] = TensorSpec(_DTYPES[tensor.elem_type], shape)
    return specs
