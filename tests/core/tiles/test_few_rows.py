"""One query of grouped heads, and a few queries, against many keys: NumPy multiplies row by row."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from calls import assert_agrees, draw_named, moved
from internals import override
from internals import products as products_of_tiles
from libraries import LIBRARIES

from sdpa_xp import scaled_dot_product_attention

NUMPY = LIBRARIES["numpy"][1]()


@pytest.fixture
def products(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, ...]]:
    """The shapes of the scores that are computed row by row."""
    shapes: list[tuple[int, ...]] = []
    multiply = products_of_tiles.multiply_few_rows

    def watched(*arrays: Any) -> Any:
        shapes.append((product := multiply(*arrays)).shape)
        return product

    monkeypatch.setattr(products_of_tiles, "multiply_few_rows", watched)
    return shapes


@pytest.fixture(params=[True, False], ids=["one tile", "in tasks"])
def softmax(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if not request.param:
        override(monkeypatch, "LEAST_SCORES_WITHOUT_MAXIMUM", 0)


@pytest.mark.parametrize("layout", ["...HLE", "...LHE"])
@pytest.mark.parametrize("dtype", ["float16", "float32", "float64"])
@pytest.mark.usefixtures("softmax")
@pytest.mark.parametrize(
    ("scores", "key_heads", "is_few"),
    [
        ((2, 8, 1, 512), 2, True),
        ((2, 6, 1, 700), 1, True),
        ((1, 3, 2, 513), 3, True),
        ((1, 4, 3, 600), 2, True),
        ((1, 7, 1, 600), 1, True),
        ((1, 4, 1, 511), 2, False),  # few keys
        ((1, 8, 1, 600), 1, False),  # many rows
        ((1, 3, 1, 600), 3, False),  # one row, which is no faster alone
    ],
)
def test_rows_are_multiplied_alone(
    rng: np.random.Generator, products: Any, scores: Any, key_heads: int, is_few: bool, dtype: str, layout: Any
) -> None:
    batch, _, _, keys = scores
    shape = (batch, key_heads, keys)
    arrays = draw_named(rng, {"query": (*scores[:3], 16), "key": (*shape, 16), "value": (*shape, 8)}, dtype)
    passed = {name: moved(array, layout) for name, array in arrays.items()}
    output = scaled_dot_product_attention(**passed, layout=layout, implementation="xp")
    assert_agrees(NUMPY, moved(output, layout), arrays)
    assert products == ([scores] if is_few else [])


def test_keys_whose_batch_is_one(rng: np.random.Generator, products: list[tuple[int, ...]]) -> None:
    shapes = {"query": (3, 4, 1, 16), "key": (1, 2, 600, 16), "value": (1, 2, 600, 8)}
    arrays = draw_named(rng, shapes)
    assert_agrees(NUMPY, scaled_dot_product_attention(**arrays), arrays)
    assert products == [(3, 4, 1, 600)]


def test_a_masked_nan(rng: np.random.Generator, products: list[tuple[int, ...]]) -> None:
    arrays = draw_named(rng, {"query": (4, 1, 16), "key": (2, 600, 16), "value": (2, 600, 8)})
    mask = np.arange(600) != 3
    clean = scaled_dot_product_attention(**arrays, attn_mask=mask)
    arrays["key"][:, 3] = np.nan
    np.testing.assert_array_equal(scaled_dot_product_attention(**arrays, attn_mask=mask), clean)
    assert (4, 1, 600) in products
