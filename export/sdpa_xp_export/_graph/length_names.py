"""The names of the lengths of a graph: one for all that are equal, and how each of them is computed."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import reduce

from ..spec import SymbolicShape, addends, total
from .terms import Terms, added, divided, joined_name, multiplied, parts, text


@dataclass(slots=True)
class LengthNames:
    """The sums that names stand for, and the operations that give other lengths.

    A difference of lengths is an integer, which may be negative. An axis of that length has another name, since
    x[1:] of an empty array has no element. So N - 1 + 1 is N, but the length of x[1:], plus 1, is not.
    """

    names: dict[frozenset[tuple[tuple[str, ...], int]], str] = field(default_factory=dict)
    """The name of each sum: the first one that was written."""
    sums: dict[str, Terms] = field(default_factory=dict)
    """The terms of the names of sums."""
    computed: dict[str, tuple[str, str, int]] = field(default_factory=dict)
    """A function and its operands, a name and a number, by the name of the length that it gives. A length that
    is "like" another is read from an array, because a bound of a slice may be beyond its axis."""
    heads: dict[str, tuple[str, Terms]] = field(default_factory=dict)
    """What follows in an array, and the length of both, by the name of the length of x[:3] or x[-3:]."""
    stated: set[str] = field(default_factory=set)
    """The names that the caller has for lengths: no other length gets one of them."""
    exact: set[str] = field(default_factory=set)
    """The quotients that have no rest in any run, since a Reshape would have failed."""

    def terms(self, name: int | str) -> Terms:
        """Return what a name, or a sum of names, stands for."""
        if name in self.sums:
            return self.sums[str(name)]
        terms: Terms = {}
        for part in addends(str(name)):
            is_number = part.lstrip("-").isdecimal()
            terms = added(terms, {(): int(part)} if is_number else self.sums.get(part, {(part,): 1}))
        return terms

    def name_of(self, terms: Terms) -> int | str:
        """Return the name of a sum, or the number that it is."""
        if terms.keys() <= {()}:
            return terms.get((), 0)
        key = frozenset(terms.items())
        if key not in self.names:
            name = text(terms)
            is_itself = terms == {(name,): 1}
            while name in self.names.values() or (name in self.stated and not is_itself):
                name += "_"
            self.names[key], self.sums[name] = name, terms
        return self.names[key]

    def fresh(self, *parts: object) -> str:
        """Return a name for a length that follows from others, which is no name of the caller."""
        name = joined_name(*parts)
        while name in self.stated:
            name += "_"
        return name

    def joined(self, *lengths: int | str) -> int | str:
        """Return the length of arrays that are joined: A+B, or the name that equal lengths have."""
        name, terms = reduce(total, lengths), reduce(added, map(self.terms, lengths))
        if isinstance(name, int):
            return name
        known = self.names.setdefault(frozenset(terms.items()), name)
        self.sums.setdefault(known, terms)
        return known

    def quotient(self, terms: Terms, divisor: int) -> Terms:
        """Return a sum divided by a number, and rounded down."""
        whole = {names: number // divisor for names, number in terms.items()}
        rest = {names: number % divisor for names, number in terms.items()}
        common = math.gcd(divisor, *rest.values())
        name = self.name_of(added({}, {names: number // common for names, number in rest.items()}))
        if isinstance(name, str):
            function, dividend, inner = self.computed.get(name, ("", name, 1))
            if function != "floor_divide":  # (N // 2) // 3 is N // 6
                dividend, inner = name, 1
            quotient = self.fresh(dividend, "over", inner * divisor // common)
            self.computed[quotient] = "floor_divide", dividend, inner * divisor // common
            whole = {**added(whole, {(quotient,): 1})}
        return added({}, whole)

    def counted(self, terms: Terms, step: int) -> int | str:
        """Return how many numbers a range has: its length divided by the step, rounded up, but not below 0."""
        length = self.name_of(terms)
        length = self.axis(length) if isinstance(length, str) else max(length, 0)
        return self.name_of(self.quotient(added(self.terms(length), {(): step - 1}), step))

    def axis(self, name: str) -> str:
        """Return the name of an axis of that length, which is not negative."""
        terms = self.terms(name)
        for head, (rest, whole) in self.heads.items():
            if {(head,), (rest,)} <= terms.keys():  # they are joined again
                terms = added(added(terms, {(head,): 1, (rest,): 1}, -1), whole)
                name = str(self.name_of(terms))
        plus, minus = map(text, parts(terms))
        if not minus:
            return self.names.setdefault(frozenset(terms.items()), name)
        limited = self.fresh(plus, "less", minus)
        self.computed[limited] = "maximum", str(self.name_of(terms)), 0
        return limited

    def joint(self, lengths: Iterable[int | str], loose: int | str) -> int | str:
        """Return what lengths broadcast to that are all `loose`, unless a run cuts a difference off.

        If it does, they only fit by a 1. So the result is the length that is never 1 or 0. It is N beside the 1
        of x[1:] and one more, since N is 0 then, and N beside y[:N]. Else it is read.
        """
        others = sorted({*lengths} - {1}, key=str)
        if len(others) < 2:
            return others[0] if others else 1
        if above_one := [one for one in others if self.terms(one).get((), 0) > 1]:
            return above_one[0]
        rest = self.counted(added(self.terms(loose), {(): 1}, -1), 1)
        fit = {loose, self.name_of(added(self.terms(rest), {(): 1}))}
        fit |= {name for name, (function, *_) in self.computed.items() if function == "like"}
        if loose not in others or not fit.issuperset(others):
            name = self.fresh(*others)
            self.computed[name], loose = ("like", str(loose), 0), name
        return loose

    def loose(self, length: int | str) -> int | str:
        """Return a length in which no difference is limited to 0: axes fit if their lengths are then equal."""
        length = self.name_of(self._loose(self.terms(length)))
        return self.axis(length) if isinstance(length, str) else length

    def _loose(self, terms: Terms) -> Terms:
        total: Terms = {}
        for names, factor in terms.items():
            term: Terms = {(): 1}
            for name in names:
                function, operand, number = self.computed.get(name, ("", name, 0))
                is_exact = name in self.exact and factor % number == 0
                factor //= number if is_exact else 1
                known = is_exact or function in ("maximum", "like")
                term = multiplied(term, self._loose(self.terms(operand)) if known else {(name,): 1})
            total = added(total, term, factor)
        return total

    def remaining(self, shape: SymbolicShape, others: SymbolicShape) -> int | str:
        """Return the length of the last axis if the elements of a shape get other axes."""
        one: Terms = {(): 1}
        dividend, divisor = (
            reduce(multiplied, map(self.terms, (Counter(lengths) - Counter(rest)).elements()), one)
            for lengths, rest in ((shape, others), (others, shape))
        )
        names, number = next(iter(divisor.items()))
        left = divided(dividend, names) if len(divisor) == 1 else None
        if left is None:
            return self.fresh(text(dividend), "over", text(divisor))
        quotient = self.quotient(left, number)
        self.exact |= {name for names in quotient for name in names} - {
            name for names in left for name in names
        }
        return self.name_of(quotient)
