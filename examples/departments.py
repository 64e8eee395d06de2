"""Attention as a lookup: inputs of different widths, why the scale, and two departments by four subjects.

A department is a query with a weight for each subject. A subject is a key; its value has a grade for each of
three students. The output is the mean of the grades with these weights:

                    maths  physics  biology  history         Ada  Bo  Cy
    engineering      0.1     0.2      0.3      0.4    maths    4   5   1       6.9  7.5  10.1
    medicine         0.4     0.1      0.4      0.1    physics  4   8  10   =   8.3  8.7   7.3
                                                      biology 15  14  12
                                                      history  3   3  11

Run it: python examples/departments.py
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from sdpa_xp import attention_scores, attention_weights, scaled_dot_product_attention
from sdpa_xp.layers import SingleHeadAttention

WEIGHTS = [[0.1, 0.2, 0.3, 0.4], [0.4, 0.1, 0.4, 0.1]]
GRADES = [[4.0, 5.0, 1.0], [4.0, 8.0, 10.0], [15.0, 14.0, 12.0], [3.0, 3.0, 11.0]]
MEANS = [[6.9, 7.5, 10.1], [8.3, 8.7, 7.3]]


def main(xp: Any = np) -> None:
    """Run every step with the arrays of `xp`, a module such as numpy, torch or jax.numpy."""
    widths_that_differ(xp)
    variance(xp)
    lookup(xp)


def widths_that_differ(xp: Any) -> None:
    """Project three queries of width 6 and four keys of width 5 to the same width, d_k = 4."""
    rng = np.random.default_rng(0)
    people = xp.asarray(rng.standard_normal((3, 6), np.float32))
    things = xp.asarray(rng.standard_normal((4, 5), np.float32))
    layer = SingleHeadAttention.init(rng, 6, attention_dim=4, key_dim=5, like=people)
    query, key, value = (head[0] for head in layer.project(people, things))
    assert (query.shape, key.shape, value.shape) == ((3, 4), (4, 4), (4, 4))

    scores = query @ key.T / math.sqrt(4)
    exponentials = xp.exp(scores)
    weights = exponentials / exponentials.sum(-1)[:, None]
    assert_near(layer.weights(people, things), weights)
    assert_near(layer(people, things), weights @ value)
    print("Queries of width 6 and keys of width 5 are mapped to one width, 4, so that they can be compared:")
    print(f"  query {tuple(query.shape)}, key {tuple(key.shape)}, weights {tuple(weights.shape)}")


def variance(xp: Any) -> None:
    """Check that products of vectors of d_k numbers of N(0, 1) have variance d_k, and scores variance 1.

    The relative error of the variance of n samples is about sqrt(2 / n); the check allows five times as much.
    """
    rng, count = np.random.default_rng(1), 1000
    print("Without the scale 1 / sqrt(d_k), wide vectors give almost all weight to one key:")
    for width in (4, 64, 1024):
        query, key = (xp.asarray(rng.standard_normal((count, width), np.float32)) for _ in range(2))
        products = attention_scores(query, key, scale=1.0).diagonal()
        scores = attention_scores(query, key).diagonal()
        allowed = 5 * math.sqrt(2 / count)
        assert abs(float((products**2).mean()) / width - 1) < allowed
        assert abs(float((scores**2).mean()) - 1) < allowed
        unscaled, scaled = (attention_weights(query, key, scale=scale) for scale in (1.0, None))
        largest = [float(xp.amax(weights, -1).mean()) for weights in (unscaled, scaled)]
        print(f"  d_k = {width:4}: the largest weight is {largest[0]:.2f} unscaled, {largest[1]:.2f} scaled")
    assert largest[0] > 0.9  # with d_k = 1024 the softmax picks almost one key, and its gradient vanishes
    assert largest[1] < 0.2


def lookup(xp: Any) -> None:
    """Produce chosen weights: the query is their logarithm, and the keys are unit vectors."""
    query = xp.asarray([[math.log(weight) for weight in row] for row in WEIGHTS])
    key = xp.asarray([[float(i == j) for j in range(4)] for i in range(4)])
    value = xp.asarray(GRADES)
    assert_near(attention_weights(query, key, scale=1.0), xp.asarray(WEIGHTS))
    means = scaled_dot_product_attention(query, key, value, scale=1.0)
    assert_near(means, xp.asarray(MEANS))
    print("Queries that are the logarithm of chosen weights return exactly the weighted means of the values:")
    print(means)


def assert_near(output: Any, expected: Any) -> None:
    """Check that the arrays are equal up to float32 rounding."""
    assert output.shape == expected.shape
    assert float(abs(output - expected).max()) < 1e-5


if __name__ == "__main__":
    main()
