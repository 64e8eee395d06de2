"""Explain how a call would be computed, and why, without computing it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, NamedTuple, Unpack, cast

from ._attention import choose_kernel
from ._call import PreparedCall, prepare
from ._call.options import AttentionOptions, CallOptions, takes_options
from ._checks import has_values
from ._checks.keywords import Implementation
from ._chunked import cut_call
from ._display import Squares, captioned
from ._libraries import access_of, is_unknown, namespace_of
from ._libraries.base import Autograd
from ._libraries.protocols import AnyArray, Array
from ._libraries.trees import without_arrays
from ._programs import Scores
from ._programs.reproducible import aligned
from ._run import threads
from ._tiles.plan import Plan, plan_patches
from ._torch import is_differentiated
from .errors import PACKAGE
from .masks import Mask

if TYPE_CHECKING:
    from ._many.graphs import GraphCall

MOST_SQUARES = 64
"""The most squares along a side of the picture of the tiles; of more tiles, a square stands for several."""
TILE_COLOURS = {"#": "#2f86c5", "+": "#d55e00"}
LARGE_NUMBERS = ("million", "billion", "trillion", "quadrillion", "quintillion")
"""10**6, 10**9 and so on."""


@without_arrays
class Explanation(NamedTuple):
    """How a call would be computed. `explain` returns it, and `print` shows it in three lines."""

    implementation: Implementation
    """"xp" or "native"; or "torch" if the call asks for it."""
    reason: str
    """Why this implementation was chosen. If "xp" was chosen by default, it says why "native" was not."""
    tile: tuple[int, int]
    """The most queries and keys of a tile of the portable implementation, also the fallback of a kernel."""
    tiles: int
    """The number of tiles that the portable implementation computes."""
    total_tiles: int
    """The number of all tiles. Those that are not computed are fully masked."""
    threads: int
    """The number of threads that share the tiles; 1 if the arrays' library decides about threads."""
    multiplications: int = 0
    """The multiplications of the portable implementation: E + Ev for each pair in a tile that it computes.

    Without a mask, if E = Ev, gradients take 2.5 times as many, a tangent of query, key and value 3 times, and
    a Hessian-vector product 10.5 times. 0 if the arrays are cut into chunks.
    """
    tile_map: tuple[str, ...] = ()
    """The tiles of the first head, one line for each range of queries: "#" is computed without a mask, "+" with
    one, and "." is skipped. It is empty if the keys of a tile do not lie in one range."""

    def __repr__(self) -> str:
        # All but the map, which has a character for each tile.
        shown = {name: value for name, value in self._asdict().items() if name != "tile_map"}
        return f"Explanation({', '.join(f'{name}={value!r}' for name, value in shown.items())})"

    def __str__(self) -> str:
        size = "up to {} queries x {} keys".format(*self.tile)
        order = f"in {self.threads} threads" if self.threads > 1 else "one after the other"
        tiles = f"{self.tiles:,} of {self.total_tiles:,} tiles of {size}, {order}"
        if self.implementation != "xp":
            return f"{self.implementation}: {self.reason}\n"
        lines = [f"xp: computed by {PACKAGE}, in tiles, because {self.reason}", tiles]
        if self.multiplications:
            times = "; about 2.5 times as many for gradients, 3 for tangents, 10.5 for a Hessian-vector product"
            # Derivatives of blocks of a mask are computed in ranges of keys, whose number this is not.
            count = _in_words(self.multiplications)
            lines.append(f"{count} multiplications{times if self.tile_map else ''}")
        return "\n".join(lines)

    def _repr_html_(self) -> str:
        """Return the tiles as a notebook shows them, coloured by what is done with them; a kernel has none."""
        text = str(self).strip()
        if self.implementation != "xp":
            return captioned(text, [])
        down, across = self._tiles_of_a_square()
        picture = Squares(
            _merged(self.tile_map, down, across),
            TILE_COLOURS,
            "The tiles: queries from top to bottom, keys from left to right",
        )
        meanings = [
            "queries (down) x keys",
            "blue: computed without a mask",
            "orange: masked in part",
            "empty: skipped",
        ]
        if down > 1 or across > 1:
            meanings = [
                f"queries (down) x keys; a square is {down} x {across} tiles",
                "blue: all computed without a mask",
                "orange: some masked or skipped",
                "empty: all skipped",
            ]
        return captioned(text, [picture], "; ".join(meanings))

    def _tiles_of_a_square(self) -> tuple[int, int]:
        """Return how many tiles a square of the picture stands for: 1 x 1, or as many queries as keys."""
        counts = len(self.tile_map), len(self.tile_map[0]) if self.tile_map else 0
        if max(counts) <= MOST_SQUARES:
            return 1, 1
        # As many queries as keys, so that the diagonal of a causal call is one of the picture, too.
        side = max(-(-count // MOST_SQUARES) * length for count, length in zip(counts, self.tile, strict=True))
        down, across = (min(count, -(-side // length)) for count, length in zip(counts, self.tile, strict=True))
        return down, across


def _in_words(number: int) -> str:
    """Return a number as a reader says it and as code writes it: 1.28 trillion (1.28e12)."""
    mantissa, exponent = f"{number:.2e}".split("e")
    rounded, place = f"{float(mantissa):g}e{int(exponent)}", min(int(exponent) // 3 - 2, len(LARGE_NUMBERS) - 1)
    if place < 0:
        return f"{number:,}"
    return f"{float(rounded) / 10 ** (3 * place + 6):.3g} {LARGE_NUMBERS[place]} ({rounded})"


def _merged(tile_map: Sequence[str], down: int, across: int) -> list[str]:
    """Return a character for each `down` x `across` tiles: theirs if they are alike, else "+"."""
    merged = []
    for first in range(0, len(tile_map), down):
        rows = tile_map[first : first + down]
        places = range(0, len(rows[0]), across)
        kinds = [{*"".join(row[place : place + across] for row in rows)} for place in places]
        merged.append("".join(kind.pop() if len(kind) == 1 else "+" for kind in kinds))
    return merged


@takes_options(AttentionOptions)
def explain(
    query: AnyArray,
    key: AnyArray,
    value: AnyArray,
    attn_mask: Mask | AnyArray | None = None,
    **keywords: Unpack[AttentionOptions],
) -> Explanation:
    """Return which implementation `scaled_dot_product_attention` would choose for a call, and its tiles.

    Attention is not computed: only the masks, and the biases of a `reproducible` call, are evaluated, to find
    the tiles that are skipped. Nothing is drawn from `rng`, and no method `__sdpa_xp__` of an array is called.

    Args:
        query: (..., Hq, L, E). All other arguments and errors are as in `scaled_dot_product_attention`.

    Returns:
        The implementation, the reason for the choice, and the tiles of the portable implementation.

    Examples:
        >>> import numpy as np
        >>> x = np.ones((8, 4096, 64), dtype="float32")
        >>> explain(x, x, x, is_causal=True, implementation="xp").reason
        'the call asks for it'

    References:
        Dao, "FlashAttention-2", arXiv 2307.08691, section 3.1, for the tiles.
    """
    options = CallOptions.from_keywords(attn_mask, keywords)
    call = prepare("explain", {"query": query, "key": key, "value": value}, options, has_kernels=True)
    choice = choose_kernel(call)
    # A call in chunks would draw a seed from `rng`, which has to stay as it is.
    if (cut := cut_call(call._replace(options=call.options._replace(dropout_p=0.0)))) is not None:
        return _explain_chunks(cut)
    if is_differentiated(call, has_kernel=False):
        call = _unrecorded(call)
    plan, widths = call.plan(), call.sizes.width + call.arrays["value"].shape[-1]
    tile_map: tuple[str, ...] = ()
    if (patches := plan.patches) is not None:
        computed, all_tiles = patches.blocks, patches.blocks * -(-plan.keys // patches.keys)
        pairs = math.prod(call.grid.leading_shape) * patches.blocks * patches.queries * patches.keys
        plan = plan_patches(plan, call.grid, 1, widths)
    else:
        with call.computing():
            if call.grid.is_reproducible:
                plan = aligned(call.scores(), plan)
            computed, pairs, tile_map = _mapped_tiles(call.scores(), plan)
        all_tiles = sum(len([*task.plan.column_ranges(range(plan.keys))]) for task in plan.tasks())
    return Explanation(
        implementation="xp" if choice.kernel is None else call.implementation or "native",
        reason="; ".join(filter(None, (choice.reason, _lazy_reason(call.arrays["query"])))),
        tile=(min(plan.rows, plan.queries), min(plan.columns, plan.keys)),  # a short call is less than a tile
        tiles=computed,
        total_tiles=all_tiles,
        threads=threads.thread_count() if plan.threads is None else 1,
        multiplications=pairs * widths,
        tile_map=tile_map,
    )


def _unrecorded(call: PreparedCall) -> PreparedCall:
    """Return a call as an operation computes it whose derivatives are ours: the library records none of it."""
    autograd = cast(Autograd, call.grid.library.autograd)
    access = access_of([autograd.detach(array) for array in call.arrays.values()])
    return call.changed(grid=replace(call.grid, access=access))


def _mapped_tiles(scores: Scores, plan: Plan) -> tuple[int, int, tuple[str, ...]]:
    """Count the tiles in which some pair may attend, and their pairs; draw those of the first head."""
    tasks = plan.tasks()
    rows, columns = -(-plan.queries // plan.rows), -(-plan.keys // plan.columns)
    drawn, count, pairs = [["."] * columns for _ in range(rows)], 0, 0
    for task in tasks:
        (leading,), (queries,) = task.slices, task.ranges
        for tile, allowed in scores.slice_leading(leading).tiles(queries, task.plan):
            count += 1
            pairs += math.prod(tile.shape)
            if task.slices == tasks[0].slices:
                # The first tile of a range begins where the mask does, so a tile may reach into two places.
                line = drawn[tile.rows.start // plan.rows]
                for place in range(tile.columns.start // plan.columns, -(-tile.columns.stop // plan.columns)):
                    line[place] = "#" if allowed is True and line[place] != "+" else "+"
    return count, pairs, tuple("".join(line) for line in drawn)


def _explain_chunks(cut: GraphCall) -> Explanation:
    rows, columns = (max(map(len, ranges)) for ranges in cut.pieces.ranges[-2:])
    return Explanation(
        implementation="xp",
        reason="each chunk of queries meets each chunk of keys in a task",
        tile=(rows, columns),
        tiles=sum(len(cut.blocks_of(place)) for place in cut.rows()),
        total_tiles=math.prod(map(len, cut.pieces.ranges)),
        threads=1,
    )


def _lazy_reason(array: Array) -> str:
    """Return why an array of an unknown library counts as lazy, or "" for other arrays."""
    if not is_unknown(array) or has_values(array):
        return ""
    try:
        bool(namespace_of(array).any(array))
    except Exception as error:  # the library decides what `bool` raises
        return f"the arrays count as lazy: bool() raises {type(error).__name__}: {error}"
    return "the arrays count as lazy"
