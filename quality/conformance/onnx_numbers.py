"""What a node of ONNX should give: in float64, by the textbook in its own dtype, and how near is near enough.

ONNX computed its numbers in the dtype of the case, so they are off, too: each result is judged against the
float64 reference, and so are ONNX's own numbers; what is left between the two is then bounded by both errors.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import array_api_compat.numpy
import numpy as np
from internals import judge, reference, textbook
from libraries import Library
from numpy.typing import NDArray

from quality.conformance.onnx_calls import WEIGHTS, Call, until, without


def dtype_of(array: Any) -> str:
    """The name of a dtype, in whichever library."""
    return str(array.dtype).rpartition(".")[2]


def in_numpy(call: Call) -> NDArray[Any]:
    """The output by the textbook formula in NumPy."""
    plain: NDArray[Any] = textbook(array_api_compat.numpy, **call)
    return plain


def in_library(library: Library, call: Call) -> NDArray[Any]:
    """The output by the textbook formula in `library`."""
    return library.get(library.call(partial(textbook, library.xp), **call))


def for_weights(call: Call) -> Call:
    """The call whose output are its weights: the value is the identity, (S, S) for each key head."""
    key = call["key"]
    return call | {"value": np.zeros((*key.shape[:-1], 1), key.dtype) + np.eye(key.shape[-2], dtype=key.dtype)}


def exact_stage(call: Call, mode: int) -> NDArray[np.float64]:
    """What `qk_matmul_output` should hold, by the reference."""
    if mode == WEIGHTS:
        return reference.attention(**call)[2]
    _, lse, weights = reference.attention(**until(call, mode))
    # A weight is exp(score - lse), and 0 where the score is -inf.
    return np.log(weights, out=np.full(weights.shape, -np.inf), where=weights > 0) + lse[..., np.newaxis]


def plain_stage(library: Library, call: Call, mode: int) -> NDArray[Any]:
    """The same by the textbook formula in `library`."""
    if mode == WEIGHTS:
        return in_library(library, for_weights(call))
    masked = np.isneginf(exact_stage(call, mode))
    call = without(until(call, mode), "value", "is_causal")
    scores = library.get(library.call(partial(_scores, library.xp), **call))
    return np.where(masked, scores.dtype.type(-np.inf), scores)


def _scores(
    xp: Any,
    query: Any,
    key: Any,
    attn_mask: Any = None,
    *,
    bias: Any = None,
    scale: float | None = None,
    softcap: float | None = None,
) -> Any:
    """The scores of `textbook`, each step in the dtype of the input, but for what is masked."""
    scores = query @ xp.matrix_transpose(xp.repeat(key, query.shape[-3] // key.shape[-3], axis=-3))
    scores = scores * (query.shape[-1] ** -0.5 if scale is None else scale)
    if softcap:
        scores = xp.tanh(scores / softcap) * softcap
    for term in (attn_mask, bias):
        if term is not None and dtype_of(term) == dtype_of(query):
            scores = scores + term
    assert scores.dtype == query.dtype
    return scores


def check(
    result: NDArray[Any], plain: NDArray[Any], exact: NDArray[np.float64], expected: NDArray[Any]
) -> None:
    """`result` is as near to the reference as the textbook formula `plain`, and to ONNX's numbers likewise.

    Every comparison wants NaN and inf at the same places.
    """
    dtype = expected.dtype.name
    ours = judge(result, exact, plain, dtype)
    theirs = judge(expected, exact, plain, dtype)
    gap = judge(result, expected.astype(np.float64), plain, dtype).absolute
    assert ours.agrees, f"off by {ours.absolute:.3g}, may be {ours.bound:.3g}"
    assert gap <= ours.bound + theirs.absolute, f"{gap:.3g} from ONNX, itself off by {theirs.absolute:.3g}"
