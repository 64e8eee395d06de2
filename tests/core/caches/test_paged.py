"""A paged cache: what stands in shuffled blocks of a pool attends as if it stood in one array a sequence."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from agreement import HEADS, SIZE, pages_of
from calls import assert_agrees, draw_named, moved
from internals import PagedSource, override
from libraries import LIBRARIES, Library

from sdpa_xp import PagedKVCache, masks

F = np.float32
POOL = 10
STARTS, LONGEST = [0, 4, 6], 9
"""Three sequences: an empty one, one that fills its block, one that does not."""
TABLE = [[7, 2, -1], [0, 9, 4], [5, 1, 8]]
Arrays = dict[str, np.ndarray]


@pytest.fixture
def arrays(rng: np.random.Generator) -> Arrays:
    """Queries of the new tokens; keys and values of all, as if padded."""
    shapes = {"query": (3, HEADS, 3, 8), "key": (3, 2, LONGEST, 8), "value": (3, 2, LONGEST, 5)}
    return draw_named(rng, shapes)


def cache_of(
    library: Library, arrays: Arrays, lengths: list[int], layout: str = "...HLE", table: Any = TABLE
) -> PagedKVCache[Any]:
    sequences = [{name: x[b] for name, x in arrays.items()} for b in range(len(lengths))]
    return pages_of(library, sequences, lengths, table, layout)


@pytest.mark.sampled(0, on="EAGER_JAX")
def test_padding_of_each_sequence(library: Library, arrays: Arrays) -> None:
    """Some of the last tokens of a sequence are not to be looked at; a length fits its own sequence."""
    cache = cache_of(library, arrays, [3, 8, 9])
    query = arrays["query"][:, :, :1]
    with library.guard():
        output = cache.attend(library.put(query), masks.padding([2, 7, 8]), is_causal=False)
    mask = np.arange(LONGEST) < np.asarray([2, 7, 8])[:, None, None, None]
    assert_agrees(library, library.get(output), arrays | {"query": query, "attn_mask": mask})


@pytest.mark.sampled(0, on="EAGER_JAX")
def test_more_queries_than_tokens(library: Library, arrays: Arrays) -> None:
    """Refused, since an `append` is missing, if not told `is_causal=False`: each attends its whole sequence."""
    query = arrays["query"][:, :, :2]
    for lengths in ([0, 2, 6], [2, 6, 1]):
        cache = cache_of(library, arrays, lengths)
        with library.guard():
            output = library.get(cache.attend(library.put(query), is_causal=False))
        b, _, _, j = np.ogrid[:3, :1, :2, :LONGEST]
        mask = np.array(np.broadcast_to(j < np.asarray(lengths)[b], (3, 1, 2, LONGEST)))
        assert_agrees(library, output, arrays | {"query": query, "attn_mask": mask})
    np.testing.assert_array_equal(cache_of(library, arrays, [0, 1, 1]).lengths, (0, 1, 1))


@pytest.mark.parametrize("how", ["of the library", "list", "int32", "int64"])
def test_tables_of_any_kind(library: Library, arrays: Arrays, how: str) -> None:
    """They are numbers, so they may be of another library than the pool."""
    if how == "of the library" and library.lazy:
        pytest.skip("what is lazy cannot be read")
    lengths = [3, 7, 9]
    table, lengths_array = np.asarray(TABLE), np.asarray(lengths)
    with library.guard():
        convert: Any = {
            "list": lambda x: tuple(x.tolist()),
            "of the library": lambda x: library.put(x.astype(np.int32)),
        }.get(how, lambda x: x.astype(how))
        same = cache_of(library, arrays, lengths)
        pools = same.key_blocks, same.value_blocks
        cache: PagedKVCache[Any] = PagedKVCache(*pools, convert(table), convert(lengths_array))
        output = cache.attend(library.put(arrays["query"][:, :, :1]))
    assert cache.lengths == (3, 7, 9)
    assert repr(cache) == "PagedKVCache(key_blocks=<float32 (10, 2, 4, 8)>, lengths=(3, 7, 9))"
    query = arrays["query"][:, :, :1]
    mask = np.arange(LONGEST) < lengths_array[:, None, None, None]
    assert_agrees(library, library.get(output), arrays | {"query": query, "attn_mask": mask})


def test_shared_prefix(library: Library, arrays: Arrays) -> None:
    """Two sequences read one block; each writes to its own; the shared one is refused, and not written."""
    arrays = {name: np.concatenate([x[2:], x[2:]]) for name, x in arrays.items()}
    table = [[3, 0], [3, 5]]
    cache = cache_of(library, arrays, [4, 4], table=table)
    before = library.get(cache.key_blocks).copy()
    with library.guard():
        key, value = (library.put(arrays[name][:, :, 4:6]) for name in ("key", "value"))
        longer = cache.append(key, value)
        output = longer.attend(library.put(arrays["query"][:, :, :1]))
        half: PagedKVCache[Any] = PagedKVCache(cache.key_blocks, cache.value_blocks, table, [3, 3])
        for in_place in (False, True):
            with pytest.raises(ValueError, match="one sequence"):
                half.append(key, value, in_place=in_place)
    np.testing.assert_array_equal(library.get(half.key_blocks), before)
    call = {name: x[:, :, :6] for name, x in arrays.items()} | {"query": arrays["query"][:, :, :1]}
    assert_agrees(library, library.get(output), call)


@pytest.fixture
def cuts(monkeypatch: pytest.MonkeyPatch) -> list[tuple[list[int], np.ndarray]]:
    """The pool's blocks of each part that the products get, and that part; a tile has at most two blocks."""
    parts: list[tuple[list[int], np.ndarray]] = []
    cut = PagedSource.slice_keys

    def watched(self: PagedSource, columns: range) -> Any:
        part: Any = cut(self, columns)
        blocks = slice(columns.start // SIZE, -(-columns.stop // SIZE))
        parts.append(([block for row in self.block_tables for block in row[blocks]], part))
        return part

    monkeypatch.setattr(PagedSource, "slice_keys", watched)
    override(monkeypatch, "MOST_COPIED", 2 * SIZE * 2 * (8 + 5))
    return parts


def numpy_cache(arrays: Arrays, layout: str = "...HLE") -> PagedKVCache[np.ndarray]:
    return cache_of(LIBRARIES["numpy"][1](), arrays, [3, 8, 9], layout)


@pytest.mark.parametrize("layout", ["...HLE", "...LHE"])
def test_each_block_is_read_once(arrays: Arrays, cuts: list[Any], layout: str) -> None:
    """A tile of one block is a view into the pool; several blocks are copied, as many as a tile has."""
    cache = numpy_cache(arrays, layout)
    cache.attend(moved(arrays["query"][:, :, :2], layout))
    used = [7, 0, 9, 5, 1, 8]
    assert sorted(block for blocks, _ in cuts for block in blocks) == sorted(used * 2)
    for pool, width in ((cache.key_blocks, 8), (cache.value_blocks, 5)):
        parts = [(blocks, part) for blocks, part in cuts if part.shape[-1] == width]
        assert sorted(part.shape[-2] for _, part in parts) == [1, 3, 8, 8]
        assert all(np.shares_memory(part, pool) == (len(blocks) == 1) for blocks, part in parts)


@pytest.mark.parametrize(
    ("mask", "used"),
    [
        (masks.sliding_window(0, 0), [7, 9, 8]),
        (masks.sliding_window(1, 0), [7, 9, 1, 8]),
        (masks.sliding_window(4, 0), [7, 0, 9, 1, 8]),
        (masks.causal(-4), [0, 5, 1]),
    ],
    ids=str,
)
@pytest.mark.parametrize("packed", [False, True])
def test_blocks_outside_the_mask_are_skipped(
    arrays: Arrays, cuts: list[Any], mask: Any, used: list[int], packed: bool
) -> None:
    """Lengths 3, 8 and 9: the last tokens stand at 2, 7 and 8."""
    query = arrays["query"][:, :, :1]
    if packed:
        numpy_cache(arrays).attend(query[:, :, 0].swapaxes(0, 1), mask, cu_seqlens_q=range(4))
    else:
        numpy_cache(arrays).attend(query, mask)
    assert sorted(block for blocks, _ in cuts for block in blocks) == sorted(used * 2)


def test_sequences_of_equal_lengths_are_one_computation(
    arrays: Arrays, cuts: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    override(monkeypatch, "MOST_COPIED", 2**20)
    cache_of(LIBRARIES["numpy"][1](), arrays, [8, 8, 8]).attend(arrays["query"][:, :, :1])
    assert [part.shape[0] for _, part in cuts] == [3, 3]


def test_in_place_is_the_pool(arrays: Arrays) -> None:
    """Caches over one pool see what is written; nothing but the new tokens is."""
    cache = numpy_cache(arrays)
    before = cache.key_blocks.copy()
    longer = cache.append(arrays["key"][:, :, :1], arrays["value"][:, :, :1], in_place=True)
    assert longer.key_blocks is cache.key_blocks
    assert longer.value_blocks is cache.value_blocks
    assert cache.lengths == (3, 8, 9)
    places = {(7, 3): 0, (4, 0): 1, (8, 1): 2}
    for (block, place), sequence in places.items():
        np.testing.assert_array_equal(cache.key_blocks[block, :, place], arrays["key"][sequence, :, 0])
        before[block, :, place] = arrays["key"][sequence, :, 0]
    np.testing.assert_array_equal(cache.key_blocks, before)
