"""`python -m standins.cuda.opened INDEX RESULTS`: open and run models in this process's onnxruntime-gpu.

INDEX is a list of jobs: a file, the lengths of each run, and whether each run gets a session of its own. A line
of JSON is written for each job when it is done, so that the one that ended the process is known.
"""

from __future__ import annotations

import json
import os
import re
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
from numpy.typing import NDArray
from onnx import helper

PROVIDERS = [
    ("CUDAExecutionProvider", {"use_tf32": "0", "arena_extend_strategy": "kSameAsRequested"}),
    "CPUExecutionProvider",
]
LOG = Path(os.environ["CUDA_STANDIN_LOG"])
KERNELS = {"flash_fwd": "flash", "attention_kernel_batched": "cutlass", "UnfusedSoftmax": "unfused"}
"""The kernels of attention, by a part of their names."""
DTYPE = onnx.TensorProto.DataType
TO_HOST = "copy 2"
"""How the log says that the host reads memory of the device, for which it waits."""
Types = dict[str, tuple[str, int]]
"""The dtype of values, and the number of their axes that are longer than 1."""


def main(index: Path, results: Path) -> None:
    """Do all jobs."""
    with results.open("a") as lines:
        for file, runs, fresh in json.loads(index.read_text()):
            model = onnx.load(file)
            types = _types(onnx.shape_inference.infer_shapes(model).graph)
            line = placement(file, types) | {"runs": list(measured(file, model, runs, fresh))}
            print(json.dumps(line), file=lines, flush=True)


def placement(file: str, types: Types) -> dict[str, Any]:
    """Return the nodes that are on the host, and where the nodes are that copy."""
    with tempfile.TemporaryDirectory() as folder, _stderr() as said:
        options = onnxruntime.SessionOptions()
        options.log_severity_level = 0
        options.optimized_model_filepath = f"{folder}/optimized.onnx"
        session = onnxruntime.InferenceSession(file, options, providers=PROVIDERS)
        assert session.get_providers()[0] == "CUDAExecutionProvider"
        model = onnx.load(options.optimized_model_filepath)
    on_host = _names_on_host(said[0])
    host, copies = [], Counter[str]()
    for node, place in _nodes(model.graph, "main"):
        if node.op_type.startswith("Memcpy"):
            copies[place] += 1
        elif on_host is None or node.name in on_host:
            host.append([node.op_type, place, *types.get(node.output[0], ("unknown", -1))])
    return {"host": sorted(host), "copies": copies}


def measured(
    file: str, model: onnx.ModelProto, runs: Sequence[Mapping[str, int]], fresh: bool
) -> Iterator[dict[str, Any]]:
    """Run a model at the lengths of each run; with `fresh`, a session has no memory of the run before."""
    options = onnxruntime.SessionOptions()
    options.enable_mem_pattern = False
    options.log_severity_level = 4
    session = None
    for lengths in runs:
        if fresh or session is None:
            session = onnxruntime.InferenceSession(file, options, providers=PROVIDERS)
        yield run(session, model, lengths)


def run(session: Any, model: onnx.ModelProto, lengths: Mapping[str, int]) -> dict[str, Any]:
    """Run a model; return what was allocated, which kernels ran, and how often the host read the device."""
    values = {value.name: (_filled(value.type.tensor_type, lengths)) for value in model.graph.input}
    inputs = sum(array.nbytes for array, _ in values.values())
    begin = LOG.stat().st_size
    arguments = {
        name: onnxruntime.OrtValue.ortvalue_from_numpy_with_onnx_type(*value) for name, value in values.items()
    }
    try:
        session.run_with_ort_values([output.name for output in session.get_outputs()], arguments)
    except Exception as error:  # onnxruntime's errors have no other base
        # Lengths that follow from data are arbitrary numbers, since no kernel computed them.
        return {"inputs": inputs, "error": str(error).splitlines()[0][:300]}
    with LOG.open() as log:
        log.seek(begin)
        lines = log.read().splitlines()
    launched = {line for line in lines if line.startswith("launch")}
    return {
        "inputs": inputs,
        "bytes": sum(int(line.split()[1]) for line in lines if line.startswith("malloc")),
        "kernels": sorted({kind for part, kind in KERNELS.items() if any(part in line for line in launched)}),
        "reads": sum(line.startswith(TO_HOST) for line in lines),
    }


def _filled(kind: onnx.TypeProto.Tensor, lengths: Mapping[str, int]) -> tuple[NDArray[Any], int]:
    """An input of these lengths, and its type: ones where it holds integers or bools, else 0."""
    dims = [
        dim.dim_value or sum(int(lengths.get(part, part)) for part in dim.dim_param.split("+"))
        for dim in kind.shape.dim
    ]
    dtype = np.dtype(helper.tensor_dtype_to_np_dtype(kind.elem_type))
    if kind.elem_type == DTYPE.BFLOAT16:
        dtype = np.dtype(np.uint16)
    return (np.ones if dtype.kind in "bi" else np.zeros)(dims, dtype), kind.elem_type


def _names_on_host(log: str) -> set[str] | None:
    """The names of the nodes that the log places on the CPU; None if these are all nodes."""
    on_host, names = False, set()
    for line in log.splitlines():
        if "All nodes placed on [" in line:
            return None if "[CPU" in line else set()
        if match := re.search(r"Node\(s\) placed on \[(\w+)\]", line):
            on_host = match[1].startswith("CPU")
        elif on_host and (match := re.search(r"VerifyEachNodeIsAssignedToAnEp\w*\]\s+\w+ \((.*)\)", line)):
            names.add(match[1])
    return names


def _nodes(graph: onnx.GraphProto, place: str) -> Iterator[tuple[onnx.NodeProto, str]]:
    for node in graph.node:
        yield node, place
        for body in _bodies(node):
            yield from _nodes(body, "loop")


def _types(graph: onnx.GraphProto) -> Types:
    """The types of the values of a model that was exported, as they are inferred."""
    types = {
        value.name: (
            DTYPE.Name(value.type.tensor_type.elem_type).lower(),
            sum(dim.dim_value != 1 for dim in value.type.tensor_type.shape.dim),
        )
        for value in (*graph.input, *graph.value_info, *graph.output)
    }
    for node in graph.node:
        for body in _bodies(node):
            types |= _types(body)
    return types


def _bodies(node: onnx.NodeProto) -> list[onnx.GraphProto]:
    return [attribute.g for attribute in node.attribute if attribute.type == onnx.AttributeProto.GRAPH]


@contextmanager
def _stderr() -> Iterator[list[str]]:
    """Catch what this process writes to its standard error, onnxruntime's own lines among it."""
    said: list[str] = []
    with tempfile.TemporaryFile() as file:
        old = os.dup(2)
        os.dup2(file.fileno(), 2)
        try:
            yield said
        finally:
            os.dup2(old, 2)
            os.close(old)
            file.seek(0)
            said.append(file.read().decode(errors="replace"))


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
