"""Random inputs for a call: ordinary ones, and those at the edges of what it must compute."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from sdpa_xp.checks import HLE
from sdpa_xp_export._call.call import Call
from sdpa_xp_export._dtypes.conversion import numpy_dtype
from sdpa_xp_export._verify.constants import largest
from sdpa_xp_export._verify.reference_inputs import Arrays, plain
from sdpa_xp_export.spec import TensorSpec, addends

LARGE = 40.0
"""By how much larger scores are at that edge: the largest of them have no exponential in float32."""
MOST_SCORES = 2**23
"""How many scores are worth to see the end of a long window."""


def sample(call: Call, lengths: Mapping[str, int], rng: np.random.Generator, size: float = 1.0) -> Arrays:
    """Random inputs for a call whose symbols have `lengths`; scores are of `size`, whatever the scale.

    A boolean mask is True for three pairs of four, and False for the whole last key and, where it has a row
    for each query, the whole first query. A floating one is -inf there; but its last row has the smallest
    finite number throughout, which does not mask, unless a bound would suffer. Lengths are ragged: the first is
    0, the last whole.
    """
    arrays: Arrays = {}
    for name, spec in call.inputs.items():
        shape = tuple(_length(length, lengths) for length in spec.shape)
        arrays[name] = _drawn(call, name, spec, shape or (1,), lengths, rng).reshape(shape)
    scale = arrays.get("scale", call.scale)
    typical = abs(scale) if isinstance(scale, float) else 1.0
    own = typical * math.sqrt(arrays["query"].shape[-1])
    arrays["query"] = (arrays["query"] * (size / (own or 1.0))).astype(numpy_dtype(call.query.dtype))
    return _beyond_is_nan(call, arrays)


def poison(call: Call, arrays: Arrays) -> Arrays:
    """The inputs with NaN in every key and value that no query attends; a cache is left as it is."""
    if call.cached:
        return arrays
    given = plain(call, arrays)
    key, query = given["key"], given["query"]
    heads = key.shape[-3] if key.ndim > 2 else 1
    query_heads = query.shape[-3] if query.ndim > 2 else 1
    ranks = (x.shape[:-3] for x in (query, key, given["value"]))
    pairs = (*np.broadcast_shapes(*ranks), query_heads, query.shape[-2], key.shape[-2])
    allowed = np.ones(pairs, bool)
    if given["attn_mask"] is not None:
        allowed &= given["attn_mask"]
    for term in given["bias"]:
        if not callable(term):
            allowed &= ~np.isneginf(term)
    by_group = allowed.reshape(*pairs[:-3], heads, -1, pairs[-1])  # its heads and their queries are rows
    hidden = np.asarray(~by_group.any(axis=-2))
    poisoned = {}
    for name in ("key", "value"):
        poisoned[name] = arrays[name].copy()
        seen = poisoned[name] if call.layout == HLE or key.ndim < 3 else poisoned[name].swapaxes(-2, -3)
        seen[_for_all_that_share(hidden, seen.shape[:-1])] = np.nan
    return arrays | poisoned


def several_lengths(call: Call) -> Iterator[dict[str, int]]:
    """Some lengths for each symbol: different ones, each way round, and all 1."""
    symbols = call.symbols
    if not symbols:
        yield from ({}, {}, {})
        return
    several = [length for length, _ in zip(itertools.cycle([2, 5, 9, 7, 3]), symbols, strict=False)]
    other = several[::-1] if len(symbols) > 1 else [5]
    for each in (several, other, [1] * len(symbols)):
        yield _with_room(call, dict(zip(symbols, each, strict=True)))


def blocks_of_queries(call: Call, rows: int) -> dict[str, int] | None:
    """Lengths for more queries than `rows`, and some more keys; None where a call has its own."""
    queries, keys = call.sizes.queries, call.sizes.keys
    if not isinstance(queries, str):
        return None
    lengths = dict(zip(call.symbols, itertools.cycle([2, 3]), strict=False))
    lengths |= {name: rows + 9 for name in (keys,) if name in lengths}
    lengths |= {name: rows + 3 for name in (queries,) if name in lengths}
    return _with_room(call, lengths)


def beyond_constants(call: Call) -> dict[str, int] | None:
    """Lengths at which each number in a mask or a bias matters: a window ends, a second chunk begins.

    None where there is no such number, no length to choose, or no room for so many scores.
    """
    reach = largest(call)
    counted = {*addends(str(call.sizes.queries)), *addends(str(call.sizes.keys))}
    free = [name for name in call.symbols if name in counted]
    if not reach or not free:
        return None
    lengths = dict(zip(call.symbols, itertools.cycle([2, 3]), strict=False))
    lengths |= {name: reach + 3 + 2 * number for number, name in enumerate(free)}
    lengths = _with_room(call, lengths)
    scores = math.prod(_length(length, lengths) for length in call.sizes.pairs)
    return lengths if scores <= MOST_SCORES else None


def _with_room(call: Call, lengths: dict[str, int]) -> dict[str, int]:
    """A padded cache has room for the new tokens, and some more."""
    if call.past_lengths is None or call.past_key is None:
        return lengths
    axis = -2 if call.layout == HLE else -3
    room, new = call.past_key.shape[axis], call.key.shape[axis]
    if isinstance(room, str):
        lengths[room] = 3 + lengths[room] + _length(new, lengths)
    return lengths


def _length(length: int | str, lengths: Mapping[str, int]) -> int:
    if isinstance(length, int):
        return length
    return sum(int(part) if part.isdecimal() else lengths[part] for part in addends(length))


def _drawn(
    call: Call,
    name: str,
    spec: TensorSpec,
    shape: tuple[int, ...],
    lengths: Mapping[str, int],
    rng: np.random.Generator,
) -> NDArray[Any]:
    dtype, stem = numpy_dtype(spec.dtype), name.rstrip("_0123456789")
    queries, keys = (_length(length, lengths) for length in (call.sizes.queries, call.sizes.keys))
    most = {
        "key_lengths": keys,
        "query_lengths": queries,
        "length": keys,
        "past_lengths": keys - (_new(call, lengths) if call.cached else 0),
    }
    if stem in most:
        drawn = rng.integers(0, most[stem] + 1, shape)
        if drawn.size > 1:
            drawn.flat[0], drawn.flat[-1] = 0, most[stem]
        return _held(drawn, dtype)
    if stem in ("query_ids", "key_ids"):
        return np.sort(rng.integers(0, 3, shape), axis=-1).astype(dtype)
    if stem == "offset":
        return _held(rng.integers(-2, max(keys - queries, 0) + 3, shape), dtype)
    if stem in ("attn_mask", "bias"):
        return _of_pairs(spec, shape, rng, least=_takes_least(call))
    if stem == "slopes":
        return np.asarray(rng.random(shape), dtype)
    return rng.standard_normal(shape).astype(dtype)


def _held(drawn: NDArray[np.int64], dtype: np.dtype[Any]) -> NDArray[Any]:
    """Small integers in `dtype`, those beyond it at its ends."""
    ends = np.iinfo(dtype)
    return np.clip(drawn, ends.min, min(ends.max, 2**31)).astype(dtype)


def _takes_least(call: Call) -> bool:
    """Whether the smallest finite number may be added to scores, and does not make the bound of an output void.

    The textbook loses the scores beside that of a half dtype, and beside twice that of any.
    """
    alone = len(call.biases) == 1 and call.query.dtype not in ("float16", "bfloat16")
    return alone and not {"lse", "scores"} & set(call.outputs)


def _of_pairs(
    spec: TensorSpec, shape: tuple[int, ...], rng: np.random.Generator, *, least: bool
) -> NDArray[Any]:
    allowed = rng.random(shape) < 0.75
    if shape and shape[-1] > 1:
        allowed[..., -1] = False
    if len(shape) > 1 and shape[-2] > 1:
        allowed[..., 0, :] = False
    if spec.dtype == "bool":
        return allowed
    added = np.where(allowed, rng.standard_normal(shape), -np.inf).astype(numpy_dtype(spec.dtype))
    rows = added.reshape(-1, shape[-1]) if shape else added.reshape(1, 1)
    if least and len(rows) > 2:
        rows[-1] = np.where(np.isneginf(rows[-1]), -np.inf, np.finfo(spec.dtype).min)
    return added


def _new(call: Call, lengths: Mapping[str, int]) -> int:
    return _length(call.key.shape[-2 if call.layout == HLE else -3], lengths)


def _beyond_is_nan(call: Call, arrays: Arrays) -> Arrays:
    """A padded cache with NaN where no token is yet."""
    if call.past_lengths is None:
        return arrays
    for name in ("past_key", "past_value"):
        seen = arrays[name] if call.layout == HLE else arrays[name].swapaxes(-2, -3)
        for entry, filled in enumerate(arrays["past_lengths"].tolist()):
            seen[entry, :, filled:] = np.nan
    return arrays


def _for_all_that_share(hidden: NDArray[np.bool_], shape: tuple[int, ...]) -> NDArray[np.bool_]:
    """`hidden` of the broadcast batch -> for an array of `shape`: is it for all entries that read it."""
    extra = tuple(range(hidden.ndim - len(shape)))
    broadcast = tuple(i for i, n in enumerate(shape) if n == 1)
    everywhere = np.all(np.all(hidden, axis=extra), axis=broadcast, keepdims=True)
    return np.broadcast_to(everywhere, shape)
