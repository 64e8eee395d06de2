"""Masks and biases as text: what is written is read back, and nothing but them is."""

from __future__ import annotations

import functools
import operator
from typing import Any

import numpy as np
import pytest
from internals import DEEPEST, LONGEST_EXPRESSION, Initializer, parse, text_of
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
    text = text_of(initializer)
    assert parse("test", "attn_mask", text, {"it's": initializer}) is initializer
    with pytest.raises(ValueError, match="no initializer"):
        parse("test", "attn_mask", text, {})


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


NO_TEXT = ("Mask", "from_function", "to_array")
MASKS_ONLY = ", ".join(name for name in masks.__all__ if name not in NO_TEXT)
REFUSED = {
    "a bare word": ("causal", "a function must be called, as in causal(...)"),
    "an unknown word": ("casual()", "no function 'casual'"),
    "nothing": ("", "invalid syntax"),
    "an open end": ("causal() &", "invalid syntax"),
    "two": ("causal(), causal()", "this expression is not allowed here"),
    "an attribute": ("causal().__class__", "a dot is not allowed here"),
    "a method": ("causal().bind(1)", "a dot is not allowed here"),
    "a module": ("masks.causal()", "a dot is not allowed here, write the function alone, as in causal(...)"),
    "an index": ("causal()[0]", "an index is not allowed here"),
    "a call of a call": ("causal()()", "this expression is not allowed here"),
    "eval": ("eval('1')", "no function 'eval'"),
    "import": ("causal(__import__('os'))", "no function '__import__'"),
    "dunder": ("__all__", "no function '__all__'"),
    "a class": ("Mask()", "no function 'Mask'"),
    "to_array": ("to_array(causal(), [2, 2])", "no function 'to_array'"),
    "from_function": (
        "from_function(lambda *x: True)",
        "a function cannot be written as text; pass it in Python",
    ),
    "what stands for one": ("from_function", "a function cannot be written as text"),
    "a bias": ("alibi(8)", "no function 'alibi'"),
    "**": ("causal(**{})", "** is not allowed here"),
    "*": ("causal(*[1])", "* is not allowed here"),
    "twice": ("causal(offset=1, offset=2)", "each argument is given once"),
    "an f-string": ("causal(f'{1}')", "an f-string is not allowed here"),
    "a comprehension": ("padding([x for x in y])", "a comprehension is not allowed here"),
    "a generator": ("padding(x for x in y)", "a comprehension is not allowed here"),
    "lambda": ("lambda: 1", "a lambda is not allowed here"),
    "and": ("causal() and causal()", "(write & and |) is not allowed here"),
    "arithmetic": ("causal(2 ** 9)", "this expression is not allowed here"),
    "a product": ("padding([1] * 9)", "this expression is not allowed here"),
    "a dictionary": ("causal({})", "this expression is not allowed here"),
    "bytes": ("causal(b'1')", "this expression is not allowed here"),
    "a complex number": ("causal(1j)", "this expression is not allowed here"),
    "a walrus": ("(x := causal())", "this expression is not allowed here"),
    "a number": ("1", "'1' is not a spec, a mask or a bias"),
    "a combined number": ("causal() & 1", "'1' cannot be combined by & | ~ +"),
    "an inverted number": ("~1", "'1' cannot be combined by & | ~ +"),
    "a word": ("'causal()'", "'causal()' is not a spec, a mask or a bias"),
    "a sum of masks": ("causal() + causal()", "masks cannot be added; got mask=causal()"),
    "too many arguments": (
        "causal(1, 2)",
        "causal: only `offset` may be passed without a name; got arguments=2",
    ),
    "an unknown argument": ("causal(of=1)", "causal: there is no argument `of`; got of=1"),
    "what the function refuses": ("sliding_window(-1, 0)", "`left` must be at least 0; got left=-1)"),
    "a dtype": ("int4[B]", "`dtype` must be one of float16"),
    "a shape": ("bool[2*B]", "a name in `shape` must be an identifier"),
    "a length": ("bool[-1]", "a length in `shape` must be at least 0"),
    "a backslash": (r"initializer('\x41')", "a backslash is not allowed here"),
    "a null": ("causal()\0", "null bytes"),
    "a huge number": ("causal(" + "9" * 5000 + ")", "Exceeds the limit (4300 digits)"),
    "deep": ("~" * (DEEPEST + 1) + "causal()", f"nested more than {DEEPEST} deep"),
    "deeper": ("~" * 20_000 + "causal()", f"nested more than {DEEPEST} deep"),
    "brackets": ("padding(" + "[" * 5000 + "]" * 5000 + ")", "too many nested parentheses"),
    "long": ("1" * (LONGEST_EXPRESSION + 1), f"at most {LONGEST_EXPRESSION} characters"),
}


@pytest.mark.parametrize(("text", "words"), REFUSED.values(), ids=REFUSED)
def test_refused_in_one_line(text: str, words: str) -> None:
    with pytest.raises(ValueError, match=r"^export: `attn_mask` must be readable \(") as refused:
        parse("export", "attn_mask", text)
    said = str(refused.value)
    assert words in said
    assert "\n" not in said
    assert len(said) < 900
    assert said.endswith(f"It is a spec, as float32[B,1,L,S], or made of {MASKS_ONLY} (sdpa_xp.masks).")


@pytest.mark.parametrize("name", ["scale", "sinks"])
def test_an_array_alone(name: str) -> None:
    """A scale and sinks have no functions, and are refused by their own names."""
    assert parse("test", name, "float32[H,1,1]") == TensorSpec("float32", ("H", 1, 1))
    for text in ("alibi(8)", "causal()", "float32[1] + float32[1]", "x", "2.0", "from_array(float32[1])"):
        with pytest.raises(ValueError, match=rf"^test: `{name}` must be readable .*got {name}=") as refused:
            parse("test", name, text)
        assert str(refused.value).endswith(". It is a spec, as float32[B,1,L,S].")


def test_a_bias_is_refused_with_what_biases_there_are() -> None:
    rule = r"`bias` must be readable \(no function 'causal' here, since it is for `attn_mask`\)"
    with pytest.raises(ValueError, match=rf"{rule}.*alibi, from_array, rel"):
        parse("export", "bias", "causal()")
