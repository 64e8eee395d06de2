"""Sums of lengths, each a number or a name: `P+L`, as the shape of a spec writes them."""

from __future__ import annotations

from collections.abc import Mapping


def addends(length: str) -> list[str]:
    """Return the names and numbers that a length is the sum of."""
    return length.split("+")


def evaluated(length: int | str, lengths: Mapping[str, int]) -> int:
    """Return a length as a number, when its names have these lengths."""
    if isinstance(length, int):
        return length
    return sum(int(part) if part.isdecimal() else lengths[part] for part in addends(length))


def total(one: int | str, other: int | str) -> int | str:
    """Return the length of two arrays that are joined."""
    return one + other if isinstance(one, int) and isinstance(other, int) else f"{one}+{other}"
