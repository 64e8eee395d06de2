"""Arrays of cubed: the same results, in an amount of memory that is known before anything runs."""

from __future__ import annotations

import tracemalloc
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from calls import F, draw
from hypothesis import given
from hypothesis import strategies as st
from internals import Chunks, regular

from chunks.calls_in_chunks import OPTIONS, inputs, options
from sdpa_xp import (
    attention_scores,
    attention_state,
    attention_weights,
    masks,
    scaled_dot_product_attention,
    scaled_dot_product_attention_vjp,
    varlen_attention,
)

pytestmark = pytest.mark.needs("cubed")


def cut(
    arrays: list[np.ndarray], chunks: tuple[tuple[int, ...], ...], folder: Path, allowed: int = 10**9
) -> list[Any]:
    import cubed

    spec = cubed.Spec(work_dir=str(folder), allowed_mem=allowed)
    return [cubed.from_array(x, chunks=of_array, spec=spec) for x, of_array in zip(arrays, chunks, strict=True)]


CHUNKS = ((1, 2, 5, 8), (2, 1, 4, 8), (1, 2, 6, 6))


NAMES = [name for number, name in enumerate(OPTIONS) if number % 2 == 0 or "sinks" in name or "dropout" in name]
"""About half of them: each writes its arrays to files."""


@pytest.mark.sampled(7)
@pytest.mark.parametrize("name", NAMES)
def test_output_and_state(name: str, tmp_path: Path) -> None:
    arrays = inputs()
    expected = attention_state(*arrays, **options(name))
    state = attention_state(*cut(arrays, CHUNKS, tmp_path), **options(name))
    assert state.output.dtype == expected.output.dtype
    assert state.lse.dtype == expected.lse.dtype
    np.testing.assert_allclose(state.output.compute(), expected.output, rtol=2e-6, atol=3e-6)
    np.testing.assert_allclose(state.lse.compute(), expected.lse, rtol=2e-6, atol=3e-6)


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    "chunks",
    [
        ((2, 4, 13, 8), (2, 2, 17, 8), (2, 2, 17, 6)),
        ((1, 1, 3, 8), (1, 2, 1, 8), (1, 1, 2, 6)),
        ((2, 3, 7, 4), (1, 2, 5, 3), (2, 2, 3, 5)),
    ],
)
def test_any_chunks(chunks: tuple[tuple[int, ...], ...], tmp_path: Path) -> None:
    """Also more chunks of keys than a task folds."""
    arrays = inputs()
    expected = scaled_dot_product_attention(*arrays, masks.sliding_window(14, 1))
    lazy = cut(arrays, chunks, tmp_path)
    output = scaled_dot_product_attention(*lazy, masks.sliding_window(14, 1)).compute()
    np.testing.assert_allclose(output, expected, atol=2e-6)


def test_masks_and_biases_of_cubed(tmp_path: Path) -> None:
    query, key, value = inputs()
    rng = np.random.default_rng(4)
    mask, bias = rng.random((2, 1, 13, 17)) < 0.6, rng.standard_normal((4, 1, 17)).astype(F)
    lazy = cut([query, key, value, mask, bias], (*CHUNKS, (1, 1, 13, 3), (2, 1, 17)), tmp_path)
    output = scaled_dot_product_attention(*lazy[:3], lazy[3], bias=lazy[4], is_causal=True).compute()
    expected = scaled_dot_product_attention(query, key, value, mask, bias=bias, is_causal=True)
    np.testing.assert_allclose(output, expected, atol=2e-6)


def test_packed_sequences(tmp_path: Path) -> None:
    arrays = draw(np.random.default_rng(2), (11, 4, 8), (12, 2, 8), (12, 2, 6))
    lazy = cut(arrays, ((3, 4, 8), (5, 1, 8), (4, 2, 6)), tmp_path)
    lengths = [0, 4, 11], [0, 5, 12]
    expected = varlen_attention(*arrays, *lengths, is_causal=True)
    np.testing.assert_allclose(varlen_attention(*lazy, *lengths, is_causal=True).compute(), expected, atol=2e-6)


LONG = 4096
LONG_CHUNKS = ((1, 512, 32),) * 3


def test_more_memory_than_allowed_is_refused_before_anything_runs(tmp_path: Path) -> None:
    lazy = cut(draw(np.random.default_rng(0), *[(1, LONG, 32)] * 3), LONG_CHUNKS, tmp_path, allowed=10**6)
    with pytest.raises(ValueError, match=r"exceeds? allowed_mem"):
        scaled_dot_product_attention(*lazy).compute()


def test_a_task_stays_within_what_is_projected(tmp_path: Path) -> None:
    """And what is projected does not grow with the number of keys."""
    projected = []
    for length in (LONG // 2, LONG):
        arrays = draw(np.random.default_rng(0), *[(1, length, 32)] * 3)
        for array, number in zip(arrays, range(3), strict=True):
            np.save(tmp_path / f"{number}.npy", array)
        files = [np.load(tmp_path / f"{number}.npy", mmap_mode="r") for number in range(3)]
        output = scaled_dot_product_attention(*cut(files, LONG_CHUNKS, tmp_path), is_causal=True)
        projected.append(output.plan().max_projected_mem)
        output.compute()
        tracemalloc.start()
        computed = output.compute()
        most = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert most - computed.nbytes <= projected[-1]
        np.testing.assert_allclose(computed, scaled_dot_product_attention(*arrays, is_causal=True), atol=2e-6)
    assert projected[0] == projected[1] < LONG * LONG * 4


def test_weights_and_gradients_are_refused(tmp_path: Path) -> None:
    query, key, value = cut(inputs(), CHUNKS, tmp_path)
    for function, arrays in (
        (attention_weights, (query, key)),
        (attention_scores, (query, key)),
        (scaled_dot_product_attention_vjp, (query, key, value)),
    ):
        with pytest.raises(
            TypeError, match=r"support attention, but neither weights nor gradients.*dask"
        ) as refused:
            function(*arrays)
        assert str(refused.value).startswith(f"{function.__name__}: arrays of cubed support attention, ")


@given(st.data())
def test_chunks_have_one_length_no_longer_than_those_of_the_arrays(data: st.DataObject) -> None:
    """Along each axis but the width, which is whole."""
    batch, group, key_heads, queries, keys = (data.draw(st.integers(1, 6)) for _ in range(5))

    def chunks(heads: int, tokens: int) -> Chunks:
        shape = (data.draw(st.sampled_from([1, batch])), heads, tokens)
        sizes = [data.draw(st.integers(1, length)) for length in shape]
        return (*(evenly(n, size) for n, size in zip(shape, sizes, strict=True)), (8,))

    given_chunks = chunks(group * key_heads, queries), chunks(key_heads, keys), chunks(key_heads, keys)
    for before, after in zip(given_chunks, regular(*given_chunks), strict=True):
        assert [*map(sum, after)] == [*map(sum, before)]
        for old, new in zip(before, after, strict=True):
            assert new == evenly(sum(new), new[0])
            assert new[0] <= old[0]


def evenly(length: int, size: int) -> tuple[int, ...]:
    """Chunks of one size, of which the last may be shorter."""
    return (size,) * (length // size) + ((length % size,) if length % size else ())
