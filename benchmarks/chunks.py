"""Time and memory of one call of Dask arrays in chunks, against the same call of NumPy arrays.

`python benchmarks/chunks.py [--length 16384] [--chunk 2048] [--heads 4] [--seconds 20]` times both,
with as many tasks at a time as NumPy has threads, and prints the most that the process held above the inputs.
"""

from __future__ import annotations

import argparse
from functools import partial

import dask
import dask.array as da
import machine
import numpy as np
from measuring import Row, Spread, interleaved, internals

from sdpa_xp import scaled_dot_product_attention

WIDTH = 64


def main() -> None:
    machine.without_settings()
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    for name, number in {"length": 16384, "chunk": 2048, "heads": 4, "seconds": 20}.items():
        parser.add_argument(f"--{name}", type=int, default=number)
    arguments = parser.parse_args()
    rng = np.random.default_rng(0)
    arrays = rng.standard_normal((3, arguments.heads, arguments.length, WIDTH), dtype=np.float32)
    lazy = [da.from_array(x, chunks=(arguments.heads, arguments.chunk, WIDTH)) for x in arrays]
    small = [x[:, : arguments.chunk] for x in lazy]
    with dask.config.set(scheduler="threads", num_workers=internals.threads.thread_count()):
        scaled_dot_product_attention(*small).compute()  # imports what is imported once
        for options in ({}, {"is_causal": True}):
            print(f"{arguments.heads} heads, L = S = {arguments.length}, {options or 'all pairs'}")
            output = scaled_dot_product_attention(*lazy, **options)
            print(f"{len(output.__dask_graph__())} tasks, {internals.threads.thread_count()} at a time")
            _, above = internals.peak_above(output.compute)
            if above is not None:
                print(f"{above / 1e6:.0f} MB above the inputs, with {arrays[0].nbytes / 1e6:.0f} MB of output")
            runs = {
                "numpy": partial(scaled_dot_product_attention, *arrays, **options),
                "dask": output.compute,
            }
            times = interleaved(runs, arguments.seconds)
            for name, seconds in times.items():
                print(
                    Row("time", arguments.length, name, {"seconds": Spread.from_numbers(seconds)}, len(seconds))
                )
            ratios = [mine / whole for mine, whole in zip(times["dask"], times["numpy"], strict=True)]
            print("dask / numpy, round by round:", Spread.from_numbers(ratios))


if __name__ == "__main__":
    main()
