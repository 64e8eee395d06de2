"""Which arrays of a call have gradients, and which of them each bias adds to."""

from __future__ import annotations

from collections.abc import Iterable

from sdpa_xp._core.scores import Scores
from sdpa_xp._libraries.protocols import Array
from sdpa_xp._tiles.gradient_target import GradientTarget


def gradient_targets(
    scores: Scores, key: Array, value: Array, names: Iterable[str]
) -> tuple[dict[str, GradientTarget], tuple[str | None, ...]]:
    """Return the arrays whose gradients are computed, by name, and the name of the array of each bias.

    `names` are those of the floating arrays, in the order of the biases that hold them.
    """
    targets = {
        "query": GradientTarget(scores.query.shape, ("rows", None)),
        "key": GradientTarget(key.shape, ("columns", None), scores.group),
        "value": GradientTarget(value.shape, ("columns", None), scores.group),
    }
    of_biases = [name for name in names if name not in (*targets, "scale", "sinks")]
    bias_names = tuple(
        None if bias.gradient_target is None else of_biases.pop(0) for bias in scores.options.biases
    )
    for name, bias in zip(bias_names, scores.options.biases, strict=True):
        if name and bias.gradient_target:
            targets[name] = bias.gradient_target
    if not isinstance(scores.options.scale, float):
        shape = (*[1] * (3 - scores.options.scale.ndim), *scores.options.scale.shape)
        targets["scale"] = GradientTarget(shape, ("rows" if shape[-2] > 1 else None, None))
    if scores.options.sinks is not None:
        targets["sinks"] = GradientTarget((*[1] * (3 - scores.options.sinks.ndim), *scores.options.sinks.shape))
    return targets, bias_names
