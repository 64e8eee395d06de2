"""A Loop whose body uses values of the graph around it, written so that tools find everything that it needs.

Tools that cut, join or rename graphs (`onnx.utils.extract_model`, `onnx.compose`) follow the inputs of nodes,
and do not look for what a body captures. Keys and values as states of the loop would show them, but onnxruntime
copies the states of a Scan in each step (1.13 to 1.28 of the time at L = 4096), and those of a Loop at its end
(1.2 of the memory). So the loop carries the lengths of what its body captures: a few integers.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from sdpa_xp_export._array_api import ops
from sdpa_xp_export._graph.graph import Graph, GraphValue


def count_down(
    graph: Graph, count: GraphValue, step: Callable[[Graph, GraphValue], Sequence[GraphValue]]
) -> list[GraphValue]:
    """Write a Loop over the steps count - 1, ... 1, 0, and return what they give, stacked in this order.

    Args:
        graph: The graph around the loop.
        count: The number of steps, (1,).
        step: Writes a step into the body of the loop: the body and the number of the step -> its results.
    """
    body = graph.loop_body()
    body.input("Iteration", "int64", ())
    goes_on = body.input("GoesOn", "bool", ())
    number = body.input("Step", "int64", ())
    results = step(body, number)
    captured = _lengths_of_captured(body)
    carried = body.input("Captured", "int64", captured.dims)
    # An output of a body must be the output of a node.
    states = [body.copy(goes_on), number - 1, body.copy(carried)]
    stacked = [(result.elem_type, ("steps", *result.dims)) for result in results]
    steps = ops.scalar(count)
    outputs = graph.add_many(
        "Loop",
        steps,
        graph.constant(value=True, dtype="bool"),
        steps - 1,
        captured,
        outputs=[("int64", ()), ("int64", captured.dims), *stacked],
        body=body.subgraph([*states, *results]),
    )
    return outputs[2:]


def _lengths_of_captured(body: Graph) -> GraphValue:
    """What a body captures -> integers that follow from each of it, (N,)."""
    used = {name for node in body.nodes for name in node.input}
    parts = [
        value if (value.elem_type, value.dims) == ("int64", (1,)) else _shape_of(value)
        for value in body.captured.values()
        if value.name in used
    ]
    return ops.join(parts, length=sum(int(part.dims[0]) for part in parts))


def _shape_of(value: GraphValue) -> GraphValue:
    return value.graph.add("Shape", value, dtype="int64", shape=(value.ndim,))
