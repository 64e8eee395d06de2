"""Calls on the workers of a cluster, in a process of their own: `python on_workers.py FOLDER results death`.

test_cluster.py starts it. A cluster leaves threads and event loops behind, which would show in other tests.
"""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

import numpy as np
from calls import F, draw

from chunks.calls_in_chunks import cut, inputs, options
from sdpa_xp import attention_state, masks, merge_states, scaled_dot_product_attention
from sdpa_xp import scaled_dot_product_attention_vjp as vjp


@contextlib.contextmanager
def cluster(directory: Path, workers: int, **settings: Any) -> Iterator[Any]:
    """A client of workers that are processes of their own; they end with the context."""
    from distributed import Client, LocalCluster

    with (
        LocalCluster(
            n_workers=workers,
            threads_per_worker=1,
            processes=True,
            dashboard_address=":0",  # a free port: tests run side by side
            local_directory=str(directory),
            **settings,
        ) as workers_of_test,
        Client(workers_of_test) as client,
    ):
        yield client


def results(client: Any) -> None:
    """Outputs and gradients are those of whole arrays, and a task that runs twice gives the same bytes."""
    for name in ("documents of arrays", "function", "table", "dropout"):
        arrays = inputs()
        expected = scaled_dot_product_attention(*arrays, **options(name))
        output = scaled_dot_product_attention(*cut(arrays), **options(name))
        np.testing.assert_allclose(client.compute(output).result(), expected, rtol=2e-6, atol=3e-6)
    gradients(client)
    twice(client)


def gradients(client: Any) -> None:
    arrays = inputs()
    output, pullback = vjp(*arrays, is_causal=True)
    expected = pullback(output)
    lazy_output, lazy_pullback = vjp(*cut(arrays), is_causal=True)
    gradient = client.compute(lazy_pullback(lazy_output)["key"]).result()
    np.testing.assert_allclose(gradient, expected["key"], atol=1e-5)


def twice(client: Any) -> None:
    output = scaled_dot_product_attention(*cut(inputs()), masks.causal(), **options("dropout"))
    graph = dict(output.__dask_graph__())
    keys = [key for key in graph if str(key).startswith("('attention-")]
    first, second = (client.get(graph, keys) for _ in range(2))
    assert len(first) > 80
    for both in zip(first, second, strict=True):
        of_first, of_second = (result if isinstance(result, tuple) else (result,) for result in both)
        assert [part.tobytes() for part in of_first] == [part.tobytes() for part in of_second]


def slow_keys(length: int, chunk: int, seconds: float) -> tuple[Any, np.ndarray]:
    """Keys whose chunks take some time, and the same at once."""
    import dask.array as da

    (whole,) = draw(np.random.default_rng(1), (length, 8))

    def wait(block: Any) -> Any:
        import time

        time.sleep(seconds)
        return block

    lazy = da.from_array(whole, chunks=(chunk, 8)).map_blocks(wait, dtype=F, meta=np.empty((0, 0), F))
    return lazy, whole


def death(client: Any) -> None:
    """A worker is killed when some chunks are done and others are not."""
    while client.who_has():  # the workers release what other tests computed
        time.sleep(0.01)
    keys, whole = slow_keys(160, 4, 0.05)
    output = scaled_dot_product_attention(keys[:4], keys, keys)
    result = client.compute(output)
    worker = next(iter(client.cluster.workers.values()))
    first = worker.pid
    while len(client.who_has()) < 8:  # some chunks are done, and others are not
        assert not result.done()
    worker.process.process.kill()
    np.testing.assert_allclose(
        result.result(timeout=60), scaled_dot_product_attention(whole[:4], whole, whole), atol=2e-6
    )
    assert worker.pid != first


def memory(folder: Path, limit: str, size: int) -> None:
    """Keys and values of more bytes than the worker may hold; it neither spills them to its disk nor dies."""
    import dask.array as da

    width, chunk = 256, 2**14
    length = size // (2 * width * 4 * chunk) * chunk

    def rows(block_info: Any = None) -> Any:
        (first, last), _ = block_info[None]["array-location"]
        return np.sin(np.arange(first, last, dtype=F))[:, None] * np.cos(np.arange(width, dtype=F))

    chunks = (chunk,) * (length // chunk), (width,)
    key, value = (da.map_blocks(rows, chunks=chunks, dtype=F, meta=np.empty((0, 0), F)) for _ in range(2))
    query = draw(np.random.default_rng(0), (3, width))[0]
    with cluster(folder, 1, memory_limit=limit) as client:
        worker = next(iter(client.cluster.workers.values()))
        first = worker.pid
        output = scaled_dot_product_attention(da.from_array(query, chunks=-1), key, value + 1)
        result = client.compute(output).result(timeout=300)
        assert worker.pid == first
        spilled = sum(path.stat().st_size for path in folder.rglob("storage/*") if path.is_file())
    assert spilled < size / 4
    states = []
    for start in range(0, length, chunk):
        block = rows({None: {"array-location": [(start, start + chunk), (0, width)]}})
        states.append(attention_state(query, block, block + 1))
    np.testing.assert_allclose(result, merge_states(states).output, atol=1e-5)


def main(folder: str, *names: str) -> None:
    on_two = {"results": results, "death": death}
    sizes = {"400MiB": 1000 * 2**20, "1GiB": 4 * 2**30}
    for name in names:
        if name in sizes:
            memory(Path(folder), name, sizes[name])
    if chosen := [test for name, test in on_two.items() if name in names]:
        with cluster(Path(folder), 2) as client:
            for test in chosen:
                test(client)


if __name__ == "__main__":  # workers import this file too
    main(*sys.argv[1:])
