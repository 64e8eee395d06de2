"""Every public class through what people do with objects: pickle, copy, and the transforms of JAX.

A class without an example here (a mask: in tests/public_masks.py) fails the first test.
"""

from __future__ import annotations

import copy
import inspect
import pickle
import re
from collections.abc import Callable, Iterator
from dataclasses import FrozenInstanceError, dataclass, fields, is_dataclass
from typing import Any, get_type_hints

import numpy as np
import pytest
from internals import ScoreModifier, modifier_at
from public_masks import CALLS as MASK_CALLS

import sdpa_xp
from sdpa_xp import KVCache, PagedKVCache, biases, layers, masks, positional
from sdpa_xp import scaled_dot_product_attention as attend
from sdpa_xp.layers import Layer, Linear, MultiHeadAttention, SingleHeadAttention

F, SEED = np.float32, np.random.default_rng(5)
X = SEED.normal(size=(2, 4, 5, 8)).astype(F)
WORDS = SEED.normal(size=(2, 5, 16)).astype(F)
PLACES = np.arange(5)
LENGTHS, IDS = np.asarray([3, 5]), np.asarray([[0, 0, 1, 1, 1], [0, 1, 1, 2, 2]])
TABLE = SEED.normal(size=(32, 4)).astype(F)
ROTARY = positional.Rotary(8, scaling=positional.YaRNScaling(factor=2.0, original_length=8))
TABLES = positional.RotaryTables(*positional.Rotary(8).cos_sin(range(16), like=X))
MAPS = [Linear.init(SEED, 16, 16) for _ in range(3)]
HEADS = MultiHeadAttention.init(SEED, 16, num_heads=4, num_kv_heads=2)


def distance(score: Any, b: Any, h: Any, i: Any, j: Any) -> Any:
    del b, h
    return score - abs(i - j)


@dataclass(frozen=True, repr=False)
class Block(Layer):
    """A caller's layer: layers in a tuple, an array in a dict, and options that are no arrays."""

    attention: MultiHeadAttention
    maps: tuple[Linear, ...]
    more: dict[str, Any]
    gain: float = 2.0
    mask: masks.Mask | None = None

    def __post_init__(self) -> None:
        if self.gain < 0:
            raise ValueError("gain")

    def __call__(self, x: Any) -> Any:
        for linear in self.maps:
            x = linear(x)
        return x + self.gain * self.attention(x, attn_mask=self.mask) + self.more["shift"]


@dataclass(frozen=True, slots=True, repr=False)
class SlottedBlock(Layer):
    inner: Linear

    def __call__(self, x: Any) -> Any:
        return self.inner(x)


def as_mask(mask: Any, x: Any) -> Any:
    return attend(x, x, x, mask)


def as_bias(bias: Any, x: Any) -> Any:
    return attend(x, x, x, bias=bias)


def as_layer(layer: Any, x: Any) -> Any:
    return layer(x[:, 0].reshape(2, 5, 8).repeat(2, -1))


def as_cache(cache: Any, x: Any) -> Any:
    del x
    return cache.attend(cache.key[..., -1:, :] if cache.layout == "...HLE" else cache.key[..., -1:, :, :])


def as_pool(cache: Any, x: Any) -> Any:
    return cache.attend(x[:, :, :1])


def as_rotation(rotary: Any, x: Any) -> Any:
    return rotary.apply(x, positions=range(2, 7))


def as_scaling(scaling: Any, x: Any) -> Any:
    return positional.Rotary(8, scaling=scaling).apply(x, positions=range(2, 7))


def as_statistics(statistics: Any, x: Any) -> Any:
    return statistics.entropy[..., None] * x


def as_linear_state(state: Any, x: Any) -> Any:
    return sdpa_xp.linear_attention(x, x, x, state=state.state).output


def as_convolution_state(state: Any, x: Any) -> Any:
    return sdpa_xp.causal_conv_with_state(x[:, 0], x[0, 0, :, None, :3], state=state.state).output


def as_state(state: Any, x: Any) -> Any:
    return sdpa_xp.merge_states([state, sdpa_xp.attention_state(x, x, x)]).output


Use = Callable[[Any, Any], Any]
USED: dict[str, tuple[Any, Use]] = {
    **{function.__name__: (function(**arguments), as_mask) for function, arguments in MASK_CALLS.items()},
    "causal, an array": (masks.causal(np.asarray([0, 1])), as_mask),
    "padding, arrays": (masks.padding(LENGTHS, LENGTHS), as_mask),
    "prefix, an array": (masks.prefix(LENGTHS), as_mask),
    "document, an array": (masks.document(IDS), as_mask),
    "tree, of each entry": (masks.tree([[-1, 0, 0, 1, -1], [-1, 0, 1, 2, 3]]), as_mask),
    "blocks, of each entry": (masks.blocks([[[[True, False]]], [[[True, True]]]], (5, 3)), as_mask),
    "&": (masks.causal() & masks.padding(LENGTHS), as_mask),
    "|": (masks.causal() | masks.prefix(LENGTHS), as_mask),
    "~": (~masks.prefix(2), as_mask),
    "a mask at positions": (modifier_at(masks.causal(), PLACES, PLACES, consecutive=False), as_mask),
    "alibi": (biases.alibi(TABLE[0] ** 2), as_bias),
    "relative": (biases.relative(TABLE), as_bias),
    "bias from_array": (biases.from_array(X[:, :, :, :5]), as_bias),
    "bias from_function": (biases.from_function(distance), as_bias),
    "+": (biases.relative(TABLE) + biases.alibi([0.5, 0.25, 0.125, 0.0625]), as_bias),
    "a bias at positions": (
        modifier_at(biases.alibi(TABLE[0] ** 2), PLACES, PLACES, consecutive=False),
        as_bias,
    ),
    "Linear": (MAPS[0], as_layer),
    "MultiHeadAttention": (HEADS, as_layer),
    "its own scale": (SingleHeadAttention(*MAPS, scale=np.asarray([0.5], F), temperature=2.0), as_layer),
    "a caller's layer": (
        Block(HEADS, (MAPS[0], MAPS[1]), {"shift": WORDS[0, 0], "kind": "x"}, mask=masks.causal()),
        as_layer,
    ),
    "a caller's layer with slots": (SlottedBlock(MAPS[2]), as_layer),
    "KVCache": (KVCache(X, X), as_cache),
    "KVCache with room": (KVCache(X, X, capacity=9), as_cache),
    "KVCache, heads last": (KVCache(X, X, layout="...LHE"), as_cache),
    "KVCache, first positions": (KVCache(X, X, rotary=TABLES, first_position=LENGTHS).drop_first(2), as_cache),
    "KVCache, positions": (KVCache(X, X, rotary=ROTARY, positions=[0, 1, 2, 5, 9]), as_cache),
    "PagedKVCache": (PagedKVCache(X, X, [[1], [0]], [4, 2], layout="...HLE"), as_pool),
    "Rotary": (ROTARY, as_rotation),
    "RotaryTables": (TABLES, as_rotation),
    "LinearScaling": (positional.LinearScaling(2.0), as_scaling),
    "NTKScaling": (positional.NTKScaling(2.0), as_scaling),
    "Llama3Scaling": (positional.Llama3Scaling(factor=8.0, original_length=64), as_scaling),
    "YaRNScaling": (ROTARY.scaling, as_scaling),
    "AttentionState": (sdpa_xp.attention_state(X, X, X), as_state),
    "LinearAttentionState": (sdpa_xp.linear_attention(X, X, X), as_linear_state),
    "CausalConvState": (sdpa_xp.causal_conv_with_state(X[:, 0], X[0, 0, :, None, :3]), as_convolution_state),
    "AttentionStatistics": (sdpa_xp.attention_statistics(X, X, of=("entropy",)), as_statistics),
}
by_name = pytest.mark.parametrize("name", USED)


EXPLANATION = sdpa_xp.explain(X, X, X)


def subclasses(kind: type) -> Iterator[type]:
    for derived in type.__subclasses__(kind):
        yield derived
        yield from subclasses(derived)


def test_every_public_class_has_an_example() -> None:
    modules = [sdpa_xp, masks, biases, positional, layers]
    values = [getattr(module, name) for module in modules for name in module.__all__]
    public = {value for value in values if isinstance(value, type)}
    folders = ("sdpa_xp.masks", "sdpa_xp.biases")
    public |= {kind for kind in subclasses(ScoreModifier) if kind.__module__.startswith(folders)}
    names = {kind.__name__ for kind in public if not inspect.isabstract(kind)}
    shown = {type(value).__name__ for value, _ in USED.values()} | {"Explanation", "Layer"}
    assert names - shown == set()


@by_name
def test_copies_compute_the_same(name: str) -> None:
    value, use = USED[name]
    expected = use(value, X)
    for copied in (copy.copy(value), copy.deepcopy(value), pickle.loads(pickle.dumps(value))):
        assert type(copied) is type(value)
        np.testing.assert_array_equal(use(copied, X), expected)


def test_copies_of_an_explanation_say_the_same() -> None:
    copies = copy.copy(EXPLANATION), copy.deepcopy(EXPLANATION), pickle.loads(pickle.dumps(EXPLANATION))
    for copied in copies:
        assert (type(copied), str(copied)) == (type(EXPLANATION), str(EXPLANATION))


@pytest.mark.needs("jax")
@by_name
def test_jit_and_vmap_take_it_as_an_argument(name: str) -> None:
    import jax
    import jax.numpy as jnp

    value, use = USED[name]
    x = jnp.asarray(X)
    mapped = jax.jit(jax.vmap(use))
    for _ in range(2):
        stacked = jax.tree.map(lambda array: jnp.stack([array, array]), copy.deepcopy(value))
        assert type(stacked) is type(value)
        results = mapped(stacked, jnp.stack([x, x]))
    assert mapped._cache_size() == 1
    for result in results:
        np.testing.assert_allclose(result, use(value, X), atol=3e-6)


CHANGELESS = [name for name, (value, _) in USED.items() if is_dataclass(value) and name != "a caller's layer"]


@pytest.mark.parametrize("name", CHANGELESS)
def test_no_attribute_is_set_or_deleted(name: str) -> None:
    """Of a field, the message says how to get another object; without one, what fields there are."""
    value = copy.copy(USED[name][0])
    kind = re.escape(type(value).__name__)
    names = [field.name for field in fields(value) if field.init]
    listed = rf"Its fields are {', '.join(names)}\.$"
    hints = {names[0]: rf"Write dataclasses\.replace\(x, {names[0]}=\.\.\.\) for", "foo": listed}
    before = repr(value)
    for attribute, hint in hints.items():
        rule = (
            rf"^{kind}: `{attribute}` cannot be (set|deleted), because instances of {kind} never change; got "
        )
        with pytest.raises(FrozenInstanceError, match=rf"{rule}{attribute}=1\. {hint}"):
            setattr(value, attribute, 1)
        with pytest.raises(FrozenInstanceError, match=rf"{rule}attribute='{attribute}'\. {hint}"):
            delattr(value, attribute)
    assert repr(value) == before


def test_a_class_derived_without_dataclass_has_attributes_of_its_own() -> None:
    class Named(Linear):
        def __init__(self, weight: Any, label: str) -> None:
            super().__init__(weight)
            self.label = label

    named = Named(np.eye(3), "x")
    named.label = "y"
    assert named.label == "y"
    del named.label
    with pytest.raises(FrozenInstanceError, match=r"^Named: `weight` cannot be set"):
        named.weight = np.eye(3)


@pytest.mark.parametrize(
    "module", [sdpa_xp, masks, biases, positional, layers], ids=lambda module: module.__name__
)
def test_annotations_can_be_read(module: Any) -> None:
    """As wrappers read them, and type checkers at run time; but the class of a state imports its function."""
    values = [getattr(module, name) for name in module.__all__ if name != "attention_state"]
    hints = [get_type_hints(value) for value in values if inspect.isfunction(value) or inspect.isclass(value)]
    assert any(hints)
