"""How much work a call and its gradients are, in counts of tiles, products and calls of functions."""

from __future__ import annotations

import importlib
import math
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from internals import ONE_CORE, PROBE_SIDE, backward, cut_small, prepare, products, scores, softmax
from libraries import each_module

import sdpa_xp
from sdpa_xp import biases, explain, masks, scaled_dot_product_attention
from sdpa_xp import scaled_dot_product_attention_vjp as vjp

MOST_FILES = 22
"""Of the library in a call that nothing is known of yet: to be lowered, not to be raised."""
MOST_CALLS: dict[tuple[str, str], int] = {
    ("numpy", "plain"): 53,
    ("numpy", "causal"): 61,
    ("numpy", "padding"): 58,
    ("torch", "plain"): 49,
    ("torch", "causal"): 99,
    ("torch", "padding"): 97,
    ("numpy-torch", "plain"): 76,
    ("numpy-torch", "causal"): 128,
    ("numpy-torch", "padding"): 126,
}
"""Of functions of Python and C in one tiny call: to be lowered when there are fewer, not to be raised."""
MOST_CALLS_OF_A_TILE = 25
"""The same for each tile of a long call."""
TINY: dict[str, dict[str, Any]] = {
    "plain": {},
    "causal": {"attn_mask": masks.causal()},
    "padding": {"attn_mask": masks.padding([5])},
}


def share(length: int, **rules: Any) -> float:
    """Of the tiles, those that are computed."""
    x = np.broadcast_to(np.float32(0), (1, 8, length, 64))
    explained = explain(x, x, x, **rules)
    return explained.tiles / explained.total_tiles


def calls_of(function: Callable[[], object]) -> int:
    """How many functions of Python and C a call of `function` calls in this thread."""
    calls: list[str] = []

    def count(_frame: Any, event: str, _argument: Any) -> None:
        if event in ("call", "c_call"):
            calls.append(event)

    sys.setprofile(count)
    try:
        function()
    finally:
        sys.setprofile(None)
    return len(calls)


def test_files_that_a_new_call_goes_through(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever follows a call opens so many files: from the public function to the products, and back."""
    monkeypatch.setenv("SDPA_XP_NUM_THREADS", "1")  # the profile hook sees this thread alone
    x = np.random.default_rng(0).standard_normal((1, 4, 1024, 64), dtype=np.float32)
    scaled_dot_product_attention(x, x, x)  # loads what is loaded late
    prepare._CACHE.clear()
    package, files = str(Path(sdpa_xp.__file__).parent), set[str]()

    def note(frame: Any, event: str, _argument: Any) -> None:
        if event == "call" and frame.f_code.co_filename.startswith(package):
            files.add(frame.f_code.co_filename.removeprefix(package))

    sys.setprofile(note)
    try:
        scaled_dot_product_attention(x, x, x, is_causal=True)
    finally:
        sys.setprofile(None)
    assert len(files) <= MOST_FILES, sorted(files)
    assert {"/_attention.py", "/_programs/softmax.py", "/_libraries/numpy.py"} < files


def test_masked_tiles_cost_nothing() -> None:
    assert share(4096) == 1
    assert share(4096, is_causal=True) <= 0.6
    assert share(16384, attn_mask=masks.sliding_window(512, 0)) <= 0.1
    assert share(4096, attn_mask=masks.padding(1024)) == 0.25
    assert share(4096, attn_mask=(np.arange(4096) < 1024)) == 0.25


@pytest.mark.parametrize("length", [256, 1024, 4096, 16384])
def test_a_tile_fits_into_the_cache_of_a_core(length: int) -> None:
    for heads in (1, 8, 32):
        x = np.broadcast_to(np.float32(0), (1, heads, length, 64))
        rows, columns = explain(x, x, x).tile
        assert rows * columns <= ONE_CORE.scores


@pytest.mark.needs("jax")
def test_tiles_of_a_compiled_library_have_one_shape() -> None:
    """Each operation is compiled for each shape: whole tiles on and below the diagonal share theirs."""
    xp: Any = importlib.import_module("jax.numpy")
    x = xp.zeros((1, 8, 2048, 64), dtype=xp.float32)
    rows, columns = explain(x, x, x, is_causal=True).tile
    assert rows == columns


def test_two_products_a_tile(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where a boolean array masks, and in a causal call."""
    computed: list[int] = []
    product = scores.matmul_grouped

    def counted(*arrays: Any) -> Any:
        computed.append(1)
        return product(*arrays)

    for module in (scores, products, softmax):
        monkeypatch.setattr(module, "matmul_grouped", counted)
    x = np.random.default_rng(0).standard_normal((2, 1100, 16), dtype=np.float32)
    for rules in ({}, {"is_causal": True}, {"attn_mask": np.arange(1100) < 700}):
        computed.clear()
        scaled_dot_product_attention(x, x, x, **rules)
        assert len(computed) == 2 * explain(x, x, x, **rules).tiles > 2


class Counted(np.ndarray):
    """Scores of a tile that count how often a product with them makes another array."""

    products = 0

    def __mul__(self, other: Any) -> Any:
        Counted.products += 1
        return super().__mul__(other)


def test_a_mask_multiplies_the_scores_of_a_tile_in_place(monkeypatch: pytest.MonkeyPatch) -> None:
    """exp and the mask of a tile take no memory of their own."""
    computed_tiles, tiles = scores.Scores.computed_tiles, []

    def counted(*arguments: Any, **keywords: Any) -> Any:
        for tile, s, allowed, capped in computed_tiles(*arguments, **keywords):
            tiles.append(s.shape)
            yield tile, s.view(Counted), allowed, capped

    monkeypatch.setattr(scores.Scores, "computed_tiles", counted)
    monkeypatch.setattr(Counted, "products", 0)
    x = np.random.default_rng(0).standard_normal((2, 4, 700, 16), dtype=np.float32)
    scaled_dot_product_attention(x, x, x, np.arange(700) % 3 > 0, is_causal=True)
    assert len(tiles) > 8
    assert Counted.products == 0


@pytest.mark.parametrize("rules", [{}, {"is_causal": True}], ids=["all pairs", "causal"])
def test_functions_called_by_a_tile(rules: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """In two threads they take turns in Python, so each function of a tile costs both of them time."""
    monkeypatch.setenv("SDPA_XP_NUM_THREADS", "1")
    x = np.random.default_rng(0).standard_normal((1, 8, 4096, 64), dtype=np.float32)
    scaled_dot_product_attention(x, x, x, **rules)
    calls = calls_of(partial(scaled_dot_product_attention, x, x, x, **rules))
    tiles = explain(x, x, x, **rules).tiles
    assert tiles > 500
    assert 2 * tiles < calls <= MOST_CALLS_OF_A_TILE * tiles


@pytest.mark.parametrize("name", TINY)
@pytest.mark.parametrize("module", each_module("numpy", "torch"))
def test_functions_called_by_a_tiny_call(module: str, name: str) -> None:
    xp: Any = importlib.import_module(module)
    x = xp.ones((1, 1, 8, 8), dtype=xp.float32)
    assert 20 < calls_of_a_known_call(x, **TINY[name]) <= MOST_CALLS[module, name]


@pytest.mark.needs("torch")
@pytest.mark.parametrize("name", TINY)
def test_functions_called_by_a_tiny_call_of_another_kernel(name: str) -> None:
    x = np.ones((1, 1, 8, 8), np.float32)
    calls = calls_of_a_known_call(x, **TINY[name], implementation="torch")
    assert MOST_CALLS["torch", name] < calls <= MOST_CALLS["numpy-torch", name]


def calls_of_a_known_call(x: Any, **rules: Any) -> int:
    scaled_dot_product_attention(x, x, x, **rules)  # checks and plans; what it finds is kept
    return calls_of(partial(scaled_dot_product_attention, x, x, x, **rules))


@pytest.mark.parametrize(
    "rules",
    [{}, {"is_causal": True}, {"attn_mask": masks.padding(30)}, {"attn_mask": masks.sliding_window(3, 0)}],
    ids=["plain", "causal", "padding", "window"],
)
@pytest.mark.parametrize("heads", [1, 2])
def test_the_formula_has_the_bits_of_one_tile(
    rules: dict[str, Any], heads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    rng = np.random.default_rng(0)
    query, key, value = (rng.standard_normal((2, n, 32, 8), np.float32) for n in (2, heads, heads))
    formula = scores.OneTile.attend
    used: list[Any] = []
    monkeypatch.setattr(scores.OneTile, "attend", lambda *call: used.append(formula(*call)) or used[-1])
    output = scaled_dot_product_attention(query, key, value, **rules)
    assert output is used[0]
    monkeypatch.setattr(scores.OneTile, "attend", lambda *_: None)
    np.testing.assert_array_equal(output, scaled_dot_product_attention(query, key, value, **rules))


F = np.float32


@pytest.mark.parametrize(("queries", "keys"), [(3, 5), (5, 3), (700, 5), (5, 700), (700, 900)])
def test_a_function_is_tried_on_few_scores(queries: int, keys: int) -> None:
    """Before anything else is computed, and of no pair that there is not."""
    shapes: list[tuple[int, ...]] = []

    def score_mod(score: Any, _b: Any, _h: Any, i: Any, j: Any) -> Any:
        shapes.append(np.broadcast_shapes(score.shape, i.shape, j.shape))
        return score + (i - j).astype(F)

    q, k = np.ones((1, queries, 4), F), np.ones((1, keys, 4), F)
    vjp(q, k, k, bias=biases.from_function(score_mod))
    probed = PROBE_SIDE
    assert math.prod(shapes[0]) == min(queries, probed) * min(keys, probed)
    assert max(map(math.prod, shapes)) <= max(queries * keys, probed**2)


def test_no_input_is_searched_for_special_values_where_nothing_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a device a pullback knows first which inputs are finite; on the CPU it looks when a result is not."""
    monkeypatch.setattr(prepare.PreparedCall, "_search_inputs", None)
    x = np.ones((1, 40, 4), F)
    vjp(x, x, x, masks.padding([5]))[1](x)


def test_five_products_a_tile_beside_the_scores(monkeypatch: pytest.MonkeyPatch) -> None:
    """The scores again, and those of the values, the weights, the queries and the keys."""
    computed: list[str] = []
    for module in (scores, products, softmax, backward):
        for name in ("matmul_grouped", "matmul_over_group"):
            if hasattr(module, name):
                product = getattr(module, name)

                def counted(*arrays: Any, product: Any = product, name: str = name) -> Any:
                    computed.append(name)
                    return product(*arrays)

                monkeypatch.setattr(module, name, counted)
    cut_small(monkeypatch)
    x = np.random.default_rng(0).standard_normal((2, 8, 4)).astype(F)
    output, pullback = vjp(x, x, x)
    computed.clear()
    pullback(output)
    tiles = len(computed) // 5
    assert tiles > 2
    assert computed.count("matmul_grouped") == 3 * tiles
    assert computed.count("matmul_over_group") == 2 * tiles
