"""Random calls of all that the exporter states: `verify` agrees, and the graph gives what the library gives."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any, TypeAlias

import hypothesis.strategies as st
import numpy as np
import pytest
from graphs import BATCH, LONGER, SHORTER, Arrays, Rules, check, held_by, operand, qkv, run, spec
from hypothesis import given, settings
from short_runs import assert_right

from sdpa_xp import KVCache, biases, masks
from sdpa_xp_export import export_attention

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
    return st.tuples(*drawn).map(lambda held: lambda take: make(*(each(take) for each in held)))


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
).map(lambda parts: lambda take: sum_of([each(take) for each in parts]))
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
    for each in others:
        total = total + each
    return total


def taken_in_order(parts: dict[str, Part], give: Operands) -> dict[str, Any]:
    """The keywords of a call; operands are taken in the order in which the exporter comes upon them."""
    taken: dict[str, int] = {}

    def take(name: str) -> Any:
        taken[name] = taken.get(name, 0) + 1
        return give(name if taken[name] == 1 else f"{name}_{taken[name]}")

    return {name: parts[name](take) for name in OPTIONAL if name in parts}


def drawn(parts: dict[str, Part], rng: np.random.Generator, queries: int, keys: int, dtype: str) -> Arrays:
    """The operands of a call, by the names of the inputs."""
    held: Arrays = {}

    def give(name: str) -> np.ndarray:
        held[name] = operand(name, rng, queries, keys, dtype)
        return held[name]

    taken_in_order(parts, give)
    return held


def as_rules(parts: dict[str, Part]) -> Rules:
    return lambda **held: taken_in_order(parts, held.__getitem__)


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks of 2 queries, the last of them smaller."""
    monkeypatch.setattr("sdpa_xp_export.forms.tiled.ROWS", 2)


@pytest.mark.parametrize("form", ["auto", "tiled", "primitive"])
@settings(max_examples=40)
@given(
    parts=CALLS,
    lengths=st.sampled_from([LONGER, SHORTER, (1, 7)]),
    heads=st.sampled_from([(4, 4), (4, 2), (4, 1)]),
    dtype=st.sampled_from(["float32", "float32", "float64"]),
    layout=st.sampled_from(["...HLE", "...LHE"]),
    outputs=st.sampled_from([("output",), ("output", "lse")]),
    fixed=st.booleans(),
    seed=st.integers(0, 2**32),
)
def test_calls(
    form: str,
    parts: dict[str, Part],
    lengths: tuple[int, int],
    heads: tuple[int, int],
    dtype: str,
    layout: str,
    outputs: tuple[str, ...],
    fixed: bool,
    seed: int,
) -> None:
    rng = np.random.default_rng(seed)
    arrays, held = qkv(rng, *lengths, heads=heads, dtype=dtype), drawn(parts, rng, *lengths, dtype)
    if layout != "...HLE":
        arrays = {name: x.swapaxes(-2, -3) for name, x in arrays.items()}
    names = {} if fixed else {BATCH: "B", lengths[1]: "S"} | ({lengths[0]: "L"} if lengths[0] > 1 else {})
    check(arrays, as_rules(parts), held, names=names, form=form, layout=layout, outputs=outputs)


@pytest.mark.parametrize("form", ["auto", "tiled", "primitive"])
@settings(max_examples=40)
@given(
    parts=CALLS,
    tokens=st.sampled_from([(5, 6), (1, 7), (1, 1)]),
    heads=st.sampled_from([(4, 4), (4, 2), (4, 1)]),
    seed=st.integers(0, 2**32),
)
def test_calls_with_a_cache(
    form: str, parts: dict[str, Part], tokens: tuple[int, int], heads: tuple[int, int], seed: int
) -> None:
    rng = np.random.default_rng(seed)
    queries, before = tokens
    arrays, past = qkv(rng, queries, queries, heads=heads), qkv(rng, queries, before, heads=heads)
    past = {f"past_{name}": past[name] for name in ("key", "value")}
    held = drawn(parts, rng, queries, before + queries, "float32")
    held |= {name: np.minimum(x, before + queries) for name, x in held.items() if name.startswith("key_l")}
    rules = as_rules(parts)
    rules_given = rules(**{name: spec(x, {}) for name, x in held.items()})
    specs = {name: spec(x, {}) for name, x in (arrays | past).items()}
    model = export_attention(**specs, **rules_given, form=form)
    whole = {name: np.concatenate([past[f"past_{name}"], arrays[name]], axis=-2) for name in ("key", "value")}
    wanted = KVCache(**whole).attend(arrays["query"], **({"is_causal": False} | rules(**held)))
    np.testing.assert_allclose(run(model, arrays | past | held)["output"], wanted, rtol=0, atol=2e-5)
    assert_right(model, **held_by(rules_given))
