"""`reproducible=True`: a query has the bits that it has alone with its own keys, wherever these stand."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from calls import bits

import sdpa_xp
from sdpa_xp import KVCache, PagedKVCache, attention_state, biases, masks, scaled_dot_product_attention
from sdpa_xp.positional import Rotary

F = np.float32
attend = partial(scaled_dot_product_attention, reproducible=True)
state = partial(attention_state, reproducible=True)
FRONT = 5
"""The tokens of padding in front of the first text."""


def draw(seed: int, *shapes: tuple[int, ...], dtype: str = "float32") -> list[np.ndarray]:
    rng = np.random.default_rng(seed)
    return [rng.standard_normal(shape).astype(dtype) for shape in shapes]


def texts(seed: int, lengths: list[int], fronts: list[int], dtype: str = "float32") -> list[list[np.ndarray]]:
    """A query, a key and a value for each text alone; and as a batch, with padding of NaN at both sides."""
    alone = [draw(seed + n, (4, x, 16), (2, x, 16), (2, x, 9), dtype=dtype) for n, x in enumerate(lengths)]
    most = max(front + length for front, length in zip(fronts, lengths, strict=True)) + 3
    batch = []
    for part in range(3):
        shape = (len(lengths), *alone[0][part].shape[:1], most, alone[0][part].shape[-1])
        padded = np.full(shape, np.nan, dtype)
        for n, (front, text) in enumerate(zip(fronts, alone, strict=True)):
            padded[n, :, front : front + lengths[n]] = text[part]
        batch.append(padded)
    return [batch, *alone]


def in_text(lengths: list[int], fronts: list[int], most: int) -> np.ndarray:
    """Which places of a batch are tokens, (B, 1, 1, S)."""
    first, place = np.reshape(fronts, (-1, 1)), np.arange(most)
    return ((place >= first) & (place < first + np.reshape(lengths, (-1, 1))))[:, None, None]


def additive(allowed: np.ndarray, number: float, dtype: Any = F) -> np.ndarray:
    return np.where(allowed, 0.0, number).astype(dtype)


FORMS: dict[str, Callable[[np.ndarray], dict[str, Any]]] = {
    "boolean": lambda real: {"attn_mask": real, "is_causal": True},
    "boolean, a row each": lambda real: {"attn_mask": real & np.tri(real.shape[-1], dtype=bool)},
    "-inf": lambda real: {"attn_mask": additive(real, -np.inf), "is_causal": True},
    "finfo.min of float16": lambda real: {"attn_mask": additive(real, -65504.0, np.float16), "is_causal": True},
    "-inf as a bias, a row each": lambda real: {
        "bias": additive(real & np.tri(real.shape[-1], dtype=bool), -np.inf)
    },
    "a value": lambda real: {"attn_mask": masks.from_array(real) & masks.causal()},
    "a function": lambda real: {
        "attn_mask": masks.from_function(lambda b, h, i, j: real[b, 0, 0, j]),
        "is_causal": True,
    },
    "documents": lambda real: {"attn_mask": masks.document(real[:, 0, 0].astype(int)) & masks.causal()},
    "behind, and a prefix in front": lambda real: {
        "attn_mask": masks.padding((real[:, 0, 0].cumsum(-1).argmax(-1) + 1).tolist())
        & ~masks.prefix(real[:, 0, 0].argmax(-1).tolist()),
        "is_causal": True,
    },
}


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("form", FORMS)
def test_padding_at_both_sides_changes_no_bit(form: str, seed: int) -> None:
    rng = np.random.default_rng(seed)
    lengths = [int(n) for n in rng.choice([1, 7, 127, 128, 129, 200, 300], size=3)]
    fronts = [int(n) for n in rng.choice([0, 1, 5, 127, 128, 150], size=3)]
    batch, *alone = texts(
        seed, lengths, fronts, "float16" if "float16" in form else ["float32", "float64"][seed % 2]
    )
    if "finfo" in form:  # which does not mask
        batch = [np.nan_to_num(x) for x in batch]
    real = in_text(lengths, fronts, batch[0].shape[-2])
    padded = state(*batch, **FORMS[form](real))
    for n, (front, length) in enumerate(zip(fronts, lengths, strict=True)):
        expected, rows = state(*alone[n], is_causal=True), slice(front, front + length)
        assert bits(padded, np.s_[n, :, rows]) == bits(expected)


OPTIONS: dict[str, Callable[[int], dict[str, Any]]] = {
    "window": lambda offset: {"attn_mask": masks.sliding_window(60, 0, offset=offset)},
    "window to both sides": lambda offset: {"attn_mask": masks.sliding_window(40, 30, offset=offset)},
    "chunks": lambda offset: {"is_causal": True, "softcap": 3.0},
    "alibi": lambda offset: {"is_causal": True, "bias": biases.alibi(4, offset=offset)},
    "sinks": lambda offset: {"is_causal": True, "sinks": np.linspace(-1, 1, 4).astype(F)},
    "large scores": lambda offset: {"is_causal": True, "scale": 60.0},
}


@pytest.mark.parametrize("name", OPTIONS)
def test_options_beside_padding(name: str) -> None:
    lengths, fronts = [200, 130], [FRONT, 77]
    batch, *alone = texts(0, lengths, fronts)
    real = masks.from_array(in_text(lengths, fronts, batch[0].shape[-2]))
    rules = OPTIONS[name](0)
    padded = state(*batch, **{**rules, "attn_mask": rules.get("attn_mask", real) & real})
    for n, (front, length) in enumerate(zip(fronts, lengths, strict=True)):
        expected = state(*alone[n], **rules)
        assert bits(padded, np.s_[n, :, front : front + length]) == bits(expected)


@pytest.mark.parametrize("form", ["formula", "array", "-inf"])
def test_each_query_of_a_window_has_the_bits_that_it_has_alone_with_its_keys(form: str) -> None:
    query, key, value = draw(0, (2, 4, 300, 16), (2, 2, 300, 16), (2, 2, 300, 9))
    window = masks.sliding_window(150, 10)
    allowed = np.asarray(masks.to_array(window, (300, 300)))
    rules = {"formula": window, "array": allowed, "-inf": additive(allowed, -np.inf)}
    whole = state(query, key, value, rules[form])
    for i in (0, 1, 100, 150, 151, 152, 277, 278, 290, 298, 299):
        its_keys = slice(max(0, i - 150), i + 11)
        alone = state(query[:, :, i : i + 1], key[:, :, its_keys], value[:, :, its_keys])
        assert bits(alone) == bits(whole, np.s_[:, :, i : i + 1])


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("masked", ["all", "entries", "heads", "entries and heads"])
def test_any_mask_moves_with_its_keys(masked: str, seed: int) -> None:
    """With holes, of entries and heads of its own, also in one group of query heads."""
    rng = np.random.default_rng(seed)
    query, key, value = draw(seed, (3, 4, 9, 16), (3, 2, 290, 16), (3, 2, 290, 9))
    shape = (3 if "entries" in masked else 1, 4 if "heads" in masked else 1, 9, 290)
    allowed = rng.random(shape) < rng.choice([0.02, 0.5, 0.9])
    allowed &= np.arange(290) >= rng.integers(0, 280, (*shape[:-1], 1))
    front = int(rng.integers(1, 140))
    moved = [np.pad(x, ((0, 0), (0, 0), (front, 3), (0, 0))) for x in (key, value)]
    moved_mask = np.pad(allowed, ((0, 0), (0, 0), (0, 0), (front, 3)))
    unmoved, shifted = state(query, key, value, allowed), state(query, *moved, moved_mask)
    assert bits(unmoved) == bits(shifted)
    for entry in range(3):
        for head in range(4):
            mask = allowed[entry % shape[0], head % shape[1]]
            arrays = query[entry, head], key[entry, head // 2], value[entry, head // 2]
            assert attend(*arrays, mask).tobytes() == unmoved.output[entry, head].tobytes()


def test_documents_in_one_sequence_have_the_bits_of_each_alone() -> None:
    """As those that `varlen_attention` cuts."""
    lengths = [1, 130, 7, 300, 7, 0, 129]
    starts = np.cumsum([0, *lengths]).tolist()
    query, key, value = draw(0, (starts[-1], 4, 16), (starts[-1], 2, 16), (starts[-1], 2, 9))
    mask = masks.document(np.repeat(np.arange(7), lengths)) & masks.causal()
    rules: dict[str, Any] = {"is_causal": True, "reproducible": True}
    packed = sdpa_xp.varlen_attention_state(query, key, value, starts, starts, **rules)
    joined = state(query, key, value, mask, layout="...LHE")
    assert bits(packed) == bits(joined)
    assert (
        sdpa_xp.varlen_attention(query, key, value, starts, starts, **rules).tobytes()
        == joined.output.tobytes()
    )
    for first, last in pairwise(starts):
        alone = state(*(x[first:last] for x in (query, key, value)), is_causal=True, layout="...LHE")
        assert alone.output.tobytes() == joined.output[first:last].tobytes()
        assert alone.lse.tobytes() == joined.lse[:, first:last].tobytes()


@pytest.mark.parametrize("form", ["boolean", "-inf"])
@pytest.mark.parametrize("window", [None, 100])
def test_a_decoder_of_texts_padded_on_the_left(window: int | None, form: str) -> None:
    """One token at a time, and in chunks, from a batch with a mask of real tokens."""
    lengths, fronts = [150, 140, 3], [0, 10, 147]
    batch, *alone = texts(0, lengths, fronts)
    query, key, value = (x[:, :, :150] for x in batch)
    real = in_text(lengths, fronts, 150)
    rule = None if window is None else masks.sliding_window(window, 0)
    expected = [attend(*arrays, rule, is_causal=True) for arrays in alone]
    for first, last in ((147, 150), (149, 150), (130, 140), (20, 150)):
        cache = KVCache(key[:, :, :last], value[:, :, :last])
        hidden: dict[str, Any] = {"bias": additive(real[..., :last], -np.inf), "attn_mask": rule}
        if form == "boolean":
            mask = masks.from_array(real[..., :last])
            hidden = {"attn_mask": mask if rule is None else mask & rule}
        computed = cache.attend(query[:, :, first:last], **hidden, reproducible=True)
        for n, front in enumerate(fronts):
            begin = max(first, front)
            if begin < last:
                expected_rows = expected[n][:, begin - front : last - front]
                assert computed[n, :, begin - first :].tobytes() == expected_rows.tobytes()


@pytest.mark.parametrize("in_place", [False, True])
def test_a_window_that_rolls_has_the_bits_of_a_prompt_with_a_window(in_place: bool) -> None:
    """Its first tokens are dropped, and its queries and keys are rotated by their positions."""
    query, key, value = draw(0, (2, 4, 400, 16), (2, 2, 400, 16), (2, 2, 400, 9))
    rotary = Rotary(16)
    rotated = [rotary.apply(x, 0) for x in (query, key)]
    expected = attend(*rotated, value, masks.sliding_window(149, 0), is_causal=True)
    cache = KVCache(key[:, :, :150], value[:, :, :150], capacity=300, rotary=rotary)
    for i in range(150, 400):
        token = slice(i, i + 1)
        cache = cache.append(key[:, :, token], value[:, :, token], in_place=in_place).drop_first(1)
        if i % 7 == 0:
            computed = cache.attend(query[:, :, token], reproducible=True)
            assert computed.tobytes() == expected[:, :, token].tobytes()


def test_caches_of_texts_that_begin_at_other_positions() -> None:
    """Padded on the left with `first_position`; in a pool whose first blocks were given back; and with gaps."""
    lengths, fronts = [150, 140], [0, 10]
    batch, *alone = texts(0, lengths, fronts)
    query, key, value = (x[:, :, :150] for x in batch)
    rules: dict[str, Any] = {"rotary": Rotary(16)}
    cache = KVCache(key, value, first_position=[0, -10], **rules)
    computed = cache.attend(query[:, :, -2:], in_text(lengths, fronts, 150), reproducible=True)
    for n, arrays in enumerate(alone):
        one = KVCache(*arrays[1:], **rules).attend(arrays[0][:, -2:], reproducible=True)
        assert one.tobytes() == computed[n].tobytes()
    pools = [np.ascontiguousarray(x.reshape(2, 10, 15, -1).swapaxes(0, 1)) for x in alone[0][1:]]
    paged: Any = PagedKVCache(*pools, [[*range(10)]], [150])
    paged = paged.drop_first(60)
    query, key, value = alone[0]
    computed = paged.attend(query[None, :, -1:], bias=biases.alibi(4), reproducible=True)
    bias = biases.alibi(4, offset=89)
    assert computed[0].tobytes() == attend(query[:, -1:], key[:, 60:], value[:, 60:], bias=bias).tobytes()
    tokens = [*range(3, 9), *range(20, 150)]
    shorter = KVCache(key, value).take_tokens(tokens)
    expected = attend(query[:, -1:], key[:, tokens], value[:, tokens])
    assert shorter.attend(query[:, -1:], reproducible=True).tobytes() == expected.tobytes()


def test_windows_of_a_paged_cache() -> None:
    query, key, value = draw(0, (2, 4, 1, 16), (2, 2, 320, 16), (2, 2, 320, 9))
    pools = [x.reshape(2, 2, 10, 32, -1).swapaxes(1, 2).reshape(20, 2, 32, -1) for x in (key, value)]
    cache = PagedKVCache(*pools, [[*range(10)], [*range(10, 20)]], [320, 290])
    computed = cache.attend(query, masks.sliding_window(200, 0), reproducible=True)
    for n, length in enumerate((320, 290)):
        its_keys = slice(length - 201, length)
        assert attend(query[n], key[n, :, its_keys], value[n, :, its_keys]).tobytes() == computed[n].tobytes()


def test_no_query_is_lost_or_computed_for_another(rng: np.random.Generator) -> None:
    """The numbers are those of the textbook, whatever the places of the first keys."""
    query, key, value = (rng.standard_normal((2, 4, 140, 8)) for _ in range(3))
    allowed = rng.random((2, 4, 140, 140)) < rng.choice([0.0, 0.01, 0.3], size=(2, 4, 140, 1))
    bias = additive(rng.random((2, 1, 140, 140)) < 0.9, -np.inf, np.float64) + rng.standard_normal((140, 140))
    arrays = query, key, value, allowed
    np.testing.assert_allclose(
        attend(*arrays, bias=bias), scaled_dot_product_attention(*arrays, bias=bias), rtol=1e-9, atol=1e-12
    )
