"""A million keys in Zarr, more than a worker may hold, attended through Dask. The results go back to Zarr.

Run it: python examples/million_keys.py
On a cluster: python examples/million_keys.py tcp://scheduler:8786 /a/folder/that/all/workers/see
"""

from __future__ import annotations

import contextlib
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import dask.array as da
import numpy as np
import zarr
from distributed import Client, LocalCluster, progress

from sdpa_xp import attention_scores, scaled_dot_product_attention

KEYS, WIDTH, CHUNK = 1_000_000, 64, 25_000
SOURCES = np.arange(32) * 31_000 + 7  # each query is made from one of these keys, which is then its nearest
NEAREST = 8
MEMORY_LIMIT = "400MiB"  # of the worker on this machine; keys and values take 488 MiB


def make(folder: str) -> None:
    """Write keys and values to Zarr, chunk by chunk, on the workers."""
    for seed, name in enumerate(("keys", "values")):

        def chunk(block_info: dict | None = None, seed: int = seed) -> np.ndarray:
            rng = np.random.default_rng([seed, block_info[None]["chunk-location"][0]])
            return rng.standard_normal((CHUNK, WIDTH), dtype=np.float32)

        chunks = (CHUNK,) * (KEYS // CHUNK), (WIDTH,)
        array = da.map_blocks(chunk, chunks=chunks, dtype=np.float32, meta=np.empty((0, 0), np.float32))
        array.to_zarr(f"{folder}/{name}.zarr")


def ask(client: Client, folder: str) -> None:
    """Attend to all keys, find the nearest keys of each query, and write both results to Zarr."""
    noise = np.random.default_rng(2).standard_normal((len(SOURCES), WIDTH), dtype=np.float32)
    vectors = 2 * zarr.open_array(f"{folder}/keys.zarr").oindex[SOURCES] + 0.5 * noise
    queries = da.from_array(vectors, chunks=-1)  # in one chunk: each chunk of keys is read, used and dropped
    keys, values = da.from_zarr(f"{folder}/keys.zarr"), da.from_zarr(f"{folder}/values.zarr")

    answers = scaled_dot_product_attention(queries, keys, values)
    nearest = da.argtopk(attention_scores(queries, keys), NEAREST, axis=-1)
    for name, array in {"queries": queries, "answers": answers, "nearest": nearest}.items():
        running = client.compute(array.to_zarr(f"{folder}/{name}.zarr", compute=False))
        progress(running)  # a bar here; the page at client.dashboard_link shows each task
        running.result()


def check(folder: str) -> None:
    """Compare the results with plain NumPy, which reads the keys chunk by chunk."""
    names = ("keys", "values", "queries", "answers", "nearest")
    arrays = {name: zarr.open_array(f"{folder}/{name}.zarr", mode="r") for name in names}
    queries = arrays["queries"][:].astype(np.float64) / np.sqrt(WIDTH)
    total, summed, highest = 0.0, 0.0, np.full((len(SOURCES), 1), -np.inf)
    for start in range(0, KEYS, CHUNK):
        part = slice(start, start + CHUNK)
        scores = queries @ arrays["keys"][part].T
        highest, before = np.maximum(highest, scores.max(1, keepdims=True)), highest
        weights = np.exp(scores - highest)
        total = total * np.exp(before - highest) + weights.sum(1, keepdims=True)
        summed = summed * np.exp(before - highest) + weights @ arrays["values"][part]
    error = np.abs(arrays["answers"][:] - summed / total).max()
    hits = (arrays["nearest"][:][:, 0] == SOURCES).sum()
    print(f"\nThe answers to {len(SOURCES)} queries differ from plain NumPy by at most {error:.1e}.")
    print(f"For {hits} of them, the nearest of {KEYS:,} keys is the one that it was made from.")
    if error > 1e-5 or hits < len(SOURCES):
        raise SystemExit("The results are wrong.")


@contextlib.contextmanager
def workers(address: str | None) -> Iterator[Client]:
    """Connect to a cluster, or start one worker with two threads and little memory on this machine."""
    if address is not None:
        with Client(address) as client:
            yield client
        return
    with (
        LocalCluster(n_workers=1, threads_per_worker=2, memory_limit=MEMORY_LIMIT) as cluster,
        Client(cluster) as client,
    ):
        yield client


def main(address: str | None = None, folder: str | None = None) -> None:
    """Make the keys, ask, and check."""
    with workers(address) as client, tempfile.TemporaryDirectory(dir=folder) as data_folder:
        make(data_folder)
        stored = sum(path.stat().st_size for path in Path(data_folder).rglob("*") if path.is_file())
        print(f"{KEYS:,} keys and values take {2 * KEYS * WIDTH * 4 / 2**20:.0f} MiB,")
        print(f"{stored / 2**20:.0f} MiB on disk. A worker of this machine may use {MEMORY_LIMIT}.")
        ask(client, data_folder)
        check(data_folder)


if __name__ == "__main__":
    main(*sys.argv[1:])
