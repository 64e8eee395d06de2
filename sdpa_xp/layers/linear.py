"""A linear map of the last axis."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Self, TypeVar, cast

from sdpa_xp import _checks as checks
from sdpa_xp._libraries import accumulation_dtype, astype_if_needed, library_of, namespace_of, plain, quiet
from sdpa_xp._libraries.overrides import leading
from sdpa_xp._libraries.protocols import AnyArray, Array, Rng
from sdpa_xp.layers.drawing import drawn
from sdpa_xp.layers.parameters import Layer

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
        found = checks.linear("Linear", self.weight, self.bias)
        for name, array in found.items():
            object.__setattr__(self, name, array)

    def __call__(self, x: A) -> A:
        """The map of each row.

        Args:
            x: (..., in), of the library, device and dtype of the map.

        Returns:
            (..., out).
        """
        checks.inputs("Linear", {"x": x}, {"x": self.weight})
        return self._apply(x)

    def _apply(self, x: A) -> A:
        """Return the map of an `x` that has been checked."""
        array, weight = plain(cast(Array, x)), cast(Array, self.weight)
        first = cast(Array, leading(array, weight))
        xp, held = namespace_of(first), first.dtype
        if not library_of(first).multiplies_halves:  # NumPy's BLAS has no half, and Dask cannot sum bfloat16
            held = accumulation_dtype(xp, first.dtype)
        with quiet(first):
            if held != first.dtype:
                array, weight = (astype_if_needed(xp, x, held) for x in (array, weight))
            y = array @ xp.matrix_transpose(weight)
            y = y if self.bias is None else y + cast(Array, self.bias)
            return cast(A, astype_if_needed(xp, y, x.dtype))

    @property
    def widths(self) -> tuple[int, int]:
        """Of what goes in, and of what comes out."""
        out, width = self.weight.shape
        return width, out

    @classmethod
    def init(
        cls, rng: Rng, in_dim: int, out_dim: int, *, bias: bool = True, like: AnyArray | None = None
    ) -> Self:
        """A map with weights by Xavier's rule, and biases of 0.

        Args:
            rng: What the weights follow from: a numpy.random.Generator, cupy.random.Generator,
                torch.Generator, or key of JAX or MLX.
            in_dim: Width of what goes in.
            out_dim: Width of what comes out.
            bias: Whether there is a bias.
            like: An array of the library, device and dtype that the map is to have. None is float32, in the
                library of `rng`.

        Returns:
            The map.

        Raises:
            TypeError: `rng` is no generator, or a width no integer.
            ValueError: A width below 1.
        """
        function = "Linear.init"
        widths = checks.width(function, "in_dim", in_dim), checks.width(function, "out_dim", out_dim)
        found = drawn(function, rng, {"": widths}, bias=bias, like=like)
        return cls(*found[""])

    @classmethod
    def from_mapping(cls, mapping: Mapping[str, AnyArray], prefix: str = "") -> Self:
        """The map whose arrays are called `prefix` + "weight" and, if it has one, `prefix` + "bias".

        Args:
            mapping: Arrays by name, such as a file of safetensors gives.
            prefix: What the names begin with.

        Returns:
            The map, of the arrays themselves.

        Raises:
            TypeError: `mapping` is no mapping, or `prefix` no string.
            ValueError: There is no such weight.
        """
        function = "Linear.from_mapping"
        checks.named_arrays(function, "mapping", mapping)
        checks.text(function, "prefix", prefix)
        weight = checks.entry(function, mapping, f"{prefix}weight")
        return cls(cast(AnyArray, weight), mapping.get(f"{prefix}bias"))


def linears(
    function: str, rng: Any, widths: Mapping[str, tuple[int, int]], *, bias: bool, like: AnyArray | None
) -> dict[str, Linear]:
    """A map for each of the widths (in, out)."""
    found = drawn(function, rng, widths, bias=bias, like=like)
    return {name: Linear(*pair) for name, pair in found.items()}
