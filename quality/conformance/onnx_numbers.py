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

from quality.conformance.onnx_calls import WEIGHTS, Call, until


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


def exact_stage(call: Call, mode: int) -> NDArray[np.float64]:
    """What `qk_matmul_output` should hold, by the reference."""
    *_, weights, scores = reference.attention_and_scores(**until(call, mode))
    exact: NDArray[np.float64] = weights if mode == WEIGHTS else scores
    return exact


def plain_stage(library: Library, call: Call, mode: int) -> NDArray[Any]:
    """The same by the textbook formula in `library`."""
    stages = library.call(partial(reference.stages, library.xp), **until(call, mode))
    return library.get(stages["weights" if mode == WEIGHTS else "scores"])


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
