"""ONNX's own test cases of the operator Attention, each as a call of this library.

ONNX states what Attention means in its opsets 23 to 25, and ships 93 node tests with the numbers that its
reference computed. Here they become calls of `scaled_dot_product_attention`; what the library cannot say yet
is named in `NOT_YET_IN_LIBRARY` and `NOT_YET_IN_EXPORT`, so that every case either runs or has a reason.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from importlib import import_module
from typing import Any

import numpy as np
from numpy.typing import NDArray
from onnx import TensorProto, helper
from onnx.backend.test.case import node as node_cases

Arrays = dict[str, NDArray[Any]]


@dataclass(frozen=True, slots=True, eq=False)
class Case:
    """One node test: the attributes of the node, and its arrays by the names that the operator gives them."""

    name: str
    opset: int
    attributes: Mapping[str, Any]
    inputs: Arrays
    outputs: Arrays

    @property
    def dtype(self) -> str:
        return self.inputs["Q"].dtype.name

    @property
    def mode(self) -> int | None:
        """Which stage of the scores `qk_matmul_output` holds; None where the case does not ask for it."""
        asked = "qk_matmul_output" in self.outputs
        return self.attributes.get("qk_matmul_output_mode", 0) if asked else None

    @property
    def arrays(self) -> Arrays:
        """The array arguments of the call: heads split off the width, the past before the new keys."""
        arrays = {"query": self._with_heads("Q", "q_num_heads")}
        for name, letter in (("key", "K"), ("value", "V")):
            new, past = self._with_heads(letter, "kv_num_heads"), self.inputs.get(f"past_{name}")
            arrays[name] = new if past is None else np.concatenate((past, new), axis=-2)
        if "attn_mask" in self.inputs:
            arrays["attn_mask"] = self.inputs["attn_mask"]
        return arrays

    @property
    def rules(self) -> dict[str, Any]:
        """The keywords of the call. A default of ONNX is the default here, too."""
        rules = {name: self.attributes[name] for name in ("scale", "softcap") if name in self.attributes}
        return rules | {"is_causal": bool(self.attributes.get("is_causal", 0))}

    @property
    def output(self) -> NDArray[Any]:
        """What ONNX expects of the call, (B, Hq, L, Ev)."""
        return _split_heads(self.outputs["Y"], self.attributes.get("q_num_heads", 1))

    def _with_heads(self, letter: str, heads: str) -> NDArray[Any]:
        return _split_heads(self.inputs[letter], self.attributes.get(heads, 1))


def _split_heads(array: NDArray[Any], heads: int) -> NDArray[Any]:
    """(B, L, H * E) -> (B, H, L, E); an array with 4 axes has its heads already."""
    if array.ndim == 4:
        return array
    batch, length, width = array.shape
    return array.reshape(batch, length, heads, width // heads).transpose(0, 2, 1, 3)


def _read() -> Iterator[Case]:
    """The cases, without the twins that hold the body of the function instead of the node.

    Importing a module of node tests computes its cases, each from NumPy's seed 0 or one of its own, and adds
    them to one list of all operators.
    """
    import_module("onnx.backend.test.case.node.attention")
    for test in node_cases._NodeTestCases:
        node = test.model.graph.node[0]
        if node.op_type != "Attention" or "_expanded" in test.name:
            continue
        ((inputs, outputs),) = test.data_sets
        yield Case(
            name=test.name,
            opset=test.model.opset_import[0].version,
            attributes={each.name: helper.get_attribute_value(each) for each in node.attribute},
            inputs=dict(zip(filter(None, node.input), inputs, strict=True)),
            outputs=dict(zip(filter(None, node.output), outputs, strict=True)),
        )


CASES = tuple(_read())

Needs = Callable[[Case], bool]


def _in_float64(case: Case) -> bool:
    # Half dtypes and float32 are normalised in float32: as precise as any case asks for, but for DOUBLE.
    return case.attributes.get("softmax_precision") == TensorProto.DOUBLE and case.dtype != "float64"


def _window(case: Case) -> bool:
    # -1 is no window.
    return any(case.attributes.get(f"{side}_window_size", -1) >= 0 for side in ("left", "right"))


def _padded(case: Case) -> bool:
    return "nonpad_kv_seqlen" in case.inputs


def _causal_after_past(case: Case) -> bool:
    # ONNX counts query i from the end of the past; is_causal counts it from the first key.
    return case.rules["is_causal"] and "past_key" in case.inputs


def _bfloat16(case: Case) -> bool:
    return case.dtype == "bfloat16"


NOT_YET_IN_LIBRARY: dict[str, Needs] = {
    "softmax_precision: a softmax in float64 of float32 inputs": _in_float64,
    "left_window_size, right_window_size: masks.sliding_window": _window,
    "nonpad_kv_seqlen: masks.padding": _padded,
    "is_causal after past_key: the offset of masks.causal": _causal_after_past,
}
NOT_YET_IN_EXPORT = NOT_YET_IN_LIBRARY | {"bfloat16: a dtype of TensorSpec": _bfloat16}

# `qk_matmul_output` by its mode; a case that asks for one still has its Y checked. No exported form has a
# second output, and the library gives the weights (mode 3) alone: it never makes the scores as a whole.
NO_SCORES = {
    0: "the products as they are: no function returns scores",
    1: "the products after softcap: no function returns scores",
    2: "the products after softcap and mask: no function returns scores",
}
WEIGHTS = 3


def missing(case: Case, reasons: Mapping[str, Needs]) -> str | None:
    """The first of `reasons` why the case cannot run; None where it can."""
    return next((reason for reason, needs in reasons.items() if needs(case)), None)


def running(reasons: Mapping[str, Needs]) -> list[Case]:
    """The cases that none of `reasons` keeps from running."""
    return [case for case in CASES if missing(case, reasons) is None]
