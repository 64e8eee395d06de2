"""Random calls of all that the exporter states, as strategies of hypothesis."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any, TypeAlias

import hypothesis.strategies as st

from sdpa_xp import biases, masks

Operands: TypeAlias = Callable[[str], Any]
"""Gives an array, or a spec, by the name of its argument; another one each time."""
Part: TypeAlias = Callable[[Operands], Any]
"""A mask or a bias of such operands."""


def either(*numbers: Any, name: str) -> Any:
    """One of these numbers, or an operand of that name."""
    return st.sampled_from([*numbers, None]).map(
        lambda chosen: lambda take: take(name) if chosen is None else chosen
    )


def part(make: Callable[..., Any], *drawn: Any) -> Any:
    return st.tuples(*drawn).map(lambda values: lambda take: make(*(value(take) for value in values)))


def number(*numbers: Any) -> Any:
    return st.sampled_from(numbers).map(lambda chosen: lambda take: chosen)


OFFSET = either(0, 2, -1, "lower_right", name="offset")
MASKS = st.recursive(
    st.one_of(
        part(masks.causal, OFFSET),
        part(
            lambda left, right, offset: masks.sliding_window(left, right, offset=offset),
            number(None, 0, 3),
            number(None, 0, 2),
            OFFSET,
        ),
        part(masks.padding, either(name="key_lengths"), either(name="query_lengths")),
        part(masks.prefix, either(0, 2, name="length")),
        part(masks.document, either(name="query_ids"), either(name="key_ids")),
        part(masks.chunked, number(1, 3, 4)),
        part(masks.dilated, number(1, 2, 3)),
        part(masks.from_array, either(name="attn_mask")),
        part(lambda d: masks.from_function(lambda b, h, i, j: (i + h - b) // 2 != j // d), number(2, 3)),
    ),
    lambda inner: st.one_of(
        *(
            st.tuples(inner, inner).map(
                lambda two, combine=combine: lambda take: combine(*(x(take) for x in two))
            )
            for combine in (operator.and_, operator.or_)
        ),
        inner.map(lambda one: lambda take: ~one(take)),
    ),
    max_leaves=4,
)
BIASES = st.lists(
    st.one_of(
        part(biases.from_array, either(name="bias")),
        part(
            lambda slopes, offset: biases.alibi(slopes, offset=offset),
            either(4, name="slopes"),
            number(0, 2, -1),
        ),
        part(
            lambda table, both, most: biases.relative(table, bidirectional=both, max_distance=most),
            either(name="table"),
            number(True, False),
            number(8, 128),
        ),
        part(lambda d: biases.from_function(lambda s, b, h, i, j: s * 0.5 + (h - b) * j / d), number(8, 16)),
    ),
    min_size=1,
    max_size=3,
).map(lambda parts: lambda take: sum_of([addend(take) for addend in parts]))
OPTIONAL: dict[str, Any] = {
    "attn_mask": MASKS,
    "bias": BIASES,
    "scale": either(0.3, -1.0, name="scale"),
    "softcap": number(2.0),
    "sinks": either(name="sinks"),
    "is_causal": number(True),
}
CALLS = st.fixed_dictionaries({}, optional=OPTIONAL)


def sum_of(addends: list[Any]) -> Any:
    total, *others = addends
    for addend in others:
        total = total + addend
    return total


def taken_in_order(parts: dict[str, Part], give: Operands) -> dict[str, Any]:
    """The keywords of a call; operands are taken in the order in which the exporter comes upon them."""
    counts: dict[str, int] = {}

    def take(name: str) -> Any:
        counts[name] = counts.get(name, 0) + 1
        return give(name if counts[name] == 1 else f"{name}_{counts[name]}")

    return {name: parts[name](take) for name in OPTIONAL if name in parts}
