"""The magnitude of each element of a result: the size of the numbers whose rounding causes its error.

If every product and every score is off by one part in 2**n, then to first order an element is off by at most
one part in 2**n of its magnitude. So a bound relative to magnitudes is as strict for a small element as for the
largest one, for scores of any size.
"""

from __future__ import annotations

import numpy as np

from sdpa_xp_export._verify.pair_terms import Arrays
from sdpa_xp_export._verify.reference import Floats
from sdpa_xp_export._verify.textbook import indices

STEP = 2.0**-20
"""The step of the finite difference that approximates the derivative of a function of the scores."""


def magnitudes(arguments: Arrays, lse: Floats, weights: Floats) -> dict[str, Floats]:
    """Return the magnitude of each element of `output`, `lse`, `weights` and `scores`.

    Args:
        arguments: The arguments of `reference.attention`, in float64.
        lse: The log-sum-exp that the reference returned.
        weights: The weights that the reference returned.
    """
    query, key, value = (np.asarray(arguments[name], np.float64) for name in ("query", "key", "value"))
    if query.ndim > 2:
        key, value = (_repeated(x, query.shape[-3]) for x in (key, value))
    with np.errstate(all="ignore"):  # masked keys and values may be NaN or inf
        scores = _of_scores(arguments, query, key)
        of_attended = np.where(weights > 0, scores, 0.0)
        mean = np.sum(weights * of_attended, axis=-1, keepdims=True)
        if arguments["sinks"] is not None:
            rest = 1 - np.sum(weights, axis=-1, keepdims=True)
            sinks = np.abs(np.where(np.isfinite(arguments["sinks"]), arguments["sinks"], 0.0))
            mean = mean + rest * (sinks[..., None, None] if query.ndim > 2 else sinks.reshape(1, 1))
        of_weights = np.where(weights > 0, weights * (1 + of_attended + mean), 0.0)
        of_lse = 1 + np.abs(np.where(np.isfinite(lse), lse, 0)) + mean[..., 0]
        of_output = of_weights @ np.abs(np.where(np.isfinite(value), value, 0))
    return {"output": of_output, "lse": of_lse, "weights": of_weights, "scores": scores}


def sizes_of_terms(arguments: Arrays, weights: Floats) -> Floats:
    """Return the sum of the sizes of the terms of each element of `output`."""
    value = np.asarray(arguments["value"], np.float64)
    value = _repeated(value, weights.shape[-3]) if weights.ndim > 2 else value
    return np.asarray(weights @ np.abs(np.where(np.isfinite(value), value, 0)))


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
    if cap:
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
