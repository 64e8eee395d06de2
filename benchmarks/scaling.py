"""How calls in chunks and rings scale: tasks, bytes that move, and the time with one worker and with two.

`python benchmarks/scaling.py [--seconds 10]` writes results/scaling.md. Tasks and bytes are counted. Times are
measured in rounds, with one worker and with two in turn.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import dask
import dask.array as da
import machine
import numpy as np
from distributed import Client, LocalCluster, wait
from measuring import Spread, interleaved
from threadpoolctl import threadpool_limits

from sdpa_xp import scaled_dot_product_attention

RESULT = Path(__file__).parents[1] / "results" / "scaling.md"
AT_ONCE, WIDTH, HEADS = 8, 64, 4
QUERIES, KEYS, CHUNK = 32, 2**17, 2**13
"""Sizes of the calls whose bytes are counted: few queries, many keys."""
ABOUT = """# Many workers in numbers

`python benchmarks/scaling.py` writes this page about calls of arrays in chunks and of rings. Tasks and the
bytes of rings are the same in every run. The bytes between workers are not: Dask may send a chunk of keys
to an idle worker, unless `distributed.scheduler.work-stealing` is false."""
TASKS = """With m chunks of queries and n chunks of keys, a call makes b + m (1 + merges) tasks. b is the
number of blocks in which a mask allows a pair: m n without a mask, m (m + 1) / 2 for a causal call with m =
n. A chunk of queries merges eight states at a time: merges is n / 8 + n / 64 + ..., each rounded up, until
at most eight states are left. No task holds an array."""
BYTES = """With few queries, only states must be sent: 4 H l (Ev + 1) bytes for l queries and H heads, for
any number of keys, and W - 1 states to merge those of W workers. With many queries, each worker must
receive (W - 1) / W of all keys and values."""
RING = """In parts of keys and values that one device has. Each device receives each other part once;
gradients send them once more, with gradients of the same size. Zig-zag order, which balances causal calls,
adds at most one part each of queries, keys, values and output, and twice that for gradients."""
SPEED = """Medians, with quartiles in brackets; the ratio is of each round. Two cores serve two workers, the
scheduler and the client."""
ESTIMATE = """### A thousand workers and a billion keys

An estimate, not measured: 10^9 keys and values of width 64 in float32 (512 GB), 32 queries of one head,
reading at 200 MB/s for each worker, a core for each, 1 ms of scheduler for a task. Each chunk makes about
three tasks.

| keys in a chunk | tasks, with merges | scheduler | reading and computing |
| --- | --- | --- | --- |
| 25,000 | 125,700 | 126 s | 2.6 s + 1 s |
| 100,000 | 31,500 | 32 s | 2.6 s + 1 s |
| 1,000,000 | 3,150 | 3 s | 2.6 s + 1 s |

So chunks must be large; one of a million keys takes a worker about 1 GB. All states together have 8.3 MB,
so the network is no limit. Workers that die, slow disks and storage that 1,000 readers slow down are left
out."""


def tasks_of(rows: int, columns: int, blocks: int) -> int:
    """Return the tasks of a call: partial states, merges in a tree of eight, and outputs."""
    merges, states = 0, columns
    while states > AT_ONCE:
        states = -(-states // AT_ONCE)
        merges += states
    return blocks + rows * (merges + 1)


def array(length: int, chunk: int, seed: int = 0) -> Any:
    rng, shape = da.random.default_rng(seed), (HEADS, length, WIDTH)
    return rng.standard_normal(shape, dtype=np.float32, chunks=(HEADS, chunk, WIDTH))


def counted() -> Iterator[tuple[str, ...]]:
    """Yield the rows of the table of tasks: by the formula, and in the graph."""
    for rows, columns, causal in (
        (1, 40, False),
        (8, 8, False),
        (8, 8, True),
        (16, 200, False),
        (32, 32, True),
    ):
        query, key = array(64 * rows, 64), array(64 * columns, 64, seed=1)
        graph = dict(scaled_dot_product_attention(query, key, key, is_causal=causal).__dask_graph__())
        tasks = sum(str(name).startswith("('attention-") for name in graph)
        blocks = rows * (rows + 1) // 2 if causal else rows * columns
        expected = tasks_of(rows, columns, blocks)
        if causal:  # a row of n blocks has a tree of its own
            expected = sum(tasks_of(1, n, n) for n in range(1, rows + 1))
        call = "causal" if causal else "all pairs"
        yield f"{rows}", f"{columns}", call, f"{expected:,}", f"{tasks:,}"


def cluster(stack: ExitStack, workers: int) -> Client:
    settings = {"threads_per_worker": 1, "dashboard_address": ":0", "memory_limit": 0}
    started = stack.enter_context(LocalCluster(n_workers=workers, **settings))
    return stack.enter_context(Client(started, set_as_default=False))


def finish(client: Client, futures: Any) -> None:
    with client.as_current():
        wait(futures)


def compute(client: Client, lazy: Any) -> Any:
    return client.compute(lazy).result()


def received(client: Client) -> list[int]:
    """Return the bytes that each worker has received from others."""

    def total(dask_worker: Any) -> int:
        return sum(transfer["total"] for transfer in dask_worker.transfer_incoming_log)

    return [*client.run(total).values()]


def placed(client: Client, length: int, chunk: int, seed: int) -> Any:
    """Return an array whose chunks lie on the workers, in runs: the first half on the first worker."""
    lazy = array(length, chunk, seed)
    keys = [*dask.core.flatten(lazy.__dask_keys__())]
    workers = sorted(client.scheduler_info()["workers"])
    where = {key: workers[number * len(workers) // len(keys)] for number, key in enumerate(keys)}
    with dask.annotate(workers=lambda key: where.get(key, workers[0])):
        persisted = client.persist(lazy, optimize_graph=False)
    finish(client, persisted)
    return persisted


def moved(client: Client) -> Iterator[tuple[str, ...]]:
    """Yield the rows of the table of bytes, on two workers."""
    workers = len(client.scheduler_info()["workers"])
    state = HEADS * QUERIES * (WIDTH + 1) * 4
    query = da.from_array(np.ones((HEADS, QUERIES, WIDTH), np.float32), chunks=-1)
    keys, values = (placed(client, KEYS, CHUNK, seed) for seed in (1, 2))
    few = scaled_dot_product_attention(query, keys, values)
    size = 2 * HEADS * WIDTH * 4
    yield of_call(client, f"{QUERIES} queries, {KEYS:,} keys", KEYS * size, few, state * (workers - 1))
    length, chunk = 2**12, 2**9
    many = scaled_dot_product_attention(*(placed(client, length, chunk, seed) for seed in (1, 2, 3)))
    # Each worker has half of the queries, and half of their keys lie on the other one.
    yield of_call(client, f"{length:,} queries and keys", length * size, many, length * size * (workers - 1))


def of_call(client: Client, name: str, size: int, lazy: Any, bound: int) -> tuple[str, ...]:
    before = sum(received(client))
    finish(client, client.persist(lazy))
    time.sleep(0.5)  # workers add up what they received now and then
    total = sum(received(client)) - before
    return (
        name,
        f"{size / 1e6:.1f} MB",
        f"{bound / 1e6:.2f} MB",
        f"{total / 1e6:.2f} MB",
        f"{total / bound:.1f}",
    )


def speed(clients: dict[int, Client], seconds: float) -> Iterator[tuple[str, ...]]:
    """Yield the rows of the table of times: one worker and two, in turn."""
    calls: dict[str, Callable[[Client], Any]] = {
        f"{QUERIES} queries, {KEYS:,} keys": lambda client: (
            da.from_array(np.ones((HEADS, QUERIES, WIDTH), np.float32), chunks=-1),
            placed(client, KEYS, CHUNK, 1),
            placed(client, KEYS, CHUNK, 2),
        ),
        "4,096 queries and keys": lambda client: [placed(client, 2**12, 2**9, seed) for seed in (1, 2, 3)],
    }
    for name, inputs in calls.items():
        lazy = {n: scaled_dot_product_attention(*inputs(client)) for n, client in clients.items()}
        runs = {f"{n}": partial(compute, client, lazy[n]) for n, client in clients.items()}
        times = interleaved(runs, seconds)
        ratios = [one / two for one, two in zip(times["1"], times["2"], strict=True)]
        spreads = [str(Spread.from_numbers(numbers)) for numbers in (times["1"], times["2"], ratios)]
        yield name, *spreads, str(len(ratios))


def overhead(client: Client) -> float:
    """Return seconds that the scheduler and a worker need for a task that does nothing."""
    times = []
    for _ in range(3):
        futures = client.map(lambda number: number, range(2000), pure=False)
        begin = time.perf_counter()
        finish(client, futures)
        times.append((time.perf_counter() - begin) / 2000)
    return statistics.median(times)


def task_seconds() -> float:
    """Return seconds in which queries of one head attend to a million keys, without reading them."""
    query, key = np.ones((1, QUERIES, WIDTH), np.float32), np.ones((1, 10**5, WIDTH), np.float32)
    with threadpool_limits(1):  # as in a task
        times = interleaved({"task": lambda: scaled_dot_product_attention(query, key, key)}, 3)["task"]
    return 10 * statistics.median(times)


RING = """import json, sys sys.path[:0] = {paths} from mesh import on_devices import jax, numpy as np rows =
[] for n in (8,): for name, rules in (("all pairs", dict()), ("causal", dict(is_causal=True)), ("window of
one part", None)): length = 64 * n rules = dict(attn_mask=on_devices.masks.sliding_window(64, 0)) if rules
is None else rules call = on_devices.ring(on_devices.mesh_of(n), **rules) x = jax.ShapeDtypeStruct((4,
length, 64), np.float32) forward = jax.jit(call).lower(x, x, x).compile().as_text() backward =
jax.jit(lambda g, *x: jax.vjp(call, *x)[1](g)).lower(x, x, x, x).compile().as_text() busiest =
[max(on_devices.received(text, d) for d in range(n)) for text in (forward, backward)] rows.append((n, name,
*busiest)) print(json.dumps(rows))"""


def ring() -> Iterator[tuple[str, ...]]:
    """Yield the rows of the table of rings: what the busiest device receives, in parts of keys and values."""
    root = Path(__file__).parents[1]
    code = RING.format(paths=[str(root), str(root / "export"), str(root / "tests")])
    command = [sys.executable, "-c", code]
    printed = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    part = 2 * 4 * 64 * 64 * 4
    for n, name, forward, backward in json.loads(printed.splitlines()[-1]):
        bound = 1 if "window" in name else n - 1
        yield (
            f"{n}",
            name,
            f"{bound}",
            f"{forward / part:.2f}",
            f"{(2 if bound == 1 else 3) * bound}",
            f"{backward / part:.2f}",
        )


def table(head: str, rows: Iterator[tuple[str, ...]]) -> str:
    columns = head.split(" | ")
    lines = [f"| {head} |", "|" + " --- |" * len(columns), *(f"| {' | '.join(row)} |" for row in rows)]
    return "\n".join(lines) + "\n"


def main() -> None:
    machine.without_settings()
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=float, default=10)
    seconds = parser.parse_args().seconds
    facts = machine.facts("numpy", "dask", "distributed", "jax", "sdpa_xp")
    alone = task_seconds()  # before the workers start
    with ExitStack() as stack:
        clients = {n: cluster(stack, n) for n in (1, 2)}
        times = table("call | one, s | two, s | one / two | rounds", speed(clients, seconds))
        nothing = overhead(clients[1])
        bytes_moved = table("call | keys and values | at least | moved | ratio", moved(clients[2]))
    parts = [
        f"### Tasks\n\n{TASKS}\n",
        table("chunks of queries | chunks of keys | call | by the formula | in the graph", counted()),
        f"### Bytes between two workers\n\n{BYTES}\n",
        bytes_moved,
        f"### Bytes to a device of a ring\n\n{RING}\n",
        table("devices | call | at least | output | at least | with gradients", ring()),
        f"### One worker and two\n\n{SPEED}\n",
        times,
        "### One task\n",
        f"A task that does nothing takes {nothing * 1e3:.2f} ms of scheduler and worker.",
        f"{QUERIES} queries of one head attend to a million keys of width {WIDTH} in {alone:.2f} s,",
        "without reading them.\n",
        f"{ESTIMATE}\n",
    ]
    load = f"load average {os.getloadavg()[0]:.1f}"
    where = f"{facts['cores']} cores of {facts['cpu']}, {facts['system']}, {facts['date']}, {load}"
    packages = ", ".join(f"{name} {facts[name]}" for name in ("numpy", "dask", "distributed", "jax"))
    RESULT.write_text(f"{ABOUT}\n\n{where}; Python {facts['python']}, {packages}.\n\n" + "\n".join(parts))
    print(RESULT.read_text())


if __name__ == "__main__":
    main()
