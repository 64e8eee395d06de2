"""The formula of attention over the tokens of a cache, which keeps the absolute position of every token."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
from calls import largest_terms
from internals import judge, namespace, reference, textbook
from libraries import Library

from sdpa_xp import biases, masks
from sdpa_xp.positional import LinearScaling, Rotary, YaRNScaling

F = np.float32
HEADS, KEY_HEADS, WIDTH, VALUE_WIDTH = 4, 2, 8, 5
SLOPES = np.asarray([0.5, 0.25, 1.0, 2.0])
TABLE = np.linspace(-2, 2, 8 * HEADS).reshape(8, HEADS).astype(F)
ROTARIES = [
    None,
    Rotary(8),
    Rotary(6, base=100.0, interleaved=True, scaling=LinearScaling(2.0)),
    Rotary(8, scaling=YaRNScaling(4.0, 16, beta_fast=4.0)),
]


def bucket(distance: np.ndarray) -> np.ndarray:
    """T5's buckets of j - i, four to each side: 0, 1, then 2 and 3 up to the distance 4 and beyond."""
    far = np.abs(distance)
    return np.where(far < 2, far, np.where(far < math.sqrt(2 * 4), 2, 3)) + np.where(distance > 0, 4, 0)


MASKS: dict[str, Any] = {
    "none": (None, lambda i, j: True),
    "causal": (masks.causal(), lambda i, j: j <= i),
    "window": (masks.sliding_window(2, 0), lambda i, j: (i - 2 <= j) & (j <= i)),
    "window to both sides": (masks.sliding_window(1, 1, offset=1), lambda i, j: abs(j - i - 1) <= 1),
    "chunks": (masks.chunked(3), lambda i, j: i // 3 == j // 3),
    "dilated": (masks.dilated(2), lambda i, j: (i - j) % 2 == 0),
    "prefix": (masks.prefix(4), lambda i, j: j < 4),
    "function": (
        masks.from_function(lambda b, h, q_idx, kv_idx: (q_idx + 2 * kv_idx) % 3 > 0),
        lambda i, j: (i + 2 * j) % 3 > 0,
    ),
    "joined": (
        masks.sliding_window(4, 0) & ~masks.prefix(2) | masks.chunked(2),
        lambda i, j: ((i - 4 <= j) & (j <= i) & (j >= 2)) | (i // 2 == j // 2),
    ),
}
BIASES: dict[str, Any] = {
    "none": (None, lambda i, j: 0.0 * (i + j)),
    "alibi": (biases.alibi(SLOPES.tolist()), lambda i, j: -SLOPES[:, None, None] * abs(i - j)),
    "relative": ("table", lambda i, j: np.moveaxis(TABLE[bucket(j - i)[:, 0]], -1, 1)),
    "function": (
        biases.from_function(lambda s, b, h, i, j: s + 0.25 * namespace(s).astype((i + 3 * j) % 4, s.dtype)),
        lambda i, j: 0.25 * ((i + 3 * j) % 4) * np.ones((HEADS, 1, 1)),
    ),
}


@dataclass
class Tokens:
    """What the formula knows of the tokens in a cache: each by its key, its value and its position."""

    key: np.ndarray
    value: np.ndarray
    positions: np.ndarray
    """(B, S)."""

    def at_slots(self, slots: np.ndarray) -> Tokens:
        slots = np.broadcast_to(slots, (len(self.positions), slots.shape[-1]))
        parts = [np.take_along_axis(x, slots[:, None, :, None], axis=2) for x in (self.key, self.value)]
        return Tokens(*parts, np.take_along_axis(self.positions, slots, axis=1))

    def with_more(self, key: np.ndarray, value: np.ndarray, positions: np.ndarray) -> Tokens:
        pairs = ((self.key, key, 2), (self.value, value, 2), (self.positions, positions, 1))
        return Tokens(*(np.concatenate([old, new], axis) for old, new, axis in pairs))


def rotated(x: np.ndarray, factors: np.ndarray, *, interleaved: bool) -> np.ndarray:
    """(..., L, E) in float64: pairs of numbers times complex factors (..., L, width / 2), the rest as it is."""
    half, width = factors.shape[-1], 2 * factors.shape[-1]
    halves, alternating = (slice(half), slice(half, width)), (slice(0, width, 2), slice(1, width, 2))
    one, other = alternating if interleaved else halves
    result = x.astype(np.float64)
    pairs = (result[..., one] + 1j * result[..., other]) * factors
    result[..., one], result[..., other] = pairs.real, pairs.imag
    return result


def turned(x: np.ndarray, positions: np.ndarray, rotary: Rotary) -> np.ndarray:
    """(..., H, L, E) at positions (..., L)."""
    factor = 0.1 * math.log(4) + 1 if isinstance(rotary.scaling, YaRNScaling) else 1.0
    angles = positions[..., None, :, None] * np.asarray(rotary.frequencies)
    return rotated(x, factor * np.exp(1j * angles), interleaved=rotary.interleaved)


def exact_call(
    query: np.ndarray,
    query_positions: np.ndarray,
    tokens: Tokens,
    rotary: Rotary | None,
    mask: str,
    bias: str,
    causal: bool,
) -> dict[str, Any]:
    """The call of queries at positions (B, L) as one of plain arrays, in float64."""
    i, j = query_positions[:, None, :, None], tokens.positions[:, None, None, :]
    arrays = {"query": query, "key": tokens.key}
    if rotary is not None:
        arrays = {
            "query": turned(query, query_positions, rotary),
            "key": turned(tokens.key, tokens.positions, rotary),
        }
    pairs = np.broadcast_shapes(i.shape, j.shape)
    allowed = np.broadcast_to(MASKS[mask][1](i, j), pairs).copy()
    if causal:
        queries, slots = pairs[-2:]
        allowed &= np.arange(slots) <= np.arange(queries)[:, None] + slots - queries
    added = np.broadcast_to(BIASES[bias][1](i, j), (len(query), HEADS, *pairs[-2:]))
    call = arrays | {"value": tokens.value, "attn_mask": allowed, "bias": added}
    return {name: x if x.dtype == bool else x.astype(np.float64) for name, x in call.items()}


def bias_for(library: Library, name: str) -> Any:
    """The bias of that name, with its table in the library."""
    return biases.relative(library.put(TABLE), max_distance=4) if name == "relative" else BIASES[name][0]


def assert_right(library: Library, result: np.ndarray, call: dict[str, Any]) -> None:
    if call["key"].shape[-2] == 0:
        np.testing.assert_array_equal(result, np.zeros_like(result))
        return
    rounded = {name: x if x.dtype == bool else x.astype(F) for name, x in call.items()}
    with np.errstate(all="ignore"):
        plain = library.get(library.without_settings.call(lambda **x: textbook(library.xp, **x), **rounded))
        expected, _, weights = reference.attention(**call)
    agreement = judge(result, expected, plain, "float32", largest_terms(weights, call["value"]))
    assert agreement.agrees, agreement
