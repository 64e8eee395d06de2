"""The measured calls, as data; contenders.py implements them for each library."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Literal

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

HEADS, KEY_HEADS, WIDTH = 8, 2, 64
LENGTHS = (256, 1024, 4096, 16384)
WINDOW = 512
LARGE = 250.0
"""The norm of a row of large queries and keys: their scores reach 7,800, and exp() overflows at 89."""


@dataclass(frozen=True)
class Call:
    """One call, with at most one kind of mask."""

    queries: int
    keys: int
    heads: int = HEADS
    key_heads: int = HEADS
    width: int = WIDTH
    is_causal: bool = False
    padding: Literal["none", "value", "array"] = "none"
    window: int | None = None
    norm: float | None = None
    dtype: Literal["float32", "bfloat16"] = "float32"

    def arrays(self) -> tuple[NDArray[Any], ...]:
        """Return query, key and value, (1, heads, length, width)."""
        rng = np.random.default_rng(0)
        shapes = ((self.heads, self.queries), (self.key_heads, self.keys), (self.key_heads, self.keys))
        query, key, value = (rng.standard_normal((1, *shape, self.width), np.float32) for shape in shapes)
        if self.norm is not None:
            query, key = (x * (self.norm / np.linalg.norm(x, axis=-1, keepdims=True)) for x in (query, key))
        arrays = (query, key, value)
        return arrays if self.dtype == "float32" else tuple(x.astype(ml_dtypes.bfloat16) for x in arrays)

    @property
    def real_keys(self) -> int:
        return self.keys * 3 // 4

    def attended(self) -> NDArray[np.bool_] | None:
        """Return True for keys that are not padding, (1, 1, 1, S)."""
        return None if self.padding == "none" else (np.arange(self.keys) < self.real_keys)[None, None, None]

    @property
    def plain(self) -> bool:
        """Whether all pairs attend and each query head has its own key head."""
        return self == Call(self.queries, self.keys, self.heads, self.heads, self.width)


CELLS: dict[str, Callable[[int], Call]] = {
    "all pairs": lambda length: Call(length, length),
    "causal": lambda length: Call(length, length, is_causal=True),
    "grouped heads": lambda length: Call(length, length, key_heads=KEY_HEADS),
    "padding value": lambda length: Call(length, length, padding="value"),
    "padding array": lambda length: Call(length, length, padding="array"),
}
"""Each call is measured for all LENGTHS."""

BY_CALL: dict[int, dict[str, Call]] = {
    4096: {
        "all pairs": Call(4096, 4096),
        "causal": Call(4096, 4096, is_causal=True),
        "large scores": Call(4096, 4096, norm=LARGE),
    },
    16384: {"all pairs": Call(16384, 16384), "window": Call(16384, 16384, window=WINDOW)},
}
"""Calls of sdpa_xp on NumPy, compared with the first call of their length."""

DECODING: dict[str, Call] = {
    "one query": Call(1, 4096),
    "one query, 32 heads": Call(1, 4096, heads=32, key_heads=32),
    "one query of a long cache": Call(1, 65536),
    "one query of a long cache, 32 heads": Call(1, 65536, heads=32, key_heads=32),
}
"""One query, many keys, as in decoding with a cache."""
ONE_QUERY = DECODING["one query"]
BY_TORCH: dict[str, tuple[Call, ...]] = {
    "all pairs, by torch": tuple(Call(length, length) for length in LENGTHS[:3]),
    "causal, by torch": tuple(Call(length, length, is_causal=True) for length in LENGTHS[:3]),
    "one query, by torch": (ONE_QUERY,),
    "all pairs, bfloat16": tuple(Call(length, length, dtype="bfloat16") for length in LENGTHS[:3]),
    "causal, bfloat16": tuple(Call(length, length, is_causal=True, dtype="bfloat16") for length in LENGTHS[:3]),
    "one query, bfloat16": (replace(ONE_QUERY, dtype="bfloat16"),),
}
"""Calls of NumPy arrays with `implementation="torch"`, beside torch SDPA and sdpa_xp's own code."""
TINY = Call(8, 8, heads=1, key_heads=1, width=8)
"""So small that the time is that of the checks and the Python code, not of the arithmetic."""
TINY_MASKED = {
    "causal": replace(TINY, is_causal=True),
    "padding": replace(TINY, padding="value"),
    "a window": replace(TINY, window=4),
}
