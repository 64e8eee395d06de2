"""The numbers of tiles, tasks and their memory that were found by measuring, for each kind of machine.

The programs of benchmarks/ measure them. An estimate says that it is one. Those of a vendor's kernel, or of one
library, stand in its file.
"""

from __future__ import annotations

from typing import NamedTuple


class TileSize(NamedTuple):
    """The largest tile. Measured with benchmarks/attention.py."""

    rows: int
    columns: int
    scores: int
    """The number of scores in all heads of a tile together."""


class PatchSize(NamedTuple):
    """The smallest patch that a mask is asked for: large ones compute more pairs, small ones copy more keys."""

    queries: int
    copies: float
    """The most keys that are copied for each query."""


class Work(NamedTuple):
    """How much a group computes and copies."""

    scores: int
    elements: int
    """The elements of queries, keys and values."""


# One core, on which a thread of ours computes a tile.
ONE_CORE = TileSize(512, 256, 2**17)
"""For threads that compute a tile each: 512 KiB of float32 scores stay in the cache of a core from the first
product to the second, and BLAS is fastest if the left matrix has the longer side."""
ONE_CORE_PATCH = PatchSize(2, 32)
"""For NumPy. An image of 64 x 64 with windows of 7 x 7 gets patches of 1 x 2, which compute 1.14 times the
allowed pairs. Patches of 2 x 2 took 0.8 times as long, but compute 1.31 times the pairs."""
SMALLEST_SIDE = 64
"""The fewest queries, or keys, that a large call is cut into."""
LEAST_WORK_FOR_THREADS = 2**25
"""Multiplications. Fewer take less time than threads lose by taking turns in Python. With 2**23, two heads
of 256 queries and keys took 1.7 times as long on two cores (AMD EPYC, AVX2), 32 heads of one query with 2,048
keys 1.4 times, and other calls between as long."""
LEAST_SCORES_WITHOUT_MAXIMUM = 2**16
"""The fewest scores of a call for which a softmax without a maximum saves more time than the check of its
results takes."""
MOST_COPIED = 2**20
"""The number of elements of keys and values that are copied from the blocks of a paged cache for a tile."""
MOST_GATHERED = 2**21
"""The elements of keys and values that are copied for a tile of patches on the CPU. Fewer cost more calls, and
more leave its caches: with 2**20 and 2**22 an image of 64 x 64 took 1.1 times as long, with 2**19 1.5 times."""
MOST_STACKED = 2**18
"""The number of elements of sequences of a packed batch that are stacked: too few for threads, so that threads
share the stacks."""
MOST_SHARES = 4
"""The parts of the queries of a call that add to the same sums. Each has sums of its own, which take memory."""
MOST_ROWS_ALONE, LEAST_KEYS_ALONE = 7, 512
"""Up to so many rows of a head are multiplied with so many keys or more one by one: see `multiply_few_rows`."""
COST_OF_A_COPY = 4
"""The time that it takes to copy a key and its value, in pairs of a query and a key; measured on one core."""
LEAST_PATCHED_PAIRS = 2**18
"""The fewest pairs in ranges of keys that take longer than to make the lists of keys."""
MOST_AT_ONCE = 2**22
"""The elements that are quantised at once. Each needs a few numbers of the accumulation dtype meanwhile."""
MOST_ROWS_KNOWN = 4
"""Ranges of queries whose tiles are kept. The tasks of one range, for all heads, follow each other."""
MOST_KNOWN = 2**12
"""The scores of the largest call whose mask is asked once for all equal calls: its answer is an array."""
ROWS_OF_A_PRODUCT, KEYS_OF_A_PRODUCT = 4, 128
"""The shape of each product of a reproducible call. With 4 rows, OpenBLAS 0.3.31 takes 1.3 times as long as for
one large product of 512 queries and keys, and for one query, a row among others, as long as for the product of
a vector (AVX-512, 64 columns, float32). With 2 rows these are 1.4 and 0.7 times."""
MOST_WIDTHS_OF_ONE_THREAD = 512
"""The largest E + Ev for which OpenBLAS surely computes such a product in one thread."""

# All cores, on which a library computes each operation.
ALL_CORES = TileSize(512, 512, 2**18)
"""For libraries whose operations use all cores: each core computes some heads of a tile, this many scores."""
EQUAL_TILES = TileSize(512, 512, 2**22)
"""For libraries that compile an operation for each shape: a causal call has square tiles of one shape."""
ALL_CORES_PATCH = PatchSize(16, 8)
"""For libraries whose operations cost more: 1 x 2 took 2 (torch) and 3 times (JAX) as long as 4 x 4."""
MOST_BANDS = 4
"""The loops of a causal call that is compiled. 4 of them compute 5/8 of all pairs. 8 would compute 9/16, and
take twice as long to compile."""
LEAST_WIDENED, MOST_TILES = 1024, 16
"""Keys in a tile of a quantised cache inside a compiled graph, which grows with its tiles, and the tiles."""
MOST_SCORES_KEPT = 2**16
"""The scores of a call without masks that a library may keep for its gradients: each array of them takes up to
256 KiB in float32. To compute them again takes up to twice as long (one core)."""

# A device, where each operation is a launch, and to read a value is to wait.
DEVICE = TileSize(256, 1024, 2**22)
"""For devices that compute all heads and batch entries at once; the more there are, the smaller is a tile."""
MOST_OF_FEW_ROWS = 4
"""A tile of up to `SMALLEST_SIDE` queries on a device may have this many times the scores of another."""
MOST_COPIED_ON_DEVICE = 2**26
"""`MOST_COPIED` for all sequences of a call on a device, where a tile costs launches: 256 MiB of float32."""
WORK_OF_LAUNCHES = Work(2**22, 2**23)
"""The work that takes about as long as the 40 launches of a call of one tile: a tile of `DEVICE`, and
copies of 32 MiB of float32. It is an estimate, which no GPU has measured."""
