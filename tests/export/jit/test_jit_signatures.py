"""Random calls of several signatures in turn: `jit` never returns the numbers of another session."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from sdpa_xp import masks, scaled_dot_product_attention
from sdpa_xp_export import jit

RNG = np.random.default_rng(0)
WEIGHT = RNG.standard_normal((8, 8)).astype(np.float32)
CLOSE = {"float16": 4e-3, "float32": 4e-6, "float64": 1e-13}


def attend(query: Any, key: Any, value: Any, mask: Any = None, causal: bool = False) -> Any:
    return scaled_dot_product_attention(query, key, value, mask, is_causal=causal)


def combined(a: Any, b: Any, flag: bool = True, mode: str = "add") -> Any:
    return a + b if mode == "add" else (a - b if flag else b - a)


def projected(x: Any) -> tuple[Any, Any]:
    xp = x.__array_namespace__()
    return x @ WEIGHT, xp.sum(x, axis=-1)


def random_shape(rng: np.random.Generator, axes: int, least: int) -> tuple[int, ...]:
    return tuple(int(n) for n in rng.integers(least, 5, axes))


def odd(rng: np.random.Generator, x: np.ndarray) -> np.ndarray:
    """The same numbers in memory of another kind."""
    kind = rng.integers(6)
    if kind == 0:
        return np.asfortranarray(x)
    if kind == 1 and x.ndim:
        return np.flip(np.flip(x, axis=-1).copy(), axis=-1)
    if kind == 2:
        x = x.copy()
        x.flags.writeable = False
        return x
    if kind == 3 and x.size:
        return x.astype(x.dtype.newbyteorder())
    if kind == 4 and x.ndim:
        return np.repeat(x, 2, axis=-1)[..., ::2]
    return x


def attention_call(rng: np.random.Generator) -> tuple[tuple[Any, ...], dict[str, Any]]:
    dtype, least = rng.choice(["float16", "float32", "float64"]), int(rng.random() < 0.8)
    batch, length, keys = random_shape(rng, 3, least)
    heads, width = int(rng.choice([1, 2, 4])), int(rng.choice([2, 4]))
    query = rng.standard_normal((batch, heads, length, width)).astype(dtype)
    key, value = rng.standard_normal((2, batch, int(rng.choice([1, heads])), keys, width)).astype(dtype)
    options: list[Any] = [None, masks.sliding_window(1, 0), rng.random((length, keys)) < 0.6]
    options += [masks.padding(rng.integers(0, keys + 1, batch))] if batch else []
    options += [masks.padding(rng.integers(0, keys + 1, batch).tolist())] if batch else []
    mask = options[rng.integers(len(options))]
    is_plain = not (query.size and key.size)  # which the library computes: all of one byte order there
    arrays = [x if is_plain else odd(rng, x) for x in (query, key, value)]
    return (*arrays, mask), {} if rng.random() < 0.5 else {"causal": bool(rng.random() < 0.5)}


def combined_call(rng: np.random.Generator) -> tuple[tuple[Any, ...], dict[str, Any]]:
    dtype = rng.choice(["float32", "float64", "int32", "int64", "uint8"])
    shape = random_shape(rng, int(rng.integers(0, 4)), int(rng.random() < 0.8))
    part = tuple(1 if rng.random() < 0.3 else n for n in shape)[int(rng.integers(len(shape) + 1)) :]
    one, other = (np.asarray(rng.standard_normal(s) * 9).astype(dtype) for s in (shape, part))
    keywords: dict[str, Any] = {"mode": str(rng.choice(["add", "subtract"]))} if rng.random() < 0.5 else {}
    keywords |= {"flag": bool(rng.random() < 0.5)} if rng.random() < 0.5 else {}
    if rng.random() < 0.2:
        return (odd(rng, one), int(rng.integers(5))), keywords
    return (odd(rng, one), odd(rng, other)), keywords


def projected_call(rng: np.random.Generator) -> tuple[tuple[Any, ...], dict[str, Any]]:
    shape = random_shape(rng, int(rng.integers(0, 3)), 1)
    return (odd(rng, rng.standard_normal((*shape, 8)).astype(np.float32)),), {}


def native(x: Any) -> Any:
    return x.astype(x.dtype.newbyteorder("=")) if isinstance(x, np.ndarray) else x


@pytest.mark.parametrize(
    ("layer", "call"),
    [(attend, attention_call), (combined, combined_call), (projected, projected_call)],
    ids=["attention", "broadcasting", "projection"],
)
def test_random_calls(layer: Callable[..., Any], call: Callable[..., Any]) -> None:
    rng, fast = np.random.default_rng(5), jit(layer)
    for _ in range(150):
        arguments, keywords = call(rng)
        expected = layer(*map(native, arguments), **keywords)
        result = fast(*arguments, **keywords)
        pairs = zip(expected, result, strict=True) if isinstance(expected, tuple) else [(expected, result)]
        for one, other in pairs:
            other = native(other)  # of no elements, from the library
            assert (one.shape, one.dtype) == (other.shape, other.dtype)
            close = CLOSE.get(one.dtype.name, 0) * max(1.0, np.abs(one).max(initial=0))
            np.testing.assert_allclose(other, one, rtol=0, atol=close)
