"""What people run on an ONNX file, each as a function of a model: it returns the model that the tool makes."""

from __future__ import annotations

import importlib
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


def function_of(module: str, name: str) -> Tool:
    """A function of a package that is imported when it is run."""
    return lambda model: getattr(importlib.import_module(module), name)(model)


def convert_by_onnxscript(model: onnx.ModelProto) -> onnx.ModelProto:
    import onnxscript.version_converter as converter

    (opset,) = (entry.version for entry in model.opset_import if not entry.domain)
    converter.convert_version(model, max(23, opset))  # in place
    return model


def onnxsim(model: onnx.ModelProto) -> onnx.ModelProto:
    import onnxsim

    simplified, agrees = onnxsim.simplify(model)
    assert agrees
    return simplified  # type: ignore[no-any-return]


def onnx_ir(model: onnx.ModelProto) -> onnx.ModelProto:
    import onnx_ir

    return onnx_ir.to_proto(onnx_ir.from_proto(model))


def optimized(model: onnx.ModelProto, level: str, suffix: str = "onnx") -> bytes:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / f"optimized.{suffix}"
        options = onnxruntime.SessionOptions()
        options.graph_optimization_level = getattr(onnxruntime.GraphOptimizationLevel, f"ORT_{level}")
        options.optimized_model_filepath, options.log_severity_level = str(path), 3
        onnxruntime.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
        return path.read_bytes()


def through_files(model: onnx.ModelProto, work: Callable[[str, str], Any]) -> onnx.ModelProto:
    with tempfile.TemporaryDirectory() as folder:
        source, target = (str(Path(folder) / name) for name in ("source.onnx", "target.onnx"))
        onnx.save(model, source)
        work(source, target)
        return onnx.load(target)


def add_prefix(model: onnx.ModelProto) -> onnx.ModelProto:
    """Of all names; then the names of inputs as they were, so that the results can be compared."""
    model = onnx.compose.add_prefix(model, "a/")
    names = [graph_input.name for graph_input in model.graph.input]
    assert all(name.startswith("a/") for name in [*names, *(node.name for node in model.graph.node)])
    for name in names:
        rename(model.graph, name, name.removeprefix("a/"))
    return model


def rename(graph: onnx.GraphProto, old: str, new: str) -> None:
    for graph_input in graph.input:
        graph_input.name = new if graph_input.name == old else graph_input.name
    for node in graph.node:
        node.input[:] = [new if name == old else name for name in node.input]
        for attribute in node.attribute:
            rename(attribute.g, old, new)


def extract_model(model: onnx.ModelProto) -> onnx.ModelProto:
    names = ([value.name for value in values] for values in (model.graph.input, model.graph.output))
    return through_files(model, lambda source, target: onnx.utils.extract_model(source, target, *names))


def quantize_products(model: onnx.ModelProto) -> onnx.ModelProto:
    """In 7 bits: without VNNI or AMX, a CPU adds two products of 8 bits in 16 bits, which they overflow."""
    from onnxruntime.quantization import quantize_dynamic

    options: dict[str, Any] = {"op_types_to_quantize": ["MatMul"], "reduce_range": True}
    return through_files(model, lambda *paths: quantize_dynamic(*paths, **options))


def quant_pre_process(model: onnx.ModelProto) -> onnx.ModelProto:
    from onnxruntime.quantization.shape_inference import quant_pre_process

    return through_files(model, lambda *paths: quant_pre_process(*paths, skip_symbolic_shape=True))


def float16(model: onnx.ModelProto) -> onnx.ModelProto:
    from onnxruntime.transformers.float16 import convert_float_to_float16

    return convert_float_to_float16(model, keep_io_types=True)  # type: ignore[no-any-return]


TOOLS: dict[str, Tool] = {
    "shape inference": lambda model: onnx.shape_inference.infer_shapes(
        model, check_type=True, strict_mode=True, data_prop=True
    ),
    "version converter": lambda model: onnx.version_converter.convert_version(model, 25),
    "version converter of onnxscript": convert_by_onnxscript,
    "onnxsim": onnxsim,
    "onnxslim": function_of("onnxslim", "slim"),
    "onnxoptimizer": function_of("onnxoptimizer", "optimize"),
    "optimizer of onnxscript": function_of("onnxscript.optimizer", "optimize"),
    "rewriter of onnxscript": function_of("onnxscript.rewriter", "rewrite"),
    "onnx-ir": onnx_ir,
    "inliner": onnx.inliner.inline_local_functions,
    "text": lambda model: onnx.parser.parse_model(onnx.printer.to_text(model)),
    **{
        f"saved by onnxruntime, {level}": lambda model, level=level: optimized(model, level)
        for level in ("ENABLE_BASIC", "ENABLE_EXTENDED", "ENABLE_LAYOUT", "ENABLE_ALL")
    },
    "saved by onnxruntime, ORT format": lambda model: optimized(model, "ENABLE_ALL", "ort"),
    "add_prefix": add_prefix,
    "add_prefix, but for inputs and outputs": lambda model: onnx.compose.add_prefix(
        model, "a/", rename_inputs=False, rename_outputs=False
    ),
    "extract_model": extract_model,
    "quantize_dynamic, MatMul": quantize_products,
    "quant_pre_process, skip_symbolic_shape": quant_pre_process,
    "float16 of onnxruntime": float16,
}
