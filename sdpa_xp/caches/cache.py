"""What KVCache and PagedKVCache share: tokens, their positions, and what they are stored as."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, ClassVar, Generic, Self, TypeVar

from .._checks import brief, cast_text, type_name
from .._checks.arrays import (
    HLE,
    Layout,
    check_floating,
    check_one_device,
    check_one_kind,
    check_one_library,
)
from .._checks.keywords import check_choice, check_layout
from .._display import array_facts
from .._libraries import computing, dtype_name, has_override, is_array, library_of, namespace_of
from .._libraries.protocols import AnyArray, Array, Shape
from .._libraries.trees import Tree
from .._sources.quantised import channel_magnitudes
from ..errors import ArgumentTypeError, ArgumentValueError
from ..positional.rotation import Rotation, check_fits_rotation, check_rotary
from .pages import Pages
from .quantisation import BITS, BYTES, Quantisation, bytes_of, check_same_but_width, wide_shape
from .slots import Slots

A = TypeVar("A", bound=AnyArray)


class Cache(Tree, Generic[A]):
    """A cache has tokens, their positions, and a quantisation, or None if tokens are stored as they are."""

    __slots__ = ("_layout", "_positions", "_quantisation", "_rotary", "_tokens", "_value_width")
    _layout: Layout
    _positions: Any
    _quantisation: Quantisation | None
    _rotary: Rotation | None
    _tokens: Slots | Pages
    """Where the keys and values stand."""
    _value_width: int | None
    """Ev, if values are the first numbers of their keys and not stored."""
    _names: ClassVar[tuple[str, str]]
    """The names of keys and values, in messages and among the arrays of the tokens."""

    @property
    def layout(self) -> Layout:
        """The layout of all inputs and outputs."""
        return self._layout

    @property
    def nbytes(self) -> int:
        """The bytes of the tokens so far, or of all blocks in the pool, with the scales of a quantised cache.

        The free space of a `capacity` is not counted.
        """
        return bytes_of(*self._stored().values())

    @property
    def _axis(self) -> int:
        """The axis of the tokens."""
        return -2 if self._layout == HLE else -3

    def _begin(self, function: str, layout: Layout, rotary: Rotation | None) -> None:
        """Check and set the layout and the rotation of a new cache, which is not quantised yet."""
        check_layout(function, layout)
        check_rotary(function, rotary)
        self._layout, self._rotary, self._quantisation, self._value_width = layout, rotary, None, None

    def _check_rotated(self, function: str, shape: Shape) -> None:
        """Check that keys which are rotated already are as wide as the rotation."""
        if self._rotary is not None:
            check_fits_rotation(function, self._names[0], shape, self._rotary.width)

    def _with(self, tokens: Slots | Pages, positions: object, quantisation: Quantisation | None = None) -> Self:
        """Return a cache of other tokens, which have been checked."""
        cache = object.__new__(type(self))
        cache._layout, cache._rotary = self._layout, self._rotary
        cache._tokens, cache._positions, cache._value_width = tokens, positions, self._value_width
        cache._quantisation = quantisation or self._quantisation
        if hasattr(self, "__dict__"):  # a caller's class keeps what it has
            vars(cache).update(vars(self))
        return cache

    def _stored(self) -> dict[str, Array]:
        """Return the arrays that the tokens are stored in, by name."""
        arrays, quantisation = self._tokens.arrays(), self._quantisation
        if quantisation is None or quantisation.key_channels is None:
            return arrays
        return {**arrays, "key_channels": quantisation.key_channels}

    @property
    def _stored_names(self) -> tuple[str, ...]:
        """The names of what is stored, of keys and values."""
        return self._names if self._value_width is None else self._names[:1]

    def _wide(self, name: str, dtype: str = "") -> Array:
        """Return the keys or the values, also in another dtype; those of a quantised cache are a copy."""
        if name == "value" and self._value_width is not None:
            key = self._wide("key", dtype)
            with computing(key):
                return key[..., : self._value_width]
        stored, quantisation, kind = self._tokens.read(name), self._quantisation, name.removesuffix("_blocks")
        if quantisation is None or not is_array(stored):  # in a tree of JAX, anything may stand for an array
            xp = namespace_of(stored) if dtype else None
            return xp.astype(stored, getattr(xp, dtype)) if xp else stored
        return quantisation.widened(kind, stored, self._tokens.read(f"{kind}_scale"), dtype)

    def _shape(self, name: str) -> Shape:
        """Return the shape of the keys or the values."""
        return wide_shape(self._quantisation, self._tokens.read(name))

    def _check_query(self, function: str, query: Array, cached: Array) -> bool:
        """Check that a query has the library and the device of keys that are stored as `cached`.

        It has the dtype of the keys, or a wider one, which holds all their numbers; return whether it is wider.
        """
        device, dtype, quantisation = library_of(query).device, query.dtype, self._quantisation
        fits, is_wider = quantisation is None and dtype == cached.dtype, False
        if not fits:  # hot: two names of dtypes take a third of the time of a small step
            least = dtype_name(cached.dtype) if quantisation is None else quantisation.dtype
            is_wider = BYTES.get(dtype_name(dtype), 0) > BYTES.get(least, 0) > 1
            fits = is_wider or dtype_name(dtype) == least
        if fits and type(query) is type(cached) and device(query) == device(cached):
            return is_wider
        if not has_override(query, cached):
            name = f"cache.{self._names[0]}"
            _, arrays = check_one_library(function, {"query": query, name: cached})
            check_floating(function, "query", query)
            if not fits:
                rule = f"`query` must have the dtype of `{name}`, or a wider one"
                got = {"query.dtype": query.dtype, f"{name}.dtype": least}
                hint = f"Convert it: {cast_text(query, 'query', least)}."
                raise ArgumentTypeError(function, rule, got, hint)
            check_one_device(function, arrays)
        return is_wider

    def _check_new(
        self, function: str, key: object, value: object, batch: Shape | None = None
    ) -> dict[str, Array]:
        """Return the tokens that are appended, by "key" and "value": arrays like those of the cache.

        They differ in their length, and in their first axes if these are to be the `batch`.
        """
        stored, axis = {f"cache.{name}": self._tokens.read(name) for name in self._stored_names}, self._axis
        passed = {"key": key, "value": value}
        if self._value_width is not None and passed.pop("value") is not None:
            rule = "`value` must be left out, since the cache takes values from its keys"
            got = {"value": type_name(value), "value_width": self._value_width}
            raise ArgumentValueError(function, rule, got)
        targets = [wide_shape(self._quantisation, array) for array in stored.values()]
        if self._quantisation is not None:
            stored = {name: self._quantisation.like(codes) for name, codes in stored.items()}
        _, arrays = check_one_kind(function, {**passed, **stored})
        new = {name: arrays[name] for name in passed}
        for (name, array), target in zip(new.items(), targets, strict=True):
            shape, target = array.shape, target if batch is None else (*batch, *target[1:])
            other_axes = shape[:axis] == target[:axis] and shape[axis + 1 :] == target[axis + 1 :]
            if len(shape) != len(target) or not other_axes:
                rule = f"`{name}` must have the shape of the cache, except for the length (axis {axis})"
                got = {f"{name}.shape": shape, f"cache.{name}.shape": target}
                raise ArgumentValueError(function, rule, got)
        if len(new) > 1:
            check_same_but_width(function, new)
        return new

    def _new_quantisation(
        self, function: str, dtype: str, per: str, measured: Array, axes: tuple[int, ...]
    ) -> Quantisation:
        """Check the arguments of `quantised`.

        The channels are measured on the keys `measured` along `axes`, the tokens among them.
        """
        if self._value_width is not None:
            rule = "the cache must store its values, and not take them from its keys"
            raise ArgumentValueError(function, rule, {"value_width": self._value_width})
        if (old := self._quantisation) is not None:
            rule = "the cache must not be quantised already"
            raise ArgumentValueError(function, rule, {"cache": f"int{old.bits} per {old.per}"})
        check_choice(function, "dtype", dtype, [*BITS])
        check_choice(function, "per", per, ["token", "channel"])
        for name in self._names:
            if dtype == "int4" and (shape := self._shape(name))[-1] % 2:
                why = "for int4, which has two numbers in a byte"
                rule = f"`cache.{name}` must have an even width (axis -1) {why}"
                raise ArgumentValueError(function, rule, {f"cache.{name}.shape": shape})
        if per == "token":
            return Quantisation(BITS[dtype], dtype_name(measured.dtype))
        if any(isinstance(length, int) and length == 0 for length in measured.shape):  # others are symbols
            rule = "the cache must have tokens, on which the magnitudes of the channels are measured"
            hint = "Call it after the prompt, or pass per='token'."
            raise ArgumentValueError(function, rule, {f"cache.{self._names[0]}.shape": measured.shape}, hint)
        with computing(measured):
            return Quantisation(BITS[dtype], dtype_name(measured.dtype), channel_magnitudes(measured, axes))

    def _shown(self, name: str) -> str:
        """Return the keys or the values for a repr."""
        stored, quantisation = self._tokens.read(name), self._quantisation
        if quantisation is None or not is_array(stored):
            return brief(stored)
        return f"<{quantisation.dtype} {self._shape(name)} as int{quantisation.bits}>"

    def _facts(self, name: str) -> str:
        """Return the keys or the values for the table of a notebook."""
        stored, quantisation = self._tokens.read(name), self._quantisation
        if quantisation is None or not is_array(stored):
            return array_facts(stored)
        return array_facts(stored, self._shape(name), f"{quantisation.dtype} as int{quantisation.bits}")

    def _call_text(self, function: str, shown: dict[str, str]) -> str:
        """Return the call that makes a cache like this one, for a repr."""
        if self._quantisation is not None:
            shown["per"] = repr(self._quantisation.per)
        return f"{function}({', '.join(f'{name}={text}' for name, text in shown.items())})"

    def _saving(self) -> str:
        """Return how many times as many bytes the tokens of a quantised cache took."""
        quantisation, used = self._quantisation, self.nbytes
        if quantisation is None or not used:
            return ""
        wide = sum(math.prod(self._shape(name)) for name in self._names) * BYTES[quantisation.dtype]
        return f", {wide / used:.2f} times fewer than {quantisation.dtype}"


def refuse_graph_values(function: str, feature: str, arrays: Mapping[str, object]) -> None:
    """Check that `feature` gets arrays, and not values of a graph that is being exported."""
    if has_override(*arrays.values()):
        rule = f"{feature} needs arrays, not values of a graph"
        got = {name: type_name(array) for name, array in arrays.items()}
        raise ArgumentTypeError(function, rule, got, "In a graph, use a KVCache without `capacity`.")
