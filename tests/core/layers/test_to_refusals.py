"""What `layer.to` refuses: no library, no device or no dtype, in words of its own."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from sdpa_xp.layers import MultiHeadAttention

HEADS = MultiHeadAttention.init(np.random.default_rng(0), 8, num_heads=2)
LIKE = r"^MultiHeadAttention\.to: `like` must be a library of arrays, or an array of it; got like="
PASS = (
    r"\. Pass its module, such as `numpy`\. A device is passed as device=\.\.\., and a dtype as dtype=\.\.\.$"
)
DEVICE = r"^MultiHeadAttention\.to: `device` must be one that numpy has here; got device="
DTYPE = r"^MultiHeadAttention\.to: `dtype` must be one of float16, bfloat16, float32, float64 that numpy has here; got dtype="
REFUSED: dict[str, tuple[Callable[[], Any], type[Exception], str]] = {
    "a dtype as the library": (lambda: HEADS.to(np.float16), TypeError, f"{LIKE}float16{PASS}"),
    "its name as the library": (lambda: HEADS.to("float16"), TypeError, f"{LIKE}'float16'{PASS}"),
    "a device as the library": (lambda: HEADS.to("cuda"), TypeError, f"{LIKE}'cuda'{PASS}"),
    "a class of arrays": (lambda: HEADS.to(np.ndarray), TypeError, f"{LIKE}ndarray"),
    "nothing": (lambda: HEADS.to(), TypeError, f"{LIKE}None{PASS}"),
    "a dtype as the device": (lambda: HEADS.to(np, np.float16), ValueError, f"{DEVICE}float16, its error=it is a dtype, so write dtype='float16'"),
    "a device of another library": (lambda: HEADS.to(np, "cuda"), ValueError, f"{DEVICE}'cuda', its error=Device not understood"),
    "a number as the device": (lambda: HEADS.to(np, 3), ValueError, f"{DEVICE}3"),
    "an integer dtype": (lambda: HEADS.to(dtype=np.int8), TypeError, f"{DTYPE}int8"),
    "a word": (lambda: HEADS.to(dtype="half"), TypeError, f"{DTYPE}half"),
    "what NumPy lacks": (lambda: HEADS.to(dtype="bfloat16"), TypeError, f"{DTYPE}bfloat16"),
    "three places": (lambda: HEADS.to(np, None, "float16"), TypeError, r"only `like` and `device` may be passed without a name; .* Name the others: dtype="),
}  # fmt: skip


@pytest.mark.parametrize(("call", "error", "words"), REFUSED.values(), ids=REFUSED)
def test_refusals(call: Callable[[], Any], error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        call()
