"""Positions of the tokens in both kinds of cache, against a formula that keeps the position of every token.

A rolling window, evicted tokens, rejected drafts, drafts that branch, padding on the left, beams: after any
sequence of these, a query attends to the tokens that are left, each rotated by the position it had.
"""

from __future__ import annotations

import math
from typing import Any

import hypothesis.strategies as st
import numpy as np
import pytest
from cache_formula import (
    BIASES,
    HEADS,
    KEY_HEADS,
    MASKS,
    ROTARIES,
    VALUE_WIDTH,
    WIDTH,
    Tokens,
    assert_right,
    bias_for,
    exact_call,
    turned,
)
from calls import draw_named, moved
from hypothesis import given
from internals import Scores, reference
from libraries import Library, can_write

from sdpa_xp import KVCache, PagedKVCache, biases, masks
from sdpa_xp.positional import Rotary

F = np.float32
WIDTHS = {"key": WIDTH, "value": VALUE_WIDTH}
STEPS = ["append", "append", "append", "drafts", "jump", "drop_first", "drop_last", "beams", "attend"]


class Run:
    """A cache, and the tokens that each of its sequences should have."""

    cache: Any
    tokens: list[Tokens]
    next: np.ndarray
    """The position behind the newest token of each sequence."""

    def __init__(self, library: Library, draw: Any) -> None:
        self.library, self.draw = library, draw
        self.layout = draw(st.sampled_from(["...HLE", "...LHE"]))
        self.rng = np.random.default_rng(draw(st.integers(0, 2**32)))
        self.rotary = draw(st.sampled_from(ROTARIES))
        self.in_place = draw(st.booleans()) and can_write(library)

    def new(self, count: int) -> dict[str, np.ndarray]:
        return draw_named(self.rng, {n: (len(self.next), KEY_HEADS, count, w) for n, w in WIDTHS.items()})

    def begin(self, positions: np.ndarray) -> dict[str, np.ndarray]:
        """Draw the first tokens, at positions (N, n)."""
        new = self.new(positions.shape[1])
        rows = zip(new["key"], new["value"], positions, strict=True)
        self.tokens = [Tokens(key[None], value[None], row[None]) for key, value, row in rows]
        return {name: moved(x, self.layout) for name, x in new.items()}

    @property
    def shortest(self) -> int:
        return min(t.positions.shape[1] for t in self.tokens)

    def append(self, expected: np.ndarray, positions: Any) -> None:
        """Tokens at the expected positions, (N, n)."""
        new = self.new(expected.shape[1])
        arrays = [moved(x, self.layout) for x in new.values()]
        in_place = self.in_place = self.in_place and self.has_room(expected.shape[1])
        self.cache = self.library.call(self.cache.append, *arrays, positions=positions, in_place=in_place)
        rows = zip(self.tokens, new["key"], new["value"], expected, strict=True)
        self.tokens = [t.with_more(key[None], value[None], row[None]) for t, key, value, row in rows]
        self.next = expected[:, -1] + 1

    def step(self, kind: str) -> None:
        if kind == "append":
            self.append(self.next[:, None] + np.arange(self.draw(st.integers(1, 3))), None)
        elif kind == "jump":
            first = int(self.rng.integers(-2, 9))
            self.append(np.broadcast_to(first + np.arange(2), (len(self.next), 2)), first)
        elif kind == "drafts":
            tree = self.next[:, None] + np.asarray([0, 0, 1])
            self.append(tree, self.as_argument(tree))
        elif kind in ("drop_first", "drop_last"):
            self.drop(kind)
        elif kind == "beams":
            self.take_entries(self.rng.permutation(len(self.next)).tolist())

    def drop(self, kind: str) -> None:
        counts, given_as = self.counts(kind)
        self.cache = getattr(self.cache, kind)(given_as)
        for n, (tokens, count) in enumerate(zip(self.tokens, counts, strict=True)):
            length = tokens.positions.shape[1]
            kept = np.arange(count, length) if kind == "drop_first" else np.arange(length - count)
            if kind == "drop_last" and count:
                self.next[n] = tokens.positions[0, kept[-1]] + 1 if len(kept) else tokens.positions[0, 0]
            self.tokens[n] = tokens.at_slots(kept)

    def take_entries(self, entries: list[int]) -> None:
        self.cache = self.library.call(lambda: self.cache.take_entries(entries))
        self.tokens, self.next = [self.tokens[n] for n in entries], self.next[entries]

    def attend(self) -> None:
        mask, bias = (self.draw(st.sampled_from([*table])) for table in (MASKS, BIASES))
        elsewhere = self.draw(st.booleans()) or not self.shortest
        causal = not elsewhere and self.draw(st.booleans())
        count = self.draw(st.integers(1, 3 if elsewhere else min(3, self.shortest)))
        if elsewhere:
            places = self.rng.integers(-2, 12, (len(self.next), count))
        else:
            places = np.concatenate([t.positions[:, t.positions.shape[1] - count :] for t in self.tokens])
        query = draw_named(self.rng, {"query": (len(self.next), HEADS, count, WIDTH)})["query"]
        result = self.library.call(
            self.cache.attend,
            moved(query, self.layout),
            attn_mask=MASKS[mask][0],
            bias=bias_for(self.library, bias),
            is_causal=causal,
            positions=self.as_argument(places) if elsewhere else None,
        )
        output = moved(self.library.get(result), self.layout)
        for n, (tokens, positions) in enumerate(zip(self.tokens, self.positions, strict=True)):
            call = exact_call(query[n : n + 1], places[n : n + 1], tokens, self.rotary, mask, bias, causal)
            assert_right(self.library, output[n : n + 1], call)
            assert [*positions] == tokens.positions[0].tolist()


class OfOneLength(Run):
    """A KVCache, whose entries have equally many tokens."""

    room, steps = 9, [*STEPS, "evict", "evict each", "drafts of all"]

    def __init__(self, library: Library, draw: Any) -> None:
        super().__init__(library, draw)
        length = draw(st.integers(0, 4))
        kind = draw(st.sampled_from(["zero", "one", "each entry", "each token"]))
        first = {"zero": 0, "one": int(self.rng.integers(-3, 6))}.get(kind)
        starts = self.rng.integers(-3, 6, 2) if first is None else np.asarray([first, first])
        positions = starts[:, None] + np.arange(length)
        told: dict[str, Any] = {"first_position": starts.tolist() if first is None else first}
        if kind == "each token" and length:
            positions = np.sort(self.rng.integers(-3, 9, (2, length)))
            told = {"positions": positions.astype(np.int32)}
        self.next = positions[:, -1] + 1 if length else starts.copy()
        told |= {"rotary": self.rotary, "layout": self.layout, "capacity": self.room if self.in_place else None}
        self.cache = library.call(KVCache, *self.begin(positions).values(), **told)

    @property
    def positions(self) -> Any:
        rows = self.library.get(self.cache.positions)
        return np.broadcast_to(rows, (len(self.next), rows.shape[-1])).tolist()

    def has_room(self, count: int) -> bool:
        return self.shortest + count <= self.room

    def as_argument(self, positions: np.ndarray) -> Any:
        return positions.astype(np.int32)

    def counts(self, _kind: str) -> tuple[list[int], int]:
        count = self.draw(st.integers(0, self.shortest))
        return [count] * len(self.next), count

    def step(self, kind: str) -> None:
        if kind == "drafts of all":  # the same branches for all entries, as a list
            tree = int(self.next.max()) + np.asarray([0, 1, 1])
            self.append(np.broadcast_to(tree, (len(self.next), 3)), tree.tolist())
        elif kind == "beams":
            self.in_place = False
            self.take_entries(self.rng.integers(0, len(self.next), 2).tolist())
        elif kind.startswith("evict"):
            self.evict(3 if kind == "evict each" else 0)
        else:
            super().step(kind)

    def evict(self, slots_each: int) -> None:
        """Keep the tokens at `slots_each` slots of each entry, or at any number of slots of all entries."""
        if not self.shortest:
            return
        count = slots_each or self.draw(st.integers(1, self.shortest))
        slots = np.sort(
            self.rng.integers(0, self.shortest, (len(self.next) if slots_each else 1, count)), axis=1
        )
        given_as: Any = slots.astype(np.int32) if slots_each else slots[0].tolist()
        self.cache = self.library.call(lambda slots: self.cache.take_tokens(slots), slots=given_as)
        self.in_place = False
        rows = np.broadcast_to(slots, (len(self.next), count))
        self.tokens = [t.at_slots(row) for t, row in zip(self.tokens, rows, strict=True)]
        self.next = np.asarray([t.positions[0, -1] for t in self.tokens]) + 1


class Paged(Run):
    """A PagedKVCache, whose sequences have tokens of their own."""

    size, blocks, steps = 2, 9, STEPS

    def __init__(self, library: Library, draw: Any) -> None:
        super().__init__(library, draw)
        self.in_place = self.in_place and library.name != "numpy-readonly"
        self.next = self.rng.integers(-3, 6, 3)
        self.begin(np.zeros((3, 0), int))
        pool = 3 * self.blocks
        pools = [np.full((pool, KEY_HEADS, self.size, width), math.nan, F) for width in WIDTHS.values()]
        self.cache = library.call(
            PagedKVCache,
            *(moved(pool, self.layout) for pool in pools),
            block_table=self.rng.permutation(pool).reshape(3, -1).tolist(),
            lengths=[0] * 3,
            rotary=self.rotary,
            layout=self.layout,
            first_position=self.next.tolist(),
        )

    @property
    def positions(self) -> Any:
        return self.cache.positions

    def has_room(self, _count: int) -> bool:
        return True

    def as_argument(self, positions: np.ndarray) -> Any:
        return positions.tolist()

    def counts(self, kind: str) -> tuple[list[int], list[int]]:
        unit = self.size if kind == "drop_first" else 1
        counts = [unit * int(self.rng.integers(0, t.positions.shape[1] // unit + 1)) for t in self.tokens]
        return counts, counts


@pytest.mark.rule("R15")
@pytest.mark.slow
@pytest.mark.sampled(0, on="EAGER_JAX")
@pytest.mark.usefixtures("small_tiles")
@pytest.mark.parametrize("kind", [OfOneLength, Paged])
@given(data=st.data())
def test_any_sequence_of_steps(library: Library, kind: Any, data: Any) -> None:
    run = kind(library, data.draw)
    steps = data.draw(st.lists(st.sampled_from(kind.steps), min_size=2, max_size=7))
    for step in steps[: 1 if library.lazy else None]:  # each step makes a graph longer
        if step == "attend":
            run.attend()
        else:
            run.step(step)
    run.attend()


def test_a_sequence_without_tokens_begins_at_0() -> None:
    """Also if the positions of the others are lists."""
    pool, new = np.zeros((2, 1, 4, 8), F), np.ones((2, 1, 1, 8), F)
    cache = PagedKVCache(pool, pool.copy(), [[0], [1]], [2, 0], positions=[[3, 7], []])
    appended = cache.append(new, new)
    assert [[*row] for row in appended.positions] == [[3, 7, 8], [0]]


def drawn(rng: np.random.Generator) -> list[np.ndarray]:
    """Query, key and value of nine tokens."""
    shapes = {"query": (3, HEADS, 9, WIDTH), "key": (3, KEY_HEADS, 9, WIDTH), "value": (3, KEY_HEADS, 9, 5)}
    return [*draw_named(rng, shapes).values()]


@pytest.mark.sampled(0, on="EAGER_JAX")
@pytest.mark.parametrize("rotary", ROTARIES[1:], ids=str)
def test_a_cache_that_was_put_away_goes_on(library: Library, rng: np.random.Generator, rotary: Rotary) -> None:
    """It holds what `apply` gives, to the last digit; its keys are rotated once, and the next token follows."""
    query, key, value = drawn(rng)
    with library.guard():
        prompt, token = ([library.put(x[:, :, cut].copy()) for x in (key, value)] for cut in np.s_[:8, 8:])
        before = KVCache(*prompt, rotary=rotary)
        again = KVCache(before.key, before.value, rotary=rotary, rotated=True).append(*token)
        output = library.get(again.attend(library.put(query[:, :, 8:].copy())))
        by_hand = rotary.apply(library.put(key), 0)
    np.testing.assert_array_equal(library.get(again.key), library.get(by_hand))
    np.testing.assert_array_equal(library.get(again.value), value)
    places = np.arange(9)[None]
    exact = turned(query[:, :, 8:], places[:, 8:], rotary), turned(key, places, rotary)
    expected = reference.attention(*exact, value.astype(np.float64))[0]
    np.testing.assert_allclose(output, expected, rtol=0, atol=4e-6)


@pytest.mark.sampled(0, on="EAGER_JAX")
def test_the_first_tokens_of_a_longer_query_stand_before_the_sequence(
    library: Library, rng: np.random.Generator
) -> None:
    """At positions below 0, where a causal mask lets them attend nothing."""
    query, *tokens = (x[:, :, :2] for x in drawn(rng))
    with library.guard():
        cache = KVCache(*(library.put(x[:, :, :1].copy()) for x in tokens), rotary=Rotary(8))
        output = library.get(cache.attend(library.put(query.copy()), masks.causal(), is_causal=False))
    np.testing.assert_array_equal(output[:, :, 0], np.zeros((3, 4, 5)))
    np.testing.assert_allclose(output[:, :, 1], np.repeat(tokens[1][:, :, 0], 2, axis=1), rtol=1e-6)


@pytest.mark.parametrize("positions", [None, [0, 1, 4, 5]], ids=["places", "gaps"])
def test_a_bias_that_masks_no_pair_costs_no_second_pass(
    monkeypatch: pytest.MonkeyPatch, positions: Any
) -> None:
    """It would be for a NaN of a masked pair: each NaN belongs to the output."""
    passes, computed_tiles = [], Scores.computed_tiles

    def noted(scores: Any, *arguments: Any, **options: Any) -> Any:
        passes.append(scores)
        return computed_tiles(scores, *arguments, **options)

    monkeypatch.setattr(Scores, "computed_tiles", noted)
    tokens = np.zeros((1, 2, 4, 8), F)
    cache, query = KVCache(tokens, tokens, positions=positions), tokens[:, :, 3:] * math.nan
    output = cache.attend(query, bias=biases.alibi(2), is_causal=False)
    assert np.isnan(output).all()
    assert len(passes) == 1
