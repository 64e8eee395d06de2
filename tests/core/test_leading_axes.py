"""Leading axes that only some of the inputs have: they broadcast, and nothing else changes."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
from internals import reference
from libraries import Library

from sdpa_xp import attention_state, masks

F = np.float32
LENGTHS = (70, 83)
"""Enough queries and keys for a softmax without a maximum."""


def inputs(batched: frozenset[str], heads: tuple[int, int] = (4, 2)) -> dict[str, np.ndarray]:
    """Arrays of which those in `batched` have a batch of 3, and the others none."""
    rng = np.random.default_rng(0)
    queries, keys = LENGTHS
    query_heads, key_heads = heads
    shapes = {
        "query": (query_heads, queries, 8),
        "key": (key_heads, keys, 8),
        "value": (key_heads, keys, 5),
        "attn_mask": (1, queries, keys),
        "bias": (query_heads, 1, keys),
        "scale": (query_heads, queries, 1),
        "sinks": (query_heads,),
    }
    leading = {name: (3,) if name in batched else () for name in shapes}
    arrays = {name: rng.standard_normal((*leading[name], *shape)).astype(F) for name, shape in shapes.items()}
    return arrays | {"attn_mask": arrays["attn_mask"] < 0.8, "scale": np.abs(arrays["scale"])}


def chosen(names: tuple[str, ...]) -> list[frozenset[str]]:
    """Each subset of `names` that the output's batch follows from: only query, key and value make one."""
    subsets = [frozenset(subset) for n in range(len(names) + 1) for subset in itertools.combinations(names, n)]
    return [subset for subset in subsets if not subset or subset & {"query", "key", "value"}]


@pytest.mark.rule("R1")
@pytest.mark.sampled(0, on="EAGER_JAX")
@pytest.mark.parametrize("joined", [(), ("attn_mask",), ("attn_mask", "scale"), ("bias", "sinks")], ids=str)
@pytest.mark.slow
def test_every_input_may_have_the_batch_alone(library: Library, joined: tuple[str, ...]) -> None:
    names = ("query", "key", "value", *joined)
    subsets = chosen(names)
    if library.name.startswith(("jax", "dask")):
        subsets = [frozenset({name, joined[0]} if joined else {name}) for name in ("query", "value")]
    for batched in subsets:
        arrays = {name: array for name, array in inputs(batched).items() if name in names}
        expected, lse, _ = _expected(arrays)
        state = library.call(attention_state, **arrays)
        np.testing.assert_allclose(library.get(state.output), expected, rtol=0, atol=2e-5, err_msg=str(batched))
        np.testing.assert_allclose(library.get(state.lse), lse, rtol=0, atol=2e-5, err_msg=str(batched))


@pytest.mark.sampled(0, on="EAGER_JAX")
@pytest.mark.parametrize("heads", [(4, 2), (1, 1), (3, 3)], ids=str)
@pytest.mark.parametrize("mask", ["causal", "padding", "window", "array"])
def test_values_alone_have_the_batch_and_a_mask_that_differs(
    library: Library, mask: str, heads: tuple[int, int]
) -> None:
    """A mask of one entry each, where queries and keys have no batch at all."""
    value: Any = {
        "causal": masks.causal([0, 13, -5]),
        "padding": masks.padding([83, 0, 17], [70, 70, 3]),
        "window": masks.sliding_window(5, 2, offset=[0, 7, -7]),
        "array": masks.from_array(np.random.default_rng(1).random((3, 1, 1, LENGTHS[1])) < 0.5),
    }[mask]
    arrays = inputs(frozenset({"value"}), heads)
    arrays = {name: arrays[name] for name in ("query", "key", "value")}
    dense = masks.to_array(value, (3, heads[0], *LENGTHS))
    value = dense if mask == "array" else value
    expected, lse, _ = _expected(arrays | {"attn_mask": dense})
    state = library.call(attention_state, **arrays, attn_mask=value)
    np.testing.assert_allclose(library.get(state.output), expected, rtol=0, atol=2e-5)
    np.testing.assert_allclose(library.get(state.lse), lse, rtol=0, atol=2e-5)


def _axes(name: str) -> tuple[int, ...]:
    return {"sinks": (0,)}.get(name, (0, 1, 2))


def _expected(arrays: dict[str, np.ndarray]) -> Any:
    """The reference of whole arrays, since it takes query, key and value of one rank."""
    named = ("query", "key", "value")
    batch = np.broadcast_shapes(*(x.shape[: -len(_axes(name))] for name, x in arrays.items()))
    whole = {
        name: np.broadcast_to(x, (*batch, *x.shape[-3:])) if name in named else x for name, x in arrays.items()
    }
    return reference.attention(**whole)
