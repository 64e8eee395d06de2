"""A linear map of the last axis."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Self, TypeVar, cast

from sdpa_xp import checks, namespace
from sdpa_xp.layers.parameters import Layer
from sdpa_xp.protocols import AnyArray, Array

A = TypeVar("A", bound=AnyArray)


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class Linear(Layer):
    r"""$y = x W^T + b$.

    Args:
        weight: (out, in), as torch and most files have it.
        bias: (out,), or None.

    Raises:
        TypeError: Something that is no array, or arrays of several libraries or dtypes.
        ValueError: Shapes that do not fit, or several devices.

    Examples:
        >>> import numpy as np
        >>> Linear(np.asarray([[1.0, 2.0]]), bias=np.asarray([0.5]))(np.ones((3, 2)))
        array([[3.5],
               [3.5],
               [3.5]])
    """

    weight: AnyArray
    bias: AnyArray | None = None

    def __post_init__(self) -> None:
        checks.linear("Linear", self.weight, self.bias)

    def __call__(self, x: A) -> A:
        """(..., in) -> (..., out)."""
        checks.inputs("Linear", {"x": x}, {"x": self.weight})
        return self.mapped(x)

    def mapped(self, x: A) -> A:
        """The same, of what has been checked."""
        array, weight = cast(Array, x), cast(Array, self.weight)
        xp, held = namespace.namespace(array), array.dtype
        if namespace.library_name(array) == "other":  # NumPy's BLAS has no half, and Dask cannot sum bfloat16
            held = namespace.accumulation_dtype(xp, array.dtype)
        with namespace.quiet(array):
            if held != array.dtype:
                array, weight = (namespace.converted(xp, x, held) for x in (array, weight))
            y = array @ xp.matrix_transpose(weight)
            y = y if self.bias is None else y + cast(Array, self.bias)
            return cast(A, namespace.converted(xp, y, x.dtype))

    @property
    def widths(self) -> tuple[int, int]:
        """Of what goes in, and of what comes out."""
        out, width = self.weight.shape
        return width, out

    @classmethod
    def from_mapping(cls, mapping: Mapping[str, AnyArray], prefix: str = "") -> Self:
        """The map whose arrays are called `prefix` + "weight" and, if it has one, `prefix` + "bias".

        Args:
            mapping: Arrays by name, such as a file of safetensors gives.
            prefix: What the names begin with.

        Returns:
            The map, of the arrays themselves.

        Raises:
            ValueError: There is no such weight.
        """
        weight = checks.entry("Linear.from_mapping", mapping, f"{prefix}weight")
        return cls(cast(AnyArray, weight), mapping.get(f"{prefix}bias"))
