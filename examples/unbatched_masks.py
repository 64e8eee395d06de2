"""Attention as in a NumPy tutorial: no batch, a mask whose True means "ignore", outputs between the values.

    ignored (3, 5), True = ignore      x . . . .        ~ignored, True = may attend      . x x x x
                                       . . . x x                                         x x x . .
                                       . . . . .                                         x x x x x

Each output is a mean of the values, by weights from 0 to 1 that sum to 1: it lies in their convex hull.

Run it: python examples/unbatched_masks.py [picture.png]
"""

from __future__ import annotations

import sys
from typing import Any

import numpy as np

from sdpa_xp import attention_weights, scaled_dot_product_attention


def main(picture: str | None = None) -> None:
    """Check the conversion and the hull; draw them if a file is named."""
    rng = np.random.default_rng(4)
    query, key, value = (rng.standard_normal(shape) for shape in ((3, 4), (5, 4), (5, 2)))
    ignored = np.zeros((3, 5), bool)
    ignored[0, 0] = ignored[1, 3:] = True

    output = scaled_dot_product_attention(query, key, value, ~ignored)
    weights = attention_weights(query, key, attn_mask=~ignored)
    assert np.all(weights[ignored] == 0)
    assert np.all(weights[~ignored] > 0)
    assert np.allclose(output[1], scaled_dot_product_attention(query[1:2], key[:3], value[:3])[0])
    wrong = scaled_dot_product_attention(query, key, value, ignored)  # without ~, the other keys are attended
    assert np.all(wrong[2] == 0)  # the third query then has no key
    assert not np.allclose(wrong, output)
    print("torch.nn marks the keys to ignore; sdpa_xp marks the keys that may be attended. ~mask converts one:")
    print((~ignored).astype(int))

    for row, allowed in zip(output, ~ignored, strict=True):
        assert inside(row, hull(value[allowed]))
    assert not inside(value.max(axis=0) + 1, hull(value))
    print(
        "Each output lies within the convex hull of the values that its query may attend to:",
        output.round(3),
        sep="\n",
    )
    if picture is not None:
        draw(value, output).savefig(picture)


def hull(points: np.ndarray) -> np.ndarray:
    """Return the corners of the convex hull in the plane, counterclockwise (Andrew's monotone chain, 1979)."""

    def half(ordered: np.ndarray) -> list[np.ndarray]:
        chain: list[np.ndarray] = []
        for point in ordered:
            while len(chain) > 1 and turn(chain[-2], chain[-1], point) <= 0:
                chain.pop()
            chain.append(point)
        return chain[:-1]

    ordered = points[np.lexsort(points.T[::-1])]
    return np.stack(half(ordered) + half(ordered[::-1]))


def turn(a: np.ndarray, b: np.ndarray, c: np.ndarray) -> float:
    """Return a positive number if a, b, c turn to the left."""
    return float((b[0] - a[0]) * (c[1] - a[1]) - (b[1] - a[1]) * (c[0] - a[0]))


def inside(point: np.ndarray, corners: np.ndarray) -> bool:
    """Return whether a point is to the left of every edge."""
    return all(turn(a, b, point) >= -1e-12 for a, b in zip(corners, np.roll(corners, -1, axis=0), strict=True))


def draw(value: np.ndarray, output: np.ndarray) -> Any:
    """Return a Matplotlib figure of the values, their hull, and the outputs in it."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(4, 4), layout="constrained")
    axes = figure.subplots()
    axes.fill(*hull(value).T, color="#E6E6E6", zorder=0, label="convex hull")
    axes.scatter(*value.T, color="#0072B2", marker="o", label="values")
    axes.scatter(*output.T, color="#D55E00", marker="x", label="outputs")
    axes.legend()
    return figure


if __name__ == "__main__":
    main(*sys.argv[1:])
