"""Calls with `reproducible=True`: what is refused, and arrays of other libraries as arrays of the host library.

The host library computes these calls for all libraries, so only its products have to give a row the same bits
everywhere. Most libraries share their memory on the CPU with it.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any, NoReturn

from .._checks.arrays import HLE, check_one_device, check_one_dtype, check_one_library
from .._checks.keywords import check_flag
from .._libraries import HOST, access_of, host_library, library_of, namespace_name, to_host
from .._libraries.base import Library
from .._libraries.protocols import Array
from ..biases.algebra import Bias
from ..errors import ArgumentValueError
from ..masks.algebra import Mask
from .options import CallOptions, arrays_of, with_arrays


def on_host(
    function: str, inputs: Mapping[str, Any], options: CallOptions, *, has_one_dtype: bool
) -> tuple[Mapping[str, Any], CallOptions]:
    """Return the inputs and options of a reproducible call with arrays of the host library.

    Inputs that need not have one dtype have been checked.

    Raises:
        ValueError: The call cannot be reproducible. The message names the reason.
    """
    host, reason, arrays = host_library(), _refusal(inputs, options), inputs
    if not all(host.owns(array) and host.array_signature(array) for array in inputs.values()):
        _, arrays = check_one_library(function, {**inputs, **dict(arrays_of(options))})
        if has_one_dtype:
            check_one_dtype(function, {name: arrays[name] for name in inputs})
        check_one_device(function, arrays)
        library = library_of(arrays["query"])
        if library is not host:
            reason = reason or _refusal_of_library(library, options, arrays)
        if library is not host and not reason:
            options = with_arrays(options, to_host)._replace(rng=None)
            arrays = {name: to_host(arrays[name]) for name in inputs}
    if reason:
        refuse(function, reason)
    axes = min(len(arrays[name].shape) for name in inputs)
    if axes < 2:  # refused later, as in every call
        return arrays, options
    # A BLAS adds in another order if the elements of a row do not lie side by side.
    axis = -2 if options.layout == HLE or axes < 3 else -3
    return {name: host.in_rows(arrays[name], axis) for name in inputs}, options


def refuse(function: str, reason: str, hint: str = "") -> NoReturn:
    """Refuse a call that cannot be reproducible."""
    rule = f"`reproducible` must be False, because {reason}"
    raise ArgumentValueError(function, rule, {"reproducible": True}, hint)


def check_layer(function: str, reproducible: object) -> None:
    """Refuse a reproducible call of a layer."""
    if check_flag(function, "reproducible", reproducible):
        hint = "Project with products of your own, and call `scaled_dot_product_attention` with the heads."
        refuse(function, "the projections of a layer are not reproducible", hint)


def _refusal(inputs: Collection[str], options: CallOptions) -> str:
    """Return why no library computes a call reproducibly, or ""."""
    if "key_scale" in inputs:
        return "the cache is quantised"
    if options.implementation not in (None, "xp"):
        return "a kernel adds in an order of its own, so `implementation` must be None or 'xp'"
    if options.dropout_p:
        return "`dropout_p` drops the weights of a query by its place in the batch"
    return ""


def _refusal_of_library(library: Library, options: CallOptions, arrays: Mapping[str, Array]) -> str:
    """Return why the host cannot compute a call for a library, or ""."""
    name, access = namespace_name(arrays["query"]), access_of(arrays.values())
    if library.adopted(arrays["query"]) is not None:
        return f"{HOST} computes such calls without derivatives, and {name} carry some"
    if access.is_traced:
        return f"{HOST} computes such calls, and arrays of {name} have no values yet"
    if library.is_accelerator(library.device(arrays["query"])):
        return f"{HOST} computes such calls on the CPU, and arrays of {name} are on another device"
    if library.autograd is not None and library.autograd.records([*arrays.values()]):
        return f"{HOST} computes such calls without derivatives, and {name} records the arrays for them"
    # Where derivatives are computed of arrays that look like all others.
    rules = library.tangent_rules if library.autograd is None else None
    if rules is not None and rules.may_record(access):
        return f"{HOST} computes such calls without derivatives, and {name} does not show whether it needs them"
    modifiers = [option for option in (options.attn_mask, options.bias) if isinstance(option, Mask | Bias)]
    if any(modifier.has_code_of_caller() for modifier in modifiers):
        return f"{HOST} computes such calls, and a function of yours expects arrays of {name}"
    return ""
