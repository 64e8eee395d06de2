"""Masks and biases are traced from their formulas: the caller's classes, and public ones."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, cast

import graphs
import numpy as np
import pytest
from public_masks import CALLS
from short_runs import assert_right

from sdpa_xp import KVCache, biases, masks, scaled_dot_product_attention
from sdpa_xp.biases import Bias
from sdpa_xp.biases.algebra import Term
from sdpa_xp.masks import Mask
from sdpa_xp.masks.algebra import Pattern
from sdpa_xp_export import TensorSpec, export_attention, to_onnx, verify

pytestmark = pytest.mark.usefixtures("small_blocks")


def without_inputs(function: Callable[..., Mask], arguments: dict[str, Any]) -> graphs.Rules:
    return lambda: {"attn_mask": function(**arguments)}


PUBLIC: dict[str, graphs.Rules] = {
    **{function.__name__: without_inputs(function, arguments) for function, arguments in CALLS.items()},
    "neighbourhood": lambda: {"attn_mask": masks.neighbourhood((3, 3), 1, periodic=(False, True))},
    "blocks": lambda: {"attn_mask": masks.blocks([[True, False, True], [False, True, True]], (3, 4))},
    "causal": lambda offset: {"attn_mask": masks.causal(offset)},
    "document": lambda query_ids, key_ids: {"attn_mask": masks.document(query_ids, key_ids)},
    "from_array": lambda attn_mask: {"attn_mask": masks.from_array(attn_mask)},
    "from_function": lambda: {"attn_mask": masks.from_function(lambda b, h, i, j: (j + b) % (h + 2) < 2)},
    "padding": lambda key_lengths, query_lengths: {"attn_mask": masks.padding(key_lengths, query_lengths)},
    "prefix": lambda length: {"attn_mask": masks.prefix(length)},
    "sliding_window": lambda offset: {"attn_mask": masks.sliding_window(2, 1, offset=offset)},
}
"""Each public mask, with an input where it takes one, or where its call is for other lengths."""
NO_MASKS = {"Mask", "to_array"}
NAMES = {graphs.BATCH: "B", 5: "L", 9: "S"}
KNOWN_LENGTHS = {
    "blocks": {graphs.BATCH: "B"},
    "keys": {graphs.BATCH: "B"},
    "neighbourhood": {graphs.BATCH: "B"},
    "tree": {graphs.BATCH: "B", 9: "S"},
}
"""The lengths that may be names where a mask is made for numbers."""
RUNTIMES = ["onnxruntime>=1.23;cpu", "onnxruntime>=1.28;cpu", "onnxruntime>=1.30;web", "onnxruntime>=1.28;cuda"]


def test_every_public_mask_has_a_line() -> None:
    assert PUBLIC.keys() == {*masks.__all__} - NO_MASKS


@pytest.mark.parametrize("name", PUBLIC)
def test_public_masks(rng: np.random.Generator, name: str) -> None:
    """In every form that takes masks; `verify` agrees."""
    graphs.check_forms(
        graphs.qkv(rng),
        PUBLIC[name],
        graphs.operands(PUBLIC[name], rng, *graphs.LONGER),
        names=KNOWN_LENGTHS.get(name, NAMES),
    )


OTHERS: dict[str, Mask] = {
    "places behind a token": masks.neighbourhood(
        (2, 4), window=(2, 3), periodic=(False, True), causal=(True, False), prefix_tokens=1
    ),
    "blocks of heads": masks.blocks(np.random.default_rng(1).random((4, 2, 3)) < 0.5, (3, 4)),
    "blocks of entries": masks.blocks(np.random.default_rng(2).random((graphs.BATCH, 1, 2, 3)) < 0.5, (3, 4)),
    "blocks of entries and heads": masks.blocks(np.random.default_rng(3).random((graphs.BATCH, 4, 1, 2)) < 0.5),
    "tree of each entry": masks.tree([[-1, 0, 0, 1, -1], [-1, 0, 1, 2, 3], [-1, -1, 1, 0, 2]], offset=2),
}


@pytest.mark.parametrize("name", OTHERS)
def test_masks_of_entries_and_heads(rng: np.random.Generator, name: str) -> None:
    """In every form that takes masks, of a known batch."""
    names = {"places behind a token": {graphs.BATCH: "B"}, "tree of each entry": {9: "S"}}
    graphs.check_forms(graphs.qkv(rng), lambda: {"attn_mask": OTHERS[name]}, {}, names=names.get(name, {}))


@dataclass(frozen=True, eq=False, repr=False)
class Every(Mask, Pattern):
    """Its own pattern, of a number: each key whose number is a multiple."""

    name = "every"
    step: int

    def bind(self, grid: Any) -> Any:
        assert grid.heads
        return self

    def allowed_in(self, tile: Any) -> Any:
        return (tile.key_index % self.step == 0) | (tile.key_index == tile.query_index)


@dataclass(frozen=True)
class Nameless(Mask, Pattern):
    """Without a name; `uniform` answers for whole tiles as the library's masks do."""

    first: int

    def bind(self, _grid: Any) -> Any:
        return self

    def allowed_in(self, tile: Any) -> Any:
        if tile.columns.stop <= self.first:
            return True
        return tile.grid.xp.where(tile.key_index < self.first, True, tile.key_index == tile.query_index)


@dataclass(frozen=True, eq=False, repr=False)
class Table(Mask):
    """Of an array, or of an input, that is asked for each pair."""

    name = "table"
    allowed: Any

    def bind(self, grid: Any) -> Any:
        return Looked(grid.check_scores_shape("attn_mask", self.allowed))


@dataclass(frozen=True)
class Looked(Pattern):
    allowed: Any

    def allowed_in(self, tile: Any) -> Any:
        return ~tile.slice(self.allowed)


@dataclass(frozen=True, eq=False, repr=False)
class LeftPadding(Mask):
    """Of an integer for each batch entry: the keys from there on, and never the last of all."""

    name = "padding"  # the name of another mask
    first: Any

    def bind(self, grid: Any) -> Any:
        return From(grid.check_integers("attn_mask.first", self.first, least=0), grid.keys)


@dataclass(frozen=True)
class From(Pattern):
    first: Any
    keys: Any

    def allowed_in(self, tile: Any) -> Any:
        return (tile.key_index >= tile.slice_integers(self.first).values) & (tile.key_index < self.keys - 1)


class Strictly(type(masks.causal())):  # type: ignore[misc]
    """A subclass of a mask of the library, which keeps its name and its field."""

    def bind(self, grid: Any) -> Any:
        return cast(Any, ~masks.sliding_window(0, None) & masks.prefix(7)).bind(grid)


class Closed(Mask, Pattern):
    """No dataclass; its array is a global."""

    def bind(self, _grid: Any) -> Any:
        return self

    def allowed_in(self, tile: Any) -> Any:
        xp = tile.grid.xp
        return (
            xp.take(xp.asarray(PHASES), xp.reshape(tile.key_index, (-1,)) % 3, axis=0) <= tile.query_index % 2
        )


PHASES = np.asarray([0, 2, 1])

OWN: dict[str, graphs.Rules] = {
    "a number": lambda: {"attn_mask": Every(3)},
    "joined": lambda key_lengths: {"attn_mask": (masks.causal() & ~Every(2)) | masks.padding(key_lengths)},
    "no name": lambda: {"attn_mask": Nameless(4)},
    "an array": lambda allowed: {"attn_mask": Table(allowed)},
    "integers": lambda first: {"attn_mask": LeftPadding(first)},
    "a list": lambda: {"attn_mask": LeftPadding((0, 3, 2))},
    "a subclass": lambda: {"attn_mask": Strictly()},
    "no dataclass": lambda: {"attn_mask": Closed()},
    "with a bias": lambda bias: {"attn_mask": Every(2), "bias": bias, "softcap": 2.0},
}


@pytest.mark.parametrize(("queries", "keys"), [graphs.LONGER, graphs.SHORTER])
@pytest.mark.parametrize("name", OWN)
def test_own_masks(rng: np.random.Generator, name: str, queries: int, keys: int) -> None:
    """In every form that takes masks, of lengths that only a run knows."""
    rules = OWN[name]
    arguments = {
        "integers": {"first": np.asarray([0, 4, 9])},
        "an array": {"allowed": np.asarray(rng.random((4, queries, keys)) < 0.6)},
    }.get(name) or graphs.operands(rules, rng, queries, keys)
    names = {queries: "L", keys: "S"} | ({} if name == "a list" else {graphs.BATCH: "B"})
    graphs.check_forms(graphs.qkv(rng, queries, keys), rules, arguments, names=names)


@pytest.mark.parametrize("runtime", RUNTIMES)
@pytest.mark.parametrize("opset", [17, 21])
def test_runtimes(rng: np.random.Generator, runtime: str, opset: int) -> None:
    """A formula is written for each of them; here the CPU computes the graphs of all."""
    arrays, mask = graphs.qkv(rng), masks.causal(2) & (Every(2) | Closed())
    specs = [graphs.spec(x, NAMES) for x in arrays.values()]
    model = export_attention(*specs, mask, runtime=runtime, opset=opset)
    graphs.assert_close(graphs.run(model, arrays), graphs.library(arrays, ("output",), attn_mask=mask))


@pytest.mark.parametrize("form", ["auto", "attention", *graphs.EVERY_CALL])
def test_of_a_cache(form: str) -> None:
    """A position counts the keys before the first query, as in the library's own caches."""
    new, past = (TensorSpec("float32", ("B", 2, n, 8)) for n in ("L", "P"))
    mask = Every(3) & masks.causal()
    model = export_attention(new, new, new, mask, past_key=past, past_value=past, form=form)
    assert_right(model, attn_mask=mask)


@pytest.mark.parametrize("form", ["auto", "attention", *graphs.EVERY_CALL])
def test_in_a_layer(rng: np.random.Generator, form: str) -> None:
    """A mask of the layer may hold a value that the layer computes, and an array."""

    def layer(x: Any, first: Any) -> Any:
        xp = x.__array_namespace__()
        cache = KVCache(x[:, :, :1, :], x[:, :, :1, :]).append(x, x)
        mask = LeftPadding(first // 2) & Every(2)
        return scaled_dot_product_attention(x, x, xp.tanh(x), mask) + cache.attend(x, Every(3))

    x, first = rng.standard_normal((3, 2, 5, 8), np.float32), np.asarray([0, 3, 7])
    specs = TensorSpec("float32", ("B", 2, "L", 8)), TensorSpec("int64", ("B",))
    (output,) = graphs.run(to_onnx(layer, *specs, form=form), {"x": x, "first": first}).values()
    np.testing.assert_allclose(output, layer(x, first), atol=3e-6)


@dataclass(frozen=True, eq=False, repr=False)
class Nearness(Bias, Term):
    """A bias of the caller, which masks what is far."""

    name = "alibi"
    slopes: Any

    def bind(self, grid: Any) -> Any:
        return (Nearness(grid.check_heads_shape("bias.slopes", self.slopes)),)

    def apply(self, tile: Any, scores: Any, *, in_place: bool = False) -> Any:
        del in_place
        xp = tile.grid.xp
        distance = xp.abs(tile.query_index - tile.key_index)
        changed = scores - tile.slice(self.slopes) * xp.astype(distance, tile.grid.dtype)
        return xp.where(distance > 3, -xp.inf, changed), distance <= 3


@pytest.mark.parametrize("masked", [True, False])
def test_own_biases(rng: np.random.Generator, masked: bool) -> None:
    def rules(slopes: Any) -> dict[str, Any]:
        return {"bias": Nearness(slopes) + biases.alibi(4)} | ({"attn_mask": Every(2)} if masked else {})

    graphs.check_forms(graphs.qkv(rng), rules, graphs.operands(rules, rng, *graphs.LONGER), names=NAMES)


@pytest.mark.usefixtures("short_verify")
@pytest.mark.parametrize(
    ("mask", "other"),
    [(Every(3), Every(2)), (Strictly(), masks.causal()), (LeftPadding(3), masks.padding(3))],
    ids=["a number", "a subclass", "the name of another"],
)
def test_verify_asks_for_a_mask_of_the_caller(mask: Mask, other: Mask) -> None:
    """Its class cannot be written to the metadata, whatever its name is."""
    x = TensorSpec("float32", (2, 4, 9, 8))
    model = export_attention(x, x, x, mask)
    with pytest.raises(ValueError, match="written as text"):
        verify(model)
    assert verify(model, attn_mask=mask).agrees
    assert not verify(model, attn_mask=other).agrees


@dataclass(frozen=True, eq=False, repr=False)
class AsManyAs(Mask, Pattern):
    """As many keys as an array has elements behind its first."""

    name = "as many as"
    x: Any

    def bind(self, _grid: Any) -> Any:
        return self

    def allowed_in(self, tile: Any) -> Any:
        xp, rest = tile.grid.xp, self.x[1:]
        return xp.astype(tile.key_index, rest.dtype) < xp.sum(xp.ones(rest.shape, dtype=rest.dtype))


@pytest.mark.parametrize("form", ["primitive", "tiled"])
def test_a_length_in_a_formula_has_no_name_of_the_caller(rng: np.random.Generator, form: Any) -> None:
    """`x[1:]` of N elements is no axis N_less_1 of the call."""
    query, key = (TensorSpec("float32", (1, 2, length, 8)) for length in ("L", "N_less_1"))
    model = export_attention(query, key, key, AsManyAs(TensorSpec("float32", ("N",))), form=form)
    q, k, v = (rng.standard_normal((1, 2, length, 8)).astype(np.float32) for length in (3, 9, 9))
    results = graphs.run(model, {"query": q, "key": k, "value": v, "x": np.ones(5, np.float32)})
    graphs.assert_close(results, {"output": scaled_dot_product_attention(q, k[:, :, :4], v[:, :, :4])})
