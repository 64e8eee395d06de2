"""How NaN and inf of masked keys and values are kept out of the output.

A weight of zero is not enough, because 0 * NaN is NaN. A check of each pair costs three more products. So the
eager path first computes without a guard. If the output contains NaN or inf, the affected rows are computed
again with the guard "pairs".
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Literal, TypeAlias

from sdpa_xp._core.products import any_query_attends, matmul_grouped
from sdpa_xp._core.tile_buffers import Buffer
from sdpa_xp._libraries import library_of, namespace_of
from sdpa_xp._libraries.dtypes import astype_if_needed
from sdpa_xp._libraries.protocols import Array, Namespace
from sdpa_xp._tiles.score_grid import ScoreGrid
from sdpa_xp._tiles.tile import Allowed

NonfiniteGuard: TypeAlias = Literal["none", "columns", "pairs"]
"""What `weigh` keeps out of its product.

"none": nothing. "columns": the values that no query of the tile attends to, which is all that a traced graph
can afford. "pairs": every value that a masked pair would bring in.
"""


def weigh(
    xp: Namespace,
    p: Array,
    value: Array,
    allowed: Allowed,
    guard: NonfiniteGuard,
    buffer: Buffer | None = None,
) -> Array:
    """Return p @ value over the pairs that may attend; without a guard, in the memory of `buffer`."""
    if guard == "none" or isinstance(allowed, bool):
        return matmul_grouped(xp, p, value, buffer)
    if guard == "columns":
        attended = any_query_attends(xp, allowed, value.shape[-3])
        return matmul_grouped(xp, p, xp.where(attended, value, 0.0))
    product = matmul_grouped(xp, p, xp.where(xp.isfinite(value), value, 0.0))
    attends = xp.astype(xp.broadcast_to(allowed, p.shape), p.dtype)
    specials = {math.nan: xp.isnan(value), math.inf: value >= math.inf, -math.inf: value <= -math.inf}
    for special, is_special in specials.items():
        # The product counts the special values that a row attends: it gets them if there is one, whatever p is.
        meets = matmul_grouped(xp, attends, xp.astype(is_special, p.dtype)) > 0.0
        product = xp.where(meets, product + special, product)
    return product


def finite_sums(grid: ScoreGrid, arrays: Iterable[Array]) -> Array:
    """Return whether each array has a finite sum: then it has no NaN and no inf."""
    xp = grid.xp
    return xp.stack([xp.isfinite(xp.sum(astype_if_needed(xp, x, grid.dtype))) for x in arrays], axis=0)


def is_finite(xp: Namespace, output: Array, l: Array) -> bool:
    """Return whether the rows have no NaN or inf; if Ev = 0, only their sums l show it."""
    return bool(xp.isfinite(xp.sum(output) + xp.sum(l)))


def are_finite(checksums: Sequence[Array]) -> list[bool]:
    """Return whether each of some checksums (1,) is finite; a device is waited for once."""
    xp = namespace_of(checksums[0])
    joined = checksums[0] if len(checksums) == 1 else xp.concat(checksums, axis=0)
    flags: list[bool] = library_of(joined).to_list(xp.isfinite(joined))
    return flags


def checksum(xp: Namespace, output: Array, l: Array) -> Array:
    """Return a number that is NaN or inf if a row has one."""
    return xp.sum(output) + xp.sum(l)
