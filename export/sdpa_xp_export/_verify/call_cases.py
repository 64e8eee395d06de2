"""What a call is tried with: the table of its cases, and for each case its inputs and the expected rows."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from .._call.call import ExportCall
from .._call.mask_analysis import constants
from .._call.operands import AXES, row_axis
from .._dtypes.dtype import INTEGERS
from .._runtime.limits import check_time
from .case_lengths import SCORES_AT_ONCE, SMALL, CallLengths, Lengths, scores_shape, shown_shapes
from .cases import Case
from .expected import Arrays, expected_rows, heads_first, reference_inputs, reference_shape, stated_dtype
from .inputs import LARGE, OperandChoice, extremes, poison, random_inputs, with_extremes, with_nan
from .judging import Compared, ExpectedRows

HUGE = {"float16": 8e3, "bfloat16": 3e4, "float32": 3e4, "float64": 3e4}
"""The size of huge scores by the dtype of the query; they reveal a mask that adds -1e4 instead of -inf."""
LONGEST, THOROUGH_LONGEST = 2053, 4099
"""The longest length if no number of the call needs a longer one. It is prime, so no block ends there."""
LARGE_BATCH = 7
"""The largest batch that a call is tried with by default."""
OTHER_SIZES = ((64, 64), (1024, 1024), (150, 161, LARGE_BATCH), (520, 531, 3))
"""Numbers of queries and keys that are multiples of powers of 2, and large ones with a batch."""
DRAWS_OF_FIXED = 3
"""The number of draws for each size of scores if all lengths of a call are fixed; one if it has many scores."""
FEW_ROWS = 32
"""The rows that are compared at random lengths: a fault at a length concerns most rows."""


DEFAULT_ROWS, THOROUGH_ROWS = 512, 8192
"""The most rows, of all heads and batch entries together; the reference computes them one by one."""
MOST_SCORES = 2**22
"""The most scores of all compared rows together."""
FEWEST = 6
"""The fewest queries that are compared, for any number of heads."""


def planned_cases(
    call: ExportCall,
    blocks: Sequence[int] = (),
    cut: int = 0,
    *,
    thorough: bool = False,
    seed: int = 0,
    memory: int | None = None,
) -> list[Case]:
    """Return the cases for a model that cuts its queries into blocks, and heads of blocks with `cut` scores.

    Each seed adds other random lengths. A limit of memory leaves out long ones.
    """
    chosen = CallLengths.for_call(call, thorough=thorough, memory=memory)
    small = [lengths for lengths in chosen.small() if chosen.affords(lengths)]
    # Primes, which no block and no vector of a kernel divides; then beyond a block of 128 queries.
    many, blocky = (
        lengths if chosen.affords(lengths) else small[0]
        for lengths in (chosen(19, 23, batch=LARGE_BATCH), chosen(130, 141))
    )
    other_sizes = [chosen(*size) for size in OTHER_SIZES]
    at_numbers = [*chosen.around(blocks), *_in_parts(chosen, blocks, cut)]
    ordinary = [*small, *_small(chosen), many]
    if chosen.past and call.past_lengths is None:  # a padded past is never empty
        ordinary += [chosen(4, 4, batch=2), chosen(1, 7, batch=2)]
    ordinary += [blocky, *other_sizes, *at_numbers]
    cases = [Case(lengths) for lengths in (*ordinary, *_longest(chosen))]
    cases += [Case(lengths, LARGE) for lengths in (*small, many, blocky, other_sizes[-1])]
    cases += [Case(lengths, HUGE[call.query.dtype]) for lengths in small[:2]]
    inputs: tuple[Literal["query", "key", "value"], ...] = ("query", "key", "value")
    cases += [Case(lengths, nan_in=name) for lengths in (many, blocky) for name in inputs]
    # A mask that allows all or nothing, and lengths that are all 0 or whole, may take branches of their own.
    dtypes, ends = {spec.dtype for spec in call.inputs.values()}, list[OperandChoice]()
    ends += ["least integers", "most integers"] if dtypes & set(INTEGERS) else []
    ends += ["mask of False", "mask of True"] if "bool" in dtypes else []
    cases += [Case(lengths, operands=end) for lengths in (small[0], many) for end in ends]
    beyond = [2 * number + 3 for number in constants(call)[-1:]]  # where a window masks pairs
    wide = (many, blocky, *(chosen(number, number + 2) for number in beyond))
    cases += [Case(lengths, extreme=extreme) for lengths in wide for extreme in extremes(call)]
    if thorough:
        cases += _thorough(chosen, at_numbers)
    # Not the generator of the inputs, which would then depend on how many lengths were drawn.
    drawn = chosen.at_random(np.random.default_rng([seed, 1]))
    cases += [Case(lengths, most_rows=FEW_ROWS) for lengths in drawn]
    return list(_affordable(cases, chosen))


def _small(chosen: CallLengths) -> Iterator[Lengths]:
    """Yield each number up to 9 as the number of queries, of keys, of past tokens, and as the batch."""
    for length in range(1, SMALL + 1):
        # All three run through the same numbers, and are never all equal.
        yield chosen(length, (length + 3) % SMALL + 1, batch=2 * length % SMALL + 1)
        if chosen.past:
            yield chosen(1, length + 1, batch=2)


def _in_parts(chosen: CallLengths, blocks: Sequence[int], cut: int) -> Iterator[Lengths]:
    """Yield lengths with more than `cut` scores in a block, of few queries if these have their own length."""
    queries, keys = chosen.numbers.scores_shape[-2:]
    for block in blocks if cut else ():
        length = cut // block + 9
        yield chosen(length if queries == keys else block + 9, length)


def _longest(chosen: CallLengths) -> Iterator[Lengths]:
    """Yield the longest lengths within the limit, twice as long as any number if possible.

    Some have many queries and many keys, some have many of one and only a few of the other.
    """
    longest = THOROUGH_LONGEST if chosen.thorough else LONGEST
    wanted = max(longest, 2 * max(chosen.numbers.names, default=0) + 7)
    queries, keys = chosen.numbers.scores_shape[-2:]
    if queries != keys:  # else both have one name, and so one length
        yield from (chosen(1, wanted), chosen(3, wanted), chosen(wanted, 3))
    side = math.isqrt(chosen.most // max(chosen.heads, 1))
    # A few keys more than queries: "lower_right" and an offset of 0 are not the same then.
    yield chosen(wanted, wanted + 6) if wanted <= side else chosen(side - 7, side - 1)


def _thorough(chosen: CallLengths, at_numbers: Sequence[Lengths]) -> Iterator[Case]:
    """Yield every small length, every small batch, more draws, and large scores at the numbers of the call."""
    for length in range(1, 18):
        yield Case(chosen(length, length))
        yield Case(chosen(length, 2 * length + 1, batch=1 + length % 9))
        yield Case(chosen(2 * length + 1, length, batch=1 + length % 9), LARGE)
    yield from (Case(lengths, size) for size in (1.0, LARGE) for lengths in chosen.small())
    yield from (Case(lengths, LARGE) for lengths in at_numbers)


def _affordable(cases: Sequence[Case], chosen: CallLengths) -> Iterator[Case]:
    """Yield each case once, except cases with too many numbers.

    A call without names has one case for each size, which is drawn several times.
    """
    draws = 1 if chosen.is_long else DRAWS_OF_FIXED
    counts: Counter[str] = Counter()
    for case in cases:
        check_time()  # of a thousand numbers, the lengths alone may take a second
        counts[case.shown] += 1
        if counts[case.shown] <= (1 if case.lengths else draws) and chosen.affords(case.lengths):
            yield case


def left_out(
    call: ExportCall, blocks: Sequence[int], cases: Sequence[Case], memory: int | None = None
) -> tuple[str, ...]:
    """Return a line for each number of the call, and each block, that `cases` do not go beyond.

    A number that no lengths of the call can exceed is not listed.
    """
    chosen, tried = CallLengths.for_call(call, memory=memory), [case.lengths for case in cases]
    names = {**chosen.numbers.names} | {block: f"blocks of {block} queries" for block in blocks}
    missed = {name: chosen.missed(number, tried) for number, name in sorted(names.items())}
    if chosen.batch_name and max(lengths[chosen.batch_name] for lengths in tried) < LARGE_BATCH:
        missed[f"a batch of {LARGE_BATCH}"] = chosen.needs(chosen(19, 23, batch=LARGE_BATCH))
    return tuple(f"{name}: {needs}" for name, needs in missed.items() if needs)


def _place(axis: int | None, rows: NDArray[np.int64], index: tuple[int, ...]) -> str:
    """Return the batch entry, the head and the query of an element, or the key if it is a sum of queries."""
    if not index:
        return ""
    *leading, last = index if axis is None else index[: len(index) + 1 + axis]
    place = f"key {last}" if axis is None else f"query {rows[last]}"
    heads = [f"head {number}" for number in leading[-1:]]
    return ", ".join([*(f"batch {number}" for number in leading[:-1]), *heads, place])


def drawn_cases(
    call: ExportCall,
    cases: Iterable[Case],
    rng: np.random.Generator,
    *,
    computed_in: str,
    borders: Iterable[int] = (),
    rows: int = DEFAULT_ROWS,
) -> Iterator[Case]:
    """Yield each case with its inputs, and what they should give.

    Args:
        call: The call.
        cases: The cases.
        rng: Draws the inputs, and which rows are compared.
        computed_in: The dtype of the textbook formula.
        borders: The rows next to these numbers are always compared.
        rows: How many rows of a run are compared, all heads and batch entries together.
    """
    borders = list(borders)
    for case in cases:
        check_time()
        arrays = random_inputs(call, case.lengths, rng, case.size, case.operands)
        if case.nan_in:
            arrays = with_nan(call, arrays, case.nan_in)
        dtype = computed_in
        if case.extreme:
            arrays = with_extremes(call, arrays, case.extreme, rng)
            # In a half dtype the textbook formula would overflow, but sums and scores are never in one.
            dtype = call.accumulation_dtype
        sample = sampled_rows(call, case.lengths, borders, rng, min(rows, case.most_rows or rows))
        yield filled_case(call, case, arrays, dtype, sample)


def filled_case(
    call: ExportCall, case: Case, arrays: Arrays, computed_in: str, rows: NDArray[np.int64] | None = None
) -> Case:
    """Return the case with these inputs, and NaN in the keys and values that no query attends."""
    pairs = reference_shape(call, arrays)
    rows = np.arange(pairs[-2]) if rows is None else rows
    parts: list[dict[str, ExpectedRows]] = []
    copies: dict[str, ExpectedRows] = {}
    at_once = max(SCORES_AT_ONCE // max(math.prod(pairs[:-2]) * pairs[-1], 1), 1)
    for piece in np.array_split(rows, range(at_once, len(rows), at_once)):
        check_time()
        arguments = reference_inputs(call, arrays, piece)
        parts.append(expected_rows(call.outputs, arguments, computed_in, leaks=bool(case.nan_in)))
        if call.cached and not copies:  # each piece has the whole cache
            cache = {name: heads_first(call, arguments[name]) for name in ("key", "value")}
            copies = {f"present_{name}": ExpectedRows(x, x) for name, x in cache.items()}
    joined = {n: ExpectedRows.joined([part[n] for part in parts], row_axis(n)) for n in call.outputs}
    return replace(
        case,
        # What is expected was computed without NaN: the reference never reads a key that is hidden.
        inputs=poison(call, arrays),
        expected=joined | copies,
        read=partial(_compared, call, rows, pairs),
        shapes=shown_shapes({name: arrays[name] for name in ("query", "key")}),
        scores=math.prod(pairs),
    )


def _compared(
    call: ExportCall,
    rows: NDArray[np.int64],
    pairs: tuple[int, ...],
    case: Case,
    name: str,
    result: NDArray[Any],
) -> Compared:
    """Take the `rows` of each head and batch entry from an output; `pairs` is the shape of the scores.

    If an output has another dtype or shape than the call requires, all its rows count as NaN. This is also so
    if any row is NaN although no query attends to a NaN.
    """
    expected, (*leading, queries, keys) = case.expected[name], pairs
    heads = math.prod(leading)  # of all batch entries
    counts = max(queries, keys), heads * len(rows), heads * queries
    if name not in call.outputs:
        copy = _real_tokens(call, case.inputs, result, expected.reference)
        return Compared(copy, expected, counts=counts, where=lambda _: "")
    axis, shape, dtype = row_axis(name), list(expected.reference.shape), stated_dtype(call, name)
    if axis is not None:
        shape[axis] = queries
    if name == "output" and result.ndim >= len(AXES[name]):
        result = heads_first(call, result)
    is_stated = list(result.shape) == shape and result.dtype.name == dtype
    if not is_stated or (expected.leaks is None and np.isnan(result).any()):
        result = np.full(expected.reference.shape, np.nan)
    elif axis is not None:
        result = result.take(rows, axis=axis)
    if expected.leaks is not None:
        result = np.where(np.isnan(result) & expected.leaks, expected.reference, result)
    return Compared(result, expected, case.size, case.extreme, dtype, counts, partial(_place, axis, rows))


def _real_tokens(
    call: ExportCall, inputs: Arrays, result: NDArray[Any], expected: NDArray[Any]
) -> NDArray[Any]:
    """Return a cache with 0 where no real token is; NaN if its dtype or shape is wrong."""
    if result.shape != expected.shape or result.dtype != expected.dtype:
        return np.full(expected.shape, np.nan)
    if call.past_lengths is None:  # a joined cache has no room
        return result
    result = result.copy()
    for rows, past in zip(heads_first(call, result), inputs["past_lengths"].tolist(), strict=True):
        rows[:, past + inputs["key"].shape[call.length_axis] :] = 0
    return result


def sampled_rows(
    call: ExportCall,
    lengths: Mapping[str, int],
    borders: Iterable[int],
    rng: np.random.Generator,
    most: int = DEFAULT_ROWS,
) -> NDArray[np.int64]:
    """Return the indices of the queries to compare, in ascending order, for every head and batch entry.

    If there are too many queries, they are the first two and the last two, the queries next to each of
    `borders`, and some random ones. A border is counted from the first query, from the last, and from the first
    key. A sum over queries needs all of them.
    """
    *leading, queries, keys = scores_shape(call, lengths)
    heads = max(math.prod(leading), 1)
    if call.sums_queries:
        return np.arange(queries)
    count = max(min(most // heads, MOST_SCORES // max(heads * keys, 1)), FEWEST)
    if queries <= count:
        return np.arange(queries)
    rows = [0, queries - 1, 1, queries - 2]  # the ends first: the first four are kept in any case
    for border in borders:
        for start in (border, queries - border, border - max(keys - queries, 0)):
            rows += [row for row in (start - 1, start, start + 1) if 0 <= row < queries]
    first = list(dict.fromkeys(rows))
    if len(first) > count - 2:  # the ends, and some of the others
        first = [*first[:4], *rng.choice(first[4:], max(count - 6, 0), replace=False).tolist()]
    rest = np.setdiff1d(np.arange(queries), first)
    drawn = rng.choice(rest, min(max(count - len(first), 0), len(rest)), replace=False)
    return np.sort(np.concatenate([np.asarray(first, np.int64), drawn]))
