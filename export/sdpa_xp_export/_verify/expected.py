"""What a run should return: the reference of some rows, the textbook formula, and the size of rounding errors.

The magnitude of an element is the size of the numbers whose rounding causes its error. If every product and
every score is off by one part in 2**n, then to first order an element is off by at most one part in 2**n of its
magnitude. So a bound relative to magnitudes is as strict for a small element as for the largest one, for scores
of any size.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import array_api_compat.numpy as numpy_namespace
import numpy as np
from numpy.typing import NDArray

from sdpa_xp_export._call.arguments import OUTPUTS
from sdpa_xp_export._call.call import ExportCall
from sdpa_xp_export._dtypes.dtype import numpy_dtype
from sdpa_xp_export._verify import reference
from sdpa_xp_export._verify.judging import ExpectedRows
from sdpa_xp_export._verify.pairs import Arrays
from sdpa_xp_export._verify.reference import Floats, indices, stages

STEP = 2.0**-20
"""The step of the finite difference that approximates the derivative of a function of the scores."""


def stated_dtype(call: ExportCall, name: str) -> str:
    """Return the dtype that an output of the call has."""
    return call.accumulation_dtype if name == "lse" else call.query.dtype


def row_axis(name: str) -> int:
    """Return the axis of the queries in an output of that name."""
    return -1 if name == "lse" else -2


def expected_rows(
    call: ExportCall, arguments: Arrays, computed_in: str, *, leaks: bool = False
) -> dict[str, ExpectedRows]:
    """Return the expected values of each output of the call, for the rows in `arguments`.

    Args:
        call: The call.
        arguments: The arguments of `reference.attention`; see `reference_inputs`.
        computed_in: The dtype of the textbook formula.
        leaks: Whether a NaN of a key or value may also show where a mask hides it from some queries only.
    """
    with np.errstate(all="ignore"):  # masked keys and values may be NaN or inf
        exact = _reference(arguments)
        textbook = _textbook(arguments, computed_in)
        if computed_in == "float64":
            textbook = _double_precision(arguments, exact, textbook)
        sizes, sums = _magnitudes(arguments, exact["lse"], exact["weights"])
        # A product of matrices adds 0 times NaN for a masked pair. So only keys and values that no query
        # attends are without effect in every graph; that is what `poison` tries.
        unmasked = _reference(arguments | {"attn_mask": None, "bias": ()}) if leaks else {}
    terms = exact | {"output": sums}

    def rows(name: str) -> ExpectedRows:
        # The weights have the batch of the values too, and so have what is computed without them.
        one, size, term = (np.broadcast_to(x[name], exact[name].shape) for x in (textbook, sizes, terms))
        return ExpectedRows(exact[name], one, size, term, np.isnan(unmasked[name]) if leaks else None)

    return {name: rows(name) for name in call.outputs}


def _reference(arguments: Arrays) -> dict[str, Floats]:
    return dict(zip(OUTPUTS, reference.attention_and_scores(**arguments), strict=True))


def _textbook(arguments: Arrays, dtype: str) -> dict[str, NDArray[Any]]:
    tokens = {name: arguments[name].astype(numpy_dtype(dtype)) for name in ("query", "key", "value")}
    return stages(numpy_namespace, **arguments | tokens)


def _double_precision(
    arguments: Arrays, exact: Mapping[str, Floats], textbook: Mapping[str, NDArray[Any]]
) -> dict[str, NDArray[Any]]:
    """Return the result of the textbook formula in float64, plus an estimate of its error.

    The reference is float64 too, and rounds large scores in the same way, so the difference of the two says
    little. The error of float32, divided by 2**29, is used where it is larger.
    """
    narrow = {name: _in_range_of_float32(value) for name, value in arguments.items()}
    narrow |= {name: arguments[name].astype(np.float32) for name in ("query", "key", "value")}
    right, off = _reference(narrow), _textbook(narrow, "float32")
    with_error = {}
    for name, plain in textbook.items():
        scaled = (off[name] - right[name]) * 2.0**-29  # epsilon of float64 over epsilon of float32
        shown = exact[name] + np.where(np.isfinite(scaled), scaled, 0.0)
        with_error[name] = np.where(np.abs(scaled) > np.abs(plain - exact[name]), shown, plain)
    return with_error


def _in_range_of_float32(value: Any) -> Any:
    """Return finite numbers of float64 as finite ones of float32: the smallest bias must not become -inf."""
    if isinstance(value, tuple):
        return tuple(_in_range_of_float32(item) for item in value)
    if not isinstance(value, np.ndarray) or value.dtype != np.float64:
        return value
    largest = np.finfo(np.float32).max
    return np.where(np.isinf(value), value, np.clip(value, -largest, largest))


def _magnitudes(arguments: Arrays, lse: Floats, weights: Floats) -> tuple[dict[str, Floats], Floats]:
    """Return the magnitudes of `output`, `lse`, `weights` and `scores`, and the sizes of the terms of `output`.

    Args:
        arguments: The arguments of `reference.attention`, in float64.
        lse: The log-sum-exp that the reference returned.
        weights: The weights that the reference returned.
    """
    query, key, value = (np.asarray(arguments[name], np.float64) for name in ("query", "key", "value"))
    if query.ndim > 2:
        key, value = (_repeated(x, query.shape[-3]) for x in (key, value))
    scores = _of_scores(arguments, query, key)
    of_attended = np.where(weights > 0, scores, 0.0)
    mean = np.sum(weights * of_attended, axis=-1, keepdims=True)
    if arguments["sinks"] is not None:
        rest = 1 - np.sum(weights, axis=-1, keepdims=True)
        sinks = np.abs(np.where(np.isfinite(arguments["sinks"]), arguments["sinks"], 0.0))
        mean = mean + rest * (sinks[..., None, None] if query.ndim > 2 else sinks.reshape(1, 1))
    of_weights = np.where(weights > 0, weights * (1 + of_attended + mean), 0.0)
    of_lse = 1 + np.abs(np.where(np.isfinite(lse), lse, 0)) + mean[..., 0]
    sizes = np.abs(np.where(np.isfinite(value), value, 0))
    return (
        {"output": of_weights @ sizes, "lse": of_lse, "weights": of_weights, "scores": scores},
        np.asarray(weights @ sizes),
    )


def _repeated(x: Floats, heads: int) -> Floats:
    """Return keys or values with one head for each of the `heads` of the query."""
    if x.ndim < 3:
        return x
    return np.repeat(x, heads // max(x.shape[-3], 1), axis=-3)


def _of_scores(arguments: Arrays, query: Floats, key: Floats) -> Floats:
    """Return the magnitude of the scores after each step: q k^T, scale, softcap and biases."""
    scale = np.asarray(arguments["scale"], np.float64)
    scores = (query @ np.swapaxes(key, -1, -2)) * scale
    size = (np.abs(query) @ np.swapaxes(np.abs(key), -1, -2)) * np.abs(scale)
    cap = arguments["softcap"]
    if cap:  # tanh is steep for small scores, and flat for large ones
        capped = cap * np.tanh(scores / cap)
        size = np.abs(cap * np.tanh((scores + STEP * size) / cap) - capped) / STEP + np.abs(capped)
        scores = capped
    for term in arguments["bias"]:
        if callable(term):
            positions = indices(np, scores)
            changed = np.broadcast_to(term(scores, *positions), scores.shape)
            size = np.abs(term(scores + STEP * size, *positions) - changed) / STEP + np.abs(changed)
            scores = changed
        else:
            added = np.where(np.isfinite(term), np.asarray(term, np.float64), 0.0)
            scores, size = scores + added, size + np.abs(added)
    return np.asarray(np.where(np.isfinite(size), size, 0.0))
