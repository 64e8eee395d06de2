"""Positions of the tokens in a PagedKVCache: each sequence alone, by the formula with absolute positions."""

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
)
from calls import draw_named, moved
from hypothesis import given
from libraries import Library, can_write

from sdpa_xp import PagedKVCache

F = np.float32
SEQUENCES, SIZE, BLOCKS = 3, 2, 9
STEPS = st.lists(
    st.sampled_from(["append", "append", "drafts", "jump", "drop first", "drop last", "beams", "attend"]),
    min_size=2,
    max_size=6,
)


class Run:
    """A paged cache, and the tokens that its sequences should have."""

    def __init__(self, library: Library, draw: Any, layout: Any) -> None:
        self.library, self.layout, self.draw = library, layout, draw
        self.rng = np.random.default_rng(draw(st.integers(0, 2**32)))
        self.rotary = draw(st.sampled_from(ROTARIES))
        self.in_place = draw(st.booleans()) and can_write(library) and library.name != "numpy-readonly"
        self.next = self.rng.integers(-3, 6, SEQUENCES)
        self.tokens = [
            Tokens(
                np.zeros((1, KEY_HEADS, 0, WIDTH), F),
                np.zeros((1, KEY_HEADS, 0, VALUE_WIDTH), F),
                np.zeros((1, 0), int),
            )
            for _ in range(SEQUENCES)
        ]
        table = self.rng.permutation(SEQUENCES * BLOCKS).reshape(SEQUENCES, BLOCKS)
        pools = [
            np.full((SEQUENCES * BLOCKS, KEY_HEADS, SIZE, width), math.nan, F) for width in (WIDTH, VALUE_WIDTH)
        ]
        with library.guard():
            self.cache = PagedKVCache(
                *(library.put(moved(pool, layout)) for pool in pools),
                block_table=table.tolist(),
                lengths=[0] * SEQUENCES,
                rotary=self.rotary,
                layout=layout,
                first_position=self.next.tolist(),
            )

    def append(self, expected: np.ndarray, positions: Any) -> None:
        """Tokens at the expected positions, (N, n)."""
        count = expected.shape[1]
        shapes = {
            name: (SEQUENCES, KEY_HEADS, count, width)
            for name, width in (("key", WIDTH), ("value", VALUE_WIDTH))
        }
        new = draw_named(self.rng, shapes)
        with self.library.guard():
            arrays = [self.library.put(moved(x, self.layout)) for x in new.values()]
            self.cache = self.cache.append(*arrays, positions=positions, in_place=self.in_place)
        self.tokens = [
            tokens.with_more(new["key"][n : n + 1], new["value"][n : n + 1], expected[n : n + 1])
            for n, tokens in enumerate(self.tokens)
        ]
        self.next = expected[:, -1] + 1

    def step(self, kind: str) -> None:
        if kind == "append":
            self.append(self.next[:, None] + np.arange(self.draw(st.integers(1, 3))), None)
        elif kind == "jump":
            first = int(self.rng.integers(-2, 9))
            self.append(np.broadcast_to(first + np.arange(2), (SEQUENCES, 2)), first)
        elif kind == "drafts":
            tree = self.next[:, None] + np.asarray([0, 0, 1])
            self.append(tree, tree.tolist())
        elif kind == "drop first":
            counts = [SIZE * int(self.rng.integers(0, len(t.positions[0]) // SIZE + 1)) for t in self.tokens]
            self.cache = self.cache.drop_first(counts)
            self.tokens = [
                t.at_slots(np.arange(n, t.positions.shape[1])) for t, n in zip(self.tokens, counts, strict=True)
            ]
        elif kind == "drop last":
            counts = [int(self.rng.integers(0, t.positions.shape[1] + 1)) for t in self.tokens]
            self.cache = self.cache.drop_last(counts)
            for n, (tokens, count) in enumerate(zip(self.tokens, counts, strict=True)):
                kept = tokens.positions.shape[1] - count
                if count:
                    self.next[n] = tokens.positions[0, kept - 1] + 1 if kept else tokens.positions[0, 0]
                self.tokens[n] = tokens.at_slots(np.arange(kept))
        elif kind == "beams":  # each once, since blocks that are shared are not written to
            order = self.rng.permutation(SEQUENCES).tolist()
            self.cache = self.cache.take_entries(order)
            self.tokens, self.next = [self.tokens[n] for n in order], self.next[order]

    def attend(self) -> None:
        mask, bias = (self.draw(st.sampled_from([*table])) for table in (MASKS, BIASES))
        shortest = min(t.positions.shape[1] for t in self.tokens)
        elsewhere = self.draw(st.booleans()) or not shortest
        causal = not elsewhere and self.draw(st.booleans())
        count = self.draw(st.integers(1, 3 if elsewhere else min(3, shortest)))
        positions: Any = None
        if elsewhere:
            places = self.rng.integers(-2, 12, (SEQUENCES, count))
            positions = places.tolist()
        else:
            places = np.concatenate([t.positions[:, t.positions.shape[1] - count :] for t in self.tokens])
        query = draw_named(self.rng, {"query": (SEQUENCES, HEADS, count, WIDTH)})["query"]
        result = self.library.call(
            self.cache.attend,
            moved(query, self.layout),
            attn_mask=MASKS[mask][0],
            bias=bias_for(self.library, bias),
            is_causal=causal,
            positions=positions,
        )
        output = moved(self.library.get(result), self.layout)
        for n, tokens in enumerate(self.tokens):
            call = exact_call(query[n : n + 1], places[n : n + 1], tokens, self.rotary, mask, bias, causal)
            assert_right(self.library, output[n : n + 1], call)
            assert [*self.cache.positions[n]] == tokens.positions[0].tolist()


@pytest.mark.slow
@pytest.mark.sampled(0, on="EAGER_JAX")
@pytest.mark.usefixtures("small_tiles")
@given(data=st.data())
def test_any_sequence_of_steps(library: Library, data: Any) -> None:
    run = Run(library, data.draw, data.draw(st.sampled_from(["...HLE", "...LHE"])))
    for kind in data.draw(STEPS)[: 1 if library.lazy else None]:  # each step makes a graph longer
        if kind == "attend":
            run.attend()
        else:
            run.step(kind)
    run.attend()


def test_a_sequence_without_tokens_begins_at_0() -> None:
    """Also if the positions of the others are lists."""
    pool, new = np.zeros((2, 1, 4, 8), F), np.ones((2, 1, 1, 8), F)
    cache = PagedKVCache(pool, pool.copy(), [[0], [1]], [2, 0], positions=[[3, 7], []])
    appended = cache.append(new, new)
    assert [[*row] for row in appended.positions] == [[3, 7, 8], [0]]
