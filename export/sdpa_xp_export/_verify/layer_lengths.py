"""Lengths on both sides of each number in the attention calls of a layer, as far as the scores allow it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from sdpa_xp_export._call.numbers import CallNumbers
from sdpa_xp_export._verify.trial_lengths import OF_A_SCORE, Lengths, numbers_within
from sdpa_xp_export._verify.trial_settings import (
    DEFAULT_NUMBERS,
    MOST_CONSTANTS,
    THOROUGH_NUMBERS,
    larger_limit,
)


class LayerLengths:
    """Chooses lengths for the names of a layer by the numbers of its calls."""

    def __init__(
        self,
        calls: Sequence[CallNumbers],
        names: Sequence[str],
        blocks: Sequence[int],
        *,
        thorough: bool,
        memory: int | None = None,
    ) -> None:
        self.calls, self.names, self.blocks, self.thorough = calls, names, blocks, thorough
        self.affordable = numbers_within(memory, OF_A_SCORE)
        self.most = min(THOROUGH_NUMBERS if thorough else DEFAULT_NUMBERS, self.affordable)

    def around(self) -> list[Lengths]:
        """Return the lengths that there is room for, each once."""
        wanted = [lengths for call in self.calls for lengths in self._wanted(call)]
        return [lengths for lengths in _different(wanted) if self._count(lengths) <= self.most]

    def longest(self) -> list[Lengths]:
        """Return lengths that are beyond most of the numbers, for runs with large inputs."""
        around = [lengths for lengths in self.around() if any(call.names for call in self.calls)]
        return around and [max(around, key=self._count)]

    def left_out(self, tried: Sequence[Lengths]) -> Iterator[str]:
        """Yield a line for each number that none of the lengths in `tried` goes beyond."""
        lines: dict[str, None] = {}
        for call in self.calls:
            for number, name in sorted(call.names.items()):
                lengths = call.lengths(number + 2, number + 2, self.names)
                *_, queries, keys = call.sizes(lengths)
                beyond = any(max(call.sizes(other)[-2:]) >= max(queries, keys) for other in tried)
                if max(queries, keys) > number and not beyond:
                    lines[f"{name}: {self._needs(queries, keys, lengths)}"] = None
        yield from lines

    def _wanted(self, call: CallNumbers) -> Iterator[Lengths]:
        numbers = sorted(call.names)
        for number in numbers if self.thorough else numbers[:MOST_CONSTANTS]:
            for side in (-1, 0, 1, 2, 3) if self.thorough else (0, 2):
                yield call.lengths(number + side, number + side, self.names)
        if numbers:
            yield call.lengths(2 * numbers[-1] + 3, 2 * numbers[-1] + 5, self.names)
            yield call.lengths(3, numbers[-1] + 2, self.names)
        for block in self.blocks:
            for queries, keys in ((block, block + 1), (block + 1, block + 9), (3 * block + 5, 3 * block + 20)):
                yield call.lengths(queries, keys, self.names)

    def _count(self, lengths: Lengths) -> float:
        return max(call.count(lengths) for call in self.calls)

    def _needs(self, queries: int, keys: int, lengths: Lengths) -> str:
        count = self._count(lengths)
        shown = f"{count / 1e6:,.0f} million" if count >= 1e6 else f"{count:,.0f}"
        if count <= self.most:
            return f"only the {MOST_CONSTANTS} smallest numbers are tried; `thorough=True` tries it"
        hint = larger_limit(count, self.affordable)
        return f"needs {queries:,} queries and {keys:,} keys, {shown} scores{hint}"


def _different(many: Sequence[Lengths]) -> list[Lengths]:
    return [dict(items) for items in dict.fromkeys(tuple(lengths.items()) for lengths in many) if items]
