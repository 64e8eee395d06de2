"""The table of docs/how-to/export.md: what a tool breaks, and that the way around is right.

A test that no longer raises says that a tool was mended: then its row goes.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx.compose
import onnx.version_converter
import pytest
from onnxruntime.quantization import CalibrationDataReader, QuantFormat, quantize_dynamic, quantize_static
from onnxruntime.quantization.shape_inference import quant_pre_process
from tools.models import MODELS, Arrays, Exported, call, run
from tools.results import expected
from tools.tools import TOOLS, through_files

from sdpa_xp_export import TensorSpec, export_attention, verify

pytestmark = [
    pytest.mark.filterwarnings("ignore"),  # of the tools
    pytest.mark.usefixtures("short_verify"),
]
OF_ATTENTION = [name for name, exported in MODELS.items() if exported.form == "attention"]
HALF = TensorSpec("float16", ("B", 4, "L", 8))


class Calibration(CalibrationDataReader):  # type: ignore[misc]
    def __init__(self, exported: Exported) -> None:
        self.left: Iterator[Arrays] = iter([exported.feeds(0)])

    def get_next(self) -> Arrays | None:
        return next(self.left, None)


def quantized(name: str, **options: Any) -> onnx.ModelProto:
    exported = MODELS[name]
    reader = Calibration(exported)
    return through_files(exported.model, lambda *paths: quantize_static(*paths, reader, **options))


def worst(got: list[np.ndarray], right: list[np.ndarray]) -> float:
    return max(float(np.abs(a - b).max() / np.abs(b).max()) for a, b in zip(got, right, strict=True))


@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", OF_ATTENTION)
def test_quantize_dynamic_takes_attention_for_another_operator(name: str) -> None:
    """The way around is `quantize_dynamic, MatMul` of the tools."""
    broken = through_files(MODELS[name].model, quantize_dynamic)
    with pytest.raises(Exception, match="QAttention"):
        run(broken, MODELS[name].feeds(0))


@pytest.mark.parametrize("name", ["tiled, fixed", "attention 23, causal", "grouped_query, fixed"])
def test_symbolic_shapes_of_onnxruntime(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The way around is `quant_pre_process, skip_symbolic_shape` of the tools."""
    monkeypatch.chdir(tmp_path)  # where it leaves a file when it fails
    # For `tiled` it looks up the trip count, which a loop need not have: KeyError('').
    with pytest.raises((AssertionError, Exception), match=r"^(?:'')?$|Incomplete symbolic shape inference"):
        through_files(MODELS[name].model, quant_pre_process)


@pytest.mark.parametrize("kind", ["QDQ", "QOperator"])
def test_quantize_static_of_all_operators(kind: str) -> None:
    """It quantizes the -inf of a mask: nothing of the output is right."""
    name = "primitive 17, causal"
    broken = quantized(name, quant_format=QuantFormat[kind])
    assert worst(run(broken, MODELS[name].feeds(0)), expected(name, 0)) > 0.5


@pytest.mark.parametrize("kind", ["QDQ", "QOperator"])
def test_quantize_static_of_products_of_the_primitive_form(kind: str) -> None:
    name = "primitive 21, padding"
    kinds = {"quant_format": QuantFormat[kind], "op_types_to_quantize": ["MatMul"]}
    with pytest.raises(Exception, match="does not match"):
        run(quantized(name, **kinds), MODELS[name].feeds(0))


@pytest.mark.sampled(5)
@pytest.mark.parametrize(
    "name", [name for name, exported in MODELS.items() if exported.form in ("tiled", "attention")]
)
def test_quantize_static_of_products(name: str) -> None:
    """The numbers of a layer's weights are rounded to 7 bits; the products of attention in a Loop are not."""
    model = quantized(name, quant_format=QuantFormat.QDQ, op_types_to_quantize=["MatMul"], reduce_range=True)
    assert worst(run(model, MODELS[name].feeds(0)), expected(name, 0)) < 0.05


@pytest.mark.needs("onnxslim")
def test_onnxslim_of_grouped_query() -> None:
    """Other tools shorten the graph: onnxsim and onnxruntime do."""
    with pytest.raises(Exception, match="Invalid tensor data type"):
        run(TOOLS["onnxslim"](MODELS["grouped_query, fixed"].model), MODELS["grouped_query, fixed"].feeds(0))


@pytest.mark.parametrize("name", OF_ATTENTION)
def test_older_opsets_have_no_attention(name: str) -> None:
    with pytest.raises(RuntimeError, match=r"[Aa]dapt"):
        onnx.version_converter.convert_version(MODELS[name].model, 22)


@pytest.mark.parametrize("opset", [17, 22])
def test_the_exporter_writes_older_opsets(opset: int) -> None:
    older = call("auto", (TensorSpec("float32", ("B", 4, "L", 8)),) * 3, is_causal=True, opset=opset)
    assert verify(older.model).agrees


@pytest.mark.parametrize("name", ["tiled, two outputs", "arrays, tiled"])
def test_float16_of_a_maximum_in_a_loop(name: str) -> None:
    with pytest.raises(Exception, match=r"ReduceMax|Node input 'Reshape_.*is not a graph input"):
        run(TOOLS["float16 of onnxruntime"](MODELS[name].model), MODELS[name].feeds(0))


def test_the_exporter_writes_float16() -> None:
    assert verify(export_attention(HALF, HALF, HALF, sinks=TensorSpec("float16", (4,)), form="tiled")).agrees


def test_merged_models_must_have_the_same_opset() -> None:
    """The way around is in test_merges.py."""
    one, other = MODELS["tiled 18, causal"].model, MODELS["tiled 21, padding"].model
    with pytest.raises(ValueError, match="IR version mismatch"):
        onnx.compose.merge_models(one, other, [("output", "query")], prefix1="a/", prefix2="b/")
    other.ir_version = one.ir_version
    with pytest.raises(ValueError, match="different operator set ids"):
        onnx.compose.merge_models(one, other, [("output", "query")], prefix1="a/", prefix2="b/")


def test_verify_needs_the_metadata() -> None:
    """`extract_model` drops it."""
    changed = TOOLS["extract_model"](MODELS["tiled 18, causal"].model)
    assert isinstance(changed, onnx.ModelProto)
    with pytest.raises(ValueError, match="metadata"):
        verify(changed)
    changed.metadata_props.extend(MODELS["tiled 18, causal"].model.metadata_props)
    assert verify(changed).agrees
