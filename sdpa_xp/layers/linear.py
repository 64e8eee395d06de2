"""A linear map of the last axis."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Self, TypeVar, cast

from sdpa_xp._checks.keywords import explains_keywords
from sdpa_xp._checks.layers import (
    check_inputs,
    check_linear,
    check_mapping_entry,
    check_named_arrays,
    check_text,
    check_width,
)
from sdpa_xp._libraries import (
    accumulation_dtype,
    astype_if_needed,
    dtype_name,
    leading_array,
    library_of,
    namespace_of,
    plain,
    quiet,
)
from sdpa_xp._libraries.protocols import AnyArray, Array, Rng
from sdpa_xp.layers.initialization import draw_parameters
from sdpa_xp.layers.parameters import Layer

A = TypeVar("A", bound=AnyArray)


@explains_keywords
@dataclass(frozen=True, slots=True, eq=False, repr=False)
class Linear(Layer):
    r"""A linear map of the last axis, $y = x W^T + b$.

    Args:
        weight: W, (out, in), as in torch and in most files.
        bias: b, (out,), or None.

    Raises:
        TypeError: An argument is not an array, or the arrays have several libraries or dtypes.
        ValueError: The shapes do not fit, or the arrays are on several devices.

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
        arrays = check_linear("Linear", self.weight, self.bias)
        for name, array in arrays.items():
            object.__setattr__(self, name, array)

    def __call__(self, x: A) -> A:
        """Return $x W^T + b$ for each row of `x`.

        Args:
            x: (..., in), with the library, device and dtype of the map.

        Returns:
            (..., out).
        """
        check_inputs("Linear", {"x": x}, {"x": self.weight})
        return self._apply(x)

    def _apply(self, x: A) -> A:
        """Return the map of an `x` that has been checked."""
        array, weight = plain(cast(Array, x)), cast(Array, self.weight)
        leader = cast(Array, leading_array(array, weight))
        xp, library, dtype = namespace_of(leader), library_of(leader), leader.dtype
        if not library.multiplies_halves:  # NumPy's BLAS has no half, and Dask cannot sum bfloat16
            dtype = accumulation_dtype(xp, leader.dtype)
        with quiet(leader):
            if dtype != leader.dtype:
                array, weight = (astype_if_needed(xp, x, dtype) for x in (array, weight))
            shape = array.shape
            if flattens := library.flattens_products and len(shape) > 2:
                array = xp.reshape(array, (math.prod(shape[:-1]), shape[-1]))
            y = array @ xp.matrix_transpose(weight)
            if flattens:
                y = xp.reshape(y, (*shape[:-1], y.shape[-1]))
            if self.bias is not None:
                y = y + library.with_axes(cast(Array, self.bias), y.ndim)
            return cast(A, astype_if_needed(xp, y, x.dtype))

    def __repr__(self) -> str:
        if len(getattr(self.weight, "shape", ())) < 2:  # JAX put something else where arrays were, such as axes
            return Layer.__repr__(self)
        in_width, out_width = self.widths
        bias = ", bias=None" if self.bias is None else ""
        return f"Linear({in_width} -> {out_width}{bias}, {dtype_name(self.weight.dtype)})"

    @property
    def widths(self) -> tuple[int, int]:
        """The width of the input and the width of the output."""
        out_width, in_width = self.weight.shape[-2:]  # a stack of maps, for jax.vmap, has more axes
        return in_width, out_width

    @classmethod
    def init(
        cls, rng: Rng, in_dim: int, out_dim: int, *, bias: bool = True, like: AnyArray | None = None
    ) -> Self:
        """Create a map with random weights by Xavier's rule, and a bias of 0.

        Args:
            rng: The generator that the weights are drawn from: a numpy.random.Generator,
                cupy.random.Generator, torch.Generator, or key of JAX or MLX.
            in_dim: The width of the input.
            out_dim: The width of the output.
            bias: Whether there is a bias.
            like: An array with the library, device and dtype of the new map. None means float32, in the library
                of `rng`.

        Returns:
            The map.

        Raises:
            TypeError: `rng` is not a generator, or a width is not an integer.
            ValueError: A width is below 1.
        """
        function = "Linear.init"
        widths = check_width(function, "in_dim", in_dim), check_width(function, "out_dim", out_dim)
        parameters = draw_parameters(function, rng, {"": widths}, bias=bias, like=like)
        return cls(*parameters[""])

    @classmethod
    def from_mapping(cls, mapping: Mapping[str, AnyArray], prefix: str = "") -> Self:
        """Create a map from the arrays called `prefix` + "weight" and, if there is one, `prefix` + "bias".

        Args:
            mapping: Arrays by name, such as the arrays of a safetensors file.
            prefix: The beginning of the names.

        Returns:
            The map. Its arrays are not copied.

        Raises:
            TypeError: `mapping` is not a mapping, or `prefix` is not a string.
            ValueError: The weight is missing in the mapping.
        """
        function = "Linear.from_mapping"
        check_named_arrays(function, "mapping", mapping)
        check_text(function, "prefix", prefix)
        weight = check_mapping_entry(function, mapping, f"{prefix}weight")
        return cls(cast(AnyArray, weight), mapping.get(f"{prefix}bias"))


def init_linears(
    function: str, rng: Any, widths: Mapping[str, tuple[int, int]], *, bias: bool, like: AnyArray | None
) -> dict[str, Linear]:
    """Return a map for each of the widths (in, out), with weights by Xavier's rule."""
    parameters = draw_parameters(function, rng, widths, bias=bias, like=like)
    return {name: Linear(*arrays) for name, arrays in parameters.items()}
