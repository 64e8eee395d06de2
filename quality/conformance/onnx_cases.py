"""ONNX's own test cases of the operator Attention, read into the terms of this library.

ONNX states what Attention means in its opsets 23 to 25, and ships 93 node tests with the numbers that its
reference computed. Here each becomes a value that says what the node was asked; `onnx_calls` makes calls of it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from importlib import import_module
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray
from onnx import TensorProto, helper
from onnx.backend.test.case import node as node_cases

Arrays = dict[str, NDArray[Any]]

# The softmax of ONNX is in the dtype of the case unless softmax_precision names another, and its scores are
# rounded to the dtype of the case before that. The library never holds either below float32.
SOFTMAX_DTYPES = {TensorProto.FLOAT: "float32", TensorProto.DOUBLE: "float64"}


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
        is_output = "qk_matmul_output" in self.outputs
        return self.attributes.get("qk_matmul_output_mode", 0) if is_output else None

    @property
    def layout(self) -> Literal["...HLE", "...LHE"]:
        """3-D inputs are (B, L, H * E): the heads stand behind the length."""
        return "...HLE" if self.inputs["Q"].ndim == 4 else "...LHE"

    @property
    def query(self) -> NDArray[Any]:
        """(B, Hq, L, E), as all arrays from here on have their heads before the length."""
        return _split_heads(self.inputs["Q"], self.attributes.get("q_num_heads", 1))

    @property
    def new(self) -> Arrays:
        """Key and value of the node, (B, H, n, E) and (B, H, n, Ev)."""
        heads = self.attributes.get("kv_num_heads", 1)
        return {name: _split_heads(self.inputs[letter], heads) for name, letter in _LETTERS.items()}

    @property
    def past(self) -> Arrays:
        """Key and value of the tokens before; with four axes also where the others have three."""
        return {name: self.inputs[f"past_{name}"] for name in _LETTERS if f"past_{name}" in self.inputs}

    @property
    def arrays(self) -> Arrays:
        """Query, and all keys and values: the new ones behind the past."""
        whole = {name: np.concatenate((self.past[name], self.new[name]), axis=-2) for name in self.past}
        return {"query": self.query} | self.new | whole

    @property
    def mask(self) -> NDArray[Any] | None:
        """`attn_mask` over all keys. ONNX masks those behind the end of a shorter one."""
        mask = self.inputs.get("attn_mask")
        if mask is None:
            return None
        missing = (*mask.shape[:-1], self.arrays["key"].shape[-2] - mask.shape[-1])
        masked = False if mask.dtype == np.bool_ else -np.inf
        return np.concatenate((mask, np.full(missing, masked, mask.dtype)), axis=-1)

    @property
    def is_causal(self) -> bool:
        return bool(self.attributes.get("is_causal", 0))

    @property
    def window(self) -> tuple[int | None, int | None]:
        """How far a query sees to the left and to the right; None, which ONNX writes as -1, is open."""
        left, right = (self.attributes.get(f"{side}_window_size", -1) for side in ("left", "right"))
        return None if left == -1 else left, None if right == -1 else right

    @property
    def key_lengths(self) -> NDArray[np.int64] | None:
        """How many keys of each batch entry are real, (B,)."""
        return self.inputs.get("nonpad_kv_seqlen")

    @property
    def offset(self) -> int | NDArray[np.int64]:
        """Before which key the first query stands, as causal masks and windows count: one, or one an entry.

        ONNX: the length of the past; without one, by how much the real keys outnumber the queries, which
        may be less than 0; without such lengths, 0.
        """
        if self.past:
            return int(self.past["key"].shape[-2])
        return 0 if self.key_lengths is None else self.key_lengths - self.query.shape[-2]

    @property
    def rules(self) -> dict[str, float]:
        """Scale and softcap. A default of ONNX is the default of the library, too."""
        return {name: self.attributes[name] for name in ("scale", "softcap") if name in self.attributes}

    @property
    def softmax_dtype(self) -> str | None:
        precision = self.attributes.get("softmax_precision")
        return None if precision is None else SOFTMAX_DTYPES[precision]

    @property
    def output(self) -> NDArray[Any]:
        """What ONNX expects of the call, (B, Hq, L, Ev)."""
        return _split_heads(self.outputs["Y"], self.attributes.get("q_num_heads", 1))


_LETTERS = {"key": "K", "value": "V"}


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
            attributes={attribute.name: helper.get_attribute_value(attribute) for attribute in node.attribute},
            inputs=dict(zip(filter(None, node.input), inputs, strict=True)),
            outputs=dict(zip(filter(None, node.output), outputs, strict=True)),
        )


CASES = tuple(_read())


def named(case: Case) -> str:
    """The id of a test of `case`."""
    return case.name
