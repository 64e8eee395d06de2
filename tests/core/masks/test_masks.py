"""Each mask against a boolean array that NumPy makes of its formula, on every library."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import pytest
from calls import assert_agrees, draw
from internals import device, namespace
from libraries import Library
from places import ancestors, neighbours

from sdpa_xp import attention_weights, masks, scaled_dot_product_attention
from sdpa_xp.masks.algebra import Mask, Pattern

F = np.float32
PAIRS = (2, 4, 7, 11)  # B, Hq, L, S
B, H, I, J = np.ogrid[:2, :4, :7, :11]


class Case(NamedTuple):
    """A mask, made with a function that puts NumPy arrays into the library, and its formula."""

    make: Callable[[Callable[[np.ndarray], Any]], masks.Mask]
    allowed: Any
    """Broadcasts to PAIRS."""


def ints(*values: Any) -> np.ndarray:
    return np.asarray(values, np.int32)


def per_entry(*values: int) -> np.ndarray:
    """One number per batch entry."""
    return np.asarray(values).reshape(-1, 1, 1, 1)


def listed(lists: np.ndarray) -> np.ndarray:
    """Return which of 11 keys are in each list (..., k), for each of the 4 heads."""
    return np.repeat((lists[..., None] == np.arange(11)).any(axis=-2), 4 // lists.shape[-3], axis=-3)


QUERY_IDS = ints([0, 0, 1, 1, 1, 2, 2], [5, 5, 5, 5, 9, 9, 9])
KEY_IDS = ints([0, 0, 0, 1, 1, 1, 1, 2, 2, 2, 2], [9, 9, 5, 5, 5, 5, 5, 5, 3, 3, 3])
DRAWN = np.random.default_rng(5).random((3, *PAIRS)) < 0.6
BY_KEY, BY_ROW, BY_PAIR = DRAWN[0, :, :1, :1], DRAWN[1, 0, :, :, :1], DRAWN[2, 0, 0]
PARENTS = [-1, 0, 0, -1, 1, 3, 2]
LISTS = np.random.default_rng(7).integers(-1, 11, (2, 2, 7, 3)).astype(np.int32)
OF_BLOCKS = np.random.default_rng(8).integers(-1, 3, (1, 4, 2)).astype(np.int32)
FORKS = [PARENTS, [-1, -1, 1, 0, -1, 0, 5]]
TABLES = np.random.default_rng(6).random((4, 3, 3)) < 0.5
OF_ENTRIES = np.random.default_rng(9).random((2, 4, 3, 3)) < 0.5

CASES: dict[str, Case] = {
    "causal": Case(lambda _: masks.causal(), J <= I),
    "causal lower_right": Case(lambda _: masks.causal("lower_right"), J <= I + 4),
    "causal list": Case(lambda _: masks.causal([3, -1]), I + per_entry(3, -1) >= J),
    "causal array": Case(lambda put: masks.causal(put(ints(-3, 6))), I + per_entry(-3, 6) >= J),
    "window 2 1 3": Case(lambda _: masks.sliding_window(2, 1, offset=3), (I + 1 <= J) & (J <= I + 4)),
    "window lower_right": Case(
        lambda _: masks.sliding_window(3, 0, offset="lower_right"), (I + 1 <= J) & (J <= I + 4)
    ),
    "window list": Case(
        lambda _: masks.sliding_window(1, 2, offset=[4, -2]),
        (I + per_entry(3, -3) <= J) & (I + per_entry(6, 0) >= J),
    ),
    "window array": Case(
        lambda put: masks.sliding_window(1, None, offset=put(ints(5, 0))), I + per_entry(4, -1) <= J
    ),
    "padding list": Case(lambda _: masks.padding([3, 11]), per_entry(3, 11) > J),
    "padding array": Case(lambda put: masks.padding(put(ints(0, 7))), per_entry(0, 7) > J),
    "padding both lists": Case(
        lambda _: masks.padding([5, 11], [7, 2]), (per_entry(5, 11) > J) & (per_entry(7, 2) > I)
    ),
    "padding both arrays": Case(
        lambda put: masks.padding(put(ints(8)), put(ints(4, 6))), (J < 8) & (per_entry(4, 6) > I)
    ),
    "document": Case(
        lambda put: masks.document(put(QUERY_IDS), put(KEY_IDS)), QUERY_IDS[B, I] == KEY_IDS[B, J]
    ),
    "document of keys": Case(
        lambda put: masks.document(put(QUERY_IDS[0]), put(KEY_IDS)), QUERY_IDS[0][I] == KEY_IDS[B, J]
    ),
    "prefix list": Case(lambda _: masks.prefix([0, 20]), per_entry(0, 20) > J),
    "prefix array": Case(lambda put: masks.prefix(put(ints(2, 6))), per_entry(2, 6) > J),
    "chunked 3": Case(lambda _: masks.chunked(3), I // 3 == J // 3),
    "dilated 3": Case(lambda _: masks.dilated(3), (I - J) % 3 == 0),
    "array of keys": Case(lambda put: masks.from_array(put(BY_KEY)), BY_KEY),
    "array of rows": Case(lambda put: masks.from_array(put(BY_ROW)), BY_ROW),
    "function": Case(
        lambda _: masks.from_function(lambda b, h, i, j: (j + h <= i + 2 * b) | (j == 9)),
        (J + H <= I + 2 * B) | (J == 9),
    ),
    "function of bool": Case(lambda _: masks.from_function(lambda *_: False), J < 0),
    "neighbourhood": Case(
        lambda _: masks.neighbourhood((4, 3), 1, dilation=(1, 1)),
        neighbours((4, 3), (3, 3), (1, 1), (False, False), (False, False), "shifted")[:7, :11],
    ),
    "neighbourhood cut and periodic": Case(
        lambda _: masks.neighbourhood((2, 6), (1, 1), dilation=(1, 2), periodic=(False, True), borders="cut"),
        neighbours((2, 6), (3, 3), (1, 2), (False, True), (False, False), "cut")[:7, :11],
    ),
    "neighbourhood of an even window": Case(
        lambda _: masks.neighbourhood((3, 4), window=(2, 4), causal=(True, False)),
        neighbours((3, 4), (2, 4), (1, 1), (False, False), (True, False), "shifted")[:7, :11],
    ),
    "neighbourhood with tokens in front": Case(
        lambda _: masks.neighbourhood((9,), window=2, periodic=True, prefix_tokens=2),
        neighbours((9,), (2,), (1,), (True,), (False,), "shifted", 2)[:7, :11],
    ),
    "tree": Case(lambda _: masks.tree(PARENTS, offset=3), ancestors(PARENTS, 3, 11)),
    "tree per entry": Case(
        lambda put: masks.tree(PARENTS, offset=put(ints(4, 0))),
        np.stack([ancestors(PARENTS, 4, 11), ancestors(PARENTS, 0, 11)])[:, None],
    ),
    "tree of each entry": Case(
        lambda _: masks.tree(FORKS, offset=3), np.stack([ancestors(tree, 3, 11) for tree in FORKS])[:, None]
    ),
    "tree and offset of each entry": Case(
        lambda put: masks.tree(np.asarray(FORKS), offset=put(ints(4, 0))),
        np.stack([ancestors(FORKS[0], 4, 11), ancestors(FORKS[1], 0, 11)])[:, None],
    ),
    "blocks": Case(lambda _: masks.blocks(TABLES[0], (3, 4)), TABLES[0][I // 3, J // 4]),
    "blocks of heads": Case(lambda _: masks.blocks(TABLES), TABLES[H, I // 3, J // 4]),
    "blocks of entries": Case(
        lambda _: masks.blocks(OF_ENTRIES[:, :1], (3, 4)), OF_ENTRIES[B, 0, I // 3, J // 4]
    ),
    "blocks of entries and heads": Case(
        lambda _: masks.blocks(OF_ENTRIES.tolist()), OF_ENTRIES[B, H, I // 3, J // 4]
    ),
    "keys": Case(lambda put: masks.keys(put(LISTS)), listed(LISTS)),
    "keys of blocks": Case(
        lambda put: masks.keys(put(OF_BLOCKS), (2, 4)) & masks.causal(3),
        listed(OF_BLOCKS)[H, I // 2, J // 4] & (J <= I + 3),
    ),
    "and": Case(
        lambda _: masks.causal("lower_right") & masks.sliding_window(3, None), (I - 3 <= J) & (J <= I + 4)
    ),
    "or": Case(lambda _: masks.causal() | masks.prefix([2, 5]), (J <= I) | (per_entry(2, 5) > J)),
    "not of or": Case(
        lambda _: ~(masks.padding([3, 8]) | masks.chunked(4)), (per_entry(3, 8) <= J) & (I // 4 != J // 4)
    ),
    "mask & array": Case(lambda put: masks.causal(3) & put(BY_PAIR), (J <= I + 3) & BY_PAIR),
    "~mask | array": Case(lambda put: ~masks.dilated(2) | put(BY_PAIR), ((I - J) % 2 > 0) | BY_PAIR),
}


def whole(allowed: Any) -> np.ndarray:
    """A formula for every pair."""
    return np.array(np.broadcast_to(allowed, PAIRS))


def grouped(rng: np.random.Generator) -> list[np.ndarray]:
    """Query, key and value whose scores are PAIRS; two query heads read one key head."""
    return draw(rng, (2, 4, 7, 8), (2, 2, 11, 8), (2, 2, 11, 5))


@pytest.mark.rule("R16")
@pytest.mark.sampled(0, on="EAGER_JAX")
@pytest.mark.sampled(1)
@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_to_array(library: Library, case: Case) -> None:
    with library.guard():
        like = library.put(np.zeros(1, F))
        array = masks.to_array(case.make(library.put), PAIRS, like=like)
    assert namespace(array) is library.xp
    assert device(array) == device(like)
    assert library.get(array).dtype == bool
    np.testing.assert_array_equal(library.get(array), whole(case.allowed))
    with library.guard():
        part = masks.to_array(case.make(library.put), PAIRS, rows=range(1, 3), like=like)
    np.testing.assert_array_equal(library.get(part), whole(case.allowed)[..., 1:3, :])


@pytest.mark.rule("R16")
@pytest.mark.sampled(1)
@pytest.mark.usefixtures("tiles")
@pytest.mark.parametrize("name", CASES)
def test_attention(library: Library, rng: np.random.Generator, name: str) -> None:
    case, inputs = CASES[name], grouped(rng)
    with library.guard():
        mask = case.make(library.put)
    output = library.call(scaled_dot_product_attention, *inputs, attn_mask=mask)
    call = dict(zip(("query", "key", "value"), inputs, strict=True))
    assert_agrees(library, library.get(output), call, attn_mask=whole(case.allowed))


def test_array_on_the_left(library: Library) -> None:
    """The array lets the mask answer."""
    if library.name.startswith(("strict", "mlx")):
        pytest.skip("the library raises where Python lets the other operand answer")
    with library.guard():
        left = library.put(BY_PAIR)
        result = [masks.to_array(mask, PAIRS) for mask in (left & masks.causal(), left | masks.causal())]
    for array, expected in zip(result, ((J <= I) & BY_PAIR, (J <= I) | BY_PAIR), strict=True):
        np.testing.assert_array_equal(library.get(array), whole(expected))


def weights(library: Library, queries: int, keys: int, mask: Any, **rules: Any) -> np.ndarray:
    """Of scores that are all equal: 1 over the number of keys that a query attends."""
    q, k = np.zeros((queries, 2), F), np.ones((keys, 2), F)
    return library.get(library.call(attention_weights, q, k, attn_mask=mask, **rules))


def test_document_of_queries_and_keys(library: Library) -> None:
    """Without `key_ids` both have the same, in whatever order."""
    for ids in ([9, 4, 9], ints(9, 4, 9)):
        with library.guard():
            mask = masks.document(library.put(ids) if isinstance(ids, np.ndarray) else ids)
        w = weights(library, 3, 3, mask)
        np.testing.assert_array_equal(w, [[0.5, 0, 0.5], [0, 1, 0], [0.5, 0, 0.5]])


@dataclass(frozen=True)
class Every(Mask, Pattern):
    """A mask of the caller, without slots."""

    step: int

    def bind(self, _grid: Any) -> Pattern:
        return self

    def allowed_in(self, tile: Any) -> Any:
        return tile.key_index % self.step == 0


class Held(Every):
    """Its number is no field."""

    def __init__(self, step: int) -> None:
        object.__setattr__(self, "step", step)


@pytest.mark.parametrize("mask_class", [Every, Held])
def test_a_class_of_the_caller_is_asked_in_each_call(mask_class: Callable[[int], Mask]) -> None:
    """Nothing of it is kept from one call to the next, since it may have more than its fields."""
    x = draw(np.random.default_rng(0), (2, 6, 4), (2, 6, 4), (2, 6, 4))
    for step in (2, 3):
        result = scaled_dot_product_attention(*x, mask_class(step))
        expected = scaled_dot_product_attention(*x, np.arange(6) % step == 0)
        np.testing.assert_array_equal(result, expected)
