"""Two layers with the same weights: one computes its attention itself, the other lets sdpa_xp compute it."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable
from functools import partial
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
    import jax.numpy as jnp  # here, because Keras' layers run without JAX too

    return jnp.asarray(np.random.default_rng(seed).standard_normal(shape, "float32"))


def allowed(*shape: int) -> Any:
    """Numbers other than 0 and 1 as well; the first query of the last entry has no key, unless it is alone."""
    numbers = np.random.default_rng(len(shape)).choice([0, 1, 3], shape)
    numbers[..., 0] = 1
    if len(shape) > 1 and shape[-2] > 1:
        numbers.reshape(-1, *shape[-2:])[-1, 0] = 0
    return numbers


def epsilon(x: Any) -> float:
    """Of the dtype of an array of JAX."""
    import jax.numpy as jnp

    return float(jnp.finfo(x.dtype).eps)


def assert_same(ours: Any, theirs: Any, case: str = "", *, rounding: float | None = None) -> None:
    """The outputs differ by rounding only, in all rows."""
    assert (ours.dtype, ours.shape) == (theirs.dtype, theirs.shape), case
    bound = ROUNDINGS * (rounding or epsilon(ours))
    ours, theirs = (np.asarray(x, np.float64) for x in (ours, theirs))
    assert np.max(np.abs(ours - theirs)) <= bound * np.max(np.abs(theirs)), case


def compared(
    runs: dict[str, Callable[[Any], Any]], theirs: Any, ours: Any, calls: list[int], most: int = 5
) -> dict[str, int]:
    """Run each of `runs` with `theirs` and with `ours`; return how often sdpa_xp was called.

    `most` of them in one jit, because JAX compiles a large function in less time than many small ones.
    """
    import jax

    counted = {}

    def results(names: list[str]) -> dict[str, Any]:
        outputs = {}
        for name in names:
            calls[0] = 0
            expected = runs[name](theirs)
            assert calls == [0]
            outputs[name] = (runs[name](ours), expected)
            counted[name] = calls[0]
        return outputs

    for start in range(0, len(runs), most):
        for name, outputs in jax.jit(partial(results, list(runs)[start : start + most]))().items():
            # Flax computes these scores in bfloat16.
            assert_same(*outputs, name, rounding=2**-8 if name == "float32 softmax" else None)
    return counted


def assert_all_named(functions: Iterable[Any], named: Iterable[str]) -> None:
    """The sweep names each argument of the framework's functions: a new one has to be thought about."""
    arguments = {name for function in functions for name in inspect.signature(function).parameters}
    assert arguments - {"self", "args", "kwargs"} <= set(named)
