"""How much work gradients are, in counts of scores and of products."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from internals import TileSize, backward, nonfinite, online_softmax, override, scores

from sdpa_xp import biases, gradients
from sdpa_xp import scaled_dot_product_attention_vjp as vjp

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
    probed = gradients.PROBE_SIDE
    assert math.prod(shapes[0]) == min(queries, probed) * min(keys, probed)
    assert max(map(math.prod, shapes)) <= max(queries * keys, probed**2)


def test_five_products_a_tile_beside_the_scores(monkeypatch: pytest.MonkeyPatch) -> None:
    """The scores again, and those of the values, the weights, the queries and the keys."""
    products: list[str] = []
    for module in (scores, nonfinite, online_softmax, backward):
        for name in ("matmul_grouped", "matmul_over_group"):
            if hasattr(module, name):
                product = getattr(module, name)

                def counted(*arrays: Any, product: Any = product, name: str = name) -> Any:
                    products.append(name)
                    return product(*arrays)

                monkeypatch.setattr(module, name, counted)
    for name in ("ONE_CORE", "ALL_CORES"):
        override(monkeypatch, name, TileSize(4, 6, 24))
    x = np.random.default_rng(0).standard_normal((2, 8, 4)).astype(F)
    output, pullback = vjp(x, x, x)
    products.clear()
    pullback(output)
    tiles = len(products) // 5
    assert tiles > 2
    assert products.count("matmul_grouped") == 3 * tiles
    assert products.count("matmul_over_group") == 2 * tiles
