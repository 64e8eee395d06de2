"""Packed sequences and paged caches on a device: few padded calls, one table, and the numbers of the CPU."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import pytest

torch: Any = pytest.importorskip("torch")

from internals import Work, judge, override  # noqa: E402
from standins.counts import Counts  # noqa: E402
from standins.torch_cuda import cuda_tensors, get, put  # noqa: E402

from sdpa_xp import PagedKVCache, biases, masks, positional, varlen_attention, varlen_attention_state  # noqa: E402

pytestmark = pytest.mark.needs("torch")

HEADS, KEY_HEADS, WIDTH, SIZE = 4, 2, 16, 16
KEYS = [5 + 37 * n % 128 for n in range(32)]
"""32 unlike lengths."""
QUERIES = [1 + n % 5 for n in range(32)]
SOME_QUERIES, SOME_KEYS = [5, 0, 3, 1, 1, 4], [7, 3, 0, 20, 2, 33]
"""With a sequence without queries, and one without keys."""
NEW_TOKENS, CACHED = [1, 3, 0, 2, 1, 4], [7, 3, 5, 20, 2, 33]
REAL_KEYS, REAL_QUERIES, OFFSETS = [5, 3, 0, 11, 1, 30], [1, 0, 0, 1, 1, 2], [1, 0, 2, -1, 3, 20]
OPEN = np.arange(6 * HEADS).reshape(6, HEADS, 1, 1) % 3 > 0
BLOCKS = np.arange(6 * HEADS * 45).reshape(6, HEADS, 9, 5) % 7 % 3 > 0
SLOPES = np.linspace(0, 1, 6 * HEADS).reshape(6, HEADS)
TABLE = np.linspace(-1, 1, 8 * HEADS).reshape(8, HEADS)
Place = Callable[[Any], Any]
"""Puts an array where a call is computed; a floating one in the dtype of the call."""

OPTIONS: dict[str, Callable[[Place], dict[str, Any]]] = {
    "plain": lambda _: {},
    "causal": lambda _: {"is_causal": True},
    "lower right": lambda _: {"attn_mask": masks.causal("lower_right")},
    "window": lambda _: {"attn_mask": masks.sliding_window(3, 2, offset="lower_right")},
    "offsets": lambda _: {"attn_mask": masks.causal(OFFSETS) | masks.prefix(REAL_KEYS)},
    "offsets in an array": lambda place: {"attn_mask": masks.causal(place(np.asarray(OFFSETS)))},
    "chunks": lambda _: {"attn_mask": masks.chunked(4)},
    "gaps": lambda _: {"attn_mask": ~masks.dilated(3)},
    "blocks": lambda _: {"attn_mask": masks.blocks(BLOCKS, (4, 8))},
    "padding": lambda _: {"attn_mask": masks.padding(REAL_KEYS, REAL_QUERIES)},
    "padding in arrays": lambda place: {
        "attn_mask": masks.padding(*(place(np.asarray(lengths)) for lengths in (REAL_KEYS, REAL_QUERIES)))
    },
    "array": lambda place: {"attn_mask": place(OPEN)},
    "function": lambda _: {"attn_mask": masks.from_function(lambda b, h, i, j: (i + j + h) % (b + 2) > 0)},
    "alibi": lambda _: {"bias": biases.alibi(HEADS, offset="lower_right")},
    "slopes": lambda place: {"bias": biases.alibi(place(SLOPES)), "is_causal": True},
    "relative": lambda place: {"bias": biases.relative(place(TABLE), max_distance=9, offset="lower_right")},
    "score function": lambda _: {"bias": biases.from_function(lambda s, b, h, i, j: s + 0.1 * (i - j) * h)},
    "floating array": lambda place: {"bias": place(SLOPES[:, :, None, None])},
    "scale, softcap, sinks": lambda place: {
        "scale": place(SLOPES[:, :, None, None]),
        "softcap": 2.0,
        "sinks": place(SLOPES),
    },
    "dropout": lambda _: {"dropout_p": 0.4, "rng": torch.Generator().manual_seed(3)},
}
POSITIONS: dict[str, dict[str, Any]] = {
    "first": {"first_position": [0, 16, 3, 0, 7, 1]},
    "each": {"positions": [[3 * n - number for n in range(length)] for number, length in enumerate(CACHED)]},
    "rotated": {"first_position": 5, "rotary": positional.Rotary(16)},
}


def sums(lengths: Sequence[int]) -> list[int]:
    return [0, *itertools.accumulate(lengths)]


def draw(*shapes: tuple[int, ...], dtype: Any = torch.float32) -> list[Any]:
    rng = np.random.default_rng(0)
    return [torch.asarray(rng.standard_normal(shape)).to(dtype) for shape in shapes]


def pools(lengths: Sequence[int], dtype: Any = torch.float32) -> tuple[list[Any], list[list[int]]]:
    """Keys and values in shuffled blocks, which are NaN behind a sequence; and the table of the blocks."""
    counts = [-(-length // SIZE) for length in lengths]
    blocks = [int(n) for n in np.random.default_rng(1).permutation(sum(counts) + 3)]
    starts = sums(counts)
    table = [blocks[first:last] for first, last in itertools.pairwise(starts)]
    arrays = draw(*[(len(blocks), KEY_HEADS, SIZE, WIDTH)] * 2, dtype=dtype)
    for row, length in zip(table, lengths, strict=True):
        for pool in arrays:
            if length % SIZE:
                pool[row[-1], :, length % SIZE :] = math.nan
    return arrays, table


def packed(queries: Sequence[int], keys: Sequence[int], dtype: Any = torch.float32) -> list[Any]:
    shapes = (sum(queries), HEADS, WIDTH), (sum(keys), KEY_HEADS, WIDTH), (sum(keys), KEY_HEADS, WIDTH)
    return draw(*shapes, dtype=dtype)


def counted(call: Callable[[], Any]) -> Counts:
    """The counts of a second call, which finds what is kept between calls."""
    with cuda_tensors():
        call()
    with cuda_tensors() as counts:
        call()
    return counts


def as_integers(values: Sequence[Any]) -> Any:
    return put(torch.asarray(values, dtype=torch.int32))


def paged_step(integers: Callable[[Any], Any] = list) -> Callable[[], Any]:
    arrays, table = pools(KEYS)
    (query,) = draw((32, HEADS, 1, WIDTH))
    longest = max(map(len, table))
    rows = [row + [-1] * (longest - len(row)) for row in table]
    query, arrays = put(query), [put(pool) for pool in arrays]
    return lambda: PagedKVCache(*arrays, integers(rows), integers(KEYS)).attend(query)


def packed_call(integers: Callable[[Any], Any] = list) -> Callable[[], Any]:
    arrays = [put(array) for array in packed(QUERIES, KEYS)]
    return lambda: varlen_attention(*arrays, *(integers(sums(lengths)) for lengths in (QUERIES, KEYS)))


@pytest.mark.parametrize("call", [paged_step, packed_call])
def test_a_padded_call(call: Callable[..., Callable[[], Any]]) -> None:
    counts = counted(call())
    assert counts.waits.total() <= 1, counts
    assert counts.copies.total() <= 1, counts
    assert counts.launches.total() <= 50, counts


@pytest.mark.parametrize("mask", [None, masks.causal("lower_right")], ids=str)
def test_calls_of_unlike_sizes_share_a_wait(mask: Any) -> None:
    """A giant is not padded with the others, but one read asks whether all are finite."""
    queries, keys = [*[1] * 31, 700], [*range(3, 34), 900]
    arrays = [put(array) for array in packed(queries, keys)]
    counts = counted(lambda: varlen_attention(*arrays, sums(queries), sums(keys), mask))
    assert counts.waits.total() <= 1, counts
    assert counts.copies.total() <= 1, counts
    arrays[2][-1] = math.nan  # its last key; the giant alone is computed again
    more = counted(lambda: varlen_attention(*arrays, sums(queries), sums(keys), mask))
    assert more.waits.total() <= 1, more


@pytest.mark.parametrize("call", [paged_step, packed_call])
def test_tables_on_the_device_are_read_at_once(call: Callable[..., Callable[[], Any]]) -> None:
    counts = counted(call(as_integers))
    assert counts.waits.total() <= 2, counts


@pytest.mark.parametrize("shape", [(), (1,)])
def test_one_length_in_an_array_is_read_once(shape: tuple[int, ...]) -> None:
    """It is compared with the length of each sequence."""
    arrays = [put(array) for array in packed(QUERIES, KEYS)]
    mask = masks.padding(put(torch.full(shape, 3)))
    counts = counted(lambda: varlen_attention(*arrays, sums(QUERIES), sums(KEYS), mask))
    assert counts.waits.total() <= 2, counts


def test_equal_lengths_need_no_mask() -> None:
    arrays = [put(array) for array in packed([8] * 32, [8] * 32)]
    counts = counted(lambda: varlen_attention(*arrays, sums([8] * 32), sums([8] * 32)))
    assert counts.waits.total() == 0
    assert counts.launches.total() <= 20, counts


@pytest.mark.parametrize("in_place", [False, True])
@pytest.mark.parametrize("layout", ["...HLE", "...LHE"])
@pytest.mark.parametrize("is_packed", [False, True])
def test_tokens_are_appended_at_once(is_packed: bool, layout: Any, in_place: bool) -> None:
    arrays, table = pools([length + 5 for length in KEYS])
    counts = [n % 4 for n in range(32)] if is_packed else [5] * 32
    shape = (KEY_HEADS, sum(counts), WIDTH) if is_packed else (32, KEY_HEADS, 5, WIDTH)
    options = {"cu_seqlens_k": sums(counts)} if is_packed else {}
    arrays = [*arrays, *draw(shape, shape)]
    if layout == "...LHE":
        arrays = [array.transpose(-2, -3).contiguous() for array in arrays]

    def append(move: Callable[[Any], Any]) -> PagedKVCache[Any]:
        keys, values, *tokens = (move(array.clone()) for array in arrays)
        cache = PagedKVCache(keys, values, table, KEYS, layout=layout)
        return cache.append(*tokens, **options, in_place=in_place)

    with cuda_tensors() as counted:
        cache = append(put)
    assert counted.waits.total() == 0
    assert counted.copies.total() == 1, counted
    assert counted.launches.total() <= 6, counted
    expected = append(lambda array: array)
    for name in ("key_blocks", "value_blocks"):
        torch.testing.assert_close(
            get(getattr(cache, name)), getattr(expected, name), rtol=0, atol=0, equal_nan=True
        )


def test_positions_of_a_cache_are_computed_on_the_device() -> None:
    """Two numbers for each sequence travel there, not one for each token."""
    arrays, table = pools(KEYS)
    (query,) = draw((32, HEADS, 1, WIDTH))
    query, arrays = put(query), [put(pool) for pool in arrays]

    def step() -> Any:
        cache = PagedKVCache(*arrays, table, KEYS, first_position=[16] * 32)
        return cache.attend(query, masks.chunked(64))

    counts = counted(step)
    assert counts.waits.total() <= 1, counts
    assert counts.copies.total() <= 3, counts
    assert [what for what in counts.copies if what.startswith("(32, 2)")], counts
    assert counts.launches.total() <= 60, counts


def test_tables_of_each_sequence_rotate_all_packed_tokens_at_once() -> None:
    arrays, table = pools([length + 2 for length in KEYS])
    cos, sin, *tokens = draw((32, 160, WIDTH // 2), (32, 160, WIDTH // 2), *[(KEY_HEADS, 64, WIDTH)] * 2)

    def append(place: Place) -> PagedKVCache[Any]:
        rotary = positional.RotaryTables(place(cos), place(sin))
        cache = PagedKVCache(*map(place, arrays), table, KEYS, rotary=rotary)
        return cache.append(*map(place, tokens), cu_seqlens_k=sums([2] * 32))

    with cuda_tensors() as counts:
        cache = append(put)
    assert counts.copies.total() <= 2, counts
    assert counts.launches.total() <= 30, counts
    expected = append(lambda array: array)
    torch.testing.assert_close(get(cache.key_blocks), expected.key_blocks, rtol=0, atol=0, equal_nan=True)


def varlen(place: Place, options: Mapping[str, Any]) -> Any:
    arrays = map(place, packed(SOME_QUERIES, SOME_KEYS))
    return varlen_attention_state(*arrays, sums(SOME_QUERIES), sums(SOME_KEYS), **options)


def cache_of(place: Place, **options: Any) -> PagedKVCache[Any]:
    arrays, table = pools(CACHED)
    return PagedKVCache(*map(place, arrays), table, CACHED, **options)


def paged(place: Place, options: Mapping[str, Any], **positions: Any) -> Any:
    (query,) = draw((6, HEADS, 2, WIDTH))
    return cache_of(place, **positions).attend_state(place(query), **{"is_causal": False, **options})


def paged_packed(place: Place, options: Mapping[str, Any], **positions: Any) -> Any:
    (query,) = draw((HEADS, sum(NEW_TOKENS), WIDTH))
    starts = sums(NEW_TOKENS)
    options = {"is_causal": False, **options, "cu_seqlens_q": starts}
    return cache_of(place, **positions).attend_state(place(query), **options)


def assert_agrees(call: Callable[[Place], Any], dtype: Any = torch.float32) -> None:
    """Judge what is computed on the device by the house's rule, against the CPU, which pads nothing."""

    def in_dtype(dtype: Any, move: Place = lambda array: array) -> Place:
        def place(array: Any) -> Any:
            array = torch.asarray(array)
            return move(array.to(dtype) if array.dtype.is_floating_point else array)

        return place

    with cuda_tensors():
        computed = call(in_dtype(dtype, put))
    plain, expected = call(in_dtype(dtype)), call(in_dtype(torch.float64))
    for name in ("output", "lse"):
        result, textbook, reference = (
            np.nan_to_num(array.double().numpy(), neginf=0.0)
            for array in (get(getattr(computed, name)), getattr(plain, name), getattr(expected, name))
        )
        agreement = judge(result, reference, textbook, "float32" if name == "lse" else str(dtype)[6:])
        assert agreement.agrees, (name, agreement)
    assert get(computed.lse).isneginf().equal(expected.lse.isneginf())


@pytest.mark.sampled(3)
@pytest.mark.parametrize("name", OPTIONS)
@pytest.mark.parametrize("call", [varlen, paged, paged_packed])
@pytest.mark.parametrize("in_groups", [False, True])
def test_each_option(call: Any, name: str, in_groups: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if in_groups:  # as if launches cost little, so that sequences of a group do not lie side by side
        override(monkeypatch, "WORK_OF_LAUNCHES", Work(100, 1500))
    assert_agrees(lambda place: call(place, OPTIONS[name](place)))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64], ids=str)
@pytest.mark.parametrize("call", [varlen, paged, paged_packed])
def test_each_dtype(call: Callable[..., Any], dtype: Any) -> None:
    assert_agrees(lambda place: call(place, {"attn_mask": masks.causal("lower_right")}), dtype)


@pytest.mark.sampled(5)
@pytest.mark.parametrize("name", ["causal", "window", "chunks", "function", "alibi", "slopes", "relative"])
@pytest.mark.parametrize("positions", POSITIONS)
@pytest.mark.parametrize("call", [paged, paged_packed])
def test_positions_of_caches(call: Callable[..., Any], positions: str, name: str) -> None:
    assert_agrees(lambda place: call(place, OPTIONS[name](place), **POSITIONS[positions]))


@pytest.mark.parametrize("small_tiles", ["maximum"], indirect=True)
@pytest.mark.parametrize("name", ["plain", "lower right", "window", "relative", "slopes"])
@pytest.mark.usefixtures("small_tiles")
def test_many_tiles(name: str) -> None:
    for call in (varlen, paged, paged_packed):
        assert_agrees(lambda place, call=call: call(place, OPTIONS[name](place)))


@pytest.mark.parametrize("name", ["plain", "lower right", "alibi", "scale, softcap, sinks"])
def test_gradients_through_packed_sequences(name: str) -> None:
    """A NaN in the last sequence reaches the gradients of no other one."""

    def gradients(place: Place) -> list[Any]:
        arrays = packed(SOME_QUERIES, SOME_KEYS)
        for array in arrays:
            array[-1] = math.nan
        placed = [place(array).requires_grad_() for array in arrays]
        output = varlen_attention(*placed, sums(SOME_QUERIES), sums(SOME_KEYS), **OPTIONS[name](place))
        output[: sum(SOME_QUERIES[:-1])].square().sum().backward()
        return [array.grad for array in placed]

    def on_cpu(dtype: Any) -> list[Any]:
        return gradients(lambda array: torch.asarray(array).to(dtype).clone())

    with cuda_tensors():
        computed = gradients(lambda array: put(torch.asarray(array).float().clone()))
    on_device, expected, plain = map(get, computed), on_cpu(torch.float64), on_cpu(torch.float32)
    for *results, last in zip(on_device, expected, plain, (4, 33, 33), strict=True):
        agreement = judge(*(gradient[:-last].double().numpy() for gradient in results), "float32")
        assert agreement.agrees, agreement


def test_a_function_of_the_caller_sees_no_padding() -> None:
    """It may index tables of all tokens with i and j, so they are those of real tokens."""
    queries, keys = sums(SOME_QUERIES), sums(SOME_KEYS)
    places_asked: list[tuple[Any, Any]] = []

    def allowed(b: Any, h: Any, i: Any, j: Any) -> Any:
        first_i, first_j = (torch.asarray(starts, device=b.device)[b] for starts in (queries, keys))
        places_asked.append((get(first_i + i), get(first_j + j)))
        return (i + j + h) % 2 == 0

    with cuda_tensors():
        varlen(lambda array: put(torch.asarray(array).float()), {"attn_mask": masks.from_function(allowed)})
    assert places_asked
    for places, starts in zip(zip(*places_asked, strict=True), (queries, keys), strict=True):
        assert all(int(place.max()) < starts[-1] for place in places)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"attn_mask": masks.padding([5, 7])}, r"at most S; got attn_mask.key_lengths=5, S=4"),
        ({"attn_mask": masks.padding(None, [2, 5])}, r"at most L; got attn_mask.query_lengths=2, L=1"),
        ({"attn_mask": masks.document([0] * 5, [0] * 7)}, r"one integer for each token"),
        ({"attn_mask": masks.blocks([[True]])}, r"`attn_mask.size` must be a number"),
        ({"attn_mask": np.ones((2, HEADS, 1, 7), bool)}, r"sequences may have different L and S"),
        ({"bias": np.ones((5, 1), "f4")}, r"sequences may have different L and S"),
        ({"scale": np.ones((2, HEADS, 5, 1), "f4")}, r"`scale` must broadcast"),
    ],
    ids=["keys", "queries", "documents", "blocks", "array of keys", "array of queries", "scale"],
)
def test_what_fits_only_the_longest_is_refused(options: dict[str, Any], message: str) -> None:
    with cuda_tensors():
        placed = {
            name: put(torch.asarray(value)) if isinstance(value, np.ndarray) else value
            for name, value in options.items()
        }
        arrays = [put(array) for array in packed([1, 5], [4, 7])]
        with pytest.raises(ValueError, match=message):
            varlen_attention(*arrays, [0, 1, 6], [0, 4, 11], **placed)
