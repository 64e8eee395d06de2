"""Keywords that are no arrays: flags, numbers, names."""

from __future__ import annotations

import math
import numbers

from sdpa_xp import namespace as door
from sdpa_xp.checks.messages import message, type_name
from sdpa_xp.protocols import Dtype


def flag(function: str, name: str, value: object) -> bool:
    """A Python or NumPy bool."""
    if isinstance(value, bool) or type(value).__name__ in ("bool_", "bool"):
        return bool(value)
    raise TypeError(message(function, f"`{name}` must be True or False", {name: repr(value)}))


def number(function: str, name: str, value: object, dtype: Dtype = "float64") -> float:
    """A real number, finite in `dtype`, and 0 there only if it is 0."""
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        rule = f"`{name}` must be a real number"
        raise TypeError(message(function, rule, {name: f"{value!r} ({type_name(value)})"}))
    try:
        result = float(value)
    except OverflowError:
        result = math.inf
    largest = door.LARGEST[door.dtype_name(dtype)]
    if not abs(result) <= largest:
        rule = f"`{name}` must be finite" + (f" in {door.dtype_name(dtype)}" if math.isfinite(result) else "")
        raise ValueError(message(function, rule, {name: result}))
    if 0 < abs(result) < 1 / largest:
        rule = f"`{name}` must be 0 or at least {1 / largest:.1e} in size"
        raise ValueError(message(function, rule, {name: result}))
    return result


def softcap(function: str, value: object, dtype: Dtype = "float64") -> float | None:
    """A positive number; None or 0 is off."""
    cap = 0.0 if value is None else number(function, "softcap", value, dtype)
    if cap < 0:
        rule = "`softcap` must be positive, or None or 0 for off"
        raise ValueError(message(function, rule, {"softcap": value}))
    return cap or None


def implementation(function: str, value: object) -> None:
    """One of the implementations that there are."""
    if not (value is None or (isinstance(value, str) and value == "xp")):
        rule = "`implementation` must be None or 'xp', the portable one"
        raise ValueError(message(function, rule, {"implementation": repr(value)}))
