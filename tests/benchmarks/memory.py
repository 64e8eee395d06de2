"""Peak memory at 100,000 queries and keys, where the score matrix would take 40 GB.

Prints the growth of the process above its inputs, and above its inputs and its output, measured by the
operating system. `python tests/benchmarks/memory.py [length]`
"""

from __future__ import annotations

import resource
import sys
import time

import numpy as np

from sdpa_xp import scaled_dot_product_attention

WIDTH = 64
MB = 1e6


def peak() -> int:
    """Bytes that the process held at most until now (Linux counts in KiB)."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def main(length: int) -> None:
    rng = np.random.default_rng(0)
    query, key, value = (rng.standard_normal((1, 1, length, WIDTH), np.float32) for _ in range(3))
    small = query[:, :, :8]
    scaled_dot_product_attention(small, small, small)  # so that what is loaded once is not counted
    before = peak()
    start = time.perf_counter()
    output = scaled_dot_product_attention(query, key, value)
    seconds = time.perf_counter() - start
    above = peak() - before
    scores = length * length * query.itemsize
    print(f"L = S = {length:,}, one head, E = {WIDTH}, float32, non-causal, NumPy {np.__version__}")
    print(f"peak above the inputs:            {above / MB:,.0f} MB")
    print(f"peak above inputs and output:     {(above - output.nbytes) / MB:,.0f} MB")
    print(f"the score matrix would have been: {scores / MB:,.0f} MB")
    print(f"time: {seconds:.1f} s")


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 100_000)
