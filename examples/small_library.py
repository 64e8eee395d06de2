"""A small array library, which wraps the functions of NumPy: sdpa_xp has no code for it, but works with it.

It has the names that the array API standard asks for. A library of your own needs no more than these.

Run it: python examples/small_library.py
"""

from __future__ import annotations

import types
from collections.abc import Callable
from typing import Any

import numpy as np

from sdpa_xp import KVCache, biases, masks, scaled_dot_product_attention


class Array:
    """An array of the library."""

    def __init__(self, data: Any) -> None:
        self.data = np.asarray(data)

    shape = property(lambda self: self.data.shape)
    ndim = property(lambda self: self.data.ndim)
    dtype = property(lambda self: self.data.dtype)
    device = "cpu"

    def __array_namespace__(self, api_version: str | None = None) -> Any:
        return toy  # the module with the functions of this library


def opened(value: Any) -> Any:
    """Return the NumPy array of an array of the library, also inside lists and tuples."""
    if isinstance(value, Array):
        return value.data
    if isinstance(value, list | tuple):
        return type(value)(opened(item) for item in value)
    return value


def wrapped(function: Callable[..., Any]) -> Callable[..., Any]:
    """Turn a NumPy function into a function of arrays of the library."""

    def call(*args: Any, **keywords: Any) -> Any:
        keywords = {name: opened(value) for name, value in keywords.items()}
        result = function(*opened(args), **keywords)
        return Array(result) if isinstance(result, np.ndarray | np.generic) else result

    return call


toy: Any = types.ModuleType("toy")
for name in dir(np):
    known = getattr(np, name)
    plain = isinstance(known, type) or not callable(known) or name[0] == "_"
    setattr(toy, name, known if plain else wrapped(known))

OPERATORS = "add sub mul truediv floordiv mod matmul and or xor rshift"
for name in OPERATORS.split():
    for method in (f"__{name}__", f"__r{name}__"):
        setattr(Array, method, wrapped(getattr(np.ndarray, method)))
OTHERS = "getitem neg invert le lt ge gt eq ne bool int float"
for name in OTHERS.split():
    setattr(Array, f"__{name}__", wrapped(getattr(np.ndarray, f"__{name}__")))


def main() -> None:
    """Compute a call and a cache with arrays of the library, and compare the call with NumPy."""
    rng = np.random.default_rng(0)
    query, key, value = rng.standard_normal((3, 2, 4, 6, 8))
    mask = masks.causal() & masks.padding([3, 6])
    rules = {"attn_mask": mask, "bias": biases.alibi(4)}

    arrays = Array(query), Array(key), Array(value)
    output = scaled_dot_product_attention(*arrays, **rules)
    assert np.allclose(output.data, scaled_dot_product_attention(query, key, value, **rules))
    print("A call of arrays of the library returns one of them, of shape", output.shape)
    print("and with the numbers that NumPy has: nothing in sdpa_xp names the library.")

    cache = KVCache(*arrays[1:]).append(*arrays[1:])
    print("A cache of such arrays works too: a query attends to", len(cache), "tokens,")
    print("and its output has the shape", cache.attend(arrays[0]).shape)


if __name__ == "__main__":
    main()
