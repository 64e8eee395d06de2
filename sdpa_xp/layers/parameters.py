"""The arrays of a layer by name, and the same layer with other arrays."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields, replace
from typing import TYPE_CHECKING, Any, Self, cast

from sdpa_xp import _checks as checks
from sdpa_xp._libraries import is_array
from sdpa_xp._libraries.protocols import AnyArray, Array
from sdpa_xp.layers.moving import moved, place

if TYPE_CHECKING:
    from _typeshed import DataclassInstance


class Layer:
    """What every layer is: an immutable dataclass, whose fields that are arrays or layers hold its parameters.

    Examples:
        >>> from dataclasses import dataclass
        >>> import numpy as np
        >>> from sdpa_xp.layers import Linear
        >>> @dataclass(frozen=True, repr=False)
        ... class Residual(Layer):
        ...     inner: Linear
        ...     def __call__(self, x):
        ...         return x + self.inner(x)
        >>> block = Residual(Linear.init(np.random.default_rng(0), 4, 4))
        >>> [*block.parameters], block.to(np)
        (['inner.weight', 'inner.bias'], Residual(Linear(weight=<float32 (4, 4)>, bias=[0, 0, 0, 0])))
    """

    __slots__ = ()

    @property
    def parameters(self) -> dict[str, AnyArray]:
        """Each array of the layer by its name; a layer within gives its names after its own and a dot."""
        found: dict[str, AnyArray] = {}
        for name, held in _fields(self).items():
            found |= _arrays(name, held)
        return found

    def with_parameters(self, parameters: Mapping[str, AnyArray]) -> Self:
        """The layer that has these arrays in place of its own; those that are not named stay.

        Args:
            parameters: By names of `parameters`.

        Returns:
            Another layer; this one stays as it is.

        Raises:
            TypeError: Something that is no array, or arrays of several libraries or dtypes.
            ValueError: A name that the layer does not have, or shapes that do not fit.
        """
        checks.named_arrays(f"{type(self).__name__}.with_parameters", "parameters", parameters)
        checks.known_names(type(self).__name__, parameters, self.parameters)
        return self._with(parameters, "")

    def to(self, like: object, device: object = None) -> Self:
        """The layer with its arrays in another library, or on another device; they are copied.

        Args:
            like: The library, as a module (numpy, torch, jax.numpy, ...) or by an array of it.
            device: One of that library's. None is that of the array, or the library's default.

        Returns:
            Another layer. Its dtype is the same where the library has it, and float32 otherwise, which is what
                becomes of bfloat16 in NumPy, and of float64 in JAX without x64 and in MLX. What torch has
                recorded for gradients stays behind.

        Raises:
            TypeError: `like` is neither a module of arrays nor an array.
        """
        there = place(f"{type(self).__name__}.to", like, device)
        return self.with_parameters({name: moved(cast(Array, x), there) for name, x in self.parameters.items()})

    def __repr__(self) -> str:
        return checks.call_of(cast("DataclassInstance", self), type(self).__name__)

    def _with(self, parameters: Mapping[str, AnyArray], prefix: str) -> Self:
        held = _fields(self).items()
        changed: dict[str, Any] = {name: _changed(each, parameters, prefix + name) for name, each in held}
        return cast(Self, replace(cast(Any, self), **changed))


def _arrays(name: str, held: object) -> dict[str, AnyArray]:
    """The arrays of what a field holds; those of a tuple or a list by their numbers."""
    if isinstance(held, Layer):
        return {f"{name}.{inner}": array for inner, array in held.parameters.items()}
    if isinstance(held, tuple | list):
        return {each: x for n, one in enumerate(held) for each, x in _arrays(f"{name}.{n}", one).items()}
    return {name: held} if is_array(held) else {}


def _changed(held: Any, parameters: Mapping[str, AnyArray], name: str) -> Any:
    """What a field is to hold."""
    if isinstance(held, Layer):
        return held._with(parameters, f"{name}.")
    if isinstance(held, tuple | list) and _arrays(name, held):
        made = [_changed(each, parameters, f"{name}.{n}") for n, each in enumerate(held)]
        return type(held)(*made) if hasattr(held, "_fields") else type(held)(made)
    return parameters.get(name, held)


def _fields(layer: Layer) -> dict[str, object]:
    return {field.name: getattr(layer, field.name) for field in fields(cast("DataclassInstance", layer))}
