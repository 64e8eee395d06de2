"""Kernel density, kernel regression and entropic transport as attention, each beside its formula of all pairs.

All three need the logarithm of a sum of Gaussians around the points y. |x - y|^2 = |x|^2 - 2 x.y + |y|^2, so
this is a log-sum-exp of scores with the scale 1 / width^2 and the bias -|y|^2 / (2 width^2), and the output of
attention is the mean of the values with the same weights.

Run it: python examples/kernels.py
"""

from __future__ import annotations

import math

import numpy as np

from sdpa_xp import attention_state, masks, scaled_dot_product_attention_jvp


def main() -> None:
    """Run every step."""
    density()
    regression()
    optimal_transport()


def log_density(places: np.ndarray, points: np.ndarray, width: float) -> tuple[np.ndarray, np.ndarray]:
    """Return the logarithm of the mean of a Gaussian around each point, at each place, and its gradient.

    Subtract the mean of the points from both arrays first: far from the origin, |x|^2 is large, and its digits
    are lost. `places + width**2 * gradient`, again and again, is mean-shift clustering.
    """
    count, dims = points.shape
    bias = -np.sum(points**2, axis=-1) / (2 * width**2)
    state = attention_state(places, points, points, bias, scale=width**-2)
    inside = np.sum(places**2, axis=-1) / (2 * width**2)
    volume = math.log(count) + dims / 2 * math.log(2 * math.pi * width**2)
    return state.lse - inside - volume, (state.output - places) / width**2


def density() -> None:
    """Compare the density and its gradient with those from all pairs."""
    rng = np.random.default_rng(0)
    places, points = rng.standard_normal((6, 2)), rng.standard_normal((40, 2))
    logarithm, gradient = log_density(places, points, 0.5)

    away = (places[:, None] - points) / 0.5
    kernels = np.exp(-np.sum(away**2, axis=-1) / 2) / (2 * np.pi * 0.5**2)
    weights = kernels / np.sum(kernels, axis=-1, keepdims=True)
    np.testing.assert_allclose(logarithm, np.log(np.mean(kernels, axis=-1)), atol=1e-13)
    expected = -np.sum(weights[..., None] * away, axis=1) / 0.5
    np.testing.assert_allclose(gradient, expected, atol=1e-13)
    print("The density of 40 points at 6 places, and its gradient, are those of the formula.")


def left_out(points: np.ndarray, targets: np.ndarray, width: float) -> tuple[float, float]:
    """Return the error of predicting each target from all others, and its derivative by the width.

    This is Nadaraya-Watson regression. The mask leaves out the point itself, and `moved` says how scale and
    bias change with the width.
    """
    square = np.sum(points**2, axis=-1)
    scale, bias = np.asarray(width**-2), -square / (2 * width**2)
    moved = {"scale": np.asarray(-2 / width**3), "bias": square / width**3}
    arrays = points, points, targets[:, None]
    others = ~masks.sliding_window(0, 0)
    predicted, slopes = scaled_dot_product_attention_jvp(*arrays, moved, others, bias=bias, scale=scale)
    wrong = predicted[:, 0] - targets
    return float(np.mean(wrong**2)), float(np.mean(2 * wrong * slopes[:, 0]))


def regression() -> None:
    """Choose the width by the slope of the error, and compare both with the formula over all pairs."""
    rng = np.random.default_rng(0)
    points = rng.uniform(-3, 3, (200, 1))
    targets = np.sin(2 * points[:, 0]) + 0.2 * rng.standard_normal(200)

    def formula(width: float) -> float:
        kernels = np.exp(-(((points - points.T) / width) ** 2) / 2) * (1 - np.eye(len(points)))
        return float(np.mean((kernels @ targets / np.sum(kernels, axis=-1) - targets) ** 2))

    error, slope = left_out(points, targets, 0.5)
    np.testing.assert_allclose(error, formula(0.5), atol=1e-12)
    np.testing.assert_allclose(slope, (formula(0.5 + 1e-6) - formula(0.5 - 1e-6)) / 2e-6, rtol=1e-6)

    width = 1.0
    for _ in range(60):
        error, slope = left_out(points, targets, width)
        width *= math.exp(-np.clip(2 * slope, -0.3, 0.3))
    first, _ = left_out(points, targets, 1.0)
    assert error < 0.06 < first
    print(f"The error of predicting a point from the others falls from {first:.2f} to {error:.2f}.")


def step(
    places: np.ndarray, points: np.ndarray, potential: np.ndarray, strength: float
) -> tuple[np.ndarray, np.ndarray]:
    """Return the potential of `places`, and the mean of the points where each one goes."""
    bias = (potential - np.sum(points**2, axis=-1) / 2) / strength - math.log(len(points))
    state = attention_state(places, points, points, bias, scale=1 / strength)
    return np.sum(places**2, axis=-1) / 2 - strength * state.lse, state.output


def transport(x: np.ndarray, y: np.ndarray, strength: float, steps: int = 200) -> tuple[float, np.ndarray]:
    """Return the cost of moving equal masses at x to y, and its gradient for x, by Sinkhorn's steps.

    The cost of a pair is |x - y|^2 / 2. The gradient is the way back from where each x goes.
    """
    of_y = np.zeros(len(y))
    for _ in range(steps):
        of_x, _ = step(x, y, of_y, strength)
        of_y, _ = step(y, x, of_x, strength)
    of_x, goes = step(x, y, of_y, strength)
    return float(np.mean(of_x) + np.mean(of_y)), (x - goes) / len(x)


def optimal_transport() -> None:
    """Compare the cost with that from all pairs, and its gradient with a slope."""
    rng = np.random.default_rng(0)
    x, y = rng.standard_normal((8, 2)), 1 + rng.standard_normal((12, 2))
    cost, gradient = transport(x, y, 0.5)

    def formula(x: np.ndarray) -> float:
        kernel = np.exp(-np.sum((x[:, None] - y) ** 2, axis=-1) / 2 / 0.5)
        of_y = np.ones(len(y))
        for _ in range(200):
            of_x = 1 / np.mean(kernel * of_y, axis=1)
            of_y = 1 / np.mean(kernel * of_x[:, None], axis=0)
        return float(0.5 * (np.mean(np.log(of_x)) + np.mean(np.log(of_y))))

    np.testing.assert_allclose(cost, formula(x), atol=1e-12)
    moved = np.zeros_like(x)
    moved[0, 0] = 1e-5
    slope = (formula(x + moved) - formula(x - moved)) / 2e-5
    np.testing.assert_allclose(gradient[0, 0], slope, rtol=1e-7)
    print(f"Moving 8 points to 12 costs {cost:.2f}, and the gradient is the slope.")


if __name__ == "__main__":
    main()
