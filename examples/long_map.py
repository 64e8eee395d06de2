"""What attends to what among 100,000 tokens, in a picture of 511 x 511 blocks.

The weights would take 40 GB. `attention_statistics` sums them in blocks, tile by tile, with a few megabytes.

Run it: python examples/long_map.py long_map.png
It takes about a minute of one core. A number after the file name is the number of tokens.
"""

from __future__ import annotations

import sys

import numpy as np

from sdpa_xp import attention_statistics, attention_weights, plot

WIDTH, TOPICS, CHAPTERS = 64, 7, 20
SCALE = 0.02


def tokens(length: int) -> np.ndarray:
    """Return tokens (length, WIDTH) of a text whose chapters have one topic each; topics come back."""
    rng = np.random.default_rng(6)
    ends = np.cumsum(rng.uniform(0.5, 1.5, CHAPTERS))
    chapter = np.searchsorted(ends / ends[-1], np.arange(length) / length, side="right")
    topics = rng.standard_normal((TOPICS, WIDTH), dtype=np.float32)
    noise = rng.standard_normal((length, WIDTH), dtype=np.float32)
    return 1.5 * topics[rng.integers(0, TOPICS, CHAPTERS)[chapter]] + noise


def block_map(x: np.ndarray, block_size: int) -> np.ndarray:
    """Return the sum of the weights in each block, as a share of the largest sum."""
    sums = attention_statistics(x, x, of="block_sums", block_size=block_size, scale=SCALE).block_sums
    return sums / sums.max()


def main(file: str | None = None, length: int = 100_000) -> None:
    """Compare a small map with the weights, and draw the large one."""
    x = tokens(600)
    weights = attention_weights(x, x, scale=SCALE).reshape(6, 100, 6, 100).sum(axis=(1, 3))
    np.testing.assert_allclose(block_map(x, 100), weights / weights.max(), atol=1e-5)

    block_size = -(-length // 512)
    sums = block_map(tokens(length), block_size)
    size = length**2 * 4 / 1e6
    print(f"{length:,} tokens: {size:,.0f} MB of weights, a map of {sums.shape[0]} x {sums.shape[1]}")
    if file is not None:
        figure = plot.attention(sums, block_size=block_size)
        figure.savefig(file, dpi=60)
        print(f"the picture is in {file}")


if __name__ == "__main__":
    main(*sys.argv[1:2], *map(int, sys.argv[2:3]))
