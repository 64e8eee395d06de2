"""What JAX's transforms do with layers, caches and masks, and classes that JAX knows already."""

from __future__ import annotations

import copy
import pickle
import re
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

from sdpa_xp import KVCache, biases, explain, masks, positional
from sdpa_xp.layers import Layer, Linear, MultiHeadAttention

pytestmark = pytest.mark.needs("jax")
F, SEED = np.float32, np.random.default_rng(6)
WORDS = SEED.normal(size=(2, 5, 16)).astype(F)


@pytest.fixture
def heads() -> list[MultiHeadAttention]:
    """Return two layers that are created after JAX was imported."""
    import jax

    assert jax
    return [MultiHeadAttention.init(np.random.default_rng(n), 16, num_heads=4) for n in range(2)]


def test_a_step_of_training_changes_all_parameters(heads: list[MultiHeadAttention]) -> None:
    import jax
    import jax.numpy as jnp

    layer, x = heads[0].to(jnp), jnp.asarray(WORDS)

    def loss(layer: Any) -> Any:
        return (layer(x) ** 2).mean()

    def loss_of(parameters: Any) -> Any:
        return loss(layer.with_parameters(parameters))

    def step(layer: Any, _: None) -> Any:
        return jax.tree.map(lambda p, g: p - 0.1 * g, layer, jax.grad(loss)(layer)), None

    gradients = jax.jit(jax.grad(loss))(layer)
    expected = jax.jit(jax.grad(loss_of))(layer.parameters)
    assert type(gradients) is MultiHeadAttention
    for name, gradient in gradients.parameters.items():
        np.testing.assert_allclose(gradient, expected[name], atol=1e-6)
    trained, _ = jax.lax.scan(step, layer, length=3)
    assert loss(trained) < loss(layer)


def test_a_scan_carries_a_cache_over_which_a_window_moves() -> None:
    import jax
    import jax.numpy as jnp

    tokens = jnp.asarray(SEED.normal(size=(4, 1, 2, 1, 8)).astype(F))
    prompt = jnp.asarray(SEED.normal(size=(1, 2, 5, 8)).astype(F))

    def step(cache: Any, token: Any) -> Any:
        cache = cache.append(token, token).drop_first(1)
        return cache, cache.attend(token)

    start = KVCache(prompt, prompt, rotary=positional.Rotary(8), first_position=jnp.asarray(3))
    last, results = jax.lax.scan(step, start, tokens)
    cache = KVCache(prompt, prompt, rotary=positional.Rotary(8), first_position=3)
    for token, result in zip(tokens, results, strict=True):
        cache, expected = step(cache, token)
        np.testing.assert_allclose(result, expected, atol=3e-6)
    np.testing.assert_array_equal(last.positions, cache.positions)


def test_explain_says_in_a_jit_what_it_would_do_there() -> None:
    import jax
    import jax.numpy as jnp

    x = jnp.asarray(WORDS)
    explained = jax.jit(lambda x: explain(x, x, x))(x)
    assert explained.implementation == "xp"
    assert jax.jit(lambda explained, x: x * explained.tiles)(explained, x).shape == x.shape


def test_leaves_have_the_names_of_parameters(heads: list[MultiHeadAttention]) -> None:
    import jax

    block = Stack((heads[0].query, *heads))
    paths = [
        ".".join(re.findall(r"\w+", jax.tree_util.keystr(path)))
        for path, _ in jax.tree_util.tree_leaves_with_path(block)
    ]
    assert paths == [*block.parameters]
    assert "parts.1.query.weight" in paths


VALUES: dict[str, Callable[[], Any]] = {
    "a layer": lambda: MultiHeadAttention.init(SEED, 16, num_heads=4),
    "a mask": lambda: masks.causal() & masks.padding(np.asarray([1, 2])),
    "a bias": lambda: biases.relative(np.ones((32, 4), F)),
    "a cache": lambda: KVCache(WORDS[:, None], WORDS[:, None], first_position=[0, 1]),
    "a rotation": lambda: positional.RotaryTables(np.ones((4, 2)), np.ones((4, 2))),
}


@pytest.mark.parametrize("name", VALUES)
def test_leaves_may_be_anything(name: str) -> None:
    """Optimizers put booleans where arrays are, shardings put axes there, and people print shapes."""
    import jax
    from jax.sharding import PartitionSpec

    value = VALUES[name]()
    leaves, structure = jax.tree.flatten(value)
    assert leaves
    others: list[Any] = [True, 3, "x", np.float32(1), PartitionSpec("data"), object()]
    for leaf in (*others, jax.ShapeDtypeStruct((2, 3), "f4")):
        changed = jax.tree.map(lambda _, leaf=leaf: leaf, value)
        assert type(changed) is type(value)
        assert jax.tree.flatten(changed) == ([leaf] * len(leaves), structure)
        assert repr(changed)
        # As in a notebook whose last line is a tree of specs, or of axes for `vmap`.
        assert not hasattr(changed, "_repr_html_") or (changed._repr_html_() or ">").endswith(">")
    shapes = jax.tree.map(np.shape, value)
    assert jax.tree.structure(shapes, is_leaf=lambda x: isinstance(x, tuple)) == structure
    assert str(np.shape(leaves[0])) in repr(shapes)
    assert jax.tree.leaves(jax.tree.map(lambda _: None, value)) == []


def is_earlier(b: Any, h: Any, i: Any, j: Any) -> Any:
    del b, h
    return j <= i


def pickled(value: Any) -> Any:
    return pickle.loads(pickle.dumps(value))


@pytest.mark.parametrize("name", [*VALUES, "a function"])
@pytest.mark.parametrize("copied", [copy.deepcopy, pickled])
def test_a_copied_structure_is_the_same(name: str, copied: Callable[[Any], Any]) -> None:
    import jax

    value = (
        VALUES[name]() if name in VALUES else (masks.from_function(is_earlier) & masks.padding(np.ones(2, int)))
    )
    leaves, structure = jax.tree.flatten(value)
    other = copied(structure)
    assert other == structure
    assert hash(other) == hash(structure)
    rebuilt = jax.tree.unflatten(other, leaves)
    assert all(jax.tree.leaves(jax.tree.map(lambda a, b: a is b, value, rebuilt)))
    assert jax.tree.structure(jax.tree.map(np.asarray, rebuilt)) == jax.tree.structure(copied(value))
    with_paths = [jax.tree_util.tree_leaves_with_path(tree) for tree in (value, rebuilt)]
    paths, others = ([path for path, _ in pairs] for pairs in with_paths)
    assert paths == others
    assert [*map(jax.tree_util.keystr, copied(paths))] == [*map(jax.tree_util.keystr, paths)]


# What JAX says from 0.6 on, and what 0.5 says.
DIFFERENT_CHILDREN = r"(?s)different numbers of pytree children.*symmetric difference|Mismatch custom node data"
DIFFERENT_METADATA = "different pytree metadata|Mismatch custom node data"


def test_jax_says_which_children_differ() -> None:
    import jax

    lengths = np.asarray([1, 2])
    trees = masks.padding(lengths), masks.padding(lengths, lengths)
    with pytest.raises(ValueError, match=DIFFERENT_CHILDREN):
        jax.tree.map(lambda a, _: a, *trees)
    with pytest.raises(ValueError, match=DIFFERENT_METADATA):
        jax.tree.map(lambda a, _: a, *(MultiHeadAttention.init(SEED, 16, num_heads=n) for n in (2, 4)))


def test_what_is_no_array_is_static() -> None:
    import jax

    def structure(value: object) -> object:
        return jax.tree.structure(Options(value))

    values: list[object] = [1, True, 1.0, 0.0, -0.0, "1", None, (1,), [1], {"1": 1}, np.float32(1), float, {1}]
    structures = [structure(value) for value in values]
    assert [jax.tree.leaves(Options(value)) for value in values] == [[]] * len(values)
    for n, one in enumerate(structures):
        assert one == structure(values[n])
        assert [other == one for other in structures].count(True) == 1
    assert structure(float("nan")) == structure(float("nan"))
    assert masks.sliding_window(2, 0) == jax.tree.map(lambda x: x, masks.sliding_window(2, 0))


def test_the_pytrees_of_others_are_walked_by_jax() -> None:
    import jax

    options = Options(jax.tree_util.Partial(np.multiply, np.arange(3)))
    assert len(jax.tree.leaves(options)) == 1
    doubled = jax.tree.map(lambda x: 2 * x, options)
    np.testing.assert_array_equal(doubled.value(5), [0, 10, 20])


def test_a_class_that_its_author_registers_stays_theirs(heads: list[MultiHeadAttention]) -> None:
    import jax

    @jax.tree_util.register_pytree_node_class
    @dataclass(frozen=True, slots=True, repr=False)
    class Theirs(Layer):
        inner: Linear

        def tree_flatten(self) -> tuple[tuple[Linear], str]:
            return (self.inner,), "theirs"

        @classmethod
        def tree_unflatten(cls, aux: str, children: tuple[Linear]) -> Theirs:
            assert aux == "theirs"
            return cls(*children)

    theirs = Theirs(heads[0].query)
    assert "theirs" in str(jax.tree.structure(theirs))
    assert "theirs" in str(jax.tree.structure(Options(theirs)))
    np.testing.assert_array_equal(jax.tree.map(lambda x: 2 * x, theirs).inner.weight, 2 * heads[0].query.weight)


BEFORE_JAX = """
from dataclasses import dataclass
import numpy as np
from sdpa_xp import masks, scaled_dot_product_attention
from sdpa_xp.layers import Layer, Linear

@dataclass(frozen=True)
class Mine(Layer):
    inner: Linear

mine, mask = Mine(Linear(np.ones((2, 2)))), masks.causal()
import jax
import jax.numpy as jnp
x = jnp.ones((1, 3, 2))
print(scaled_dot_product_attention(x, x, x, mask).shape)
call = jax.jit(lambda mine, mask, x: scaled_dot_product_attention(x, x, mine.inner(x), mask))
print(call(mine, mask, x).shape)
"""


def test_what_was_made_before_jax_was_imported_is_known_from_the_first_array_on() -> None:
    ran = subprocess.run([sys.executable, "-c", BEFORE_JAX], capture_output=True, text=True, check=False)
    assert (ran.stdout.split("\n"), ran.returncode) == (["(1, 3, 2)"] * 2 + [""], 0), ran.stderr


@dataclass(frozen=True)
class Options(Layer):
    value: object


@dataclass(frozen=True, repr=False)
class Stack(Layer):
    parts: tuple[Layer, ...]
