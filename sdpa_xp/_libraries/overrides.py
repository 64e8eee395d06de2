"""Types of array that override public functions, as the exporter's values of a graph do.

`__sdpa_xp__` is to this library what `__array_function__` is to NumPy. A type of array defines the method

    def __sdpa_xp__(self, function, inputs, options): ...

It gets the name of the public function, the arguments query, key and value by name, and the other arguments by
name, not validated. Its return value is the result of the call.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

Override: TypeAlias = Callable[[str, Mapping[str, object], Mapping[str, object]], Any]


def override(*inputs: Any) -> Override | None:
    """Return the method of the first input that overrides public functions, or None."""
    for array in inputs:
        if hasattr(type(array), "__sdpa_xp__"):
            method: Override = array.__sdpa_xp__
            return method
    return None


def leading_array(first: Any, second: Any) -> Any:
    """Return the array whose library computes: the first, unless only the second overrides functions."""
    return second if override(first) is None and override(second) is not None else first
