"""A paged cache whose sequences get and ask unlike numbers of tokens in one call, packed, or as many each."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from agreement import (
    CASES,
    HEADS,
    SIZE,
    Sequences,
    assert_agrees,
    cumulative,
    packed_tokens,
    pages_of,
    sequences_of,
    table_of,
)
from libraries import Library, can_write, generator

from sdpa_xp import KVCache, PagedKVCache, attention_state, masks
from sdpa_xp.positional import Rotary, RotaryTables

F = np.float32
POOL = 12
OLD, NEW = [0, 4, 6, 3], [3, 1, 0, 2]
"""A prompt, the next token of a sequence whose block is full, an idle sequence, and a draft of two tokens."""
TABLE = [[7, 2], [0, 9], [5, 1], [11, 3]]
CAUSAL = CASES["is_causal"]


def drawn(new: Sequence[int]) -> Sequences:
    return sequences_of(new, [o + n for o, n in zip(OLD, new, strict=True)])


each_kind = pytest.mark.parametrize("new", [NEW, [2] * 4], ids=["packed", "batch"])


@pytest.mark.sampled(0, on="EAGER_JAX")
@each_kind
@pytest.mark.parametrize("layout", ["...HLE", "...LHE"])
@pytest.mark.parametrize("in_place", [False, True])
def test_layouts_and_in_place(library: Library, layout: str, in_place: bool, new: list[int]) -> None:
    sequences = drawn(new)
    if in_place and (library.name == "numpy-readonly" or not can_write(library)):
        with pytest.raises(TypeError, match="written to"):
            assert_agrees(library, "pages", CAUSAL, sequences, OLD, layout=layout, table=TABLE, in_place=True)
        return
    assert_agrees(library, "pages", CAUSAL, sequences, OLD, layout=layout, table=TABLE, in_place=in_place)


@pytest.mark.sampled(0, on="EAGER_JAX")
@each_kind
def test_append_is_one_append_for_each_sequence(library: Library, new: list[int]) -> None:
    """To the last bit; the old cache, and blocks of others, stay as they were."""
    sequences, is_packed = drawn(new), new is NEW
    cache = pages_of(library, sequences, OLD, TABLE)
    before = library.get(cache.key_blocks).copy()
    tokens = [packed_tokens(sequences, name, OLD) for name in ("key", "value")]
    with library.guard():
        key, value = (library.put(x if is_packed else np.stack(np.split(x, 4, axis=-2))) for x in tokens)
        longer = cache.append(key, value, cu_seqlens_k=np.asarray(cumulative(new)) if is_packed else None)
    assert cache.lengths == tuple(OLD)
    np.testing.assert_array_equal(library.get(cache.key_blocks), before)
    for name, blocks in (("key", longer.key_blocks), ("value", longer.value_blocks)):
        pool = library.get(blocks)
        for row, x, length in zip(TABLE, sequences, longer.lengths, strict=True):
            tokens = [pool[row[t // SIZE], :, t % SIZE] for t in range(length)]
            np.testing.assert_array_equal(np.stack(tokens, axis=1), x[name])
        assert np.isfinite(pool).all(axis=-1).sum() == 2 * sum(longer.lengths)


@pytest.mark.sampled(0, on="EAGER_JAX")
def test_a_cache_without_a_new_token(library: Library) -> None:
    library.needs_empty_arrays()
    sequences = drawn([0] * 4)
    with library.guard():
        tables = (library.put(table(np.ones((9, 3), F))) for table in (np.cos, np.sin))
        cache = pages_of(library, sequences, OLD, TABLE, rotary=RotaryTables(*tables))
        query, key, value = (library.put(packed_tokens(sequences, n, OLD)) for n in ("query", "key", "value"))
        same = cache.append(key, value, cu_seqlens_k=[0] * 5)
        assert same.lengths == cache.lengths
        assert same.attend(query, cu_seqlens_q=[0] * 5).shape == (HEADS, 0, 5)
        batch = library.put(np.zeros((4, HEADS, 0, 8), F))
        assert same.attend(batch).shape == (4, HEADS, 0, 5)


@pytest.mark.sampled(0, on="EAGER_JAX")
@pytest.mark.parametrize("layout", ["...HLE", "...LHE"])
@pytest.mark.parametrize("entries", [None, 1, 4])
def test_tables_of_the_caller(library: Library, entries: int | None, layout: str) -> None:
    """Any angles, also other ones for each sequence."""
    sequences = drawn(NEW)
    angles = np.random.default_rng(2).random((*([] if entries is None else [entries]), 9, 3))
    with library.guard():
        rotary = RotaryTables(*(library.put(table(angles).astype(F)) for table in (np.cos, np.sin)))
    turned = []
    for b, (o, x) in enumerate(zip(OLD, sequences, strict=True)):
        row = angles if entries is None else angles[b % entries]
        exact, wide = RotaryTables(np.cos(row), np.sin(row)), x["key"].astype(np.float64)
        key = np.concatenate([wide[:, :o], exact.apply(wide[:, o:], o)], axis=1)  # the pool is rotated already
        turned.append(x | {"query": exact.apply(x["query"].astype(np.float64), o), "key": key})
    assert_agrees(library, "pages", CAUSAL, sequences, OLD, exact=turned, rotary=rotary, layout=layout)


FIRST = [3, 0, 7, 1]
"""The positions of the first tokens that are left."""
DRAFT = [[3, 4, 4], [4], [], [5, 5]]
"""Positions of new tokens that branch."""


@pytest.mark.sampled(0, on="EAGER_JAX")
@pytest.mark.sampled(5)
@pytest.mark.parametrize("name", ["follow", "first", "packed", "lists"])
@pytest.mark.parametrize("mask", [None, masks.sliding_window(3, 1), masks.chunked(4)], ids=str)
def test_positions_of_their_own(library: Library, name: str, mask: Any) -> None:
    """As one KVCache for each sequence: old tokens were dropped, new ones branch, and masks count positions."""
    rotary, sequences = Rotary(8), drawn(NEW)
    positions: Any = {"follow": None, "first": 9, "packed": [*itertools.chain(*DRAFT)], "lists": DRAFT}[name]
    told = {"rotary": rotary, "first_position": FIRST}
    rules = {"attn_mask": mask, "is_causal": positions is None}
    cache = pages_of(library, sequences, OLD, TABLE, **told)
    with library.guard():
        query, key, value = (library.put(packed_tokens(sequences, n, OLD)) for n in ("query", "key", "value"))
        longer = cache.append(key, value, cu_seqlens_k=cumulative(NEW), positions=positions)
        state = longer.attend_state(query, cu_seqlens_q=cumulative(NEW), positions=positions, **rules)
    output, lse = (library.get(x) for x in state)
    for b, (first, last) in enumerate(itertools.pairwise(cumulative(NEW))):
        row = {"follow": None, "first": 9}.get(name, DRAFT[b])
        old, new = (
            [sequences[b][n][:, part].astype(np.float64) for n in ("key", "value")]
            for part in (slice(0, OLD[b]), slice(OLD[b], None))
        )
        alone: KVCache[Any] = KVCache(*old, rotary=rotary, rotated=True, first_position=FIRST[b])
        if first == last:
            continue
        alone = alone.append(*new, positions=row)
        expected = alone.attend_state(sequences[b]["query"].astype(np.float64), positions=row, **rules)
        assert [*longer.positions[b]] == alone.positions.tolist()
        np.testing.assert_allclose(output[:, first:last], expected.output, rtol=0, atol=4e-6)
        np.testing.assert_allclose(lse[:, first:last], expected.lse, rtol=0, atol=4e-6)


@pytest.mark.sampled(0, on="EAGER_JAX")
def test_dropout_of_unlike_numbers_of_queries(library: Library) -> None:
    """A pair is dropped by its place: the last queries of a longer call lose the same weights."""
    lengths = [5, 8, 3, 5]
    sequences = sequences_of(lengths, lengths)
    cache = pages_of(library, sequences, lengths, table_of(lengths))
    batch = np.stack([x["query"][:, -3:] for x in sequences])
    counts = [1, 3, 0, 2]
    rows = np.concatenate([x[:, 3 - n :] for x, n in zip(batch, counts, strict=True)], axis=-2)
    with library.guard():
        whole = library.get(cache.attend(library.put(batch), dropout_p=0.5, rng=generator(library)))
        bounds = cumulative(counts)
        state = cache.attend_state(
            library.put(rows), cu_seqlens_q=bounds, dropout_p=0.5, rng=generator(library)
        )
        plain = cache.attend_state(library.put(rows), cu_seqlens_q=bounds)
    expected = np.concatenate([x[:, 3 - n :] for x, n in zip(whole, counts, strict=True)], axis=-2)
    np.testing.assert_allclose(library.get(state.output), expected, rtol=0, atol=2e-6)
    np.testing.assert_allclose(library.get(state.lse), library.get(plain.lse), rtol=0, atol=1e-6)


@pytest.mark.needs("torch")
def test_gradients_by_torch() -> None:
    """Of queries, new tokens and pools, through output and log-sum-exp, as of a call for each sequence."""
    import torch

    sequences = [{name: x.astype(np.float64) for name, x in s.items()} for s in drawn(NEW)]
    pools = [torch.zeros(POOL, 2, SIZE, width, dtype=torch.float64) for width in (8, 5)]
    for pool, name in zip(pools, ("key", "value"), strict=True):
        for row, x, length in zip(TABLE, sequences, OLD, strict=True):
            for t in range(length):
                pool[row[t // SIZE], :, t % SIZE] = torch.asarray(x[name][:, t])
        pool.requires_grad_()
    query, key, value = (
        torch.asarray(packed_tokens(sequences, name, OLD)).requires_grad_()
        for name in ("query", "key", "value")
    )
    cache = PagedKVCache(*pools, TABLE, OLD).append(key, value, cu_seqlens_k=cumulative(NEW))
    state = cache.attend_state(query, cu_seqlens_q=cumulative(NEW))
    ours = torch.autograd.grad(state.output.square().sum() + state.lse.sum(), [query, key, value, *pools])
    for b, (first, last) in enumerate(itertools.pairwise(cumulative(NEW))):
        alone = {name: torch.asarray(x).requires_grad_() for name, x in sequences[b].items()}
        expected = attention_state(**alone, attn_mask=masks.causal("lower_right"))
        theirs = torch.autograd.grad(expected.output.square().sum() + expected.lse.sum(), [*alone.values()])
        torch.testing.assert_close(ours[0][:, first:last], theirs[0])
        for new, pool, gradient in zip(ours[1:3], ours[3:], theirs[1:], strict=True):
            torch.testing.assert_close(new[:, first:last], gradient[:, OLD[b] :])
            for t in range(OLD[b]):
                torch.testing.assert_close(pool[TABLE[b][t // SIZE], :, t % SIZE], gradient[:, t])


@pytest.mark.needs("jax")
def test_a_step_inside_of_jit_and_its_gradient() -> None:
    import jax
    import jax.numpy as jnp

    sequences = drawn(NEW)
    new = [jnp.asarray(packed_tokens(sequences, name, OLD)) for name in ("query", "key", "value")]
    pools = [jnp.zeros((POOL, 2, SIZE, width)) for width in (8, 5)]

    def loss(query: Any, key: Any, value: Any) -> Any:
        cache = PagedKVCache(*pools, TABLE, [0] * 4).append(key, value, cu_seqlens_k=cumulative(NEW))
        state = cache.attend_state(query, cu_seqlens_q=cumulative(NEW))
        return (state.output**2).sum() + state.lse.sum()

    def apart(query: Any, key: Any, value: Any) -> Any:
        total = 0.0
        for first, last in itertools.pairwise(cumulative(NEW)):
            if first < last:
                cut = [x[:, first:last] for x in (query, key, value)]
                state = attention_state(*cut, is_causal=True)
                total += (state.output**2).sum() + state.lse.sum()
        return total

    ours, theirs = (jax.jit(jax.grad(f, (0, 1, 2)))(*new) for f in (loss, apart))
    for x, y in zip(ours, theirs, strict=True):
        np.testing.assert_allclose(x, y, rtol=0, atol=4e-6)
