"""Positions of the tokens in a KVCache, against a formula that keeps the absolute position of every token.

A rolling window, evicted tokens, rejected drafts, drafts that branch, padding on the left, beams: after any
sequence of these, a query attends to the tokens that are left, each at the position it had.
"""

from __future__ import annotations

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

from sdpa_xp import KVCache

F = np.float32
BATCH = 2
ROOM = 9
STEPS = st.lists(
    st.sampled_from(
        [
            "append",
            "append",
            "append",
            "drafts",
            "jump",
            "drop first",
            "drop last",
            "evict",
            "evict each",
            "beams",
            "attend",
        ]
    ),
    min_size=2,
    max_size=7,
)


class Run:
    """A cache, and the tokens that it should have."""

    def __init__(self, library: Library, draw: Any, layout: Any) -> None:
        self.library, self.layout = library, layout
        self.rng = np.random.default_rng(draw(st.integers(0, 2**32)))
        self.draw = draw
        self.rotary = draw(st.sampled_from(ROTARIES))
        self.in_place = draw(st.booleans()) and can_write(library)
        length, kind = (
            draw(st.integers(0, 4)),
            draw(st.sampled_from(["zero", "one", "each entry", "each token"])),
        )
        key, value = self.new(length)
        first = {"zero": 0, "one": int(self.rng.integers(-3, 6))}.get(kind)
        starts = self.rng.integers(-3, 6, (BATCH, 1))
        positions = np.broadcast_to(starts if first is None else first, (BATCH, 1)) + np.arange(length)
        options: dict[str, Any] = {"first_position": starts[:, 0].tolist() if first is None else first}
        if kind == "each token" and length:
            positions = np.sort(self.rng.integers(-3, 9, (BATCH, length)))
            options = {"positions": positions.astype(np.int32)}
        self.next = (
            positions[:, -1:] + 1 if length else np.broadcast_to(starts if first is None else first, (BATCH, 1))
        )
        self.tokens = Tokens(key, value, positions)
        self.cache = library.call(
            KVCache,
            *(moved(x, layout) for x in (key, value)),
            rotary=self.rotary,
            layout=layout,
            capacity=ROOM if self.in_place else None,
            **options,
        )

    def new(self, count: int) -> list[np.ndarray]:
        shapes = {
            "key": (len(self), KEY_HEADS, count, WIDTH),
            "value": (len(self), KEY_HEADS, count, VALUE_WIDTH),
        }
        return [*draw_named(self.rng, shapes).values()]

    def __len__(self) -> int:
        return len(self.tokens.positions) if hasattr(self, "tokens") else BATCH

    @property
    def length(self) -> int:
        return self.tokens.positions.shape[1]

    def append(self, count: int, positions: Any, expected: np.ndarray) -> None:
        key, value = self.new(count)
        in_place = self.in_place and self.cache_has_room(count)
        self.in_place = in_place
        self.tokens = self.tokens.with_more(key, value, expected)
        arrays = [moved(x, self.layout) for x in (key, value)]
        self.cache = self.library.call(self.cache.append, *arrays, positions=positions, in_place=in_place)
        self.next = expected[:, -1:] + 1

    def cache_has_room(self, count: int) -> bool:
        return self.length + count <= ROOM

    def take(self, kind: str) -> None:
        slots = np.sort(self.rng.integers(0, self.length, self.draw(st.integers(1, self.length))))
        if kind == "evict each":
            slots = np.sort(self.rng.integers(0, self.length, (len(self), 3)), axis=1)
        given_as: Any = slots.astype(np.int32) if kind == "evict each" else slots.tolist()
        self.cache = self.library.call(lambda slots: self.cache.take_tokens(slots), slots=given_as)
        self.tokens, self.in_place = self.tokens.at_slots(slots), False
        self.next = self.tokens.positions[:, -1:] + 1

    def step(self, kind: str) -> None:
        if kind == "append":
            count = self.draw(st.integers(1, 3))
            self.append(count, None, self.next + np.arange(count))
        elif kind == "jump":
            first = int(self.rng.integers(-2, 9))
            self.append(2, first, np.broadcast_to(first + np.arange(2), (len(self), 2)))
        elif kind == "drafts":
            if self.draw(st.booleans()):  # the same branches for all entries, as a list
                tree = int(self.next.max()) + np.asarray([0, 1, 1])
                self.append(3, tree.tolist(), np.broadcast_to(tree, (len(self), 3)))
            else:
                tree = self.next + np.asarray([0, 0, 1])
                self.append(3, tree.astype(np.int32), tree)
        elif kind in ("drop first", "drop last"):
            count = self.draw(st.integers(0, self.length))
            if kind == "drop first":
                self.cache, kept = self.cache.drop_first(count), np.arange(count, self.length)
            else:
                self.cache, kept = self.cache.drop_last(count), np.arange(self.length - count)
                if count:
                    self.next = self.tokens.positions[:, self.length - count :][:, :1]
                    self.next = self.next if len(kept) == 0 else self.tokens.positions[:, kept[-1:]] + 1
            self.tokens = self.tokens.at_slots(kept)
        elif kind in ("evict", "evict each") and self.length:
            self.take(kind)
        elif kind == "beams":
            entries = self.rng.integers(0, len(self), 2).tolist()
            self.cache, self.in_place = self.library.call(lambda: self.cache.take_entries(entries)), False
            self.tokens, self.next = self.tokens.of_entries(entries), self.next[entries]

    def attend(self) -> None:
        mask, bias = (self.draw(st.sampled_from([*table])) for table in (MASKS, BIASES))
        elsewhere = self.draw(st.booleans()) or not self.length
        causal = not elsewhere and self.draw(st.booleans())
        count = self.draw(st.integers(1, 3 if elsewhere else min(3, self.length)))
        positions: Any = None
        query_positions = self.tokens.positions[:, self.length - count :]
        if elsewhere:
            query_positions = self.rng.integers(-2, 12, (len(self), count))
            positions = query_positions.astype(np.int32)
        query = draw_named(self.rng, {"query": (len(self), HEADS, count, WIDTH)})["query"]
        result = self.library.call(
            self.cache.attend,
            moved(query, self.layout),
            attn_mask=MASKS[mask][0],
            bias=bias_for(self.library, bias),
            is_causal=causal,
            positions=positions,
        )
        call = exact_call(query, query_positions, self.tokens, self.rotary, mask, bias, causal)
        assert_right(self.library, moved(self.library.get(result), self.layout), call)
        cached = np.broadcast_to(self.library.get(self.cache.positions), self.tokens.positions.shape)
        np.testing.assert_array_equal(cached, self.tokens.positions)
        assert len(self.cache) == self.length


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
