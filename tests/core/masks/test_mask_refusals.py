"""Bad masks and biases are refused by a message that names function, argument, rule and what came."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from calls import ones
from internals import override
from libraries import LIBRARIES, Library

from sdpa_xp import attention_state, attention_weights, biases, masks, scaled_dot_product_attention

F = np.float32
Q, K, V = (np.ones(shape, F) for shape in ((2, 4, 3, 8), (2, 2, 5, 8), (2, 2, 5, 6)))
FAR = 2**31


def ints(*values: Any) -> np.ndarray:
    return np.asarray(values, np.int64)


def boolean(*shape: int) -> np.ndarray:
    return np.ones(shape, bool)


MASKS: list[tuple[masks.Mask, type[Exception], str]] = [
    (masks.causal(1.0), TypeError, r"`attn_mask.offset` must be an integer.*got attn_mask.offset=1.0 \(float\)"),
    (masks.causal(FAR), ValueError, f"`attn_mask.offset` must be at most .*got attn_mask.offset={FAR}"),
    (masks.causal(-FAR), ValueError, f"`attn_mask.offset` must be at least .*got attn_mask.offset=-{FAR}"),
    (masks.causal([0, FAR]), ValueError, r"`attn_mask.offset\[1\]` must be at most"),
    (masks.causal([0, 1, 2]), ValueError, r"`attn_mask.offset` must broadcast to the batch \(...\); got.*\(3,\).*\(2,\)"),
    (masks.causal(ints(0, FAR)), ValueError, f"`attn_mask.offset` must be at most .*{FAR}"),
    (masks.padding(6), ValueError, "`attn_mask.key_lengths` must be at most S; got attn_mask.key_lengths=6, S=5"),
    (masks.padding(-1), ValueError, "`attn_mask.key_lengths` must be at least 0; got attn_mask.key_lengths=-1"),
    (masks.padding([3, -1]), ValueError, r"`attn_mask.key_lengths\[1\]` must be at least 0; got.*=-1"),
    (masks.padding(ints(3, -1)), ValueError, "`attn_mask.key_lengths` must be at least 0; got attn_mask.key_lengths=-1"),
    (masks.padding([1, 2, 3]), ValueError, r"`attn_mask.key_lengths` must broadcast to the batch \(...\); got.*\(3,\)"),
    (masks.document([0, 0], [0] * 5), ValueError, r"`attn_mask.query_ids` must have one integer for each token.*L.*\(2,\).*\(2, 3\)"),
    (masks.document([0] * 3), ValueError, r"`attn_mask.query_ids` must have one integer for each token.*S.*\(3,\).*\(2, 5\)"),
    (masks.document(ones(3), [0] * 5), TypeError, "`attn_mask.query_ids` must hold integers; got attn_mask.query_ids.dtype=float32"),
    (masks.from_array(boolean(3, 4)), ValueError, r"`attn_mask` must broadcast to \(..., Hq, L, S\).*\(3, 4\).*\(2, 4, 3, 5\)"),
    (masks.from_array(boolean(2, 5)), ValueError, r"`attn_mask` must broadcast.*attn_mask\[:, None, None, :\]"),
    (masks.causal() & ones(3, 5), TypeError, "`attn_mask` must be boolean.*got attn_mask.dtype=float32"),
    (masks.causal() | ints(*[1] * 5), TypeError, "`attn_mask` must be boolean.*got attn_mask.dtype=int64.*attn_mask != 0"),
    (masks.from_function(lambda *_: 1), TypeError, "the function of `attn_mask` must return an array; got result=1"),
    (masks.from_function(lambda _b, _h, i, j: i - j), TypeError, "the function of `attn_mask` must return booleans.*got result.dtype=int32.*kv_idx <= q_idx"),
    (masks.from_function(lambda *_: boolean(3, 3)), ValueError, r"function of `attn_mask` returns must broadcast.*\(3, 3\).*\(2, 4, 3, 5\)"),
]  # fmt: skip

TABLE = ones(8, 4)
BIASES: list[tuple[biases.Bias, type[Exception], str]] = [
    (biases.alibi(3), ValueError, r"`bias.slopes` must have as many heads as `query` \(Hq\); got heads of bias.slopes=3, Hq=4"),
    (biases.alibi([0.1, 0.2, 0.3]), ValueError, r"`bias.slopes` must broadcast to \(..., Hq\).*\(3,\).*\(2, 4\)"),
    (biases.alibi(4, offset=0.5), TypeError, "`bias.offset` must be an integer; got bias.offset=0.5"),
    (biases.relative(ones(8, 3)), ValueError, "`bias.table` must have as many heads.*=3, Hq=4"),
    (biases.from_function(lambda *_: 0.0), TypeError, "the function of `bias` must return an array; got result=0.0"),
    (biases.from_function(lambda s, *_: s > 0), TypeError, "`bias` must be one of float16.*got bias.dtype=bool"),
    (biases.from_function(lambda s, *_: s[..., :2]), ValueError, r"function of `bias` returns must broadcast.*\(2, 4, 3, 2\).*\(2, 4, 3, 5\)"),
]  # fmt: skip


@pytest.mark.parametrize(("mask", "error", "words"), MASKS, ids=lambda value: repr(value)[:60])
def test_mask_refused_by_a_call(mask: masks.Mask, error: type[Exception], words: str) -> None:
    for function, inputs in ((scaled_dot_product_attention, (Q, K, V)), (attention_weights, (Q, K))):
        with pytest.raises(error, match=f"^{function.__name__}: .*{words}"):
            function(*inputs, attn_mask=mask)
    with pytest.raises(error, match=f"^attention_state: .*{words}"):
        attention_state(Q, K, V, masks.chunked(2) | ~mask)
    with pytest.raises(error, match=f"^to_array: .*{words}"):
        masks.to_array(mask, (2, 4, 3, 5))


@pytest.mark.parametrize(("bias", "error", "words"), BIASES, ids=lambda value: repr(value)[:60])
def test_bias_refused_by_a_call(bias: biases.Bias, error: type[Exception], words: str) -> None:
    for function, inputs in ((scaled_dot_product_attention, (Q, K, V)), (attention_weights, (Q, K))):
        with pytest.raises(error, match=f"^{function.__name__}: .*{words}"):
            function(*inputs, bias=bias)
    with pytest.raises(error, match=f"^attention_state: .*{words}"):
        attention_state(Q, K, V, bias=biases.alibi(4) + bias)
    if "dtype of `query`" not in words:  # there is none
        with pytest.raises(error, match=f"^to_array: .*{words}"):
            biases.to_array(bias, (2, 4, 3, 5))


@pytest.mark.parametrize(
    ("make", "error", "words"),
    [
        (lambda: masks.sliding_window(-1, 0), ValueError, "sliding_window: `left` must be at least 0; got left=-1"),
        (lambda: masks.causal("upper_left"), ValueError, "causal: `offset` must be 'lower_right' or integers.*got offset='upper_left'"),
        (lambda: masks.sliding_window(1, 0, offset="right"), ValueError, "sliding_window: `offset` must be 'lower_right' or integers.*'right'"),
        (lambda: biases.alibi(4, offset="left"), ValueError, "alibi: `offset` must be 'lower_right' or integers.*'left'"),
        (lambda: biases.relative(TABLE, offset="left"), ValueError, "relative: `offset` must be 'lower_right' or an integer; got offset='left'"),
        (lambda: masks.sliding_window(1.5, 0), TypeError, r"sliding_window: `left` must be an integer; got left=1.5 \(float\)"),
        (lambda: masks.sliding_window(ints(1), 0), TypeError, "sliding_window: `left` must be an integer; got left=numpy.ndarray"),
        (lambda: masks.chunked(0), ValueError, "chunked: `size` must be at least 1; got size=0"),
        (lambda: masks.chunked(2.0), TypeError, "chunked: `size` must be an integer; got size=2.0"),
        (lambda: masks.dilated(0), ValueError, "dilated: `step` must be at least 1; got step=0"),
        (lambda: masks.dilated(None), TypeError, "dilated: `step` must be an integer; got step=None"),
        (lambda: masks.from_array([True]), TypeError, "from_array: `boolean` must be a plain array.*got boolean=\\[True\\].*asarray"),
        (lambda: masks.from_array(ints(1)), TypeError, "from_array: `boolean` must be boolean.*got boolean.dtype=int64"),
        (lambda: masks.from_array(ones(3)), TypeError, "from_array: `boolean` must be boolean.*got boolean.dtype=float32"),
        (lambda: masks.from_function(boolean(3)), TypeError, "from_function: `mask_mod` must be a function; got mask_mod=numpy.ndarray"),
        (lambda: masks.causal() and masks.prefix(1), TypeError, r"masks: a mask is neither true nor false; got mask=causal\(\)\. Combine masks with `&`, `\|` and `~`"),
        (lambda: masks.to_array(boolean(2, 2), (2, 2)), TypeError, "to_array: `mask` must be a mask; got mask=<bool"),
        (lambda: masks.to_array(masks.causal(), 2), TypeError, "to_array: `shape` must be .*got shape=2"),
        (lambda: masks.to_array(masks.causal(), (2, -1)), ValueError, r"to_array: `shape\[1\]` must be at least 0; got shape\[1\]=-1"),
        (lambda: masks.to_array(masks.causal(), (2, 3), rows=[0]), TypeError, r"to_array: `rows` must be a range with step 1; got rows=\[0\]"),
        (lambda: masks.to_array(masks.causal(), (2, 3), rows=range(1, 3)), ValueError, r"to_array: `rows` must be among the 2 queries \(L\); got rows=range\(1, 3\)"),
        (lambda: biases.to_array(biases.alibi(1), (2, 3), rows=range(1, 3)), ValueError, "to_array: `rows` must be among the 2 queries"),
        (lambda: masks.to_array(masks.causal(), (2, 3.0)), TypeError, r"to_array: `shape\[1\]` must be an integer; got shape\[1\]=3.0"),
        (lambda: biases.alibi(0), ValueError, "alibi: `slopes` must be at least 1; got slopes=0"),
        (lambda: biases.alibi(True), TypeError, "alibi: `slopes` must be .*got slopes=True"),
        (lambda: biases.alibi([0.5, "x"]), TypeError, r"alibi: `slopes\[1\]` must be a real number; got slopes\[1\]='x'"),
        (lambda: biases.alibi([float("inf")]), ValueError, r"alibi: `slopes\[0\]` must be finite; got slopes\[0\]=inf"),
        (lambda: biases.alibi(ints(1, 2)), TypeError, "alibi: `slopes` must be one of float16.*got slopes.dtype=int64"),
        (lambda: biases.relative([[1.0]]), TypeError, "relative: `table` must be a plain array.*got table=a list of length"),
        (lambda: biases.relative(np.ones((8, 4), int)), TypeError, "relative: `table` must be one of float16.*int64"),
        (lambda: biases.relative(ones(8)), ValueError, r"relative: `table` must be \(buckets, Hq\), with 4 buckets.*got table.shape=\(8,\)"),
        (lambda: biases.relative(ones(1, 4), bidirectional=False), ValueError, "relative: `table` must be .*2 buckets or more; got"),
        (lambda: biases.relative(TABLE, bidirectional=1), TypeError, "relative: `bidirectional` must be True or False; got bidirectional=1"),
        (lambda: biases.relative(TABLE, max_distance=2), ValueError, "relative: `max_distance` must be at least 3; got max_distance=2"),
        (lambda: biases.relative(TABLE, max_distance=8.0), TypeError, "relative: `max_distance` must be an integer; got max_distance=8.0"),
        (lambda: biases.relative(TABLE, offset=[1]), TypeError, r"relative: `offset` must be .*integer; got offset=\[1\]"),
        (lambda: biases.from_array([1.0]), TypeError, "from_array: `array` must be a plain array.*got array=\\[1.0\\]"),
        (lambda: biases.from_array(boolean(2)), TypeError, "from_array: `array` must be one of float16.*got array.dtype=bool"),
        (lambda: biases.from_function(None), TypeError, "from_function: `score_mod` must be a function; got score_mod=None"),
        (lambda: biases.alibi(4) + 1.0, TypeError, "biases: `bias` must be .*got bias=1.0"),
        (lambda: biases.to_array(masks.causal(), (2, 2)), TypeError, r"to_array: `bias` must be a bias; got bias=causal\(\)"),
        (lambda: scaled_dot_product_attention(Q, K, V, biases.alibi(4)), TypeError, r"attention: `attn_mask` must not be a bias; got attn_mask=alibi\(4\)\. .*`bias`"),
    ],
)  # fmt: skip
def test_refused_at_once(make: Callable[[], Any], error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        make()


def holders(put: Callable[[np.ndarray], Any]) -> list[tuple[str, str, Any]]:
    """Each mask and bias that holds an array: the keyword it goes to, the array's name, and the value."""
    offsets, ids = put(np.zeros(2, np.int32)), [put(np.zeros((2, n), np.int32)) for n in (3, 5)]
    return [
        ("attn_mask", "offset", masks.causal(offsets)),
        ("attn_mask", "offset", masks.sliding_window(1, 1, offset=offsets)),
        ("attn_mask", "key_lengths", masks.padding(offsets)),
        ("attn_mask", "query_lengths", masks.padding(3, offsets)),
        ("attn_mask", "query_ids", masks.document(ids[0], [0] * 5)),
        ("attn_mask", "key_ids", masks.document([0] * 3, ids[1])),
        ("attn_mask", "length", masks.prefix(offsets)),
        ("attn_mask", "boolean", masks.from_array(put(boolean(3, 5)))),
        ("attn_mask", "boolean", ~(masks.causal() | put(boolean(3, 5)))),
        ("bias", "slopes", biases.alibi(put(ones(4)))),
        ("bias", "offset", biases.alibi(4, offset=offsets)),
        ("bias", "table", biases.relative(put(TABLE))),
        ("bias", "array", biases.from_array(put(ones(3, 5)))),
        ("bias", "array", biases.alibi(4) + put(ones(3, 5))),
    ]


@pytest.mark.parametrize("number", range(len(holders(np.asarray))))
@pytest.mark.needs("torch")
def test_arrays_of_another_library(number: int) -> None:
    """Also where another mask holds an array of the same name, which is of the right one."""
    torch = LIBRARIES["torch"][1]()
    (keyword, name, value), (_, _, fitting) = holders(torch.put)[number], holders(np.asarray)[number]
    words = rf"must be arrays of one library; got query=numpy.ndarray, {keyword}\.{name}.*=torch.Tensor"
    both = (value & fitting, fitting & value) if keyword == "attn_mask" else (value + fitting, fitting + value)
    for holder in (value, *both):
        with pytest.raises(TypeError, match=rf"^attention_state: `query` and `{keyword}\.{name}.*{words}"):
            attention_state(Q, K, V, **{keyword: holder})
    to_array = masks.to_array if keyword == "attn_mask" else biases.to_array
    for holder, like in ((value, Q), (both[0], None), (both[1], None)):
        with pytest.raises(TypeError, match=r"^to_array: .*must be arrays of one library; got"):
            to_array(holder, (2, 4, 3, 5), like=like)


@pytest.mark.parametrize("number", range(len(holders(np.asarray))))
@pytest.mark.needs("array_api_strict")
def test_arrays_on_another_device(number: int) -> None:
    first, other = (LIBRARIES[f"strict-{device}"][1]() for device in ("CPU_DEVICE", "device1"))
    (keyword, name, value), (_, _, fitting) = holders(other.put)[number], holders(first.put)[number]
    words = rf"`query` and `{keyword}\.{name}.*must be on one device; got .*CPU_DEVICE.*device1"
    for holder in (value, value & fitting if keyword == "attn_mask" else value + fitting):
        with pytest.raises(ValueError, match=rf"^scaled_dot_product_attention: {words}"):
            scaled_dot_product_attention(*(first.put(x) for x in (Q, K, V)), **{keyword: holder})


@pytest.mark.parametrize("keyword", ["attn_mask", "bias"])
@pytest.mark.needs("torch")
def test_function_that_returns_another_library(keyword: str) -> None:
    torch = LIBRARIES["torch"][1]()
    value: Any = masks.from_function(lambda *_: torch.put(boolean(3, 5)))
    if keyword == "bias":
        value = biases.from_function(lambda score, *_: torch.put(score))
    words = f"^scaled_dot_product_attention: .*`{keyword}`.*one library.*torch.Tensor"
    with pytest.raises(TypeError, match=words):
        scaled_dot_product_attention(Q, K, V, **{keyword: value})


def test_nothing_is_computed_before_a_mask_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a function returns is seen when it is called; all else before any work."""
    override(monkeypatch, "attend_portably", lambda *_, **__: pytest.fail("work began"))
    for rules in ({"attn_mask": masks.padding(9)}, {"bias": biases.alibi(3)}):
        with pytest.raises(ValueError, match=r"`(attn_mask.key_lengths|bias.slopes)` must"):
            scaled_dot_product_attention(Q, K, V, **rules)
    with pytest.raises(pytest.fail.Exception, match="work began"):
        scaled_dot_product_attention(Q, K, V)


WRITTEN = {
    "causal: `offset`": (lambda flag: masks.causal(flag), lambda flag: masks.causal([0, flag])),
    "sliding_window: `offset`": (lambda flag: masks.sliding_window(1, 1, offset=flag),),
    "padding: `key_lengths`": (lambda flag: masks.padding(flag), lambda flag: masks.padding([flag, 2])),
    "padding: `query_lengths`": (
        lambda flag: masks.padding(3, flag),
        lambda flag: masks.padding(None, (flag,)),
    ),
    "prefix: `length`": (lambda flag: masks.prefix(flag), lambda flag: masks.prefix([1, flag])),
    "document: `query_ids`": (lambda flag: masks.document([0, flag]),),
    "document: `key_ids`": (lambda flag: masks.document([0, 1], [flag]),),
    "tree: `offset`": (lambda flag: masks.tree([-1], offset=flag),),
    "alibi: `offset`": (lambda flag: biases.alibi(2, offset=flag),),
}


@pytest.mark.parametrize("flag", [True, False, np.True_], ids=repr)
@pytest.mark.parametrize("argument", WRITTEN)
def test_flags_are_refused_where_they_are_written(argument: str, flag: Any) -> None:
    for write in WRITTEN[argument]:
        with pytest.raises(
            TypeError, match=rf"^{argument} must be an integer, or integers, but not booleans; got"
        ):
            write(flag)


def test_arrays_of_booleans_are_refused_where_they_are_written(library: Library) -> None:
    with library.guard():
        flags = library.put(np.asarray([True, False]))
        for write in (masks.padding, masks.prefix, masks.causal, masks.document):
            with pytest.raises(TypeError, match=r"must be an integer, or integers, but not booleans; got"):
                write(flags)
