"""Calls on the workers of a cluster: results, a worker that dies, and workers with little memory."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from calls import F, draw

from chunks.calls_in_chunks import cut, inputs, options
from sdpa_xp import attention_state, masks, merge_states, scaled_dot_product_attention
from sdpa_xp import scaled_dot_product_attention_vjp as vjp

pytestmark = pytest.mark.needs("dask", "distributed")


@contextlib.contextmanager
def cluster(directory: Path, workers: int, **settings: Any) -> Iterator[Any]:
    """A client of workers that are processes of their own; they end with the context."""
    import dask
    from distributed import Client, LocalCluster

    made = LocalCluster(
        n_workers=workers,
        threads_per_worker=1,
        processes=True,
        dashboard_address=":0",  # a free port: tests run side by side
        local_directory=str(directory),
        **settings,
    )
    with (
        dask.config.set({"distributed.admin.large-graph-warning-threshold": "1GB"}),
        made,
        Client(made) as client,
    ):
        yield client


@pytest.fixture(scope="module")
def client(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    with cluster(tmp_path_factory.mktemp("workers"), 2) as client:
        yield client


@pytest.mark.parametrize("name", ["documents of arrays", "function", "table", "dropout"])
def test_results(client: Any, name: str) -> None:
    arrays = inputs()
    expected = scaled_dot_product_attention(*arrays, **options(name))
    found = scaled_dot_product_attention(*cut(arrays), **options(name))
    np.testing.assert_allclose(client.compute(found).result(), expected, rtol=2e-6, atol=3e-6)


def test_gradients(client: Any) -> None:
    arrays = inputs()
    output, pullback = vjp(*arrays, is_causal=True)
    expected = pullback(output)
    lazy_output, lazy_pullback = vjp(*cut(arrays), is_causal=True)
    found = client.compute(lazy_pullback(lazy_output)["key"]).result()
    np.testing.assert_allclose(found, expected["key"], atol=1e-5)


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


def test_a_worker_dies_in_the_middle(tmp_path: Path) -> None:
    with cluster(tmp_path, 2) as client:
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


def test_a_task_that_runs_twice_changes_nothing(client: Any) -> None:
    """Each task is a function of its inputs: computed again, it gives the same bytes."""
    output = scaled_dot_product_attention(*cut(inputs()), masks.causal(), **options("dropout"))
    graph = dict(output.__dask_graph__())
    keys = [key for key in graph if str(key).startswith("('attention-")]
    first, second = (client.get(graph, keys) for _ in range(2))
    assert len(first) > 80
    for results in zip(first, second, strict=True):
        of_first, of_second = (result if isinstance(result, tuple) else (result,) for result in results)
        assert [part.tobytes() for part in of_first] == [part.tobytes() for part in of_second]


@pytest.mark.parametrize(
    ("limit", "size"),
    [("400MiB", 1000 * 2**20), pytest.param("1GiB", 4 * 2**30, marks=pytest.mark.slow)],
    ids=["400 MiB", "1 GiB"],
)
def test_keys_beyond_the_memory_of_a_worker(tmp_path: Path, limit: str, size: int) -> None:
    """Keys and values of more bytes than the worker may hold; it neither spills them to its disk nor dies."""
    import dask.array as da

    width, chunk = 256, 2**14
    length = size // (2 * width * 4 * chunk) * chunk

    def rows(block_info: Any = None) -> Any:
        (first, last), _ = block_info[None]["array-location"]
        angle = np.arange(first, last, dtype=np.float32)[:, None] * np.float32(0.001)
        return np.sin(angle + np.arange(width, dtype=np.float32))

    chunks = (chunk,) * (length // chunk), (width,)
    key, value = (da.map_blocks(rows, chunks=chunks, dtype=F, meta=np.empty((0, 0), F)) for _ in range(2))
    query = draw(np.random.default_rng(0), (3, width))[0]
    with cluster(tmp_path, 1, memory_limit=limit) as client:
        worker = next(iter(client.cluster.workers.values()))
        first = worker.pid
        output = scaled_dot_product_attention(da.from_array(query, chunks=-1), key, value + 1)
        found = client.compute(output).result(timeout=300)
        assert worker.pid == first
        spilled = sum(path.stat().st_size for path in tmp_path.rglob("storage/*") if path.is_file())
    assert spilled < size / 4
    states = []
    for start in range(0, length, chunk):
        block = rows({None: {"array-location": [(start, start + chunk), (0, width)]}})
        states.append(attention_state(query, block, block + 1))
    np.testing.assert_allclose(found, merge_states(states).output, atol=1e-5)
