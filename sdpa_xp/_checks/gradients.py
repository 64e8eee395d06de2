"""What a gradient can be computed of, and from."""

from __future__ import annotations

from typing import NoReturn

from sdpa_xp._checks.arrays import one_device, one_dtype, one_library
from sdpa_xp._checks.messages import message
from sdpa_xp._libraries.protocols import Array, Shape


def cotangent(function: str, value: object, query: Array, output: Shape) -> Array:
    """A cotangent is like the output, which has the library, the dtype and the device of the query."""
    _, arrays = one_library(function, {"query": query, "cotangent": value})
    one_dtype(function, arrays)
    one_device(function, arrays)
    found = arrays["cotangent"]
    if found.shape != output:
        rule = "`cotangent` must have the shape of the output"
        raise ValueError(message(function, rule, {"cotangent.shape": found.shape, "output.shape": output}))
    return found


def not_added(function: str, *, traced: bool) -> NoReturn:
    """A function of the caller is no sum of the score and something else, or cannot be looked at."""
    rule = "a gradient needs a `bias` whose function only adds to the score, since its derivative is not known"
    got = "a function inside a jit or a lazy graph, where it cannot be tried" if traced else "one that does not"
    hint = "Pass what it adds as an array, or differentiate `scaled_dot_product_attention` by torch or JAX."
    raise ValueError(message(function, rule, {"bias": got}, hint))
