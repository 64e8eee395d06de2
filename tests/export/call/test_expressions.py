"""Masks and biases as text: what is written is read back, and nothing but them is."""

from __future__ import annotations

import functools
import operator
from typing import Any

import numpy as np
import pytest
from internals import Initializer, parse, text_of
from short_runs import assert_right

from sdpa_xp import biases, masks
from sdpa_xp_export import TensorSpec, export_attention

LENGTHS: Any = TensorSpec("int64", ("B",))
TABLE: Any = TensorSpec("float32", (32, 8))

MASKS: dict[str, Any] = {
    "causal": masks.causal(),
    "causal, by offset": masks.causal(-3),
    "causal, lower right": masks.causal("lower_right"),
    "causal, one per batch entry": masks.causal([0, 2]),
    "sliding_window": masks.sliding_window(4, None, offset="lower_right"),
    "padding": masks.padding([9, 6], [3, 0]),
    "padding, queries alone": masks.padding(None, 2),
    "prefix": masks.prefix(2),
    "document": masks.document([0, 0, 1], [0, 1, 1, 1]),
    "chunked": masks.chunked(4),
    "dilated": masks.dilated(3),
    "and": masks.causal() & masks.prefix(2) & masks.dilated(2),
    "or in and": (masks.causal() | masks.prefix(2)) & masks.dilated(2),
    "and in or": masks.causal() | (masks.prefix(2) & masks.dilated(2)),
    "a long chain": functools.reduce(
        operator.or_, [masks.prefix(n % 3) & masks.dilated(2) for n in range(300)]
    ),
    "not": ~masks.causal(),
    "not of or": ~(masks.causal() | ~masks.prefix(2)) & masks.chunked(4),
}
BIASES: dict[str, Any] = {
    "alibi": biases.alibi(8),
    "alibi, by slopes": biases.alibi([0.5, 1e-30, -2.0], offset=-1),
    "sum": biases.alibi(8) + biases.alibi(8, offset="lower_right") + biases.alibi([1.0] * 8),
}
KINDS = {"attn_mask": MASKS, "bias": BIASES}
ALL = [(kind, name) for kind, values in KINDS.items() for name in values]


@pytest.mark.parametrize(("kind", "name"), ALL)
def test_round_trip(kind: str, name: str) -> None:
    value = KINDS[kind][name]
    read = parse("test", kind, text_of(value))
    assert read == value
    assert repr(read) == repr(value)


@pytest.mark.parametrize(("kind", "name"), ALL)
def test_repr_is_read_too(kind: str, name: str) -> None:
    """What Python prints can be pasted, as long as it shows all numbers."""
    value = KINDS[kind][name]
    assert parse("test", kind, repr(value)) == value


@pytest.mark.parametrize(
    ("kind", "value", "text"),
    [
        ("attn_mask", masks.padding(LENGTHS), "padding(key_lengths=int64[B], query_lengths=None)"),
        ("attn_mask", masks.prefix(LENGTHS), "prefix(length=int64[B])"),
        ("bias", biases.alibi(TABLE), "alibi(slopes=float32[32,8], offset=0)"),
        (
            "bias",
            biases.relative(TABLE, bidirectional=False),
            "relative(table=float32[32,8], bidirectional=False, max_distance=128, offset=0)",
        ),
        ("bias", biases.from_array(TABLE), "from_array(float32[32,8])"),
    ],
)
def test_specs_in_functions(kind: str, value: Any, text: str) -> None:
    assert text_of(value) == text
    assert text_of(parse("test", kind, text)) == text


@pytest.mark.parametrize(
    "text", ["bool[B,1,1,S]", "float32[]", "bool[1,for,in]", "float32[B,8,L,P+L]", "int64[7]"]
)
def test_a_spec(text: str) -> None:
    """Its names may be words of Python, and it may have no axes."""
    assert parse("test", "attn_mask", text) == TensorSpec.parse(text)
    assert text_of(parse("test", "attn_mask", f"prefix({text})")) == f"prefix(length={text})"


def test_arrays_combine_as_masks_and_biases_do() -> None:
    read = parse("test", "attn_mask", "~bool[S] | bool[L,1] & causal()")
    assert text_of(read) == "(~from_array(bool[S]) | (from_array(bool[L,1]) & causal(offset=0)))"
    read = parse("test", "bias", "float32[8,L,S] + alibi(8)")
    assert text_of(read) == "(from_array(float32[8,L,S]) + alibi(slopes=8, offset=0))"


def test_initializers_are_read_by_name() -> None:
    initializer = Initializer("it's", np.ones(3, np.bool_))
    assert parse("test", "attn_mask", text_of(initializer), {"it's": initializer}) is initializer


def test_numbers_of_numpy_are_written_as_numbers() -> None:
    ids = list(np.arange(3))
    assert text_of(masks.document(ids)) == "document(query_ids=[0, 1, 2], key_ids=None)"
    slopes: list[Any] = list(np.asarray([0.5, 2.0], np.float32))
    assert text_of(biases.alibi(slopes)) == "alibi(slopes=[0.5, 2.0], offset=0)"


def test_a_long_list_is_read_back_from_a_model() -> None:
    query, key = TensorSpec("float32", (1, 4)), TensorSpec("float32", (5000, 4))
    model = export_attention(query, key, key, masks.document([1], [number % 3 for number in range(5000)]))
    assert_right(model)


def test_white_space_does_not_matter() -> None:
    assert parse("test", "attn_mask", " causal(\n 'lower_right' )\n& prefix( 2 ) ") == masks.causal(
        "lower_right"
    ) & masks.prefix(2)


REFUSED = {
    "nothing": "",
    "an open end": "causal() &",
    "a null": "causal()\0",
    "a huge number": "causal(" + "9" * 5000 + ")",
    "deeper": "~" * 20_000 + "causal()",
    "two lines": "no\nsuch\x1b[31m",
    "brackets": "padding(" + "[" * 5000 + "]" * 5000 + ")",
}
"""What Python itself refuses, or would take too long over."""


@pytest.mark.parametrize("text", REFUSED.values(), ids=REFUSED)
def test_refused_in_one_line(text: str) -> None:
    with pytest.raises(ValueError, match="must be readable") as refused:
        parse("export", "attn_mask", text)
    said = str(refused.value)
    assert said.isprintable()
    assert len(said) < 900


def test_an_array_alone() -> None:
    for name in ("scale", "sinks"):
        assert parse("test", name, "float32[H,1,1]") == TensorSpec("float32", ("H", 1, 1))
