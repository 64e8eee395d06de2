"""MatMul, Softmax and Where: the form that every runtime since opset 17 computes to the contract."""

from __future__ import annotations

from .._call.call import ExportCall
from .._graph import Graph, GraphValue
from .._runtime.releases import Runtime
from ..lowering.statistics import sums_of
from ..lowering.tile import whole_tile
from ..lowering.tile_attention import attend_tile, scale_query
from .form import Form, finished_outputs, read_inputs


def _write(graph: Graph, call: ExportCall, runtime: Runtime) -> dict[str, GraphValue]:
    """query, key, value -> MatMul -> soft cap -> biases -> Where -> Softmax -> Where -> MatMul.

    Half inputs are computed in float32.
    """
    inputs = read_inputs(graph, call, call.accumulation_dtype)
    tile = whole_tile(inputs.lengths, inputs.key)
    query = scale_query(tile, inputs.query)
    results = attend_tile(tile, query, inputs.key, inputs.value, runtime)
    results |= {total.name: total.of_whole(tile, results[total.name]) for total in sums_of(call)}
    return finished_outputs(inputs, results)


FORM = Form("primitive", _write, nodes="MatMul and Softmax")  # it can state every call
