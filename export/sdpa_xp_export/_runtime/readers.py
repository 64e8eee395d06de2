"""Sessions of programs other than onnxruntime that read ONNX models: OpenVINO, and ONNX's own evaluator.

It has no more imports than the process that runs a model needs.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Protocol

import ml_dtypes
import numpy as np
from numpy.typing import NDArray


class Reader(Protocol):
    """A session of a program that computes on the CPU."""

    label: ClassVar[str]
    """What stands where onnxruntime has a provider."""
    math_mode: str
    """How products of float32 are computed."""

    def __init__(self, source: bytes | str, outputs: Sequence[str]) -> None:
        """Load a model, which is bytes or in a file, with outputs of these names."""

    @staticmethod
    def version() -> str:
        """Import the program; return its release."""

    def run(self, feeds: Mapping[str, NDArray[Any]]) -> dict[str, NDArray[Any]]:
        """Return the outputs by their names."""

    def nodes(self) -> list[tuple[str, str, str]]:
        """Return the name, the operator and the label of each node that runs."""


class OpenVinoReader:
    """A model that OpenVINO has compiled for the CPU."""

    label: ClassVar[str] = "OpenVINO"

    def __init__(self, source: bytes | str, outputs: Sequence[str]) -> None:
        import openvino

        core = openvino.Core()
        default = core.get_property("CPU", "INFERENCE_PRECISION_HINT").to_string()
        # By default, float32 is computed in bfloat16 on a CPU that has it (7e-4 off), or in float16.
        try:
            model = core.read_model(source)
            self._compiled = core.compile_model(model, "CPU", {"INFERENCE_PRECISION_HINT": "f32"})
        except RuntimeError as error:
            raise ValueError(_reason(str(error))) from error
        self._request = self._compiled.create_infer_request()
        self._outputs = outputs
        self.math_mode = f"float32 (OpenVINO: INFERENCE_PRECISION_HINT=f32, its default here is {default})"

    @staticmethod
    def version() -> str:
        import openvino

        return str(openvino.__version__).partition("-")[0]  # behind it stands the commit

    def run(self, feeds: Mapping[str, NDArray[Any]]) -> dict[str, NDArray[Any]]:
        self._request.infer({name: _as_tensor(np.asarray(array, order="C")) for name, array in feeds.items()})
        return {name: _as_array(self._request.get_tensor(name)) for name in self._outputs}

    def nodes(self) -> list[tuple[str, str, str]]:
        # The graph after the optimisation; of a Loop, it has no body.
        operators = self._compiled.get_runtime_model().get_ordered_ops()
        return [
            (op.get_friendly_name(), op.get_rt_info()["layerType"].astype(str), self.label) for op in operators
        ]


def _reason(text: str) -> str:
    """Return the line of an error that says what is wrong; before it stand places in the source of OpenVINO."""
    lines = [line.removeprefix("-- ") for line in text.splitlines() if line.strip()]
    said = [line for line in lines if not line.startswith(("Exception from", "Check '"))] or lines
    summary = said.index("Summary:") + 1 if "Summary:" in said[:-1] else 0
    return said[summary] if said else "RuntimeError"


def _as_tensor(array: NDArray[Any]) -> Any:
    """Return an array as OpenVINO takes it, which does not know the dtype bfloat16 of ml_dtypes."""
    import openvino

    if array.dtype != ml_dtypes.bfloat16:
        return array
    return openvino.Tensor(array.view(np.uint16), array.shape, openvino.Type.bf16)


def _as_array(tensor: Any) -> NDArray[Any]:
    """Return a copy of a tensor, whose memory the next run writes to. bfloat16 looks like float16 in NumPy."""
    import openvino

    array = np.array(tensor.data)
    return array.view(ml_dtypes.bfloat16) if tensor.element_type == openvino.Type.bf16 else array


class ReferenceReader:
    """A model in ONNX's ReferenceEvaluator, which computes each operator in NumPy as the standard says."""

    label: ClassVar[str] = "reference"

    def __init__(self, source: bytes | str, outputs: Sequence[str]) -> None:
        import onnx
        from onnx.reference import ReferenceEvaluator

        model = onnx.load_model_from_string(source) if isinstance(source, bytes) else onnx.load(source)
        self._nodes = [(node.name, node.op_type, self.label) for node in model.graph.node]
        self._evaluator = ReferenceEvaluator(model)
        self._outputs = list(outputs)
        self.math_mode = "NumPy's"

    @staticmethod
    def version() -> str:
        import onnx

        return str(onnx.__version__)

    def run(self, feeds: Mapping[str, NDArray[Any]]) -> dict[str, NDArray[Any]]:
        with np.errstate(all="ignore"):  # it warns of each row without a key
            results = self._evaluator.run(self._outputs, dict(feeds))
        return dict(zip(self._outputs, map(np.asarray, results), strict=True))

    def nodes(self) -> list[tuple[str, str, str]]:
        return self._nodes


READERS: dict[str, type[Reader]] = {"openvino": OpenVinoReader, "reference": ReferenceReader}
