"""A paged cache whose sequences get and ask unlike numbers of tokens in one call, packed, or as many each."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import hypothesis
import hypothesis.strategies as st
import numpy as np
import pytest
from calls import draw, moved
from internals import reference
from libraries import Library, can_write, generator

from sdpa_xp import AttentionState, KVCache, PagedKVCache, attention_state, biases, masks
from sdpa_xp.positional import Rotary, RotaryTables

F = np.float32
HEADS, SIZE, POOL = 4, 4, 12
OLD, NEW = [0, 4, 6, 3], [3, 1, 0, 2]
"""A prompt, the next token of a sequence whose block is full, an idle sequence, and a draft of two tokens."""
TABLE = [[7, 2], [0, 9], [5, 1], [11, 3]]
SINKS = np.linspace(-3, 4, 4 * HEADS, dtype=F).reshape(4, HEADS)
SCALES = np.linspace(0.1, 1, 4 * HEADS, dtype=F).reshape(4, HEADS, 1, 1)
SLOPES = np.linspace(0, 2, 4 * HEADS, dtype=F).reshape(4, HEADS)
Sequences = list[dict[str, np.ndarray]]


class Case(NamedTuple):
    """Keywords of `attend`, and what they mean for sequence b, head h, a query at position i and key j."""

    rules: dict[str, Any]
    allowed: Callable[..., Any] = lambda b, h, i, j: j <= i
    bias: Callable[..., Any] = lambda b, h, i, j: 0.0


CASES = {
    "plain": Case({}),
    "not causal": Case({"is_causal": False}, lambda b, h, i, j: True),
    "window": Case({"attn_mask": masks.sliding_window(2, 0)}, lambda b, h, i, j: (j <= i) & (i - j <= 2)),
    "window, offsets": Case(
        {"attn_mask": masks.sliding_window(2, None, offset=[-1, 0, -3, 1])},
        lambda b, h, i, j: (j <= i) & (j >= i - 2 + [-1, 0, -3, 1][b]),
    ),
    "offsets or prefixes": Case(
        {"is_causal": False, "attn_mask": masks.causal([0, -1, 2, 0]) | masks.prefix([1, 0, 2, 4])},
        lambda b, h, i, j: (j <= i + [0, -1, 2, 0][b]) | (j < [1, 0, 2, 4][b]),
    ),
    "function": Case(
        {"attn_mask": masks.from_function(lambda b, h, q_idx, kv_idx: (q_idx + kv_idx + h) % (b + 2) > 0)},
        lambda b, h, i, j: (j <= i) & ((i + j + h) % (b + 2) > 0),
    ),
    "array": Case({"attn_mask": SINKS[:, :, None, None] > 0}, lambda b, h, i, j: (j <= i) & (SINKS[b][h] > 0)),
    "bias array": Case({"bias": SLOPES[:, :, None, None]}, bias=lambda b, h, i, j: SLOPES[b][h] + 0 * j),
    "alibi": Case({"bias": biases.alibi(4)}, bias=lambda b, h, i, j: -(2.0 ** (-2 * (h + 1))) * abs(i - j)),
    "softcap": Case({"softcap": 1.5}),
    "sinks": Case({"sinks": SINKS}),
    "sinks of heads": Case({"sinks": SINKS[1]}),
    "scale": Case({"scale": SCALES}),
}


def starts(lengths: Sequence[int]) -> list[int]:
    return [0, *itertools.accumulate(lengths)]


def drawn(old: Sequence[int], new: Sequence[int], width: int = 8) -> Sequences:
    """The queries of the new tokens, keys and values of all, of each sequence: (heads, length, width)."""
    rng = np.random.default_rng(0)
    lengths = [(n, o + n) for o, n in zip(old, new, strict=True)]
    shapes = [((HEADS, n, width), (2, total, width), (2, total, 5)) for n, total in lengths]
    return [dict(zip(("query", "key", "value"), draw(rng, *shape), strict=True)) for shape in shapes]


def packed(sequences: Sequences, name: str, old: Sequence[int], layout: str = "...HLE") -> np.ndarray:
    """The new tokens of all sequences: queries, or keys and values."""
    parts = [x[name] if name == "query" else x[name][:, o:] for x, o in zip(sequences, old, strict=True)]
    return moved(np.concatenate(parts, axis=-2), layout)


def table_of(lengths: Sequence[int]) -> list[list[int]]:
    """Blocks in another order than the sequences; -1 where a sequence needs none."""
    blocks = iter(range(10 * len(lengths), 0, -1))
    return [[next(blocks) for _ in range(-(-length // SIZE))] + [-1] for length in lengths]


def cache_of(
    library: Library, sequences: Sequences, old: Sequence[int], table: Any, layout: Any = "...HLE", **told: Any
) -> PagedKVCache[Any]:
    """A pool of NaN, with the first tokens of each sequence in its blocks."""
    blocks = max([0, *itertools.chain(*table)]) + 1
    pools = []
    for name in ("key", "value"):
        heads, _, width = sequences[0][name].shape
        pool = np.full((blocks, heads, SIZE, width), math.nan, sequences[0][name].dtype)
        for row, x, length in zip(table, sequences, old, strict=True):
            for t in range(length):
                pool[row[t // SIZE], :, t % SIZE] = x[name][:, t]
        pools.append(moved(pool, layout))
    return library.call(PagedKVCache, *pools, block_table=table, lengths=list(old), layout=layout, **told)


def step(
    library: Library,
    sequences: Sequences,
    old: Sequence[int],
    new: Sequence[int],
    table: Any,
    *,
    layout: str = "...HLE",
    in_place: bool = False,
    rotary: Rotary | RotaryTables | None = None,
    **rules: Any,
) -> list[np.ndarray]:
    """Append the new tokens, and attend with their queries: output (Hq, T, Ev), lse, and the output alone.

    They are packed, or a batch if each sequence has as many.
    """
    cache = cache_of(library, sequences, old, table, layout, rotary=rotary)
    is_batch = len(set(new)) == 1
    of_keys, of_queries = ({} if is_batch else {f"cu_seqlens_{x}": starts(new)} for x in "kq")
    arrays = [packed(sequences, name, old) for name in ("query", "key", "value")]
    if is_batch:
        arrays = [np.stack(np.split(x, len(new), axis=-2)) for x in arrays]
    with library.guard():
        query, key, value = (library.put(moved(x, layout)) for x in arrays)
        rules = {name: library.put(x) if isinstance(x, np.ndarray) else x for name, x in rules.items()}
        cache = cache.append(key, value, **of_keys, in_place=in_place)
        state = cache.attend_state(query, **of_queries, **rules)
        output = cache.attend(query, **of_queries, **rules)
    assert isinstance(state, AttentionState)
    assert cache.lengths == tuple(map(sum, zip(old, new, strict=True)))
    results = [moved(library.get(state.output), layout), library.get(state.lse)[..., None]]
    results.append(moved(library.get(output), layout))
    output, lse, alone = (np.concatenate([*x], axis=-2) if is_batch else x for x in results)
    return [output, lse[..., 0], alone]


def assert_each_is_one_call(
    results: list[np.ndarray], sequences: Sequences, old: Sequence[int], new: Sequence[int], case: Case
) -> None:
    """Each sequence against the float64 reference of its own tokens."""
    output, lse, alone = results
    assert output.shape == alone.shape == (HEADS, sum(new), 5)
    assert lse.shape == (HEADS, sum(new))
    for b, (first, last) in enumerate(itertools.pairwise(starts(new))):
        h, row, j = np.ogrid[:HEADS, : new[b], : old[b] + new[b]]
        pairs = (HEADS, new[b], old[b] + new[b])
        allowed = np.broadcast_to(case.allowed(b, h, old[b] + row, j), pairs)
        bias = np.broadcast_to(np.asarray(case.bias(b, h, old[b] + row, j), np.float64), pairs)
        told = {"scale": case.rules["scale"][b]} if "scale" in case.rules else {}
        sinks = np.broadcast_to(case.rules.get("sinks", -math.inf), (len(old), HEADS))[b]
        told |= {"softcap": case.rules.get("softcap"), "sinks": sinks}
        expected, of_keys, _ = reference.attention(**sequences[b], attn_mask=allowed, bias=bias, **told)
        np.testing.assert_allclose(output[:, first:last], expected, rtol=0, atol=4e-6)
        np.testing.assert_allclose(alone[:, first:last], expected, rtol=0, atol=4e-6)
        np.testing.assert_allclose(lse[:, first:last], of_keys, rtol=0, atol=4e-6)


each_kind = pytest.mark.parametrize("new", [NEW, [2] * 4], ids=["packed", "batch"])


@pytest.mark.sampled(0, on="EAGER_JAX")
@each_kind
@pytest.mark.parametrize("name", CASES)
def test_prompts_and_next_tokens_in_one_call(library: Library, name: str, new: list[int]) -> None:
    sequences = drawn(OLD, new)
    results = step(library, sequences, OLD, new, TABLE, **CASES[name].rules)
    assert_each_is_one_call(results, sequences, OLD, new, CASES[name])


@pytest.mark.sampled(0, on="EAGER_JAX")
@each_kind
def test_slopes_of_each_sequence(library: Library, new: list[int]) -> None:
    with library.guard():
        bias = biases.alibi(library.put(SLOPES))
    sequences, case = drawn(OLD, new), Case({"bias": bias}, bias=lambda b, h, i, j: -SLOPES[b][h] * abs(i - j))
    assert_each_is_one_call(step(library, sequences, OLD, new, TABLE, **case.rules), sequences, OLD, new, case)


@pytest.mark.sampled(0, on="EAGER_JAX")
@hypothesis.given(
    lengths=st.lists(st.tuples(st.integers(0, 9), st.integers(0, 5)), min_size=1, max_size=4),
    name=st.sampled_from(["plain", "not causal", "window", "function"]),
)
def test_any_lengths(library: Library, lengths: list[tuple[int, int]], name: str) -> None:
    if library.lazy:
        pytest.skip("the graphs of many calls take long; the calls above ask the same")
    old, new = ([pair[axis] for pair in lengths] for axis in (0, 1))
    hypothesis.assume(any(new))
    sequences = drawn(old, new)
    table = table_of([o + n for o, n in lengths])
    results = step(library, sequences, old, new, table, **CASES[name].rules)
    assert_each_is_one_call(results, sequences, old, new, CASES[name])


@pytest.mark.sampled(0, on="EAGER_JAX")
@each_kind
@pytest.mark.parametrize("layout", ["...HLE", "...LHE"])
@pytest.mark.parametrize("in_place", [False, True])
def test_layouts_and_in_place(library: Library, layout: str, in_place: bool, new: list[int]) -> None:
    sequences = drawn(OLD, new)
    if in_place and (library.name == "numpy-readonly" or not can_write(library)):
        with pytest.raises(TypeError, match="written to"):
            step(library, sequences, OLD, new, TABLE, layout=layout, in_place=True)
        return
    results = step(library, sequences, OLD, new, TABLE, layout=layout, in_place=in_place)
    assert_each_is_one_call(results, sequences, OLD, new, CASES["plain"])


@pytest.mark.sampled(0, on="EAGER_JAX")
def test_append_is_one_append_for_each_sequence(library: Library) -> None:
    """To the last bit; the old cache, and blocks of others, stay as they were."""
    sequences = drawn(OLD, NEW)
    cache = cache_of(library, sequences, OLD, TABLE)
    before = library.get(cache.key_blocks).copy()
    with library.guard():
        key, value = (library.put(packed(sequences, name, OLD)) for name in ("key", "value"))
        longer = cache.append(key, value, cu_seqlens_k=np.asarray(starts(NEW)))
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
    sequences = drawn(OLD, [0] * 4)
    with library.guard():
        tables = (library.put(table(np.ones((9, 3), F))) for table in (np.cos, np.sin))
        cache = cache_of(library, sequences, OLD, TABLE, rotary=RotaryTables(*tables))
        query, key, value = (library.put(packed(sequences, n, OLD)) for n in ("query", "key", "value"))
        same = cache.append(key, value, cu_seqlens_k=[0] * 5)
        assert same.lengths == cache.lengths
        assert same.attend(query, cu_seqlens_q=[0] * 5).shape == (HEADS, 0, 5)
        batch = library.put(np.zeros((4, HEADS, 0, 8), F))
        assert same.attend(batch).shape == (4, HEADS, 0, 5)


@pytest.mark.sampled(0, on="EAGER_JAX")
@pytest.mark.parametrize("layout", ["...HLE", "...LHE"])
def test_each_token_is_rotated_at_its_place(library: Library, layout: str) -> None:
    """As if all tokens of a sequence had been rotated at once."""
    rotary, sequences = Rotary(6, base=100.0), drawn(OLD, NEW)
    turned = []
    for o, x in zip(OLD, sequences, strict=True):
        wide = {name: x[name].astype(np.float64) for name in ("query", "key")}
        turned.append(x | {"query": rotary.apply(wide["query"], o), "key": rotary.apply(wide["key"], 0)})
    cached = [x | {"key": turned[n]["key"].astype(F)} for n, x in enumerate(sequences)]
    # What is in the pool is rotated already; what is appended is not.
    unrotated = [
        x | {"key": np.concatenate([cached[n]["key"][:, :o], x["key"][:, o:]], axis=1)}
        for n, (o, x) in enumerate(zip(OLD, sequences, strict=True))
    ]
    results = step(library, unrotated, OLD, NEW, TABLE, rotary=rotary, layout=layout)
    assert_each_is_one_call(results, turned, OLD, NEW, CASES["plain"])


@pytest.mark.sampled(0, on="EAGER_JAX")
@pytest.mark.parametrize("layout", ["...HLE", "...LHE"])
@pytest.mark.parametrize("entries", [None, 1, 4])
def test_tables_of_the_caller(library: Library, entries: int | None, layout: str) -> None:
    """Any angles, also other ones for each sequence."""
    sequences = drawn(OLD, NEW)
    angles = np.random.default_rng(2).random((*([] if entries is None else [entries]), 9, 3))
    with library.guard():
        rotary = RotaryTables(*(library.put(table(angles).astype(F)) for table in (np.cos, np.sin)))
    turned = []
    for b, (o, x) in enumerate(zip(OLD, sequences, strict=True)):
        row = angles if entries is None else angles[b % entries]
        exact, wide = RotaryTables(np.cos(row), np.sin(row)), x["key"].astype(np.float64)
        key = np.concatenate([wide[:, :o], exact.apply(wide[:, o:], o)], axis=1)  # the pool is rotated already
        turned.append(x | {"query": exact.apply(x["query"].astype(np.float64), o), "key": key})
    results = step(library, sequences, OLD, NEW, TABLE, rotary=rotary, layout=layout)
    assert_each_is_one_call(results, turned, OLD, NEW, CASES["plain"])


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
    rotary, sequences = Rotary(8), drawn(OLD, NEW)
    positions: Any = {
        "follow": None,
        "first": 9,
        "packed": [*itertools.chain(*DRAFT)],
        "lists": DRAFT,
    }[name]
    told = {"rotary": rotary, "first_position": FIRST}
    rules = {"attn_mask": mask, "is_causal": positions is None}
    cache = cache_of(library, sequences, OLD, TABLE, **told)
    with library.guard():
        query, key, value = (library.put(packed(sequences, n, OLD)) for n in ("query", "key", "value"))
        longer = cache.append(key, value, cu_seqlens_k=starts(NEW), positions=positions)
        state = longer.attend_state(query, cu_seqlens_q=starts(NEW), positions=positions, **rules)
    output, lse = (library.get(x) for x in state)
    for b, (first, last) in enumerate(itertools.pairwise(starts(NEW))):
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
    sequences = drawn([0] * 4, lengths)
    cache = cache_of(library, sequences, lengths, table_of(lengths))
    batch = np.stack([x["query"][:, -3:] for x in sequences])
    counts = [1, 3, 0, 2]
    rows = np.concatenate([x[:, 3 - n :] for x, n in zip(batch, counts, strict=True)], axis=-2)
    with library.guard():
        whole = library.get(cache.attend(library.put(batch), dropout_p=0.5, rng=generator(library)))
        bounds = starts(counts)
        state = cache.attend_state(
            library.put(rows), cu_seqlens_q=bounds, dropout_p=0.5, rng=generator(library)
        )
        plain = cache.attend_state(library.put(rows), cu_seqlens_q=bounds)
    expected = np.concatenate([x[:, 3 - n :] for x, n in zip(whole, counts, strict=True)], axis=-2)
    np.testing.assert_allclose(library.get(state.output), expected, rtol=0, atol=2e-6)
    np.testing.assert_allclose(library.get(state.lse), library.get(plain.lse), rtol=0, atol=1e-6)


@pytest.mark.sampled(0, on="EAGER_JAX")
@pytest.mark.parametrize("dtype", ["float16", "float64"])
def test_dtypes(library: Library, dtype: str) -> None:
    """The output has the query's dtype, the log-sum-exp the accumulation dtype."""
    library.needs(dtype)
    sequences = [{name: x.astype(dtype) for name, x in s.items()} for s in drawn(OLD, NEW)]
    output, lse, _ = step(library, sequences, OLD, NEW, TABLE)
    assert (output.dtype.name, lse.dtype.name) == (dtype, "float64" if dtype == "float64" else "float32")


@pytest.mark.needs("torch")
def test_gradients_by_torch() -> None:
    """Of queries, new tokens and pools, through output and log-sum-exp, as of a call for each sequence."""
    import torch

    sequences = [{name: x.astype(np.float64) for name, x in s.items()} for s in drawn(OLD, NEW)]
    pools = [torch.zeros(POOL, 2, SIZE, width, dtype=torch.float64) for width in (8, 5)]
    for pool, name in zip(pools, ("key", "value"), strict=True):
        for row, x, length in zip(TABLE, sequences, OLD, strict=True):
            for t in range(length):
                pool[row[t // SIZE], :, t % SIZE] = torch.asarray(x[name][:, t])
        pool.requires_grad_()
    query, key, value = (
        torch.asarray(packed(sequences, name, OLD)).requires_grad_() for name in ("query", "key", "value")
    )
    cache = PagedKVCache(*pools, TABLE, OLD).append(key, value, cu_seqlens_k=starts(NEW))
    state = cache.attend_state(query, cu_seqlens_q=starts(NEW))
    ours = torch.autograd.grad(state.output.square().sum() + state.lse.sum(), [query, key, value, *pools])
    for b, (first, last) in enumerate(itertools.pairwise(starts(NEW))):
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

    sequences = drawn(OLD, NEW)
    new = [jnp.asarray(packed(sequences, name, OLD)) for name in ("query", "key", "value")]
    pools = [jnp.zeros((POOL, 2, SIZE, width)) for width in (8, 5)]

    def loss(query: Any, key: Any, value: Any) -> Any:
        cache = PagedKVCache(*pools, TABLE, [0] * 4).append(key, value, cu_seqlens_k=starts(NEW))
        state = cache.attend_state(query, cu_seqlens_q=starts(NEW))
        return (state.output**2).sum() + state.lse.sum()

    def apart(query: Any, key: Any, value: Any) -> Any:
        total = 0.0
        for first, last in itertools.pairwise(starts(NEW)):
            if first < last:
                cut = [x[:, first:last] for x in (query, key, value)]
                state = attention_state(*cut, is_causal=True)
                total += (state.output**2).sum() + state.lse.sum()
        return total

    ours, theirs = (jax.jit(jax.grad(f, (0, 1, 2)))(*new) for f in (loss, apart))
    for x, y in zip(ours, theirs, strict=True):
        np.testing.assert_allclose(x, y, rtol=0, atol=4e-6)
