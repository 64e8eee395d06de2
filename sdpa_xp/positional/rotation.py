"""What rotary embeddings have in common: pairs of elements are rotated by cosines and sines of positions."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from itertools import chain
from typing import Any, TypeAlias, TypeVar, cast

from .._checks import Immutable
from .._checks.arrays import HLE, Layout, check_plain_array, headed
from .._checks.keywords import check_instance, check_integer, check_layout, explains_keywords
from .._checks.score_arrays import check_one_each
from .._libraries import accumulation_dtype, astype_if_needed, computing, is_number, widest_dtype, with_axes
from .._libraries.protocols import AnyArray, Array, Namespace, Shape
from .._libraries.trees import Tree
from ..errors import ArgumentTypeError, ArgumentValueError
from .positions import ArrayFactory, Consecutive, PositionsLike, array_factory, as_array

A = TypeVar("A", bound=AnyArray)
Positions: TypeAlias = Consecutive | Array
"""Positions of tokens, an array of them as (..., L)."""


@explains_keywords
class Rotation(Tree, Immutable, ABC):
    """The base class of rotary embeddings: `Rotary` computes its angles, `RotaryTables` takes them from you."""

    __slots__ = ()
    width: int
    interleaved: bool

    @abstractmethod
    def _tables(self, positions: Positions, length: int, factory: ArrayFactory) -> tuple[Array, Array]:
        """Return the cosines and the sines of `length` positions, (..., length, width / 2)."""

    @property
    def _arrays(self) -> dict[str, AnyArray]:
        """The rotation's own arrays by their names in messages."""
        return {}

    def _of_packed(self, _function: str, rows: Sequence[Sequence[int]]) -> tuple[Rotation, list[int]]:
        """Return the rotation of packed tokens and their positions in it; `rows` has those of each sequence."""
        return self, [*chain(*rows)]

    def apply(self, x: A, positions: PositionsLike | int, *, layout: Layout = "...HLE") -> A:
        """Return queries or keys, rotated by their positions.

        Args:
            x: (..., H, L, E), or (L, E).
            positions: The position of the first token, if the others follow one by one; or a range, a list or
                an array of all L positions, (L,), or (..., L) with a row for each batch entry.
            layout: "...HLE", or "...LHE" with heads after the length.

        Returns:
            An array with the shape, library, device and dtype of `x`.

        Raises:
            TypeError: `x` is not a floating array, or the positions are not numbers.
            ValueError: `x` is narrower than the rotation, or the positions do not fit.
        """
        return cast(A, self._rotated(f"{type(self).__name__}.apply", x, positions, layout))

    def inverse(self, x: A, positions: PositionsLike | int, *, layout: Layout = "...HLE") -> A:
        """Return queries or keys as they were before `apply` rotated and multiplied them, up to rounding.

        To move a rotated key to another position, apply the inverse at its old position, then `apply` at the
        new.

        Args:
            x: (..., H, L, E), or (L, E): rotated tokens. All other arguments and errors are as in `apply`.

        Returns:
            An array like `x`; NaN where a table of your own has 0 for both the cosine and the sine.
        """
        return cast(A, self._rotated(f"{type(self).__name__}.inverse", x, positions, layout, back=True))

    def cos_sin(self, positions: PositionsLike, *, like: Any = None) -> tuple[Any, Any]:
        """Return the cosines and sines that `apply` multiplies by, as ONNX's RotaryEmbedding takes them.

        Args:
            positions: A range, a list or an array of any shape (...).
            like: As in `sinusoidal`; by default, the result of your own tables is like them.

        Returns:
            Cosines and sines, each (..., width / 2), multiplied by the `magnitude` of the scaling.

        Raises:
            TypeError: The positions are not numbers, or are an array of another library than `like`.
        """
        function = f"{type(self).__name__}.cos_sin"
        if is_number(positions):  # it could be a position or a length
            rule = "`positions` must be a range, a list or an array"
            hint = "For the first n positions, pass range(n)."
            raise ArgumentTypeError(function, rule, {"positions": positions}, hint)
        factory = array_factory(function, positions, like, tables=self._arrays)
        with factory.computing():
            array = as_array(function, positions, factory)
            cos, sin = self._tables(array, array.shape[-1] if array.shape else 1, factory)
            if like is None:
                return cos, sin
            return astype_if_needed(factory.xp, cos, like.dtype), astype_if_needed(factory.xp, sin, like.dtype)

    def _rotated(
        self, function: str, x: object, positions: PositionsLike | int, layout: str, *, back: bool = False
    ) -> Array:
        check_layout(function, layout)
        array = check_plain_array(function, "x", x)
        factory = _factory_like(self, function, "x", array, positions)
        array = factory.arrays["x"]
        if is_number(positions):
            first = check_integer(function, "positions", positions)
            return _rotate_at(self, array, Consecutive(first), factory, layout, back=back)
        with factory.computing():
            token_positions = as_array(function, cast(PositionsLike, positions), factory)
        tokens = (*array.shape[:-3], headed(array.shape, layout)[-2])
        check_one_each(function, "positions", token_positions.shape, tokens, "L")
        return _rotate_at(self, array, token_positions, factory, layout, back=back)


def check_rotary(function: str, value: object) -> None:
    """Check the `rotary` of a cache."""
    hint = "A `RotaryTables` takes your own cosines and sines." if isinstance(value, tuple | list) else ""
    check_instance(function, "rotary", value, Rotation, "Rotary", hint)


def check_fits_rotation(function: str, name: str, shape: Shape, width: int) -> None:
    """Check that there is a length, and a width of at least that of the rotation."""
    if len(shape) < 2 or shape[-1] < width:
        rule = f"`{name}` must have at least 2 axes, and a width (axis -1, E) of at least `rotary.width`"
        is_doubled = len(shape) > 1 and width == 2 * shape[-1]
        hint = "If tables have each number twice, pass one half of each row." if is_doubled else ""
        raise ArgumentValueError(function, rule, {f"{name}.shape": shape, "rotary.width": width}, hint)


def rotate(
    rotary: Rotation | None,
    function: str,
    name: str,
    x: object,
    positions: Positions,
    layout: str,
) -> Array:
    """Rotate tokens at their positions. Without a rotary the tokens pass through unchanged.

    `function` and `name` are for messages.
    """
    array = check_plain_array(function, name, x)
    if rotary is None:
        return array
    factory = _factory_like(rotary, function, name, array, 0)
    return _rotate_at(rotary, factory.arrays[name], positions, factory, layout)


def _factory_like(rotary: Rotation, function: str, name: str, x: Array, positions: object) -> ArrayFactory:
    """Check `x` and the library of the positions, and return the factory of arrays for both."""
    factory = array_factory(function, positions, x, name, rotary._arrays)
    check_fits_rotation(function, name, x.shape, rotary.width)
    return factory


def _rotate_at(
    rotary: Rotation, x: Array, positions: Positions, factory: ArrayFactory, layout: str, *, back: bool = False
) -> Array:
    """Rotate tokens that stand at these positions, or rotate them back."""
    xp, dtype = factory.xp, accumulation_dtype(factory.xp, x.dtype)
    with computing(x):
        cos, sin = rotary._tables(positions, headed(x.shape, layout)[-2], factory)
        if back:
            cos, sin = _inverted(factory, cos, sin)
        cos, sin = (astype_if_needed(xp, table, dtype) for table in (cos, sin))
        if x.ndim > 2:
            head_axis = -3 if layout == HLE else -2
            cos, sin = (xp.expand_dims(table, axis=head_axis) for table in (cos, sin))
        # JAX can be set to refuse to broadcast arrays of unlike ranks.
        cos, sin = (with_axes(table, x.ndim) for table in (cos, sin))
        # The elements behind the width pass unchanged, as in models that rotate a part of each head.
        front = astype_if_needed(xp, x[..., : rotary.width], dtype)
        rotated = _rotate_pairs(xp, front, cos, sin, interleaved=rotary.interleaved)
        rotated = astype_if_needed(xp, rotated, x.dtype)
        is_whole = x.shape[-1] == rotary.width
        return rotated if is_whole else xp.concat([rotated, x[..., rotary.width :]], axis=-1)


def _inverted(factory: ArrayFactory, cos: Array, sin: Array) -> tuple[Array, Array]:
    """Return the tables that undo a rotation, which may also have multiplied by sqrt(cos^2 + sin^2)."""
    dtype = widest_dtype(factory.function, cos)
    cos, sin = (astype_if_needed(factory.xp, table, dtype) for table in (cos, sin))
    squared = cos * cos + sin * sin
    with computing(cos):  # both may be 0 in tables of the caller
        return cos / squared, -sin / squared


def _rotate_pairs(xp: Namespace, x: Array, cos: Array, sin: Array, *, interleaved: bool) -> Array:
    """Rotate each pair (x_1, x_2) of elements by its angle."""
    if interleaved:
        x_1, x_2 = x[..., 0::2], x[..., 1::2]
    else:
        half = x.shape[-1] // 2
        x_1, x_2 = x[..., :half], x[..., half:]
    pair = [x_1 * cos - x_2 * sin, x_1 * sin + x_2 * cos]
    # Traced arrays take no assignment to every second element.
    return xp.reshape(xp.stack(pair, axis=-1), x.shape) if interleaved else xp.concat(pair, axis=-1)
