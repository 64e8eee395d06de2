"""Random inputs for a call, with hard cases: rows without keys, NaN in masked keys, large and extreme scores.

Extreme inputs show whether a runtime takes a finite number for -inf. A mask that adds or writes a finite number
works until scores are larger than it. CUDA's kernels use -1e30, and -65504 in float16, and return 0 for a row
whose biases are no larger. Ordinary scores do not show it, and the rounding errors of large ones would hide it.
So in these inputs no result depends on the digits of a large score: one key gets all the weight, or all scores
are equal.
"""

from __future__ import annotations

import math
import secrets
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Literal, NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from sdpa_xp._checks.keywords import check_integer

from .._call.call import ExportCall
from .._call.mask_analysis import keys_of_a_block
from .._call.operands import Input, argument_of
from .._dtypes.dtype import INTEGERS, numpy_dtype
from .._runtime.limits import check_time
from ..spec import TensorSpec, evaluated
from .expected import Arrays, heads_first, hidden_keys, numbers

LARGEST_FACTOR = {"float16": 2.0**13, "bfloat16": 2.0**124, "float32": 2.0**124, "float64": 2.0**1000}
"""The largest factor with which a normal random number stays finite."""
LARGE = 100.0
"""The size of large scores, some hundreds: the exponential of most of them overflows float32. Values, biases
and sinks are multiplied by it then."""
HUGE_KEYS = 16.0
"""Keys are multiplied by that if scores are larger than large ones."""
DRAWN_AT_ONCE = 2**20
"""The most numbers that are drawn at one time, in float64."""
HIGH = dict.fromkeys(("bfloat16", "float32", "float64"), 2.0**62) | {"float16": 2.0**15}
"""The number in each query and in one key: their score is up to 2**124, and 2**30 in float16."""
LOW = dict.fromkeys(("bfloat16", "float32", "float64"), (2.0**62, 2.0**62)) | {"float16": (2.0**8, 2.0**9)}
"""The number in each query, and in all keys if the scale is 1. The score of -2**17 in float16 leaves float32
some digits of a bias."""
LEAST = {"bfloat16": -(2.0**128 - 2.0**120)} | {
    name: float(np.finfo(name).min) for name in ("float16", "float32", "float64")
}
"""The most negative number of each dtype."""
OperandChoice: TypeAlias = Literal["drawn", "least integers", "most integers", "mask of False", "mask of True"]
"""Random integers and masks, or all integers at one end of their range, or a boolean mask of one value."""
HALVES = ("float16", "bfloat16")
LENGTHS = ("key_lengths", "query_lengths", "length", "past_lengths")
"""The operands that are numbers of tokens."""
OPERANDS = (*LENGTHS, "query_ids", "key_ids", "offset", "indices")
"""The operands that are integers."""
MOST = 2**62
"""The largest document id, if its dtype allows it."""
FAR = 2**29
"""The largest offset and prefix, if the dtype allows it; masks accept no larger offset."""
SEEDS = 2**32
"""The number of seeds that are drawn from; a caller may pass any integer from 0 on."""


def seed_of(function: str, seed: int | None) -> int:
    """Return the seed that a caller passed, or a new one."""
    if seed is None:
        return new_seed()
    return check_integer(function, "seed", seed, least=0, most=math.inf)


def new_seed() -> int:
    """Return a seed that nobody chose."""
    return secrets.randbelow(SEEDS)


def draw_each(
    specs: Mapping[str, TensorSpec],
    lengths: Mapping[str, int],
    draw: Callable[[str, TensorSpec, tuple[int, ...]], Any],
) -> Arrays:
    """Return an array for each input: what `draw` returns for its name, spec and shape, in its dtype."""
    arrays: Arrays = {}
    for name, spec in specs.items():
        shape = tuple(evaluated(length, lengths) for length in spec.shape)
        arrays[name] = np.asarray(draw(name, spec, shape), numpy_dtype(spec.dtype)).reshape(shape)
    return arrays


def random_inputs(
    call: ExportCall,
    lengths: Mapping[str, int],
    rng: np.random.Generator,
    size: float = 1.0,
    operands: OperandChoice = "drawn",
) -> Arrays:
    """Return random inputs for a call whose symbols have `lengths`; its scores have about `size` at any scale.

    A boolean mask is True for three of four pairs. It is False for the last key and, if it has a row for each
    query, for the first query. A floating mask is -inf at these pairs; its last row is the most negative finite
    number, which does not mask, unless the bound would then be useless. Key lengths differ: the first is 0, the
    last is the whole length. With another choice of `operands`, all integers have their smallest or largest
    allowed value, or a boolean mask is False or True everywhere. Values, biases and sinks grow with `size`, up
    to hundreds.
    """
    new = call.key.shape[call.length_axis] if call.cached else 0
    queries, keys, appended = (evaluated(n, lengths) for n in (call.sizes.queries, call.sizes.keys, new))
    counts = TokenCounts(queries, keys, keys - appended, keys_of_a_block(call))
    # A sum of two least numbers would be -inf. Beside one of a half dtype the textbook formula in that dtype
    # loses the scores, and array libraries are compared with it; a wider formula keeps some of their digits.
    may_be_least = len(call.biases) == 1 and call.query.dtype not in HALVES

    def drawn(stem: str, spec: TensorSpec, shape: tuple[int, ...]) -> NDArray[Any]:
        dtype = numpy_dtype(spec.dtype)
        if stem in OPERANDS:
            return drawn_integers(stem, shape, dtype, counts, rng, operands)
        if stem in ("attn_mask", "bias"):
            if spec.dtype == "bool" and "mask" in operands:
                return np.full(shape, operands == "mask of True")
            return _of_pairs(spec, shape, rng, least=may_be_least and spec.dtype not in HALVES)
        if stem == "slopes":
            return np.asarray(rng.random(shape), dtype)
        if spec.dtype == "bool":  # of a mask of the caller, as are integers here
            return rng.random(shape) < 0.6
        if spec.dtype in INTEGERS:
            return rng.integers(0, keys + 1, shape).astype(dtype)
        return _filled(shape, dtype, rng.standard_normal)

    large, of_keys = min(max(size, 1.0), LARGE), HUGE_KEYS if size > LARGE else 1.0
    factors = dict.fromkeys(("value", "bias", "attn_mask", "sinks", "table"), large) | {"key": of_keys}

    def multiplied(name: str, spec: TensorSpec, shape: tuple[int, ...]) -> NDArray[Any]:
        stem = argument_of(name)
        factor = factors.get(stem.removeprefix("past_"), 1.0)  # a cache is like new keys and values
        return _multiplied(drawn(stem, spec, shape or (1,)), factor)

    arrays = draw_each(call.inputs, lengths, multiplied)
    scale = 1.0 if isinstance(call.scale, Input) else numbers(call.scale, arrays)
    typical = float(np.max(np.abs(scale), initial=0.0))
    size_so_far = typical * math.sqrt(arrays["query"].shape[-1]) * of_keys
    factor = min(size / (size_so_far or 1.0), LARGEST_FACTOR[call.query.dtype])
    # The query alone brings scores to their size: the call has the scale, and keys may be huge already.
    arrays["query"] = (arrays["query"] * factor).astype(numpy_dtype(call.query.dtype))
    if call.past_lengths is not None:  # where no token is yet
        for name in ("past_key", "past_value"):
            for entry, filled in enumerate(arrays["past_lengths"].tolist()):
                heads_first(call, arrays[name])[entry, :, filled:] = np.nan
    return arrays


def _multiplied(array: NDArray[Any], factor: float) -> NDArray[Any]:
    """Return floats times `factor`; inf, the most negative finite numbers and other dtypes do not change."""
    if array.dtype.kind in "iub" or factor == 1.0:
        return array
    for part in _parts(array):
        ordinary = np.abs(part.astype(np.float64)) < 1e4  # normal numbers are below 10
        part[ordinary] *= array.dtype.type(factor)
    return array


def _parts(array: NDArray[Any]) -> list[NDArray[Any]]:
    """Return views of a contiguous array, one behind the other, that are small enough to compute with."""
    flat = array.reshape(-1)
    return np.array_split(flat, range(DRAWN_AT_ONCE, flat.size, DRAWN_AT_ONCE))


def _filled(shape: tuple[int, ...], dtype: np.dtype[Any], draw: Callable[[int], NDArray[Any]]) -> NDArray[Any]:
    """Return an array of what `draw(count)` returns; in parts, so that a large one takes little more memory."""
    array = np.empty(shape, dtype)
    for part in _parts(array):
        check_time()
        part[:] = draw(part.size)
    return array


def with_nan(call: ExportCall, arrays: Arrays, name: str) -> Arrays:
    """Return the inputs with a NaN in the middle of the query, key or value."""
    array = arrays[name].copy()
    view = heads_first(call, array)
    view[(*[-1] * (view.ndim - 2), view.shape[-2] // 2, view.shape[-1] // 2)] = np.nan
    return arrays | {name: array}


def poison(call: ExportCall, arrays: Arrays) -> Arrays:
    """Return the inputs with NaN in every key and value that no query attends; a cache stays unchanged."""
    if call.cached:  # it is returned too, and compared bit for bit
        return arrays
    hidden, poisoned = hidden_keys(call, arrays), {}
    for name in ("key", "value"):
        poisoned[name] = arrays[name].copy()
        view = heads_first(call, poisoned[name])
        shape = view.shape[:-1]  # of a batch that is broadcast, what is hidden from all entries that read it
        extra = tuple(range(hidden.ndim - len(shape)))
        broadcast = tuple(axis for axis, length in enumerate(shape) if length == 1)
        everywhere = np.all(np.all(hidden, axis=extra), axis=broadcast, keepdims=True)
        view[np.broadcast_to(everywhere, shape)] = np.nan
    return arrays | poisoned


def _of_pairs(
    spec: TensorSpec, shape: tuple[int, ...], rng: np.random.Generator, *, least: bool
) -> NDArray[Any]:
    allowed = _filled(shape, np.dtype(bool), lambda count: rng.random(count) < 0.75)
    if shape and shape[-1] > 1:
        allowed[..., -1] = False  # a key that no query attends, for `poison`
    if len(shape) > 1 and shape[-2] > 1:
        allowed[..., 0, :] = False  # a query without keys
    if spec.dtype == "bool":
        return allowed
    added = _filled(shape, numpy_dtype(spec.dtype), rng.standard_normal)
    added[~allowed] = -np.inf
    rows = added.reshape(-1, shape[-1]) if shape else added.reshape(1, 1)
    if least and len(rows) > 2:  # else it would be the only row with keys
        rows[-1] = np.where(np.isneginf(rows[-1]), -np.inf, np.finfo(spec.dtype).min)
    return added


def extremes(call: ExportCall) -> Iterator[str]:
    """Yield the extreme inputs that a call can have."""
    overflows = call.query.dtype == "float16" and "scores" in call.outputs  # as they are returned
    # Any other bias, such as a function, may turn a high score into inf.
    if not overflows and all(bias.only_adds for bias in call.biases):
        yield from ("one high score", "low scores")
    if any(_floating_biases(call)):
        yield "least biases"


def with_extremes(call: ExportCall, arrays: Arrays, extreme: str, rng: np.random.Generator) -> Arrays:
    """Return the inputs with one key of high score in each head, equal low scores, or the least biases."""
    query = heads_first(call, arrays["query"])
    keys = [heads_first(call, arrays[name]) for name in ("key", "past_key") if name in arrays]
    scale = float(np.max(np.abs(np.asarray(numbers(call.scale, arrays), np.float64)), initial=0.0))
    high, (low, opposite) = HIGH[call.query.dtype], LOW[call.query.dtype]
    if extreme == "least biases":
        query[...] = 0.0
    elif extreme == "one high score":
        query[..., 0] = high
        for key in keys:
            key[..., 0] = 0.0  # the other scores stay ordinary
        heads = keys[0].shape[:-2]
        chosen = np.arange(keys[0].shape[-2]) == rng.integers(0, keys[0].shape[-2], (*heads, 1))
        keys[0][..., 0][chosen] = high / max(scale, 1.0)
    else:
        query[...] = 0.0
        query[..., 0] = low
        for key in keys:  # the product times the scale is one score, the same for each pair
            key[..., 0] = -min(opposite / scale, high) if scale else 0.0
    for index, name in enumerate(_floating_biases(call)):
        _set_least(arrays[name], rows=extreme == "least biases" and index == 0, zero=extreme == "least biases")
    return arrays


def _set_least(bias: NDArray[Any], *, rows: bool, zero: bool) -> None:
    """Set some rows to the most negative number, with half of it in places; else no number to it.

    With `zero`, the other numbers become 0: in a half dtype, a sum with the most negative number has no digits.
    """
    masked, least = np.isneginf(bias), LEAST[bias.dtype.name]
    bias[(bias == least) | zero] = 0
    if rows:
        by_row = bias.reshape(-1, bias.shape[-1] if bias.ndim else 1)
        by_row[-1::-2] = least
        by_row[-3::-4, ::3] = least / 2
    bias[masked] = -np.inf


def _floating_biases(call: ExportCall) -> list[str]:
    """Return the inputs that are added to the scores of pairs."""
    return [
        name
        for name, spec in call.inputs.items()
        if argument_of(name) in ("attn_mask", "bias") and spec.dtype != "bool"
    ]


class TokenCounts(NamedTuple):
    """The tokens of a call in one run."""

    queries: int
    keys: int
    past: int = 0
    """The keys that a padded cache may have before the new ones."""
    block: int = 1
    """The keys of a block, of which lists of keys have the numbers."""


def drawn_integers(
    operand: str,
    shape: tuple[int, ...],
    dtype: np.dtype[Any],
    counts: TokenCounts,
    rng: np.random.Generator,
    choice: OperandChoice = "drawn",
) -> NDArray[Any]:
    """Return random integers that a call accepts for one of `OPERANDS`.

    Of several lengths the first is 0, and the last is the whole length. Ids are 0 to 2 in order. Offsets place
    the first query up to two keys beyond either end. Indices are -1, which is padding, to the last block.
    """
    if operand in LENGTHS:
        queries, keys, past, _ = counts
        most = {"query_lengths": queries, "past_lengths": past}.get(operand, keys)
        lengths = rng.integers(0, most + 1, shape)
        if lengths.size > 1:
            lengths.flat[0], lengths.flat[-1] = 0, most
        return clipped(_at_an_end(lengths, 0, FAR if operand == "length" else most, choice), dtype)
    if operand == "indices":
        blocks = -(-counts.keys // counts.block)
        return clipped(_at_an_end(rng.integers(-1, blocks, shape), -1, blocks - 1, choice), dtype)
    if operand == "offset":
        offsets = rng.integers(-2, max(counts.keys - counts.queries, 0) + 3, shape)
        return clipped(_at_an_end(offsets, -FAR, FAR, choice), dtype)
    ids = np.sort(rng.integers(0, 3, shape), axis=-1)
    # Two large ids that differ by 1, two far below, and so on; narrower dtypes mix them up. Two that differ by
    # 1 are one number in float32, and two far apart have the same lower half of bits.
    ends, (pair, second) = np.iinfo(dtype), np.divmod(np.arange(shape[-1]), 2)
    each_its_own = min(ends.max, MOST) - pair * 2 ** (ends.bits * 5 // 8) - second
    return clipped(_at_an_end(ids, ends.min, np.broadcast_to(each_its_own, shape), choice), dtype)


def _at_an_end(
    drawn: NDArray[np.int64], least: int, most: int | NDArray[np.int64], choice: OperandChoice
) -> NDArray[np.int64]:
    """Return what is drawn, or the least or the most of it everywhere."""
    if "integers" not in choice:
        return drawn
    return np.broadcast_to(np.asarray(least if choice == "least integers" else most), drawn.shape)


def clipped(drawn: NDArray[np.int64], dtype: np.dtype[Any]) -> NDArray[Any]:
    """Convert integers to `dtype`; those beyond its range go to its ends."""
    ends = np.iinfo(dtype)
    return np.clip(drawn, ends.min, min(ends.max, MOST)).astype(dtype)
