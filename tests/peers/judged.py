"""Ours and a peer's result, each judged by the float64 reference and the house's bound.

A peer that left the bound would be as much news as if we did: then the two do not mean the same call.
"""

from __future__ import annotations

import importlib
from typing import Any

import numpy as np
import pytest
from calls import largest_terms
from internals import EPS, jax_kernels, judge, reference, textbook

CLOSE = 2e-6
"""Between two float32 values of size 1, where the reference has no such call."""


def assert_agree(
    xp: Any, results: dict[str, Any], arrays: dict[str, Any], *, jit: Any = lambda f: f, **rules: Any
) -> None:
    """Each of `results` is attention of `arrays`, query to bias, by `rules`; all are arrays of `xp`.

    `jit` compiles the textbook formula that sets the bound, for a library that is slow without.
    """
    numbers = {name: np.asarray(x) for name, x in arrays.items()}
    dtype = numbers["query"].dtype
    expected, _, weights = reference.attention(**numbers, **rules)
    plain = np.asarray(jit(lambda arrays: textbook(xp, **arrays, **rules))(arrays))
    for name, result in results.items():
        output = np.asarray(result)
        assert output.dtype == dtype, name
        assert output.shape == expected.shape, name
        agreement = judge(output, expected, plain, dtype.name, largest_terms(weights, numbers["value"]))
        assert agreement.agrees, (name, agreement)


def assert_lse_agree(results: dict[str, Any], arrays: dict[str, Any], **rules: Any) -> None:
    """Each of `results` is the natural log-sum-exp; it is as exact as the scores that it is made of."""
    numbers = {name: np.asarray(x) for name, x in arrays.items()}
    expected = reference.attention(**numbers, **rules)[1]
    finite = np.isfinite(expected)
    bound = 8 * EPS[numbers["query"].dtype.name] * max(1.0, float(np.max(np.abs(expected[finite]))))
    for name, result in results.items():
        lse = np.asarray(result)
        assert lse.shape == expected.shape, name
        np.testing.assert_array_equal(np.isneginf(lse), ~finite, err_msg=name)
        assert np.max(np.abs(lse[finite] - expected[finite])) <= bound, name


def record_kernel(vendor: str, monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, ...]]:
    """Query, key, value and output of each call that goes to the kernel of torch, jax or mlx from now on."""
    calls: list[tuple[Any, ...]] = []

    def recorded(query: Any, key: Any, value: Any, *rest: Any, **rules: Any) -> Any:
        output = kernel(query, key, value, *rest, **rules)
        calls.append((query, key, value, output))
        return output

    if vendor == "jax":
        kernel = jax_kernels._compiled()
        monkeypatch.setattr(jax_kernels, "_compiled", lambda: recorded)
    else:
        module = importlib.import_module({"torch": "torch._C._nn", "mlx": "mlx.core.fast"}[vendor])
        kernel = module.scaled_dot_product_attention
        monkeypatch.setattr(module, "scaled_dot_product_attention", recorded)
    return calls
