"""Calls of sequences of unlike lengths, and of tokens that lie in pages or are quantised."""

from __future__ import annotations

from .._call import PreparedCall, shared_by_equal_calls
from .._libraries.protocols import Array
from .._programs import ResultName, output
from .._sources.quantised import factored_operands, source_of
from .._tiles.plan import Plan, plan_widened


def attend_quantised(call: PreparedCall, *names: ResultName) -> dict[str, Array]:
    """Return what is named, the output or the log-sum-exp, of a quantised KVCache: widened tile by tile."""
    key, value = source_of(call.arrays, "key"), source_of(call.arrays, "value")
    query, key, value = factored_operands(call.grid, call.arrays["query"], key, value)
    scores = call.draw_scores()._replace(query=query, key=key)
    finite = scores.options.finite_inputs
    if finite is not None and "value_scale" not in finite:  # a NaN of a value is in its scale
        scores = scores._replace(options=scores.options._replace(finite_inputs=finite - {"value"}))
    return call.connected(output.attend(scores, value, _plan(call), call.result_dtype, *names))


@shared_by_equal_calls
def _plan(call: PreparedCall) -> Plan:
    widths = sum(source_of(call.arrays, name).width for name in ("key", "value"))
    return plan_widened(call.grid, call.sizes.group, widths)
