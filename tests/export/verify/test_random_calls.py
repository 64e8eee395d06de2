"""Random calls of all that the exporter states: `verify` agrees, and the graph gives what the library gives."""

from __future__ import annotations

import hypothesis.strategies as st
import numpy as np
import pytest
from graphs import BATCH, LONGER, SHORTER, Arrays, Rules, check, held_by, operand, qkv, run, spec
from hypothesis import given, settings
from random_calls import CALLS, Part, taken_in_order
from short_runs import assert_right

from sdpa_xp import KVCache
from sdpa_xp_export import export_attention

pytestmark = pytest.mark.usefixtures("small_blocks")


def drawn(parts: dict[str, Part], rng: np.random.Generator, queries: int, keys: int, dtype: str) -> Arrays:
    """The operands of a call, by the names of the inputs."""
    arguments: Arrays = {}

    def give(name: str) -> np.ndarray:
        arguments[name] = operand(name, rng, queries, keys, dtype)
        return arguments[name]

    taken_in_order(parts, give)
    return arguments


def as_rules(parts: dict[str, Part]) -> Rules:
    return lambda **arguments: taken_in_order(parts, arguments.__getitem__)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("form", ["auto", "primitive", "tiled"])
@settings(max_examples=40)
@given(
    parts=CALLS,
    lengths=st.sampled_from([LONGER, SHORTER, (1, 7)]),
    heads=st.sampled_from([(4, 4), (4, 2), (4, 1)]),
    dtype=st.sampled_from(["float32", "float32", "float64"]),
    layout=st.sampled_from(["...HLE", "...LHE"]),
    outputs=st.sampled_from([("output",), ("output", "lse")]),
    fixed=st.booleans(),
    seed=st.integers(0, 2**32),
)
def test_calls(
    form: str,
    parts: dict[str, Part],
    lengths: tuple[int, int],
    heads: tuple[int, int],
    dtype: str,
    layout: str,
    outputs: tuple[str, ...],
    fixed: bool,
    seed: int,
) -> None:
    rng = np.random.default_rng(seed)
    arrays, arguments = qkv(rng, *lengths, heads=heads, dtype=dtype), drawn(parts, rng, *lengths, dtype)
    if layout != "...HLE":
        arrays = {name: x.swapaxes(-2, -3) for name, x in arrays.items()}
    names = {} if fixed else {BATCH: "B", lengths[1]: "S"} | ({lengths[0]: "L"} if lengths[0] > 1 else {})
    check(arrays, as_rules(parts), arguments, names=names, form=form, layout=layout, outputs=outputs)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("form", ["auto", "primitive", "tiled"])
@settings(max_examples=40)
@given(
    parts=CALLS,
    tokens=st.sampled_from([(5, 6), (1, 7), (1, 1)]),
    heads=st.sampled_from([(4, 4), (4, 2), (4, 1)]),
    seed=st.integers(0, 2**32),
)
def test_calls_with_a_cache(
    form: str, parts: dict[str, Part], tokens: tuple[int, int], heads: tuple[int, int], seed: int
) -> None:
    rng = np.random.default_rng(seed)
    queries, before = tokens
    arrays, past = qkv(rng, queries, queries, heads=heads), qkv(rng, queries, before, heads=heads)
    past = {f"past_{name}": past[name] for name in ("key", "value")}
    arguments = drawn(parts, rng, queries, before + queries, "float32")
    arguments |= {n: np.minimum(x, before + queries) for n, x in arguments.items() if n.startswith("key_l")}
    rules = as_rules(parts)
    rules_given = rules(**{name: spec(x, {}) for name, x in arguments.items()})
    specs = {name: spec(x, {}) for name, x in (arrays | past).items()}
    model = export_attention(**specs, **rules_given, form=form)
    whole = {name: np.concatenate([past[f"past_{name}"], arrays[name]], axis=-2) for name in ("key", "value")}
    wanted = KVCache(**whole).attend(arrays["query"], **({"is_causal": False} | rules(**arguments)))
    np.testing.assert_allclose(run(model, arrays | past | arguments)["output"], wanted, rtol=0, atol=2e-5)
    assert_right(model, **held_by(rules_given))
