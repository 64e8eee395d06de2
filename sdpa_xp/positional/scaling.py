"""Scalings: lower frequencies of rotary embeddings, for sequences longer than those of the training."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from .._checks import Immutable
from .._checks.keywords import check_flag, check_integer, check_number, explains_keywords
from .._libraries.trees import Tree
from ..errors import ArgumentValueError

Frequencies = tuple[float, ...]
"""The angle between two neighbouring positions, in radians, for each pair of elements."""


def base_frequencies(width: int, base: float) -> Frequencies:
    """Return base^(-2i/width) for each pair i of elements: the frequencies without a scaling."""
    return tuple(base ** (-2 * pair / width) for pair in range(width // 2))


def check_width_and_base(function: str, width: object, base: object) -> tuple[int, float]:
    """Check the even number of elements that frequencies are for, and their base, and return both."""
    elements = check_integer(function, "width", width, least=2)
    if elements % 2:
        raise ArgumentValueError(function, "`width` must be even", {"width": elements})
    return elements, _check_above(function, "base", base, 1)


def _check_above(function: str, name: str, value: object, limit: float) -> float:
    """Check a number greater than `limit`, and return it."""
    result = check_number(function, name, value)
    if result <= limit:
        raise ArgumentValueError(function, f"`{name}` must be greater than {limit:g}", {name: result})
    return result


class Scaling(Tree, Immutable, ABC):
    """The base class of scalings, which lower the `frequencies` of a `Rotary`."""

    @abstractmethod
    def frequencies(self, width: int, base: float, /) -> Frequencies:
        """Return the frequency of each pair of elements, in radians per position.

        Args:
            width: The number of elements that are rotated.
            base: The base of the frequencies without a scaling, base^(-2i / width).
        """

    @property
    def magnitude(self) -> float:
        """The factor by which rotated queries and keys are multiplied."""
        return 1.0


@explains_keywords
@dataclass(frozen=True, slots=True)
class LinearScaling(Scaling):
    """A scaling that divides all positions by `factor`, so that they stay within those of the training.

    Args:
        factor: The length of the sequences, divided by the length in training.

    Examples:
        >>> from sdpa_xp import positional
        >>> positional.Rotary(4, scaling=positional.LinearScaling(2)).frequencies
        (0.5, 0.005)

    References:
        Chen et al., "Extending Context Window of Large Language Models via Positional Interpolation",
        arXiv 2306.15595, section 2.3.
    """

    factor: float

    def __post_init__(self) -> None:
        _check_above("LinearScaling", "factor", self.factor, 0)

    def frequencies(self, width: int, base: float) -> Frequencies:
        return tuple(frequency / self.factor for frequency in base_frequencies(width, base))


@explains_keywords
@dataclass(frozen=True, slots=True)
class NTKScaling(Scaling):
    """A scaling by a larger base: the highest frequency stays, and the lowest is divided by `factor`.

    Args:
        factor: As for `LinearScaling`.

    Examples:
        >>> from sdpa_xp import positional
        >>> positional.Rotary(4, scaling=positional.NTKScaling(2)).frequencies
        (1.0, 0.005)

    References:
        Peng et al., "YaRN", arXiv 2309.00071, definition 1.
    """

    factor: float

    def __post_init__(self) -> None:
        _check_above("NTKScaling", "factor", self.factor, 0)

    def frequencies(self, width: int, base: float) -> Frequencies:
        # The new base is base * factor^(width / (width - 2)). A single pair has the frequency 1 with any base.
        pairs = enumerate(base_frequencies(width, base))
        return tuple(f * self.factor ** (-2 * pair / max(width - 2, 1)) for pair, f in pairs)


@explains_keywords
@dataclass(frozen=True, slots=True)
class Llama3Scaling(Scaling):
    """A scaling that divides low frequencies by `factor` and keeps high frequencies, as in Llama 3.

    Args:
        factor: As for `LinearScaling`.
        original_length: The length of the sequences in training.
        low_freq_factor: A frequency is divided if it makes at most this number of turns within
            `original_length`.
        high_freq_factor: A frequency stays if it makes at least this number of turns. Between the two numbers,
            frequencies are interpolated.

    Examples:
        >>> from sdpa_xp import positional
        >>> scaling = positional.Llama3Scaling(8.0)
        >>> rotary = positional.Rotary(8, base=500000.0, scaling=scaling)
        >>> [round(f, 7) for f in rotary.frequencies]
        [1.0, 0.037606, 0.0005248, 6.6e-06]

    References:
        Grattafiori et al., "The Llama 3 Herd of Models", arXiv 2407.21783; `apply_scaling` of its code.
    """

    factor: float
    original_length: int = 8192
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0

    def __post_init__(self) -> None:
        function = "Llama3Scaling"
        _check_above(function, "factor", self.factor, 0)
        check_integer(function, "original_length", self.original_length, least=1)
        low = _check_above(function, "low_freq_factor", self.low_freq_factor, 0)
        _check_above(function, "high_freq_factor", self.high_freq_factor, low)

    def frequencies(self, width: int, base: float) -> Frequencies:
        old = base_frequencies(width, base)
        turns = [self.original_length * frequency / (2 * math.pi) for frequency in old]
        return _interpolate(old, self.factor, _ramp(turns, self.low_freq_factor, self.high_freq_factor))


@explains_keywords
@dataclass(frozen=True, slots=True)
class YaRNScaling(Scaling):
    """A scaling that divides low frequencies by `factor` and sharpens the weights, flattened by more keys.

    High frequencies stay, as in `Llama3Scaling`; between them, the interpolation is linear in the number of the
    pair.

    Args:
        factor: As for `LinearScaling`.
        original_length: As for `Llama3Scaling`.
        beta_fast: As `high_freq_factor` of `Llama3Scaling`.
        beta_slow: As `low_freq_factor` of `Llama3Scaling`.
        attention_factor: The `magnitude`. None means 0.1 ln(factor) + 1.
        truncate: Whether the interpolation begins and ends at whole pairs, as in the authors' code.

    Examples:
        >>> from sdpa_xp import positional
        >>> scaling = positional.YaRNScaling(4.0, 4096)
        >>> round(scaling.magnitude, 4)
        1.1386

    References:
        Peng et al., "YaRN", arXiv 2309.00071, sections 3.2 and 3.4.
    """

    factor: float
    original_length: int
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float | None = None
    truncate: bool = True

    def __post_init__(self) -> None:
        function = "YaRNScaling"
        _check_above(function, "factor", self.factor, 0)
        check_integer(function, "original_length", self.original_length, least=1)
        slow = _check_above(function, "beta_slow", self.beta_slow, 0)
        _check_above(function, "beta_fast", self.beta_fast, slow)
        if self.attention_factor is not None:
            _check_above(function, "attention_factor", self.attention_factor, 0)
        check_flag(function, "truncate", self.truncate)

    @property
    def magnitude(self) -> float:
        if self.attention_factor is not None:
            return self.attention_factor
        return 0.1 * math.log(max(self.factor, 1)) + 1

    def frequencies(self, width: int, base: float) -> Frequencies:
        fast, slow = (self._pair(turns, width, base) for turns in (self.beta_fast, self.beta_slow))
        if self.truncate:
            fast, slow = math.floor(fast), math.ceil(slow)
        fast, slow = max(fast, 0), min(slow, width - 1)
        pairs = [-float(pair) for pair in range(width // 2)]
        # If the ramp has no width, 0.001 makes it a step and avoids a division by zero.
        shares = _ramp(pairs, -max(slow, fast + 0.001), -fast)
        return _interpolate(base_frequencies(width, base), self.factor, shares)

    def _pair(self, turns: float, width: int, base: float) -> float:
        """Return the pair that makes that many turns within the original length, not rounded."""
        # Pair i makes length * base^(-2i/width) / (2 pi) turns; this is the formula solved for i.
        return width * math.log(self.original_length / (turns * 2 * math.pi)) / (2 * math.log(base))


def _ramp(values: Iterable[float], low: float, high: float) -> list[float]:
    """Return 0 up to `low`, 1 from `high` on, and linear values between."""
    return [min(max((value - low) / (high - low), 0.0), 1.0) for value in values]


def _interpolate(frequencies: Frequencies, factor: float, shares: Sequence[float]) -> Frequencies:
    """Keep a share of each frequency, and divide the rest by `factor`."""
    return tuple(f * (share + (1 - share) / factor) for f, share in zip(frequencies, shares, strict=True))
