"""The first call of JAX arrays, which compiles, and later calls, in fresh processes, compared with jax.nn."""

from __future__ import annotations

import json
import statistics
import subprocess
import sys

from cells import Call
from measuring import Row, Spread, ratios

FIRST, LATER = "seconds of the first call", "milliseconds"
TO_FIRST, TO_JITTED = "over jax.nn's first call", "over jax.nn jitted"
OURS, NN, NN_JITTED = "sdpa_xp on JAX, not jitted", "jax.nn, not jitted", "jax.nn, jitted"
CALLS = 5

ONE = f"""
import json, sys, time
import jax
contender, causal, length, heads, width, calls = json.loads(sys.argv[1])
from sdpa_xp import scaled_dot_product_attention
query, key, value = (jax.random.normal(jax.random.key(n), (1, heads, length, width)) for n in range(3))
rows = [jax.block_until_ready(jax.numpy.swapaxes(x, 1, 2)) for x in (query, key, value)]
def nn(query, key, value):
    return jax.nn.dot_product_attention(query, key, value, is_causal=causal)
def ours():
    return scaled_dot_product_attention(query, key, value, is_causal=causal)
jitted = jax.jit(nn)
run = {{"{OURS}": ours, "{NN}": lambda: nn(*rows), "{NN_JITTED}": lambda: jitted(*rows)}}[contender]
times = []
for _ in range(1 + calls):
    start = time.perf_counter()
    jax.block_until_ready(run())
    times.append(time.perf_counter() - start)
print(json.dumps(times))
"""


def rows(cell: str, call: Call, rounds: int) -> list[Row]:
    """Run each contender in turn, each time in a new process, `rounds` times."""
    names = (OURS, NN, NN_JITTED)
    runs: dict[str, list[list[float]]] = {name: [] for name in names}
    for _ in range(rounds):
        for name in names:
            runs[name].append(_run(name, call))
    first = {name: [times[0] for times in processes] for name, processes in runs.items()}
    later = {name: [statistics.median(times[1:]) for times in processes] for name, processes in runs.items()}
    numbers = {
        name: {FIRST: Spread.from_numbers(first[name]), LATER: Spread.from_numbers(later[name], 1e3)}
        for name in names
    }
    numbers[OURS][TO_FIRST] = Spread.from_numbers(ratios(first[OURS], first[NN]))
    numbers[OURS][TO_JITTED] = Spread.from_numbers(ratios(later[OURS], later[NN_JITTED]))
    return [Row(f"{cell}, first call", call.keys, name, numbers[name], rounds) for name in names]


def _run(name: str, call: Call) -> list[float]:
    """Return the seconds of each call."""
    arguments = json.dumps([name, call.is_causal, call.keys, call.heads, call.width, CALLS])
    process = subprocess.run([sys.executable, "-c", ONE, arguments], capture_output=True, text=True, check=True)
    times: list[float] = json.loads(process.stdout)
    return times
