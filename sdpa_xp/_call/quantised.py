"""Attention over a quantised KVCache, whose keys and values are widened tile by tile."""

from __future__ import annotations

from .._core import streaming
from .._core.quantised import factored_operands, source_of
from .._libraries.protocols import Array
from .._tiles.plan import plan_widened
from .prepared_call import PreparedCall


def attend(call: PreparedCall, *, with_lse: bool) -> tuple[Array, Array | None]:
    """Return the output (..., Hq, L, Ev), and the log-sum-exp (..., Hq, L) if it is asked for."""
    key, value = source_of(call.arrays, "key"), source_of(call.arrays, "value")
    widths, query = key.width + value.width, call.arrays["query"]
    query, key, value = factored_operands(call.grid, query, key, value)
    scores = call.scores()._replace(query=query, key=key)
    finite = scores.options.finite_inputs
    if finite is not None and "value_scale" not in finite:  # a NaN of a value is in its scale
        scores = scores._replace(options=scores.options._replace(finite_inputs=finite - {"value"}))
    plan = call.cached("plan", lambda: plan_widened(call.grid, call.sizes.group, widths))
    output, lse = streaming.attend(scores, value, plan, call.result_dtype, with_lse=with_lse)
    return call.attach_zero_gradient(output), None if lse is None else call.connected_lse(lse)
