"""MatMul, Softmax and Where: the form that every runtime since opset 17 computes to the contract."""

from __future__ import annotations

from sdpa_xp_export._call.call import Call
from sdpa_xp_export._graph.graph import Graph, Value
from sdpa_xp_export._runtime.releases import Runtime
from sdpa_xp_export.forms.inputs import finished, read
from sdpa_xp_export.lowering.tile_attention import attend, scaled


def refusal(_call: Call, _runtime: Runtime) -> str | None:
    """Why this form cannot state the call; it can state every one."""
    return None


def write(graph: Graph, call: Call, runtime: Runtime) -> dict[str, Value]:
    """query, key, value -> MatMul -> softcap -> biases -> Where -> Softmax -> Where -> MatMul.

    Half inputs are computed in float32.
    """
    inputs = read(graph, call, call.held)
    tile = inputs.pairs.whole(inputs.key)
    query, sums = scaled(tile, inputs.query), runtime.softmax_hides_nan
    return finished(inputs, attend(tile, query, inputs.key, inputs.value, sums=sums))
