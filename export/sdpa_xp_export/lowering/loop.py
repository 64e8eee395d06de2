"""A Loop whose body uses values of the graph around it, written so that tools find everything that it needs.

Tools that cut, join or rename graphs (`onnx.utils.extract_model`, `onnx.compose`) follow the inputs of nodes,
and do not look for what a body captures. Keys and values as states of the loop would show them, but onnxruntime
copies the states of a Scan in each step (1.13 to 1.28 of the time at L = 4096), and those of a Loop at its end
(1.2 of the memory). So the loop carries the sum of the lengths of what its body captures.

On a GPU no integer moves between host and device in a step, because each move is a wait. onnxruntime leaves on
the host what follows from a Shape in the same graph, from its constants and from its inputs
(`GetCpuPreferredNodes` of fallback_cpu_capability.cc), and it moves a loop to the host if all its inputs are
there. So the number of a step is multiplied with a length of 1 that only a run knows, and the loop has no count
of its steps: each says whether another one follows.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from sdpa_xp_export._arrays import namespace as xp
from sdpa_xp_export._arrays import ops
from sdpa_xp_export._graph.graph import Graph, GraphValue


def loop_over_steps(
    graph: Graph, step: Callable[[Graph, GraphValue], tuple[GraphValue, Sequence[GraphValue]]]
) -> list[GraphValue]:
    """Write a Loop over the steps 0, 1, ..., and return what they give, stacked in this order.

    Args:
        graph: The graph around the loop.
        step: Writes a step into the body of the loop: the body and the number of the step, (1,) -> whether
            another one follows, (1,), which must follow from the number alone; and the results.
    """
    body = graph.loop_body()
    number = body.input("Iteration", "int64", ())
    body.input("GoesOn", "bool", ())
    carried = body.input("Captured", "int64", ("one",))
    one = ops.shape_of(carried)
    goes_on, results = step(body, number * one)
    states = [ops.scalar(goes_on), body.copy(carried)]  # an output of a body must be the output of a node
    stacked = [(result.elem_type, ("steps", *result.dims)) for result in results]
    captured = _sum_of_captured(body)
    outputs = graph.add_many(
        "Loop",
        None,
        graph.constant(value=True, dtype="bool"),
        captured,
        outputs=[("int64", captured.dims), *stacked],
        body=body.subgraph([*states, *results]),
    )
    return outputs[1:]


def _sum_of_captured(body: Graph) -> GraphValue:
    """What a body captures -> an integer that follows from each of it, (1,)."""
    used = {name for node in body.nodes for name in node.input}
    parts = [
        value if (value.elem_type, value.dims) == ("int64", (1,)) else ops.shape_of(value)
        for value in body.captured.values()
        if value.name in used
    ]
    return ops.reduce("ReduceSum", xp.concat(parts))
