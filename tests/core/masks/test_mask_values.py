"""What a mask is as a value: how it prints, what it equals, which integers it takes, what it leaves alone."""

from __future__ import annotations

import functools
import operator
import sys
from typing import Any

import numpy as np
import pytest
from internals import check_integers, override
from libraries import Library

import sdpa_xp
from sdpa_xp import attention_scores, attention_weights, biases, masks, scaled_dot_product_attention

F = np.float32


def test_repr_of_arrays(library: Library) -> None:
    with library.guard():
        few, many = (library.put(np.asarray(x)) for x in ([True, False], [[True, False]]))
        shown = repr(masks.causal() & few), repr(masks.from_array(many))
    short = "<bool (2,)>" if library.lazy else "[1, 0]"
    assert shown == (f"causal() & from_array({short})", "from_array(<bool (1, 2)>)")


SHOWN = (
    "causal(); causal((1, 2)); causal('lower_right'); sliding_window(left=2, right=None);"
    " sliding_window(left=2, right=0, offset=1); padding(3); padding(key_lengths=3, query_lengths=(1,));"
    " document((0, 1)); prefix(0); chunked(4); dilated(2); from_function(max);"
    " ~(causal() | prefix(1)) & chunked(2); causal() & (prefix(1) | chunked(2))"
)


@pytest.mark.parametrize("shown", SHOWN.split("; "))
def test_value(shown: str) -> None:
    """A mask is the value of its arguments: it shows, equals and hashes as they do."""
    names = {name: getattr(masks, name) for name in masks.__all__} | {"max": max}
    mask, same = (eval(shown, names) for _ in range(2))
    assert repr(mask) == shown
    assert mask == same
    assert hash(mask) == hash(same)
    assert mask != masks.prefix(77)


def test_one_mask_for_many_calls(library: Library) -> None:
    """It holds no length and no library: what it says follows from each call."""
    mask = masks.causal("lower_right") & ~masks.chunked(2)
    for queries, keys in ((3, 5), (2, 2), (3, 5)):
        expected = np.asarray(
            [[j <= i + keys - queries and i // 2 != j // 2 for j in range(keys)] for i in range(queries)]
        )
        with library.guard():
            placed = masks.to_array(mask, (queries, keys), like=library.put(np.zeros(1, F)))
        np.testing.assert_array_equal(library.get(placed), expected)
        np.testing.assert_array_equal(masks.to_array(mask, (queries, keys)), expected)


@pytest.mark.parametrize("empty", ["L", "S", "B"])
def test_ids_of_no_token(library: Library, empty: str) -> None:
    """As without a mask: an empty result, or weights over no key."""
    library.needs_empty_arrays()
    batch, queries, keys = (0 if letter == empty else n for letter, n in (("B", 2), ("L", 3), ("S", 4)))
    with library.guard():
        mask = masks.document(*(library.put(np.zeros((batch, n), np.int32)) for n in (queries, keys)))
    q, k = np.ones((batch, 2, queries, 2), F), np.ones((batch, 2, keys, 2), F)
    assert library.call(scaled_dot_product_attention, q, k, k, attn_mask=mask).shape == (batch, 2, queries, 2)
    assert library.call(attention_weights, q, k, attn_mask=mask).shape == (batch, 2, queries, keys)


def test_ids_beyond_int32(library: Library) -> None:
    """They are compared as they are; in 32 bits both would be 1."""
    library.needs("int64")
    with library.guard():
        array = masks.to_array(masks.document(library.put(np.asarray([1, 2**32 + 1]))), (2, 2))
    np.testing.assert_array_equal(library.get(array), np.eye(2, dtype=bool))


@pytest.mark.parametrize("dtype", ["int8", "uint8", "uint16", "uint32", "uint64"])
def test_integers_of_any_dtype(library: Library, dtype: str) -> None:
    """Libraries compute little with unsigned ones, and 64 bits do not mix with others."""
    library.needs(dtype)
    with library.guard():
        numbers = library.put(np.asarray([1, 2], dtype))
        for make in (masks.padding, masks.causal, lambda ids: masks.document(ids, [1, 2])):
            shape = (2, 2) if make not in (masks.padding, masks.causal) else (2, 1, 2, 2)
            array, expected = masks.to_array(make(numbers), shape), masks.to_array(make([1, 2]), shape)
            np.testing.assert_array_equal(library.get(array), expected)


def test_masks_of_equal_arrays_are_equal() -> None:
    """A list may change afterwards, a long one is shown briefly, and ~~ takes nothing."""
    assert repr(masks.padding([1, 2])) == "padding((1, 2))"
    ids = [0] * 500
    mask = masks.document(ids)
    ids[0] = 9
    assert mask == ~~mask == masks.document([0] * 500)
    assert len(repr(mask)) < 100
    lengths, other = np.asarray([1, 2]), np.asarray([1, 1])
    assert masks.padding(lengths) & masks.causal() == masks.padding(lengths) & masks.causal()
    assert len({masks.padding(lengths), masks.padding(lengths), masks.padding(other), masks.causal()}) == 3
    assert masks.causal() != masks.causal(1)
    assert masks.document(range(3)) == masks.document([0, 1, 2])


@pytest.mark.parametrize("kind", ["given", "one length", "window"])
@pytest.mark.leaves_out("cupy-rules-device1")
def test_array_is_the_callers_own(library: Library, kind: str) -> None:
    """It may be written, and no mask changes with it."""
    if not library.name.startswith(("numpy", "torch", "cupy")):
        pytest.skip("only NumPy, torch and CuPy have arrays that are views of others and can be written")
    array = library.put(np.eye(3, dtype=bool))
    mask = {"given": masks.from_array(array), "one length": masks.padding(2), "window": masks.causal()}[kind]
    before = library.get(masks.to_array(mask, (3, 3), like=array)).copy()
    values = masks.to_array(mask, (3, 3), like=array)
    values[0, 1] = not before[0, 1]
    assert (library.get(values) != before).sum() == 1
    np.testing.assert_array_equal(library.get(masks.to_array(mask, (3, 3), like=array)), before)


def test_integers_of_numpy_are_numbers(library: Library) -> None:
    """With arrays of any library, and equal to those of Python."""
    x = np.ones((3, 2), F)
    assert masks.causal(np.int64(2)) == masks.causal(2)
    for mask in (masks.causal(np.int64(2)), masks.padding(np.int64(2)), masks.prefix(np.uint8(1))):
        library.call(scaled_dot_product_attention, x, x, x, attn_mask=mask)
    library.call(scaled_dot_product_attention, x, x, x, bias=biases.alibi(np.int64(1), offset=np.int64(1)))
    assert biases.alibi(4) == biases.alibi(np.int32(4))


def test_empty_axes(library: Library) -> None:
    """Lists of nothing where there is nothing, as arrays are."""
    library.needs_empty_arrays()
    empty, three = np.ones((0, 2), F), np.ones((3, 2), F)
    blocks = masks.blocks([[True, False]] * 2, size=(2, 2))
    of_no_query = masks.document([], [0] * 3), masks.padding(1, 0), masks.dilated(2), masks.chunked(2)
    for mask in (*of_no_query, masks.causal("lower_right"), blocks, ~blocks, blocks & masks.causal()):
        assert library.call(scaled_dot_product_attention, empty, three, three, attn_mask=mask).shape == (0, 2)
    for mask in (masks.document([0] * 3, []), masks.padding(0), blocks, ~blocks):
        output = library.call(scaled_dot_product_attention, three, empty, empty, attn_mask=mask)
        np.testing.assert_array_equal(library.get(output), np.zeros((3, 2)))
    batch = np.ones((0, 1, 3, 2), F)
    assert (
        library.call(scaled_dot_product_attention, batch, batch, batch, attn_mask=masks.padding([])).shape[0]
        == 0
    )
    for shape in ((0, 5), (5, 0), (0, 1, 2, 2)):
        assert masks.to_array(masks.causal(), shape).shape == shape
        assert biases.to_array(biases.alibi(1), shape).shape == shape


def test_a_batch_of_its_own_lengths_is_not_read_again_for_each(monkeypatch: pytest.MonkeyPatch) -> None:
    """512 packed sequences of equal lengths look at 512 lengths once."""
    looked: list[object] = []
    whole = check_integers

    def integers(function: str, name: str, value: object, *rest: Any, **rules: Any) -> Any:
        looked.append(value)
        return whole(function, name, value, *rest, **rules)

    override(monkeypatch, "check_grid_integers", integers)
    rows = np.ones((512, 1, 2), F)
    starts = list(range(513))
    sdpa_xp.varlen_attention(rows, rows, rows, starts, starts, masks.padding([1, 0] * 256))
    assert looked == [[1, 0] * 256]


@pytest.mark.slow
@pytest.mark.sampled(0, on="THIN")
def test_long_chains_of_one_operator(library: Library) -> None:
    """A chain is one value: no chain of masks or biases is too long, and its parts hold as they do apart.

    It is longer than Python lets calls be nested.
    """
    length = sys.getrecursionlimit() + 200
    query = np.ones((1, 3, 2), np.float32)
    either = functools.reduce(operator.or_, [masks.causal(-2 + n % 3) for n in range(length)])
    both = functools.reduce(operator.and_, [masks.causal(n % 3) for n in range(length)])
    added = functools.reduce(operator.add, [biases.alibi([n % 2]) for n in range(length)])
    np.testing.assert_array_equal(masks.to_array(either & both, (3, 4)), masks.to_array(masks.causal(), (3, 4)))
    scores = library.get(library.call(attention_scores, query, query, attn_mask=either, bias=added))
    expected = library.get(
        library.call(attention_scores, query, query, attn_mask=masks.causal(), bias=biases.alibi([length / 2]))
    )
    np.testing.assert_allclose(scores, expected, rtol=1e-5)
    assert str(either).count("|") == str(both).count("&") == str(added).count("+") == length - 1
    assert either == functools.reduce(operator.or_, either.parts)
    assert hash(either) == hash(functools.reduce(operator.or_, either.parts))


def test_masks_are_nested_only_so_deep() -> None:
    mask = masks.causal()
    for _ in range(75):
        mask = (mask & masks.prefix(1)) | masks.prefix(2)
    assert scaled_dot_product_attention(*[np.ones((1, 2, 2))] * 3, mask).shape == (1, 2, 2)
    with pytest.raises(ValueError, match="150 operators"):
        mask & masks.prefix(1)
    with pytest.raises(ValueError, match="150 operators"):
        assert ~mask


def test_a_mask_keeps_what_it_was_given(library: Library) -> None:
    """The caller may write to the arrays afterwards."""
    numbers = np.asarray([1, 3], np.int32)
    ways = {
        "padding": (masks.padding, numbers, (2, 1, 3, 3)),
        "causal": (masks.causal, numbers, (2, 1, 3, 3)),
        "sliding_window": (lambda offset: masks.sliding_window(1, 0, offset=offset), numbers, (2, 1, 3, 3)),
        "prefix": (masks.prefix, numbers, (2, 1, 3, 3)),
        "document": (masks.document, np.asarray([0, 0, 1], np.int32), (3, 3)),
        "from_array": (masks.from_array, np.eye(3, dtype=bool), (3, 3)),
        "operator": (lambda array: masks.causal() & array, np.eye(3, dtype=bool), (3, 3)),
    }
    for name, (make, values, shape) in ways.items():
        array = library.put(values)
        mask = make(array)
        expected = library.get(masks.to_array(make(library.put(values)), shape))
        if hasattr(array, "__setitem__"):
            try:
                array[:1, ...] = library.put(1 - values[:1] if values.dtype != bool else ~values[:1])
            except (TypeError, ValueError, RuntimeError):  # arrays of this library do not change
                continue
        np.testing.assert_array_equal(library.get(masks.to_array(mask, shape)), expected, err_msg=name)
