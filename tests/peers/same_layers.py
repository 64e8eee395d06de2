"""Two layers with the same weights: one computes its attention itself, the other lets sdpa_xp compute it."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable
from types import ModuleType
from typing import Any

import numpy as np

ROUNDINGS = 24
"""In units of the last place of the largest number: both computations round in each of four products."""


def count_calls(adapter: ModuleType, setattr: Callable[..., None] = setattr) -> list[int]:
    """Return a list whose only number counts the calls of sdpa_xp by `adapter`."""
    calls, attend = [0], adapter.scaled_dot_product_attention

    def counted(*args: Any, **keywords: Any) -> Any:
        calls[0] += 1
        return attend(*args, **keywords)

    setattr(adapter, "scaled_dot_product_attention", counted)
    return calls


def array(*shape: int, seed: int = 0) -> Any:
    """Normal numbers as an array of JAX."""
    import jax.numpy as jnp

    return jnp.asarray(np.random.default_rng(seed).standard_normal(shape, "float32"))


def epsilon(x: Any) -> float:
    """Of the dtype of an array of JAX."""
    import jax.numpy as jnp

    return float(jnp.finfo(x.dtype).eps)


def assert_same(ours: Any, theirs: Any, epsilon: float, case: str = "") -> None:
    """The outputs differ by rounding only, in all rows."""
    assert (ours.dtype, ours.shape) == (theirs.dtype, theirs.shape), case
    ours, theirs = (np.asarray(x, np.float64) for x in (ours, theirs))
    assert np.max(np.abs(ours - theirs)) <= ROUNDINGS * epsilon * np.max(np.abs(theirs)), case


def assert_all_named(functions: Iterable[Any], named: Iterable[str]) -> None:
    """The sweep names each argument of the framework's functions: a new one has to be thought about."""
    arguments = {name for function in functions for name in inspect.signature(function).parameters}
    assert arguments - {"self", "args", "kwargs"} <= set(named)
