"""Attention in plain NumPy without a library around it: the baseline for sdpa_xp on any machine.

The same tiles, two products, exp and row sums; a thread for each core and one BLAS thread in each; buffers
that each thread keeps; no query before a tile on the diagonal. Neither shapes nor results are checked.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
from cells import Call
from numpy.typing import NDArray

ROWS, COLUMNS = 512, 256
"""The tiles of the library."""


class Buffers(threading.local):
    """The buffers of one thread."""

    def __init__(self, width: int) -> None:
        self.scores = np.empty(ROWS * COLUMNS, np.float32)
        self.product = np.empty((ROWS, width), np.float32)


def bare_loop(call: Call) -> Callable[[], NDArray[np.float32]]:
    """Return the loop for a call of all pairs, or a causal one."""
    from threadpoolctl import ThreadpoolController

    query, key, value = (x[0] for x in call.arrays())
    scale, ones = np.float32(call.width**-0.5), np.ones(COLUMNS, np.float32)
    blas = ThreadpoolController().select(user_api="blas")
    threads = ThreadPoolExecutor(max(library.num_threads for library in blas.lib_controllers))
    buffers = Buffers(call.width)

    @functools.cache
    def below_diagonal(rows: int, columns: int, offset: int) -> NDArray[np.float32]:
        return np.tri(rows, columns, offset, dtype=np.float32)

    def attend(output: NDArray[np.float32], head: int, start: int) -> None:
        q, total = query[head, start : start + ROWS] * scale, output[head, start : start + ROWS]
        sums = np.zeros(len(q), np.float32)
        for column in range(0, start + len(q) if call.is_causal else call.keys, COLUMNS):
            k, v = (x[head, column : column + COLUMNS] for x in (key, value))
            first = max(0, column - start) if call.is_causal else 0
            rows, columns = len(q) - first, len(k)
            p = buffers.scores[: rows * columns].reshape(rows, columns)
            np.exp(np.matmul(q[first:], k.T, out=p), out=p)
            if call.is_causal and column + columns > start + first:
                p *= below_diagonal(rows, columns, start + first - column)
            sums[first:] += p @ ones[:columns]
            total[first:] += np.matmul(p, v, out=buffers.product[:rows])
        total /= sums[:, None]

    def run() -> NDArray[np.float32]:
        output = np.zeros(query.shape, np.float32)
        with blas.limit(limits=1):
            tasks: Any = [
                threads.submit(attend, output, head, start)
                for start in reversed(range(0, call.queries, ROWS))
                for head in range(call.heads)
            ]
            for task in tasks:
                task.result()
        return output[None]

    return run
