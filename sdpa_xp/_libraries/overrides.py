"""Calls that an array answers itself, as a value of a graph that is being written does.

What `__array_function__` is to NumPy, `__sdpa_xp__` is here: a method of a type of array,

    def __sdpa_xp__(self, function, inputs, rules): ...

which gets the name of a public function, the query, key and value that it was called with, by name, and its
other arguments by name, all as they came. What it returns is the result.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

Override: TypeAlias = Callable[[str, Mapping[str, object], Mapping[str, object]], Any]


def override(*inputs: Any) -> Override | None:
    """The method of the first of `inputs` that has one."""
    for array in inputs:
        if hasattr(type(array), "__sdpa_xp__"):
            answer: Override = array.__sdpa_xp__
            return answer
    return None


def leading(one: Any, other: Any) -> Any:
    """The one of two arrays whose library computes: `other` where that alone answers calls itself."""
    return other if override(one) is None and override(other) is not None else one
