"""Sums and products up to each element, products over axes, and differences of neighbours."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from sdpa_xp.errors import ArgumentValueError

from .._graph import GraphValue, has_names
from . import ops
from .elementwise import subtract
from .indexing import item
from .manipulation import Axes, axes_of, axis_of, broadcast_to, concat, expand_dims, moveaxis
from .operators import admitted, array_function
from .reductions import accumulated

__all__ = ["cumulative_prod", "cumulative_sum", "diff", "prod"]


def prod(x: Any, /, *, axis: Axes = None, dtype: Any = None, keepdims: bool = False) -> Any:
    """Multiply; integers are multiplied in 64 bits unless `dtype` says otherwise, and wrap."""
    return accumulated("prod", _prod, x, dtype, axis=axis, keepdims=keepdims)


def _prod(number: GraphValue, axis: Axes, keepdims: bool) -> GraphValue:
    axes = axes_of(number, axis)
    for position in sorted(axes, reverse=True):
        number = _products(_with_initial(number, 1, position), position)[0]
    for position in sorted(axes) if keepdims else ():
        number = expand_dims(number, axis=position)
    return number


def _sums(number: GraphValue, axis: int | None, include_initial: bool) -> GraphValue:
    position = _only_axis("cumulative_sum", number, axis)
    along = number.graph.constant(position, "int64")
    sums = number.graph.add("CumSum", number, along, dtype=number.elem_type, shape=number.dims)
    return _with_initial(sums, 0, position) if include_initial else sums


def _products_up_to(number: GraphValue, axis: int | None, include_initial: bool) -> GraphValue:
    position = _only_axis("cumulative_prod", number, axis)
    if include_initial:
        return _products(_with_initial(number, 1, position), position)[1]
    if number.dims[position] != 0 and not has_names(number.dims[position : position + 1]):
        return _products(number, position)[1]
    products = _products(_with_initial(number, 1, position), position)[1]
    bounds = (number.graph.constant([bound], "int64") for bound in (1, 2**62))
    return ops.cut(products, (next(bounds), next(bounds)), position, number.dims[position])


def _cumulative(name: str, compute: Callable[..., GraphValue]) -> Callable[..., Any]:
    """Make a function of what is up to each element; with `include_initial`, also of nothing in front."""

    def function(
        x: Any, /, *, axis: int | None = None, dtype: Any = None, include_initial: bool = False
    ) -> Any:
        return accumulated(name, compute, x, dtype, axis=axis, include_initial=include_initial)

    return function


cumulative_sum = _cumulative("cumulative_sum", _sums)
cumulative_prod = _cumulative("cumulative_prod", _products_up_to)


def _only_axis(name: str, value: GraphValue, axis: int | None) -> int:
    if not value.ndim or (axis is None and value.ndim != 1):
        rule = f"`{name}` must be along an axis, which may be left out if there is just one"
        raise ArgumentValueError(value.graph.function, rule, {"axis": axis, "shape": value.dims})
    return axis_of(value, axis or 0)


def _with_initial(value: GraphValue, initial: int, axis: int) -> GraphValue:
    shape = (*value.shape[:axis], 1, *value.shape[axis + 1 :])
    first = broadcast_to(ops.to_rank(value.graph.constant(initial, value.elem_type), value.ndim), shape)
    return concat([first, value], axis=axis)


def _products(value: GraphValue, axis: int) -> tuple[GraphValue, GraphValue]:
    """Return the product along an axis, and the product up to each element, by a Scan.

    onnxruntime's ReduceProd of int64 goes through floats from 1.28 on. Its Scan fails if there is no element.
    """
    graph, moved = value.graph, moveaxis(value, axis, 0)
    rest = moved.dims[1:]
    one = broadcast_to(ops.to_rank(graph.constant(1, value.elem_type), len(rest)), moved.shape[1:])
    body = graph.loop_body()
    product, element = (body.input(name, value.elem_type, rest) for name in ("Product", "Element"))
    product = product * element
    total, products = graph.add_many(
        "Scan",
        one,
        moved,
        outputs=[(value.elem_type, rest), (value.elem_type, moved.dims)],
        body=body.subgraph([product, body.copy(product)]),
        num_scan_inputs=1,
    )
    return total, moveaxis(products, 0, axis)


@array_function
def diff(
    value: GraphValue, *, axis: int = -1, n: int = 1, prepend: Any = None, append: Any = None
) -> GraphValue:
    """Return the differences of neighbours along an axis, taken `n` times."""
    number = admitted("diff", "numeric", value)
    position = axis_of(number, axis)
    joined = [number.graph.operand(part) for part in (prepend, number, append) if part is not None]
    number = concat(joined, axis=position) if len(joined) > 1 else number
    before = (slice(None),) * position
    for _ in range(n):
        number = subtract(item(number, (*before, slice(1, None))), item(number, (*before, slice(None, -1))))
    return number
