"""Type promotion: the dtype of a result, by the rules of the array API standard 2024.12.

The standard has no half precision; float16 and bfloat16 are as in NumPy with ml_dtypes.
"""

from __future__ import annotations

import re

SIGNED = ("int8", "int16", "int32", "int64")
UNSIGNED = ("uint8", "uint16", "uint32", "uint64")
INTEGERS = (*SIGNED, *UNSIGNED)
FLOATING = ("float16", "bfloat16", "float32", "float64")
NUMERIC = (*INTEGERS, *FLOATING)
DTYPES = ("bool", *NUMERIC)

CATEGORIES = {
    "boolean": ("bool",),
    "integer": INTEGERS,
    "integer or boolean": ("bool", *INTEGERS),
    "floating": FLOATING,
    "numeric": NUMERIC,
    "any": DTYPES,
}
"""The dtypes that a function takes, by the names that the standard has for these sets."""

DEFAULTS = {bool: "bool", int: "int64", float: "float32"}
"""The default dtypes: those of Python scalars that are combined with no array."""


def bits(dtype: str) -> int:
    """Return the number of bits of one element."""
    digits = re.search(r"\d+", dtype)
    return int(digits[0]) if digits else 8  # bool


def joint(one: str, other: str) -> str | None:
    """Return the dtype that two dtypes promote to, or None if the standard leaves it undefined."""
    if one == other:
        return one
    for kind in (SIGNED, UNSIGNED):
        if one in kind and other in kind:
            return max(one, other, key=bits)
    if one in INTEGERS and other in INTEGERS:
        signed, unsigned = (one, other) if one in SIGNED else (other, one)
        size = max(bits(signed), 2 * bits(unsigned))
        return f"int{size}" if size <= 64 else None
    if one in FLOATING and other in FLOATING:
        return None if bits(one) == bits(other) else max(one, other, key=bits)  # float16 and bfloat16: neither
    return None


def joint_of_kinds(one: str, other: str) -> str | None:
    """Promote dtypes of different kinds too: a bool becomes a number, and an integer becomes a float."""
    if one == "bool" or (one in INTEGERS and other in FLOATING):
        return other
    if other == "bool" or (other in INTEGERS and one in FLOATING):
        return one
    return joint(one, other)


def of_scalar(scalar: object) -> tuple[str, ...]:
    """Return the dtypes of the arrays that a Python scalar may be combined with."""
    if isinstance(scalar, bool):
        return ("bool",)
    return FLOATING if isinstance(scalar, float) else NUMERIC


def holds(dtype: str, number: int) -> bool:
    """Return whether an integer dtype can represent `number`."""
    size = bits(dtype)
    least, most = (0, 2**size - 1) if dtype in UNSIGNED else (-(2 ** (size - 1)), 2 ** (size - 1) - 1)
    return bool(least <= number <= most)
