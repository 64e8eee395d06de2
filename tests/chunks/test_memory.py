"""What a call in chunks holds at most, beside its inputs: some chunks and their states, and never all pairs."""

from __future__ import annotations

import tracemalloc
from typing import Any

import numpy as np
import pytest
from calls import draw

from chunks.calls_in_chunks import cut
from sdpa_xp import explain, masks, scaled_dot_product_attention

pytestmark = pytest.mark.needs("dask")


def peak(length: int, chunk: int, heads: int, width: int = 64) -> tuple[int, int]:
    """Bytes that two threads hold at most above the inputs, and those of the output."""
    arrays = draw(np.random.default_rng(0), *[(heads, length, width)] * 3)
    output = scaled_dot_product_attention(*cut(arrays, ((heads, chunk, width),) * 3), is_causal=True)
    settings: dict[str, Any] = {"scheduler": "threads", "num_workers": 2}
    output[:, :chunk].compute(**settings)
    tracemalloc.start()
    computed = output.compute(**settings)
    peak_bytes = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    return peak_bytes, computed.nbytes


def test_memory_grows_with_the_length() -> None:
    """Twice the queries and keys have twice the output, and four times the scores."""
    (short, output), (long, twice) = peak(2048, 256, 1), peak(4096, 256, 1)
    assert long - twice < 1.5 * (short - output) + 2**20
    assert long < 4096 * 4096 * 4 / 8


@pytest.mark.sampled(0)
@pytest.mark.slow
def test_sixteen_thousand_tokens() -> None:
    """The scores of 4 heads would take 4.3 GB."""
    peak_bytes, _ = peak(16384, 2048, 4)
    assert peak_bytes < 150e6


@pytest.mark.parametrize("axis", [0, 1])
def test_what_a_mask_repeats_is_not_written_out(axis: int) -> None:
    """A row or a column that NumPy broadcasts to L x S."""
    import dask.array as da

    length = 4096
    row = np.arange(length) % 3 > 0
    mask = np.broadcast_to(np.expand_dims(row, axis), (length, length))
    x = da.ones((length, 4), chunks=(1024, 4))
    tracemalloc.start()
    output = scaled_dot_product_attention(x, x, x, mask)
    peak_bytes = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak_bytes < length * length / 8
    expected = [float(axis == 0), 1, 1]  # a row that only repeats leaves out keys, a column leaves out queries
    np.testing.assert_allclose(output[:3].compute(scheduler="synchronous")[:, 0], expected)


def test_explained() -> None:
    """The chunks and the blocks, counted before anything runs."""
    arrays = cut(draw(np.random.default_rng(0), *[(2, 40, 8)] * 3), ((1, 8, 8), (1, 10, 8), (2, 10, 8)))
    explained = explain(*arrays, masks.causal())
    assert explained.implementation == "xp"
    assert explained.reason == "each chunk of queries meets each chunk of keys in a task"
    assert (explained.tile, explained.tiles, explained.total_tiles) == ((8, 10), 2 * (1 + 2 + 3 + 4 + 4), 40)
