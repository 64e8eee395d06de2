"""The names of the lengths of a graph: one for all that are equal, and how to compute or where to read each.

A length is a sum of products of names. Equal sums are equal lengths, however a layer computes them. The terms
{("B", "L"): 2, (): 1} are 2 B L + 1. No factor is 0, so equal sums have equal terms.
"""

from __future__ import annotations

import math
import operator
import re
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import reduce
from itertools import product
from typing import Any, TypeAlias

from sdpa_xp.errors import ArgumentTypeError

from ..spec import SymbolicShape, addends, total

HINT = (
    "Compute with +, -, *, //, %, / and **, such as x.shape[1] ** 0.5 for math.sqrt; `reshape` takes -1. "
    "Write xp = x.__array_namespace__(), then xp.arange(x.shape[1]), xp.zeros(x.shape), "
    "xp.asarray(x.shape[1]) for its value, or xp.take(table, xp.arange(x.shape[1]), axis=0) "
    "for table[: x.shape[1]]."
)
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


def length_error(function: str, got: Mapping[str, object], hint: str = HINT) -> TypeError:
    """Return the error for a length that is used as a number, in Python or in NumPy."""
    rule = "a length that is known only when the graph runs cannot be used as a Python number"
    return ArgumentTypeError(function, rule, got, hint)


@dataclass(slots=True)
class NamedLengths:
    """The names of the lengths of a graph: the sum that each stands for, and how it is computed or read.

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

    sources: dict[str, tuple[Any, int]] = field(default_factory=dict)
    """A value of the graph that has a length, and the axis, by the name of the length."""

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

    def learnt(self, value: Any, dims: SymbolicShape) -> SymbolicShape:
        """Return the shape of a value in the names of the graph; a length that nothing says is read from it."""
        dims = tuple(self.axis(length) if isinstance(length, str) else length for length in dims)
        for axis, length in enumerate(dims):
            if not self.knows(length):
                self.sources[str(length)] = value, axis
        return dims

    def knows(self, length: int | str) -> bool:
        """Return whether a length is a number, or can be read or computed."""
        if isinstance(length, int) or length in self.sources:
            return True
        if length in self.computed:
            return self.computed[length][0] != "like"
        names = {name for product in self.terms(length) for name in product}
        return length not in names and all(map(self.knows, names))

    def read(self, graph: Any, length: int | str) -> Any:
        """Return a length as a value of the graph, (1,)."""
        if isinstance(length, int):
            return graph.constant([length], "int64")
        if length in self.sources:
            value, axis = self.sources[length]
            return graph.add("Shape", value, dtype="int64", shape=(1,), start=axis, end=axis + 1)
        if length in self.computed:
            function, operand, number = self.computed[length]
            return getattr(graph.namespace, function)(self.read(graph, operand), number, exact=False)
        terms = self.terms(length)
        if not self.knows(length):  # L, beside inputs of the lengths P + L and P
            for known in self.sources:
                rest = added(self.terms(known), terms, -1)
                if all(self.knows(name) for names in rest for name in names):
                    return self.read(graph, known) - self.read(graph, self.name_of(rest))
            raise length_error(graph.function, {"length": length})
        plus, minus = parts(terms)
        total = self._sum(graph, plus or {(): 0})
        return total - self._sum(graph, minus) if minus else total

    def _sum(self, graph: Any, terms: Terms) -> Any:
        products = [[self.read(graph, name) for name in term] for term in factors(terms)]
        return reduce(operator.add, [reduce(operator.mul, product) for product in products])
