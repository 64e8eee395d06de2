"""Validate a call, and bind its options to the grid of its scores; equal calls are validated once."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

from sdpa_xp._call.options import CallOptions, arrays_of, check_options, with_arrays
from sdpa_xp._call.prepared_call import PreparedCall
from sdpa_xp._checks.arrays import (
    HLE,
    check_appended,
    check_floating,
    check_one_device,
    check_one_dtype,
    check_one_library,
    check_shapes,
    explain_missing_name,
    swap_heads_and_length,
)
from sdpa_xp._checks.keywords import Implementation, check_flag, check_layout, refuse_missing_kernel
from sdpa_xp._core.threads import asked_threads
from sdpa_xp._libraries import access_of, array_signatures, computing, is_array, library_of, namespace_of
from sdpa_xp._libraries.base import Library, accumulation_dtype, dtype_name
from sdpa_xp._libraries.protocols import Array, Device, Dtype, Namespace, Shape
from sdpa_xp._tiles.modifier import PLAIN_TYPES, ScoreModifier
from sdpa_xp._tiles.score_grid import ScoreGrid
from sdpa_xp.errors import ArgumentValueError

MOST_CACHED = 1024
_CACHE: dict[object, PreparedCall] = {}
"""Calls by their signature, without their arrays. It needs no lock, also without the GIL: each access is one
operation of a dict, and two threads that prepare equal calls store equal values."""


def prepare(
    function: str,
    inputs: Mapping[str, Any],
    options: CallOptions,
    *,
    queries_at_end: bool = False,
    cache_shapes: tuple[Shape, Shape] | None = None,
    has_kernels: bool = False,
    has_entries: bool = False,
) -> PreparedCall:
    """Validate and prepare a call.

    Args:
        function: The public function, for messages.
        inputs: The query and the key, and the value if the function has one.
        options: The keyword arguments.
        queries_at_end: Whether the queries are the last tokens of a cache.
        cache_shapes: The shapes that the keys and values of a paged cache would have as arrays.
        has_kernels: Whether vendors have kernels for the function.
        has_entries: Whether batch entries have different lengths. Then the options are not bound here, but to
            the grid of each entry.
    """
    signature = _signature(function, inputs, options, (queries_at_end, cache_shapes))
    call = None if signature is None else _CACHE.get(signature)
    if call is not None:
        arrays = inputs if call.is_default_layout else _to_heads_first(call.grid, inputs, call.layout)
        # `arrays` is the second field. `_replace(arrays=arrays)` takes three times as long.
        return PreparedCall(call[0], arrays, *call[2:])
    try:
        with computing(inputs["query"]):
            call = _validated(function, inputs, options, queries_at_end, cache_shapes, has_kernels)
    except AttributeError as error:
        if is_array(query := inputs["query"]):
            explain_missing_name(function, namespace_of(query), error)
        raise
    if not has_entries:
        with call.computing():
            call.bound_options()  # checks them as well
    if signature is not None:
        if len(_CACHE) >= MOST_CACHED:
            _CACHE.clear()  # all at once: to drop the oldest, each call that is found would have to be moved up
        _CACHE[signature] = call._replace(arrays={})
    return call


def _signature(function: str, inputs: Mapping[str, Any], options: CallOptions, cache: object) -> object:
    """Return a key of all that the checks look at, or None if the call is not to be cached.

    Types are part of the key, because True == 1.
    """
    types = tuple(map(type, options))
    key: tuple[object, ...] = options
    if not PLAIN_TYPES.issuperset(types):
        attn_mask, bias, *others = options
        attn_mask, bias = _option_signature(attn_mask), _option_signature(bias)
        if attn_mask is None or bias is None or not PLAIN_TYPES.issuperset(types[2:]):
            return None
        key = attn_mask, bias, *others
    arrays = array_signatures(inputs.values())
    return None if arrays is None else (function, cache, types, key, arrays)


def _option_signature(option: object) -> object:
    """Return a key of a mask or a bias; None if calls with it are not to be cached, as with an array."""
    return "" if option is None else option.signature if isinstance(option, ScoreModifier) else None


def _validated(
    function: str,
    inputs: Mapping[str, object],
    options: CallOptions,
    queries_at_end: bool,
    cache_shapes: tuple[Shape, Shape] | None,
    has_kernels: bool,
) -> PreparedCall:
    implementation = _check_implementation(function, options.implementation, kernels=has_kernels)
    check_layout(function, options.layout)
    layout = str(options.layout)
    library = library_of(inputs["query"])
    if (chunks := library.chunks) is not None:
        options = with_arrays(options, partial(chunks.as_lazy, like=inputs["query"]))
    xp, arrays = check_one_library(function, {**inputs, **dict(arrays_of(options))})
    tensors = {name: arrays[name] for name in inputs}
    for name, array in tensors.items():
        check_floating(function, name, array)
    check_one_dtype(function, tensors)  # masks and biases may have others
    check_one_device(function, arrays)
    query = tensors["query"]
    other_shapes = [array.shape for name, array in tensors.items() if name != "query"]
    shapes = other_shapes if cache_shapes is None else cache_shapes
    sizes = check_shapes(function, query.shape, *shapes, layout=layout)
    is_causal = check_flag(function, "is_causal", options.is_causal)
    if queries_at_end and is_causal:
        check_appended(function, sizes.queries, sizes.keys)
    input_accumulation_dtype = accumulation_dtype(xp, query.dtype)
    device = library.device(query)
    dtype = _check_softmax_dtype(function, options.softmax_dtype, input_accumulation_dtype, library, xp, device)
    grid = ScoreGrid(
        function=function,
        library=library,
        xp=xp,
        device=device,
        dtype=dtype,
        input_dtype=query.dtype,
        access=access_of(arrays.values()),
        batch=sizes.batch,
        heads=sizes.query_heads,
        queries=sizes.queries,
        keys=sizes.keys,
        is_2d=sizes.is_2d,
        position=sizes.keys - sizes.queries if queries_at_end else 0,
        needs_all_axes=library.refuses_unlike_axes(),
    )
    if grid.uses_our_threads:
        asked_threads()  # small calls need no threads, but refuse a wrong value too
    least = len(sizes.batch) + 3 if grid.needs_all_axes else 3
    is_default_layout = layout == HLE and all(array.ndim >= least for array in tensors.values())
    return PreparedCall(
        grid=grid,
        arrays=tensors if is_default_layout else _to_heads_first(grid, tensors, layout),
        is_default_layout=is_default_layout,
        sizes=sizes,
        options=check_options(options, arrays, grid, is_causal=is_causal),
        layout=layout,
        implementation=implementation,
        result_dtype=query.dtype,
        derived={},
    )


def _to_heads_first(grid: ScoreGrid, inputs: Mapping[str, Any], layout: str) -> Mapping[str, Array]:
    """Return the inputs as (..., heads, length, width); a 2-D input is one head."""
    xp = grid.xp
    with_heads = {
        name: xp.expand_dims(array, axis=0) if array.ndim == 2 else swap_heads_and_length(xp, array, layout)
        for name, array in inputs.items()
    }
    return {name: grid.in_all_axes(array) for name, array in with_heads.items()}


def _check_implementation(function: str, value: object, *, kernels: bool) -> Implementation | None:
    """Check for None, "xp", or "native" if vendors have `kernels` for the function."""
    if value is None:
        return None
    if isinstance(value, str) and value == "xp":
        return "xp"
    if isinstance(value, str) and value == "native":
        if kernels:
            return "native"
        refuse_missing_kernel(function, "no vendor has a kernel for this function")
    rule = "`implementation` must be None or 'xp', the portable one" + ", or 'native'" * kernels
    raise ArgumentValueError(function, rule, {"implementation": repr(value)})


def _check_softmax_dtype(
    function: str, value: object, default: Dtype, library: Library, xp: Namespace, device: Device
) -> Dtype:
    """Return the dtype of the scores: `default`, or the wider dtype that the caller chose."""
    if value is None:
        return default
    chosen, least = dtype_name(value), dtype_name(default)
    if chosen not in ("float32", "float64") or chosen < least:  # their names compare like their widths
        rule = "`softmax_dtype` must be None, or float32 or float64 and no narrower than the scores"
        hint = "A narrower one would only lose digits."
        raise ArgumentValueError(function, rule, {"softmax_dtype": chosen, "scores": least}, hint)
    if not library.has_dtype(function, xp, device, chosen):
        rule = f"`softmax_dtype` must be one that {xp.__name__} has on this device"
        raise ArgumentValueError(function, rule, {"softmax_dtype": chosen, "device": device})
    return getattr(xp, chosen)
