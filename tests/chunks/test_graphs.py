"""The graph of a call: lazy, without tasks that a mask makes needless, with names that say what a task does."""

from __future__ import annotations

import itertools
import pickle
import re
from typing import Any

import numpy as np
import pytest
from calls import F, draw

from chunks.calls_in_chunks import OPTIONS, blocks, cut, inputs, options
from sdpa_xp import attention_state, attention_weights, biases, masks, scaled_dot_product_attention
from sdpa_xp import scaled_dot_product_attention_vjp as vjp

pytestmark = pytest.mark.needs("dask")


def of_length(length: int, chunk: int, heads: int = 2) -> Any:
    import dask.array as da

    return da.ones((heads, length, 4), chunks=(1, chunk, 4), dtype=F)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("name", OPTIONS)
def test_nothing_is_computed_by_the_call(name: str) -> None:
    import dask

    def forbidden(*_: Any, **__: Any) -> Any:
        raise AssertionError("a lazy graph was computed")

    with dask.config.set(scheduler=forbidden):
        for lazy in (False, True):
            query, key, value = cut(inputs())
            state = attention_state(query, key, value, **options(name, lazy=lazy))
            assert state.output.chunks[-2] == query.chunks[-2]
            attention_weights(query, key, **options(name, lazy=lazy))
            output, pullback = vjp(query, key, value, **options(name, lazy=lazy))
            pullback(output)


MASKS = {
    "none": (None, lambda i, j: True),
    "causal": (masks.causal(), lambda i, j: j <= i),
    "window": (masks.sliding_window(5, 0), lambda i, j: i - 5 <= j <= i),
    "not causal": (~masks.causal(), lambda i, j: j > i),
    "padding": (masks.padding([9]), lambda i, j: j < 9),
    "padding of an array": (masks.padding(np.asarray([9])), lambda i, j: j < 9),
    "queries": (masks.padding(None, [5]), lambda i, j: i < 5),
    "chunks": (masks.chunked(8), lambda i, j: i // 8 == j // 8),
    "prefix": (masks.causal() | masks.prefix(2), lambda i, j: j <= i or j < 2),
    "causal in chunks": (masks.causal() & masks.chunked(8), lambda i, j: j <= i and i // 8 == j // 8),
    "documents": (masks.document([0] * 8 + [1] * 12), lambda i, j: (i < 8) == (j < 8)),
    "documents of an array": (masks.document(np.asarray([0] * 8 + [1] * 12)), lambda i, j: (i < 8) == (j < 8)),
    "array": (np.arange(20) < 6, lambda i, j: j < 6),
    "rows of an array": (np.arange(20)[:, None] >= 12, lambda i, j: i >= 12),
}


@pytest.mark.parametrize("name", MASKS)
def test_a_block_that_a_mask_empties_has_no_task(name: str) -> None:
    mask, allowed = MASKS[name]
    x = of_length(20, 4)
    expected = {
        (head, i // 4, j // 4)
        for head, i, j in itertools.product(range(2), range(20), range(20))
        if allowed(i, j)
    }
    assert blocks(scaled_dot_product_attention(x, x, x, mask)) == expected
    assert blocks(attention_weights(x, x, attn_mask=mask), "weights") >= expected
    assert blocks(attention_weights(x, x, attn_mask=mask), "sums") == expected
    output, pullback = vjp(x, x, x, mask)
    assert blocks(pullback(output)["key"], "gradient") == expected


def test_a_mask_that_differs_between_entries() -> None:
    """An entry has no task for the padding of its own, where each entry is a chunk."""
    import dask.array as da

    x = da.ones((2, 1, 12, 4), chunks=(1, 1, 4, 4), dtype=F)
    tasks = blocks(scaled_dot_product_attention(x, x, x, masks.padding([4, 12])))
    assert tasks == {(b, 0, i, j) for b in range(2) for i in range(3) for j in range(3) if b or not j}


def test_tasks_grow_with_the_blocks_alone() -> None:
    """One task for each block, one for each chunk of the output, and the merges of a tree."""
    import dask

    with dask.config.set(split_every=4):
        x = of_length(64, 4, heads=1)
        output = scaled_dot_product_attention(x, x, x)
    by_stage = {
        stage: sum(str(key).startswith(f"('attention-{stage}-") for key in output.__dask_graph__())
        for stage in ("partial", "merge", "output")
    }
    assert by_stage == {"partial": 256, "merge": 16 * 4, "output": 16}


@pytest.mark.parametrize(("rows", "columns", "merges"), [(2, 8, 0), (3, 9, 2), (1, 40, 5), (2, 65, 9 + 2)])
def test_merges_of_a_chunk_of_queries(rows: int, columns: int, merges: int) -> None:
    """The formula of results/scaling.md: a tree of eight, whose root is the task of the output."""
    query, key = (of_length(2 * n, 2, heads=1) for n in (rows, columns))
    output = scaled_dot_product_attention(query, key, key)
    counts = [len(blocks(output, stage)) for stage in ("partial", "merge", "output")]
    assert counts == [rows * columns, rows * merges, rows]


def test_a_long_window_has_as_many_tasks_as_it_is_long() -> None:
    x = of_length(400, 4, heads=1)
    assert len(blocks(scaled_dot_product_attention(x, x, x, masks.sliding_window(7, 0)))) == 1 + 2 + 98 * 3


@pytest.mark.parametrize("name", ["plain", "causal", "documents", "table", "dropout", "array and causal"])
def test_equal_calls_have_equal_names(name: str) -> None:
    """So that Dask computes a call once that is asked for twice, and two calls of unlike options both."""
    lazy = cut(inputs())
    first, second = (scaled_dot_product_attention(*lazy, **options(name)) for _ in range(2))
    assert first.name == second.name
    assert first.name != scaled_dot_product_attention(*lazy, **options(name), scale=3.0).name
    assert first.name != scaled_dot_product_attention(*cut(inputs(1)), **options(name)).name


@pytest.mark.parametrize("name", [n for n in OPTIONS if "function" not in n])
def test_tasks_can_be_sent(name: str) -> None:
    """Each by itself, without the arrays of the others: a task holds what its block needs and no more."""
    arrays = inputs()
    output = scaled_dot_product_attention(*cut(arrays), **options(name))
    for key, task in dict(output.__dask_graph__()).items():
        if str(key).startswith("('attention-"):
            assert len(pickle.dumps(task)) < 6000


def test_no_array_of_all_pairs() -> None:
    """Each block's arrays are as large as its chunks, also those of a mask that is an array."""
    import dask

    largest = 0
    query, key, value = draw(np.random.default_rng(0), *[(2, 96, 4)] * 3)
    mask = np.tri(96, dtype=bool)
    parts = cut([query, key, value], ((1, 8, 4),) * 3)
    output = scaled_dot_product_attention(*parts, mask, bias=biases.alibi(2))

    class Watch(dask.callbacks.Callback):
        def _posttask(self, key: Any, result: Any, *_: Any) -> None:
            nonlocal largest
            if isinstance(key, tuple) and key[0].startswith(("attention-", "array-")):
                parts = result if isinstance(result, tuple) else (result,)
                largest = max([largest, *(part.size for part in parts)])

    with Watch():
        computed = output.compute(scheduler="synchronous", optimize_graph=False)
    expected = scaled_dot_product_attention(query, key, value, mask, bias=biases.alibi(2))
    np.testing.assert_allclose(computed, expected, atol=2e-6)
    assert 0 < largest <= 64  # 8 queries and 8 keys


def test_an_error_names_its_block() -> None:
    def refuses(_b: Any, _h: Any, i: Any, j: Any) -> Any:
        if i.shape[0] == 10 and int(i[0, 0]) == 20 and int(j[0, 0]) == 10:
            raise KeyError("a row is missing")
        return i >= j

    x = of_length(30, 10)
    output = scaled_dot_product_attention(x, x, x, masks.from_function(refuses))
    with pytest.raises(KeyError, match="a row is missing") as raised:
        output.compute(scheduler="threads")
    block = r"attention-partial of heads [01]:[12], queries 20:30, keys 10:20"
    assert re.fullmatch(block, raised.value.__notes__[-1])


def test_unknown_chunks_are_refused_with_the_mend() -> None:
    x = of_length(20, 4)[0]
    unknown = x[x[:, 0] > 0]
    for arrays in ((unknown, x, x), (x, unknown, unknown)):
        with pytest.raises(ValueError, match="must be known"):
            scaled_dot_product_attention(*arrays)
    assert scaled_dot_product_attention(x, unknown.compute_chunk_sizes(), x).shape == (20, 4)


def test_a_function_that_needs_lazy_arrays_is_one_block() -> None:
    """It belongs to Dask, and no chunk has such arrays."""
    import dask.array as da

    x = of_length(20, 4)
    mask = masks.from_function(lambda b, h, i, j: da.where(i >= j, True, False))
    output = scaled_dot_product_attention(x, x, x, mask)
    assert not blocks(output)
    np.testing.assert_allclose(output.compute(scheduler="synchronous"), 1, atol=1e-6)


@pytest.mark.parametrize("length", [5, 3000])
def test_a_function_is_tried_on_few_pairs(length: int) -> None:
    """While the graph is made, and on no pair that there is not."""
    tried: list[tuple[int, ...]] = []

    def allowed(b: Any, h: Any, i: Any, j: Any) -> Any:
        tried.append(tuple(int(index.max()) for index in (b, h, i, j)))
        return i >= j

    x = of_length(length, 1000, heads=12)
    scaled_dot_product_attention(x, x, x, masks.from_function(allowed))
    last = min(length, 8) - 1
    assert tried == [(0, 7, last, last)]


@pytest.mark.needs("torch")
def test_chunks_of_another_library() -> None:
    """A task computes with the arrays that it gets; ids and slopes that were NumPy's become theirs."""
    import torch

    arrays = inputs()
    chunks = (1, 4, 5, 8), (1, 2, 4, 8), (1, 2, 4, 6)
    lazy = [x.map_blocks(torch.from_numpy, dtype=F, meta=np.empty((0,) * 4, F)) for x in cut(arrays, chunks)]
    ids = np.arange(13) // 5, np.arange(17) // 5
    rules: dict[str, Any] = {"attn_mask": masks.document(*ids), "bias": biases.alibi(4), "sinks": np.ones(4, F)}
    kinds: set[type] = set()

    def to_numpy(block: Any) -> Any:
        kinds.add(type(block))
        return block.numpy()

    output = scaled_dot_product_attention(*lazy, **rules).map_blocks(
        to_numpy, dtype=F, meta=np.empty((0,) * 4, F)
    )
    expected = scaled_dot_product_attention(*arrays, **rules)
    np.testing.assert_allclose(output.compute(scheduler="synchronous"), expected, atol=2e-6)
    assert kinds == {torch.Tensor}
