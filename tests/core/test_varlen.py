"""Packed sequences: what holds beside their numbers, which test_agreement.py has."""

from __future__ import annotations

import itertools
import math
from typing import Any

import numpy as np
import pytest
from agreement import HEADS, Case, assert_agrees, cumulative, packed_tokens, sequences_of
from calls import moved
from internals import reference, scores
from libraries import Library

from sdpa_xp import masks, scaled_dot_product_attention, varlen_attention

F = np.float32
LENGTHS = QUERIES, KEYS = [5, 0, 3, 1], [7, 3, 0, 4]
"""With a sequence without queries, and one without keys."""
Packed = dict[str, np.ndarray]


def packed(queries: list[int], keys: list[int], dtype: Any = F) -> Packed:
    """(Hq, T, E), (H, U, E) and (H, U, Ev)."""
    sequences = sequences_of(queries, keys, dtype)
    return {name: packed_tokens(sequences, name) for name in ("query", "key", "value")}


def attend(library: Library, arrays: Packed, queries: Any, keys: Any, **rules: Any) -> np.ndarray:
    rules = {"layout": "...HLE", "cu_seqlens_q": cumulative(queries), "cu_seqlens_k": cumulative(keys)} | rules
    return library.get(library.call(varlen_attention, **arrays, **rules))


def scores_of(monkeypatch: pytest.MonkeyPatch, *lengths: list[int]) -> list[tuple[int, ...]]:
    """The shapes of all scores that a call computes."""
    shapes: list[tuple[int, ...]] = []
    product = scores.matmul_grouped

    def recorded(xp: Any, rows: Any, shared: Any, *buffer: Any) -> Any:
        result = product(xp, rows, shared, *buffer)
        if (
            rows.shape[-1] == shared.shape[-2] == 8 and result.size
        ):  # the other product is that of weights and values
            shapes.append(result.shape)
        return result

    monkeypatch.setattr(scores, "matmul_grouped", recorded)
    starts = dict(zip(("cu_seqlens_q", "cu_seqlens_k"), map(cumulative, lengths), strict=True))
    varlen_attention(**packed(*lengths), **starts, layout="...HLE")
    return shapes


def test_equal_lengths_are_one_computation_and_nothing_is_padded(monkeypatch: pytest.MonkeyPatch) -> None:
    """An empty sequence has no scores."""
    assert scores_of(monkeypatch, [3, 2, 3, 3], [4, 5, 4, 4]) == [(3, HEADS, 3, 4), (1, HEADS, 2, 5)]
    expected = [(1, HEADS, l, s) for l, s in zip(QUERIES, KEYS, strict=True) if l and s]
    assert scores_of(monkeypatch, *LENGTHS) == expected


@pytest.mark.sampled(0, on="EAGER_JAX")
def test_padding_of_each_sequence(library: Library) -> None:
    """Lengths of keys, and of queries, that fit each its own sequence."""
    lengths = [1, 5], [4, 7]
    keys, queries = np.asarray([3, 6]), np.asarray([1, 4])
    mask = masks.padding(keys.tolist(), queries.tolist())
    case = Case({"attn_mask": mask}, lambda b, h, i, j, c: (j < keys[b]) & (i < queries[b]))
    assert_agrees(library, "varlen", case, sequences_of(*lengths))


@pytest.mark.sampled(0, on="EAGER_JAX")
def test_heads_stand_behind_the_length_by_default(library: Library) -> None:
    """As flash-attention packs; all in one sequence is attention itself."""
    arrays = packed([5], [7])
    behind = [moved(x, "...LHE") for x in arrays.values()]
    result = library.call(varlen_attention, *behind, cu_seqlens_q=[0, 5], cu_seqlens_k=(0, 7), is_causal=True)
    assert result.shape == (5, HEADS, 5)
    assert result.dtype == library.put(arrays["query"]).dtype
    expected = reference.attention(*arrays.values(), is_causal=True)[0]
    np.testing.assert_allclose(moved(library.get(result), "...LHE"), expected, rtol=0, atol=4e-6)


@pytest.mark.sampled(0, on="EAGER_JAX")
@pytest.mark.parametrize("how", ["of the library", "int32", "int64", "uint8"])
def test_lengths_of_any_kind(library: Library, how: str) -> None:
    """They are numbers, so they may be of another library than the arrays."""
    if how == "of the library" and library.lazy:
        pytest.skip("what is lazy cannot be read")
    arrays = packed(*LENGTHS)
    expected = attend(library, arrays, *LENGTHS)
    starts = [
        np.asarray(cumulative(lengths), "int32" if how == "of the library" else how) for lengths in LENGTHS
    ]
    with library.guard():
        q, k = (library.put(x) for x in starts) if how == "of the library" else starts
        placed = {name: library.put(x) for name, x in arrays.items()}
        result = varlen_attention(**placed, cu_seqlens_q=q, cu_seqlens_k=k, layout="...HLE")
    np.testing.assert_array_equal(library.get(result), expected)


@pytest.mark.sampled(0, on="EAGER_JAX")
@pytest.mark.leaves_out("jax-debug")
@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize("name", ["query", "key", "value"])
def test_nonfinite_stays_in_its_sequence(library: Library, name: str, bad: float) -> None:
    arrays = packed(*LENGTHS)
    clean = attend(library, arrays, *LENGTHS, is_causal=True)
    begin = cumulative(LENGTHS[0 if name == "query" else 1])
    arrays[name][:, begin[0] : begin[1]] = bad
    output = attend(library, arrays, *LENGTHS, is_causal=True)
    np.testing.assert_array_equal(output[:, QUERIES[0] :], clean[:, QUERIES[0] :])
    assert not np.all(np.isfinite(output[:, : QUERIES[0]]))


@pytest.mark.sampled(0, on="EAGER_JAX")
def test_no_query_at_all_and_no_key_at_all(library: Library) -> None:
    library.needs_empty_arrays()
    nothing = attend(library, packed([0, 0], [3, 2]), [0, 0], [3, 2])
    assert nothing.shape == (HEADS, 0, 5)
    empty = attend(library, packed([3, 2], [0, 0]), [3, 2], [0, 0], is_causal=True)
    np.testing.assert_array_equal(empty, np.zeros((HEADS, 5, 5)))


@pytest.mark.sampled(0, on="EAGER_JAX")
@pytest.mark.leaves_out("jax-debug")
@pytest.mark.parametrize("rules", [{}, {"is_causal": True}, {"attn_mask": masks.sliding_window(2, 1)}], ids=str)
@pytest.mark.parametrize("special", [math.nan, math.inf])
def test_stacked_sequences_are_computed_again_as_they_were(
    library: Library, rules: dict[str, Any], special: float
) -> None:
    """A NaN or inf of one sequence changes no row of another, and no row of its own that does not attend it."""
    lengths = [4, 2, 4, 3, 2, 4]  # sequences of equal lengths lie apart, so that they are stacked
    arrays, starts = packed(lengths, lengths), cumulative(lengths)
    arrays["value"][:, starts[2] + 3] = special  # the last token of the third sequence
    output = attend(library, arrays, lengths, lengths, **rules)
    for first, last in itertools.pairwise(starts):
        alone = {name: x[None, :, first:last] for name, x in arrays.items()}
        expected = scaled_dot_product_attention(*(alone[name] for name in ("query", "key", "value")), **rules)
        np.testing.assert_allclose(output[:, first:last], expected[0], rtol=0, atol=1e-6)
