"""Lengths as sums of products of names, by which lengths are equal however a layer computes them.

The terms {("B", "L"): 2, (): 1} are 2 B L + 1. No factor is 0, so equal sums have equal terms.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping
from itertools import product
from typing import TypeAlias

Terms: TypeAlias = Mapping[tuple[str, ...], int]
"""The factor of each product of names; of the number, the product has no names."""


def added(one: Terms, other: Terms, factor: int = 1) -> Terms:
    """Return one sum plus the other times a factor."""
    total = Counter(one)
    for names, number in other.items():
        total[names] += factor * number
    return {names: number for names, number in total.items() if number}


def multiplied(one: Terms, other: Terms) -> Terms:
    """Return the product of two sums."""
    total: Counter[tuple[str, ...]] = Counter()
    for (names, number), (more, factor) in product(one.items(), other.items()):
        total[tuple(sorted(names + more))] += number * factor
    return added(total, {})


def divided(terms: Terms, names: tuple[str, ...]) -> Terms | None:
    """Return a sum divided by a product of names; None if a term has not all of them."""
    rests = [Counter(term) for term in terms]
    for rest in rests:
        rest.subtract(names)
    if any(count < 0 for rest in rests for count in rest.values()):
        return None
    return {tuple(sorted(rest.elements())): number for rest, number in zip(rests, terms.values(), strict=True)}


def parts(terms: Terms) -> tuple[Terms, Terms]:
    """Return what is added in a sum, and what is subtracted."""
    plus, minus = ({names: sign * n for names, n in terms.items() if sign * n > 0} for sign in (1, -1))
    return plus, minus


def factors(terms: Terms) -> list[tuple[int | str, ...]]:
    """Return what is multiplied in each term: names, and a number unless it is 1 beside names."""
    return [names if number == 1 and names else (*names, number) for names, number in terms.items()]


def text(terms: Terms) -> str:
    """Return a name for a sum; the graph gives it to equal sums in another order, too."""
    plus, minus = ("+".join("_times_".join(map(str, f)) for f in factors(part)) for part in parts(terms))
    return joined_name(plus or "0", "minus", minus) if minus else plus


def joined_name(*names: object) -> str:
    """Return a name for a new length, made of what it follows from; equal parts give equal names."""
    words = (str(getattr(name, "name", name)) for name in names)
    joined = "_".join(words).replace("+", "_and_").replace("-", "minus_")
    return re.sub(r"\W|^(?=\d)", "_", joined)
