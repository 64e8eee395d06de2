"""Which arrays of a call have gradients, and whether all are known."""

from __future__ import annotations

from collections.abc import Iterable

from .._libraries.protocols import Array
from .._tiles.tile import Target
from .scores import Scores

PROBE_SIDE = 8
"""Queries and keys of the tile on which a function of the caller is tried before a call is computed."""


def gradient_targets(
    scores: Scores, key: Array, value: Array, names: Iterable[str]
) -> tuple[dict[str, Target], tuple[str | None, ...]]:
    """Return the arrays whose gradients are computed, by name, and the name of the array of each bias.

    `names` are those of the floating arrays, in the order of the biases that hold them.
    """
    targets = {
        "query": Target(scores.query.shape, ("rows", None)),
        "key": Target(key.shape, ("columns", None), scores.group),
        "value": Target(value.shape, ("columns", None), scores.group),
    }
    of_biases = [name for name in names if name not in (*targets, "scale", "sinks")]
    bias_names = tuple(
        # Only a floating array is a target, and the names have the order of the biases.
        None if bias.gradient_target is None else of_biases.pop(0)
        for bias in scores.options.biases
    )
    for name, bias in zip(bias_names, scores.options.biases, strict=True):
        if name and bias.gradient_target:
            targets[name] = bias.gradient_target
    if not isinstance(scores.options.scale, float):
        shape = (*[1] * (3 - scores.options.scale.ndim), *scores.options.scale.shape)
        targets["scale"] = Target(shape, ("rows" if shape[-2] != 1 else None, None))
    if scores.options.sinks is not None:
        targets["sinks"] = Target((*[1] * (3 - scores.options.sinks.ndim), *scores.options.sinks.shape))
    return targets, bias_names


def try_functions(scores: Scores) -> None:
    """Refuse a bias whose function does more than add: it is tried on some scores before the call."""
    if not scores.options.has_functions:
        return
    grid = scores.grid
    rows, columns = (range(min(PROBE_SIDE, len(side))) for side in grid.sides)
    tile = scores.tile(rows, columns)
    distance = grid.xp.astype(tile.key_index - tile.query_index, grid.dtype)
    # None of these scores is 0, of which a multiple is no other number.
    probe = grid.xp.broadcast_to(distance * 0.75 + 0.5, tile.shape)
    for bias in scores.options.biases:
        if bias.is_of_caller:
            bias.gradient(tile, probe, probe)
