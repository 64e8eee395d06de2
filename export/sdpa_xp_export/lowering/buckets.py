"""The bucket of a distance in a graph, by the rules of `biases.relative`, for a `max_distance` of any size."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol, cast

import numpy as np

from sdpa_xp import biases
from sdpa_xp.biases import Bias
from sdpa_xp_export._arrays import namespace as xp
from sdpa_xp_export._graph.graph import GraphValue

LISTED = 2**10
"""Up to this `max_distance` a graph holds the bucket of each distance; beyond, where each bucket begins."""


class _HasFirstDistances(Protocol):
    """The bias that `biases.relative` returns."""

    @property
    def first_distances(self) -> list[int]: ...


@dataclass(frozen=True, slots=True)
class Buckets:
    """The rules by which `biases.relative` sorts distances into `count` buckets."""

    count: int
    bidirectional: bool
    max_distance: int

    @property
    def of_one_direction(self) -> int:
        """The number of buckets for earlier keys; later keys have as many, or share the first."""
        return self.count // 2 if self.bidirectional else self.count

    def first_distances(self) -> list[int]:
        """Return the smallest distance of each bucket of one direction except the first, in order."""
        return cast(_HasFirstDistances, self._bias(0)).first_distances

    def of_each_distance(self) -> np.ndarray:
        """Return the bucket of each distance from -max_distance to max_distance."""
        bias, most = self._bias(self.max_distance), self.max_distance
        return np.asarray(biases.to_array(bias, (1, 1, 2 * most + 1))[0, 0], np.int64)

    def _bias(self, offset: int) -> Bias:
        """Return a bias of the library that adds the number of the bucket."""
        numbers = np.arange(float(self.count))[:, None]
        return biases.relative(
            numbers, bidirectional=self.bidirectional, max_distance=self.max_distance, offset=offset
        )


def bucket(rules: Buckets, distance: GraphValue) -> GraphValue:
    """Find the buckets of distances j - i by a binary search among the distances at which buckets begin.

    Each step is Gather -> LessOrEqual -> Where, for all distances at once, and there is one for each bit of the
    number of buckets. Nothing is rounded, as a logarithm would be.
    """
    graph, away = distance.graph, abs(distance)
    begins = [0, *rules.first_distances()]
    steps = range(len(begins).bit_length() - 1, -1, -1)
    never = [2**62] * (2 ** len(steps) - len(begins))
    listed = graph.constant([*begins, *never], "int64")
    number = distance * 0
    for step in steps:
        further = number + 2**step
        reached = xp.take(listed, further, axis=0) <= away
        number = xp.where(reached, further, number)
    if rules.bidirectional:
        return xp.where(distance > 0, number + rules.of_one_direction, number)
    return xp.where(distance > 0, 0, number)
