"""What people run on an ONNX file, each as a function of a model: it returns the model that the tool makes."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import onnx
import onnx.compose
import onnx.inliner
import onnx.parser
import onnx.printer
import onnx.shape_inference
import onnx.utils
import onnx.version_converter
import onnxruntime

Tool = Callable[[onnx.ModelProto], onnx.ModelProto | bytes]
TOOLS: dict[str, Tool] = {}


def tool(name: str) -> Callable[[Tool], Tool]:
    def registered(function: Tool) -> Tool:
        TOOLS[name] = function
        return function

    return registered


@tool("shape inference")
def infer_shapes(model: onnx.ModelProto) -> onnx.ModelProto:
    return onnx.shape_inference.infer_shapes(model, check_type=True, strict_mode=True, data_prop=True)


def opset_of(model: onnx.ModelProto) -> int:
    (opset,) = (entry.version for entry in model.opset_import if not entry.domain)
    return opset


@tool("version converter")
def convert_version(model: onnx.ModelProto) -> onnx.ModelProto:
    return onnx.version_converter.convert_version(model, 25)


@tool("version converter of onnxscript")
def convert_version_of_onnxscript(model: onnx.ModelProto) -> onnx.ModelProto:
    import onnxscript.version_converter as converter

    converter.convert_version(model, max(23, opset_of(model)))  # in place
    return model


@tool("onnxsim")
def onnxsim(model: onnx.ModelProto) -> onnx.ModelProto:
    import onnxsim

    simplified, agrees = onnxsim.simplify(model)
    assert agrees
    return simplified  # type: ignore[no-any-return]


@tool("onnxslim")
def onnxslim(model: onnx.ModelProto) -> onnx.ModelProto:
    import onnxslim

    return onnxslim.slim(model)


@tool("onnxoptimizer")
def onnxoptimizer(model: onnx.ModelProto) -> onnx.ModelProto:
    import onnxoptimizer

    return onnxoptimizer.optimize(model)


@tool("optimizer of onnxscript")
def optimizer_of_onnxscript(model: onnx.ModelProto) -> onnx.ModelProto:
    import onnxscript.optimizer

    return onnxscript.optimizer.optimize(model)


@tool("rewriter of onnxscript")
def rewriter_of_onnxscript(model: onnx.ModelProto) -> onnx.ModelProto:
    import onnxscript.rewriter

    return onnxscript.rewriter.rewrite(model)


@tool("onnx-ir")
def onnx_ir(model: onnx.ModelProto) -> onnx.ModelProto:
    import onnx_ir

    return onnx_ir.to_proto(onnx_ir.from_proto(model))


@tool("inliner")
def inline(model: onnx.ModelProto) -> onnx.ModelProto:
    return onnx.inliner.inline_local_functions(model)


@tool("text")
def as_text(model: onnx.ModelProto) -> onnx.ModelProto:
    return onnx.parser.parse_model(onnx.printer.to_text(model))


def optimized(model: onnx.ModelProto, level: str, suffix: str = "onnx") -> bytes:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / f"optimized.{suffix}"
        options = onnxruntime.SessionOptions()
        options.graph_optimization_level = getattr(onnxruntime.GraphOptimizationLevel, f"ORT_{level}")
        options.optimized_model_filepath, options.log_severity_level = str(path), 3
        onnxruntime.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
        return path.read_bytes()


for _level in ("ENABLE_BASIC", "ENABLE_EXTENDED", "ENABLE_LAYOUT", "ENABLE_ALL"):
    TOOLS[f"saved by onnxruntime, {_level}"] = lambda model, level=_level: optimized(model, level)
TOOLS["saved by onnxruntime, ORT format"] = lambda model: optimized(model, "ENABLE_ALL", "ort")


def through_files(model: onnx.ModelProto, work: Callable[[str, str], Any]) -> onnx.ModelProto:
    with tempfile.TemporaryDirectory() as folder:
        source, target = (str(Path(folder) / name) for name in ("source.onnx", "target.onnx"))
        onnx.save(model, source)
        work(source, target)
        return onnx.load(target)


@tool("add_prefix")
def add_prefix(model: onnx.ModelProto) -> onnx.ModelProto:
    """Of all names; then the names of inputs and outputs as they were, so that the results can be compared."""
    return without_prefix(onnx.compose.add_prefix(model, "a/"), "a/")


@tool("add_prefix, but for inputs and outputs")
def add_prefix_inside(model: onnx.ModelProto) -> onnx.ModelProto:
    return onnx.compose.add_prefix(model, "a/", rename_inputs=False, rename_outputs=False)


def without_prefix(model: onnx.ModelProto, prefix: str) -> onnx.ModelProto:
    names = [graph_input.name for graph_input in model.graph.input]
    assert all(name.startswith(prefix) for name in [*names, *(node.name for node in model.graph.node)])
    for name in names:
        rename(model.graph, name, name.removeprefix(prefix))
    return model


def rename(graph: onnx.GraphProto, old: str, new: str) -> None:
    for graph_input in graph.input:
        graph_input.name = new if graph_input.name == old else graph_input.name
    for node in graph.node:
        node.input[:] = [new if name == old else name for name in node.input]
        for attribute in node.attribute:
            rename(attribute.g, old, new)


@tool("extract_model")
def extract_model(model: onnx.ModelProto) -> onnx.ModelProto:
    names = ([value.name for value in values] for values in (model.graph.input, model.graph.output))
    return through_files(model, lambda source, target: onnx.utils.extract_model(source, target, *names))


@tool("quantize_dynamic, MatMul")
def quantize_dynamic(model: onnx.ModelProto) -> onnx.ModelProto:
    from onnxruntime.quantization import quantize_dynamic

    return through_files(model, lambda *paths: quantize_dynamic(*paths, op_types_to_quantize=["MatMul"]))


@tool("quant_pre_process, skip_symbolic_shape")
def quant_pre_process(model: onnx.ModelProto) -> onnx.ModelProto:
    from onnxruntime.quantization.shape_inference import quant_pre_process

    return through_files(model, lambda *paths: quant_pre_process(*paths, skip_symbolic_shape=True))


@tool("float16 of onnxruntime")
def float16(model: onnx.ModelProto) -> onnx.ModelProto:
    from onnxruntime.transformers.float16 import convert_float_to_float16

    return convert_float_to_float16(model, keep_io_types=True)  # type: ignore[no-any-return]
