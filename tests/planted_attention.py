"""A right attention in NumPy with places for a fault, and right ones that differ in order and precision.

It is written apart from the judge and from the library. A fault is a function of what a step has computed.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np

Step = Callable[..., Any]


def attention(
    query: Any,
    key: Any,
    value: Any,
    attn_mask: Any = None,
    *,
    bias: Any = None,
    is_causal: bool = False,
    scale: float | None = None,
    softcap: float | None = None,
    sinks: Any = None,
    plant: dict[str, Step] | None = None,
) -> Any:
    """Attention; `plant` has, by the name of a step, what replaces what the step has computed."""
    plant, dtype = plant or {}, query.dtype

    def step(name: str, result: Any, *more: Any) -> Any:
        return plant[name](result, *more) if name in plant else result

    acc = step("dtype", np.float64 if dtype == np.float64 else np.float32)
    q, k, v = step("tokens", tuple(x.astype(acc) for x in (query, key, value)))
    group = q.shape[-3] // max(k.shape[-3], 1) if q.ndim > 2 else 1
    k, v = step(
        "groups", tuple(np.repeat(x, group, axis=-3) if group > 1 else x for x in (k, v)), key, value, q
    )
    with np.errstate(all="ignore"):
        pairs = (*np.broadcast_shapes(q.shape[:-2], k.shape[:-2]), q.shape[-2], k.shape[-2])
        factor = step("scale", 1 / math.sqrt(q.shape[-1]) if scale is None else scale, q, v, scale)
        allowed = np.ones(pairs, bool)
        if attn_mask is not None:
            allowed = allowed & step("mask", attn_mask, pairs, is_causal)
        if step("is_causal", is_causal, pairs, attn_mask):
            allowed = allowed & step("causal", np.tri(*pairs[-2:], dtype=bool), pairs)
        allowed = step("allowed", allowed)
        bias = step("bias", bias, pairs, attn_mask, factor)
        scores = step("scores", (q @ np.swapaxes(k, -1, -2)) * acc(factor), q, k, factor)
        cap = step("cap", softcap, bias)
        if cap:
            scores = acc(cap) * np.tanh(scores / acc(cap))
        scores = scores if bias is None else step("added", scores + np.asarray(bias).astype(acc), softcap)
        allowed = allowed if bias is None else allowed & ~np.isneginf(np.asarray(bias).astype(np.float64))
        scores = step("masked", np.where(allowed, scores, -np.inf), scores, allowed, softcap)
        sinks = None if sinks is None else step("sinks", sinks.astype(acc)[:, None, None], factor)
        largest = scores.max(axis=-1, keepdims=True, initial=-np.inf)
        largest = largest if sinks is None else step("largest sink", np.maximum(largest, sinks), largest)
        largest = step("largest", np.where(np.isneginf(largest), acc(0), largest), scores, allowed)
        p = step("exponentials", np.exp(scores - largest), scores, largest)
        total = p.sum(axis=-1, keepdims=True)
        total = total if sinks is None else step("total sink", total + np.exp(sinks - largest), sinks, largest)
        total = step("total", total, p)
        p = step("weights", np.where(total == 0, acc(0), p / np.where(total == 0, acc(1), total)), scores)
        p, hidden = p if "masked" in plant else np.where(allowed, p, acc(0)), step("hidden", True)
        reached = (np.isnan(v) | np.isinf(v)).any(axis=-1)
        output = p @ np.where(np.isfinite(v), v, acc(0)) if hidden else p @ v
        if hidden and reached.any():  # a weight of 0 keeps what is not finite away
            for *head, j in np.argwhere(np.broadcast_to(reached, pairs[:-2] + pairs[-1:])):
                rows = allowed[(*head, slice(None), j)]
                terms = p[(*head, slice(None), j)][:, None] * v[(*head, j)]
                bad = rows[:, None] & ~np.isfinite(v[(*head, j)])
                output[tuple(head)] = np.where(bad, terms, output[tuple(head)])
        output = step("output", output, v, allowed)
    return step("result", output.astype(dtype))


def tiles(causes: Step) -> Step:
    """A fault of the keys of a tile: `causes` says which of S keys are lost."""

    def drop(allowed: Any) -> Any:
        lost = causes(allowed.shape[-1])
        return allowed & ~np.isin(np.arange(allowed.shape[-1]), lost)

    return drop


def over_pairs(mask: Any, pairs: tuple[int, ...]) -> Any:
    return np.broadcast_to(mask, pairs)


class Stale:
    """The mask of the first call of these shapes is used in all later ones."""

    def __init__(self) -> None:
        self.kept: dict[Any, Any] = {}

    def __call__(self, mask: Any, pairs: Any, _causal: Any) -> Any:
        return self.kept.setdefault((pairs, np.shape(mask)), mask)


def are_halves(*arrays: Any) -> bool:
    """Whether float32 arrays hold what were float16."""
    return all(np.array_equal(x, x.astype(np.float16), equal_nan=True) for x in arrays)


def rows_like_before(output: Any, _value: Any, allowed: Any) -> Any:
    empty = ~allowed.any(axis=-1)[..., None]
    return np.where(empty, np.roll(output, 1, axis=-2), output)


def mean_of_empty(output: Any, value: Any, allowed: Any) -> Any:
    return np.where(allowed.any(axis=-1)[..., None], output, value.mean(axis=-2, keepdims=True))


def half(x: Any) -> Any:
    return x.astype(ml_dtypes.bfloat16).astype(x.dtype)


def in_row(index: int, change: Step) -> Step:
    """Change one row of an output."""

    def changed(output: Any, *_more: Any) -> Any:
        output = output.copy()
        if output.shape[-2] > abs(index) - (index < 0):
            output[..., index, :] = change(output[..., index, :])
        return output

    return changed


def first_tile_not_scaled(p: Any, scores: Any, largest: Any) -> Any:
    of_first = scores[..., :16].max(axis=-1, keepdims=True, initial=-np.inf)
    of_first = np.where(np.isneginf(of_first), largest, of_first)
    return np.concatenate([np.exp(scores[..., :16] - of_first), p[..., 16:]], axis=-1)


def packed(x: Any) -> Any:
    """Read the memory from its start, as if there were no strides."""
    return np.ravel(x, order="K").reshape(x.shape)


def written(bias: Any, pairs: tuple[int, ...], mask: Any, _factor: Any) -> Any:
    """Write the mask into the bias, if it has a place for each pair."""
    if bias is not None and mask is not None and bias.shape == pairs:
        np.copyto(bias, -np.inf, where=~mask)
    return bias


def of_the_first_entry(allowed: Any) -> Any:
    """Skip the tiles of 32 keys in which the first entry has none."""
    tiles = np.arange(allowed.shape[-1]) // 32
    skipped = [n for n in {*tiles} if allowed.ndim > 3 and not allowed[0][..., tiles == n].any()]
    return allowed & ~np.isin(tiles, skipped)


FAULTS: dict[str, dict[str, Step]] = {
    "the scale of the values' width": {
        "scale": lambda s, q, v, passed: s if passed is not None else v.shape[-1] ** -0.5
    },
    "the scale is 1 / E": {"scale": lambda s, q, v, passed: s if passed is not None else 1 / q.shape[-1]},
    "the scale is not used": {"scale": lambda s, q, v, passed: q.shape[-1] ** -0.5},
    "the scale joins the default": {
        "scale": lambda s, q, v, passed: s if passed is None else s * q.shape[-1] ** -0.5
    },
    "a scale of 0 is the default": {"scale": lambda s, q, v, passed: s or q.shape[-1] ** -0.5},
    "the scale has no sign": {"scale": lambda s, q, v, passed: abs(s)},
    "the width counts from 16": {
        "scale": lambda s, q, v, passed: s if passed is not None else max(q.shape[-1], 16) ** -0.5
    },
    "the mask is off by one": {"mask": lambda m, *_: np.roll(m, 1, axis=-1)},
    "the mask is dropped": {"mask": lambda m, *_: np.True_},
    "the mask is dropped if causal": {"mask": lambda m, pairs, causal: np.True_ if causal else m},
    "the mask of the first head": {"mask": lambda m, *_: m if np.ndim(m) < 3 else m[..., :1, :, :]},
    "the mask of the first entry": {"mask": lambda m, *_: m if np.ndim(m) < 4 else m[:1]},
    "the mask of the first query": {"mask": lambda m, *_: m if np.ndim(m) < 2 else m[..., :1, :]},
    "only 128 keys are masked": {
        "mask": lambda m, pairs, _: over_pairs(m, pairs) | (np.arange(pairs[-1]) >= 128)
    },
    "only 64 queries are masked": {
        "mask": lambda m, pairs, _: over_pairs(m, pairs) | (np.arange(pairs[-2]) >= 64)[:, None]
    },
    "padding counts from the left": {
        "mask": lambda m, pairs, _: np.arange(pairs[-1]) < over_pairs(m, pairs).sum(axis=-1, keepdims=True)
    },
    "the mask of an earlier call": {"mask": Stale()},
    "the first key is always allowed": {"allowed": lambda a: a | (np.arange(a.shape[-1]) == 0)},
    "the diagonal is always allowed": {"allowed": lambda a: a | np.eye(*a.shape[-2:], dtype=bool)},
    "the last key is lost": {"allowed": tiles(lambda n: [n - 1] if n > 1 else [])},
    "the first key is lost": {"allowed": tiles(lambda n: [0] if n > 1 else [])},
    "a last partial tile of 16 is lost": {"allowed": tiles(lambda n: range(n - n % 16, n) if n > 16 else [])},
    "a last partial tile of 64 is lost": {"allowed": tiles(lambda n: range(n - n % 64, n) if n > 64 else [])},
    "a last partial tile of 256 is lost": {
        "allowed": tiles(lambda n: range(n - n % 256, n) if n > 256 else [])
    },
    "keys beyond 1,024 are lost": {"allowed": tiles(lambda n: range(1024, n))},
    "key 15 of each 32 is lost": {"allowed": tiles(lambda n: range(15, n, 32))},
    "a mask of -10000": {
        "masked": lambda s, scores, a, _: np.where(a, scores, scores - scores.dtype.type(1e4))
    },
    "a mask of -30": {"masked": lambda s, scores, a, _: np.where(a, scores, scores.dtype.type(-30))},
    "masked scores are capped": {
        "masked": lambda s, scores, a, cap: np.where(a, scores, scores.dtype.type(-(cap or np.inf)))
    },
    "masked by the least number": {
        "masked": lambda s, scores, a, _: np.where(a, scores, np.finfo(scores.dtype).min),
        "hidden": lambda _: False,
    },
    "causal without the diagonal": {"causal": lambda c, pairs: np.tri(*pairs[-2:], -1, dtype=bool)},
    "causal with the next key": {"causal": lambda c, pairs: np.tri(*pairs[-2:], 1, dtype=bool)},
    "causal at the right if L > S": {
        "causal": lambda c, pairs: np.tri(*pairs[-2:], min(pairs[-1] - pairs[-2], 0), dtype=bool)
    },
    "causal at the right if long": {
        "causal": lambda c, p: np.tri(*p[-2:], p[-1] - p[-2] if p[-1] > 64 else 0, dtype=bool)
    },
    "not causal for one query": {"is_causal": lambda c, pairs, _: c and pairs[-2] > 1},
    "not causal beyond 64 queries": {"is_causal": lambda c, pairs, _: c and pairs[-2] <= 64},
    "not causal with a mask": {"is_causal": lambda c, pairs, mask: c and mask is None},
    "not causal if lengths differ": {"is_causal": lambda c, pairs, _: c and pairs[-2] == pairs[-1]},
    "causal if told not to be": {
        "is_causal": lambda c, pairs, _: c is not None and (c or pairs[-2:] == (9, 9))
    },
    "the softcap is not used": {"cap": lambda cap, _: None},
    "the softcap is doubled": {"cap": lambda cap, _: cap and 2 * cap},
    "the softcap is dropped with a bias": {"cap": lambda cap, bias: cap if bias is None else None},
    "the bias is scaled": {"bias": lambda b, pairs, mask, s: None if b is None else b * np.asarray(s, b.dtype)},
    "the bias is added twice": {"bias": lambda b, *_: None if b is None else b + b},
    "the bias of the first head": {"bias": lambda b, *_: b if b is None or b.ndim < 3 else b[..., :1, :, :]},
    "the bias is dropped with a mask": {"bias": lambda b, pairs, mask, _: b if mask is None else None},
    "the bias of 128 keys": {
        "bias": lambda b, pairs, *_: (
            b if b is None or pairs[-1] <= 128 else np.where(np.arange(pairs[-1]) < 128, b, 0)
        )
    },
    "no maximum": {"largest": lambda m, *_: m * 0},
    "the maximum is 120 too large if any key is masked": {
        "largest": lambda m, scores, a: m + 120 * ~a.all(axis=-1, keepdims=True)
    },
    "one maximum for all queries": {"largest": lambda m, *_: m.max(axis=-2, keepdims=True)},
    "the maximum of the first 32 keys": {
        "largest": lambda m, scores, a: np.where(
            np.isneginf(x := scores[..., :32].max(axis=-1, keepdims=True)), m, x
        )
    },
    "the first tile is not scaled down": {"exponentials": first_tile_not_scaled},
    "exponentials are 1 % off": {"exponentials": lambda p, *_: p * (1 + 0.01 * np.sin(40 * p))},
    "weights in bfloat16": {"exponentials": lambda p, *_: half(p)},
    "exponentials below 1e-4 are lost": {"exponentials": lambda p, *_: np.where(p < 1e-4, 0, p)},
    "the total has 1e-4 more": {"total": lambda t, _: np.where(t == 0, t, t + t.dtype.type(1e-4))},
    "not divided by the total": {"total": lambda t, _: np.where(t == 0, t, t * 0 + 1)},
    "empty rows are as the row before": {"output": rows_like_before},
    "empty rows are as in a mean, but half": {"output": lambda o, v, a: (mean_of_empty(o, v, a) + o) / 2},
    "the first row is 0": {"output": in_row(0, lambda x: x * 0)},
    "the last row is 0": {"output": in_row(-1, lambda x: x * 0)},
    "row 128 is the row before": {"output": in_row(128, lambda x: x * 0 + 1)},
    "two heads are swapped": {
        "output": lambda o, *_: np.roll(o, 1, axis=-3) if o.ndim > 2 and o.shape[-3] == 5 else o
    },
    "entries of the batch are swapped": {"output": lambda o, *_: np.flip(o, axis=0) if o.ndim > 3 else o},
    "heads of the first entry": {
        "tokens": lambda t: (t[0], np.broadcast_to(t[1][:1], t[1].shape) if t[1].ndim > 3 else t[1], t[2])
    },
    "groups count from the end": {
        "groups": lambda result, key, value, q: tuple(
            np.flip(x, axis=-3) if q.ndim > 2 and q.shape[-3] != key.shape[-3] else x for x in result
        )
    },
    "the last column of an odd width is lost": {
        "tokens": lambda t: (
            np.where(
                np.arange(t[0].shape[-1]) < t[0].shape[-1] // 4 * 4 if t[0].shape[-1] > 4 else True, t[0], 0
            ),
            *t[1:],
        )
    },
    "columns beyond 128 are lost": {
        "tokens": lambda t: (np.where(np.arange(t[0].shape[-1]) < 128, t[0], 0), *t[1:])
    },
    "NaN becomes 0": {"output": lambda o, *_: np.nan_to_num(o)},
    "float64 by way of float32": {"dtype": lambda _: np.float32},
    "zeros": {"output": lambda o, *_: o * 0},
    "ones": {"output": lambda o, *_: o * 0 + 1},
    "the mean of the values": {"output": lambda o, v, a: o * 0 + v.mean(axis=-2, keepdims=True)},
    "a value": {"output": lambda o, v, a: o * 0 + v[..., :1, :] if v.shape[-2] else o},
    "sinks are scaled": {"sinks": lambda s, factor: s * np.asarray(factor, s.dtype)},
    "sinks count twice": {"total sink": lambda t, s, m: t + np.exp(s - m)},
    "sinks are dropped": {"sinks": lambda s, _: s * 0 - np.inf},
    "sinks in float32": {"sinks": lambda s, _: s.astype(np.float32).astype(s.dtype)},
    "positions in bfloat16": {
        "causal": lambda c, pairs: (
            half(np.arange(pairs[-2], dtype=np.float32))[:, None]
            >= half(np.arange(pairs[-1], dtype=np.float32))
        )
    },
    "padding of 16 enters the maximum": {
        "largest": lambda m, scores, _: np.maximum(m, m.dtype.type(0)) if scores.shape[-1] % 16 else m
    },
    "a masked last tile empties its rows": {
        "output": lambda o, v, a: o * a[..., (a.shape[-1] - 1) // 16 * 16 :].any(axis=-1)[..., None]
    },
    "a mask of pairs is one of the batch": {
        "mask": lambda m, pairs, _: (
            m[:, None, None, :] if m.ndim == 2 and m.shape[0] == pairs[0] > 1 < len(pairs) - 2 else m
        )
    },
    "the mask has no strides": {"mask": lambda m, *_: packed(m)},
    "the bias has no strides": {"bias": lambda b, *_: None if b is None else packed(b)},
    "a transposed key has no strides": {
        "tokens": lambda t: (t[0], packed(t[1]) if t[1].strides[-1] > t[1].strides[-2] else t[1], t[2])
    },
    "an expanded mask has no strides": {
        "mask": lambda m, *_: m if all(m.strides) else np.resize(m[..., :1, :, :], m.shape)
    },
    "a view of a few tokens of width 64 has no strides": {  # pytorch 181133
        "tokens": lambda t: tuple(packed(x) if x.shape[-1] == 64 and x.shape[-2] < 5 else x for x in t)
    },
    "the entries of a mask meet the heads": {  # mlx-lm 1903
        "mask": lambda m, pairs, _: (
            np.repeat(m, pairs[1] // pairs[0], axis=0).swapaxes(0, 1)
            if m.ndim == 4 and m.shape[:2] == (pairs[0], 1) and 1 < pairs[0] < pairs[1] == pairs[0] * 3
            else m
        )
    },
    "rows of a mask from 512 on": {  # pytorch 162588
        "mask": lambda m, *_: m if m.ndim < 2 else np.take(m, np.arange(m.shape[-2]) % 512, axis=-2)
    },
    "the mask is written into the bias": {"bias": written},
    "tiles are those of the first entry": {"allowed": of_the_first_entry},
    "a row of a mask is for 64 queries": {
        "mask": lambda m, pairs, _: (
            m | (np.arange(pairs[-2]) >= 64)[:, None] if m.ndim > 1 and m.shape[-2] == 1 else m
        )
    },
    "no mask for three axes": {"mask": lambda m, pairs, _: np.True_ if len(pairs) == 3 else m},
    "a mask of -65504": {
        "masked": lambda s, scores, a, _: np.where(a, scores, np.where(a.any(-1, keepdims=True), -65504.0, s))
    },
    "the log of a sum vanishes": {
        "weights": lambda p, s: np.where(np.isfinite(s) & (s < -1e30) & (p > 0), 1, p)
    },
    "wide values of a second tile are lost": {
        "output": lambda o, v, a: np.where(np.arange(o.shape[-1]) < 64, o, 0) if v.shape[-2] > 64 else o
    },
    "bfloat16 by way of float16": {
        "result": lambda o: o.astype(np.float16).astype(o.dtype) if o.dtype == ml_dtypes.bfloat16 else o
    },
    "products overflow in float16": {
        "scores": lambda s, q, k, factor: (
            np.where(np.abs(s) > 65504 * abs(factor), np.sign(s) * np.inf, s) if are_halves(q, k) else s
        )
    },
    "scores are cut at 1,000": {"scores": lambda s, *_: np.clip(s, -1000, 1000)},
    "NaN for a query without a key beside a sink": {
        "largest sink": lambda m, largest: np.where(np.isneginf(largest), np.nan, m),
        "masked": lambda s, *_: s,
    },
    "a large output is cut": {"result": lambda o: np.clip(o, -1e4, 1e4)},
    "the result is rounded to bfloat16": {"result": half},
}
"""By what is wrong."""


def in_tiles(
    query: Any, key: Any, value: Any, attn_mask: Any = None, *, is_causal: bool = False, scale: Any = None
) -> Any:
    """The online softmax, over tiles of 16 keys from the last to the first."""
    acc = np.float64 if query.dtype == np.float64 else np.float32
    q, k, v = (x.astype(acc) for x in (query, key, value))
    group = q.shape[-3] // k.shape[-3] if q.ndim > 2 else 1
    k, v = (np.repeat(x, group, axis=-3) if group > 1 else x for x in (k, v))
    queries, keys = q.shape[-2], k.shape[-2]
    allowed = np.ones((*q.shape[:-1], keys), bool) & (True if attn_mask is None else attn_mask)
    allowed = allowed & np.tri(queries, keys, dtype=bool) if is_causal else allowed
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    most, total = np.full((*q.shape[:-1], 1), -np.inf, acc), np.zeros((*q.shape[:-1], 1), acc)
    output = np.zeros((*q.shape[:-1], v.shape[-1]), acc)
    with np.errstate(all="ignore"):
        for start in reversed(range(0, keys, 16)):
            here = slice(start, start + 16)
            scores = np.where(
                allowed[..., here], (q * acc(scale)) @ np.swapaxes(k[..., here, :], -1, -2), -np.inf
            )
            largest = np.maximum(most, scores.max(axis=-1, keepdims=True))
            shift = np.where(np.isneginf(largest), acc(0), largest)
            p, keep = np.exp2((scores - shift) * acc(math.log2(math.e))), np.exp(most - shift)
            output = output * keep + p @ v[..., here, :]
            total, most = total * keep + p.sum(axis=-1, keepdims=True), largest
        return np.where(total == 0, acc(0), output / np.where(total == 0, acc(1), total)).astype(query.dtype)


def plain(dtype: Any, empty: float, order: int = 1) -> Step:
    """Three lines that compute in one dtype; a query without a key gives `empty`."""

    def attend(query: Any, key: Any, value: Any, mask: Any = None, is_causal: bool = False) -> Any:
        acc = dtype or query.dtype
        q, k, v = query.astype(acc), key.astype(acc)[..., ::order, :], value.astype(acc)[..., ::order, :]
        allowed = np.True_ if mask is None else np.broadcast_to(mask, (*q.shape[:-1], key.shape[-2]))
        allowed = allowed & np.tri(q.shape[-2], key.shape[-2], dtype=bool) if is_causal else allowed
        allowed = allowed[..., ::order] if allowed.ndim else allowed
        with np.errstate(all="ignore"):
            root = np.asarray(math.sqrt(q.shape[-1]), acc)
            scores = np.where(
                allowed, (q @ np.swapaxes(k, -1, -2) / root).astype(acc), np.asarray(-np.inf, acc)
            )
            p = np.exp(scores - scores.max(axis=-1, keepdims=True, initial=-np.inf).astype(acc))
            output = (p / p.sum(axis=-1, keepdims=True)).astype(acc) @ v
            output = output.astype(acc)
        if np.ndim(allowed):
            output = np.where(allowed.any(axis=-1)[..., None], output, np.asarray(empty, acc))
        return output.astype(query.dtype)

    return attend


def in_parts(query: Any, key: Any, value: Any, attn_mask: Any = None, is_causal: bool = False) -> Any:
    """Three parts of the keys, each with its log-sum-exp, by einsum; merged in float64."""
    q, k, v = (x.astype(np.float64) for x in (query, key, value))
    group = q.shape[-3] // k.shape[-3] if q.ndim > 2 else 1
    k, v = (np.repeat(x, group, axis=-3) if group > 1 else x for x in (k, v))
    allowed = np.broadcast_to(True if attn_mask is None else attn_mask, (*q.shape[:-1], k.shape[-2]))
    allowed = allowed & np.tri(q.shape[-2], k.shape[-2], dtype=bool) if is_causal else allowed
    outputs, states = [], []
    with np.errstate(all="ignore"):
        for part in np.array_split(np.arange(k.shape[-2]), 3):
            scores = np.einsum("...le,...se->...ls", q, k[..., part, :]) / math.sqrt(q.shape[-1])
            scores = np.where(allowed[..., part], scores, -np.inf)
            largest = scores.max(axis=-1, keepdims=True, initial=-np.inf)
            shift = np.where(np.isneginf(largest), 0.0, largest)
            weights = np.where(allowed[..., part], np.exp(scores - shift), 0.0)
            total = weights.sum(axis=-1, keepdims=True)
            outputs.append(
                np.einsum("...ls,...sv->...lv", weights, v[..., part, :]) / np.where(total == 0, 1, total)
            )
            states.append(np.log(total) + shift)
        most = np.maximum(np.maximum(*states[:2]), states[2])
        shares = [np.exp(x - np.where(np.isneginf(most), 0.0, most)) for x in states]
        total = sum(shares)
        merged = sum(x * share for x, share in zip(outputs, shares, strict=True))
        return (merged / np.where(total == 0, 1, total)).astype(query.dtype)


def one_after_the_other(query: Any, key: Any, value: Any) -> Any:
    """All sums in the order of the keys, in float32, as a loop of a kernel adds."""
    if query.ndim < 3 or query.shape[-3] != key.shape[-3] or not key.shape[-2]:
        raise ValueError("equal heads, and keys")
    acc = np.float64 if query.dtype == np.float64 else np.float32
    q, k, v = (x.astype(acc) for x in (query, key, value))
    with np.errstate(all="ignore"):
        scores = (q @ np.swapaxes(k, -1, -2)) * acc(1 / math.sqrt(q.shape[-1]))
        weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
        total = np.add.accumulate(weights, axis=-1)[..., -1:]
        columns = [
            np.add.accumulate(weights * v[..., None, :, e], axis=-1)[..., -1] for e in range(v.shape[-1])
        ]
        return (np.stack(columns, axis=-1) / total).astype(query.dtype)


RIGHT: dict[str, Step] = {
    "in one piece": attention,
    "in tiles, from the last": in_tiles,
    "in float64 inside": plain(np.float64, 0.0),
    "the textbook in its dtype": plain(None, 0.0),
    "keys from the last to the first": plain(None, 0.0, -1),
    "NaN for a query without a key": plain(np.float64, math.nan),
    "in parts, merged": in_parts,
    "one after the other": one_after_the_other,
}
