"""A cache of keys and values, for decoding token by token."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Generic, TypeVar, cast

from sdpa_xp import _checks as checks
from sdpa_xp._call.options import CallOptions
from sdpa_xp._checks import Implementation
from sdpa_xp._display import table
from sdpa_xp._libraries import device_of, dtype_name, library_of, namespace_of
from sdpa_xp._libraries.protocols import AnyArray, Array, Dtype, Rng
from sdpa_xp._tiles.layout import Layout, slice_of_axis
from sdpa_xp.attention import compute_output
from sdpa_xp.biases import Bias
from sdpa_xp.masks import Mask
from sdpa_xp.positional import rotary as rotation
from sdpa_xp.positional.rotary import Rotary

A = TypeVar("A", bound=AnyArray)


@dataclass(slots=True, eq=False)
class _Buffers:
    """The arrays of caches that were appended to in place, which share them."""

    key: Array
    value: Array
    filled: int
    """The number of tokens in the newest of these caches."""


class KVCache(Generic[A]):
    """The keys and values of the tokens so far, for decoding one token after the other.

    `append` returns a cache with more tokens; a cache itself does not change. `attend` computes the attention
    of the last tokens over all tokens in the cache. A loop of single steps gives the same result as one causal
    call over all tokens.

    Shapes:
        `S` tokens in the cache, `n` new ones, `L` queries, `Hq` query heads, `H` key heads, `E` and `Ev`
        widths, `...` batch.

    Args:
        key: (..., H, S, E): the keys of the prompt. S may be 0. Without `capacity`, keys and values are not
            copied.
        value: (..., H, S, Ev).
        capacity: The number of tokens to reserve memory for, so that `append(..., in_place=True)` copies only
            the new tokens. It needs writeable arrays (NumPy, CuPy, torch).
        layout: The layout of all inputs and outputs: "...HLE", or "...LHE" with heads after the length.
        rotary: A `positional.Rotary`. The cache then rotates the keys of the prompt, keys when they are
            appended, and queries when they attend, each by its position in the cache. The first token is at
            position 0.
        rotated: Whether `key` is rotated already, such as the `key` of another cache with a `rotary`.

    Raises:
        TypeError: The arrays have several libraries or dtypes, or are not writeable although there is a
            capacity.
        ValueError: The shapes do not fit, the arrays are on several devices, or the capacity is below S.

    Examples:
        >>> import numpy as np
        >>> token = np.ones((1, 1, 2))  # one head, one token
        >>> cache = KVCache(token, token, capacity=8)
        >>> for _ in range(3):
        ...     cache = cache.append(token, token, in_place=True)
        >>> len(cache), cache.attend(token).shape
        (4, (1, 1, 2))

    References:
        Pope et al., "Efficiently Scaling Transformer Inference", arXiv 2211.05102, section 2.1.
    """

    __slots__ = ("_axis", "_buffers", "_layout", "_length", "_rotary")

    def __init__(
        self,
        key: A,
        value: AnyArray,
        *,
        capacity: int | None = None,
        layout: Layout = "...HLE",
        rotary: Rotary | None = None,
        rotated: bool = False,
    ) -> None:
        checks.named("KVCache", "layout", layout, checks.LAYOUTS)
        checks.instance("KVCache", "rotary", rotary, Rotary)
        self._layout, self._axis, self._rotary = layout, -2 if layout == checks.HLE else -3, rotary
        _, arrays = checks.one_library("KVCache", {"key": key, "value": value})
        checks.same_dtype_and_device("KVCache", arrays)
        checks.same_but_width("KVCache", {name: array.shape for name, array in arrays.items()})
        self._length = arrays["key"].shape[self._axis]
        if checks.flag("KVCache", "rotated", rotated) and rotary is not None:
            checks.fits_rotation("KVCache", "key", arrays["key"].shape, rotary.width)
        else:
            arrays["key"] = rotation.rotate(rotary, "KVCache", "key", arrays["key"], self._length, layout)
        if capacity is not None:
            checks.no_graph_values("KVCache", "`capacity`", arrays)
            room = checks.integer("KVCache", "capacity", capacity, least=self._length) - self._length
            arrays = {name: self._with_room(array, room) for name, array in arrays.items()}
            checks.writeable("KVCache", "`capacity`", arrays)
        self._buffers = _Buffers(arrays["key"], arrays["value"], self._length)

    def __len__(self) -> int:
        """Return the number of tokens in the cache."""
        return self._length

    def __repr__(self) -> str:
        return f"KVCache(key={checks.brief(self.key)}, value={checks.brief(self.value)})"

    def _repr_html_(self) -> str:
        """Return the table that a notebook shows."""
        key, room = self._buffers.key, self._buffers.key.shape[self._axis]
        rows = [
            ("tokens", f"{self._length:,}" + (f" of {room:,}" if room > self._length else "")),
            ("key", str(tuple(self.key.shape))),
            ("value", str(tuple(self.value.shape))),
            ("layout", self._layout),
            ("arrays", f"{library_of(key).name}, {dtype_name(key.dtype)}, {device_of(key)}"),
        ]
        return table("KVCache", rows if self._rotary is None else [*rows, ("rotary", str(self._rotary))])

    @property
    def layout(self) -> Layout:
        """The layout of all inputs and outputs."""
        return self._layout

    @property
    def key(self) -> A:
        """The keys of the tokens so far, (..., H, S, E); rotated, if the cache has a `rotary`."""
        return cast(A, self._filled(self._buffers.key))

    @property
    def value(self) -> A:
        """The values of the tokens so far, (..., H, S, Ev)."""
        return cast(A, self._filled(self._buffers.value))

    def append(self, key: A, value: AnyArray, *, in_place: bool = False) -> KVCache[A]:
        """Return a cache with `n` more tokens.

        Args:
            key: (..., H, n, E), with the cache's library, device and dtype.
            value: (..., H, n, Ev).
            in_place: Write into the memory that `capacity` reserved, instead of copying the cache. This cache
                does not change, but you cannot append to it in place a second time, and torch can no longer
                differentiate attention that was computed from it. If False, the new cache is a copy without
                reserved memory.

        Returns:
            The new cache. With `in_place`, it shares its arrays with this one.

        Raises:
            TypeError: As for the cache.
            ValueError: As for the cache; or, with `in_place`, the tokens exceed the capacity, or tokens were
                appended to this cache in place before.
        """
        old = {"key": self._filled(self._buffers.key), "value": self._filled(self._buffers.value)}
        cached = {f"cache.{name}": array for name, array in old.items()}
        xp, arrays = checks.one_library("KVCache.append", {"key": key, "value": value, **cached})
        checks.same_dtype_and_device("KVCache.append", arrays)
        new = {name: arrays[name] for name in ("key", "value")}
        for name, array in new.items():
            checks.same_but("KVCache.append", name, array.shape, old[name].shape, self._axis)
        checks.same_but_width("KVCache.append", {name: array.shape for name, array in new.items()})
        stop = self._length + new["key"].shape[self._axis]
        new["key"] = rotation.rotate(self._rotary, "KVCache.append", "key", new["key"], stop, self._layout)
        if not checks.flag("KVCache.append", "in_place", in_place):
            joined = {name: xp.concat([old[name], new[name]], axis=self._axis) for name in new}
            return self._with_buffers(_Buffers(joined["key"], joined["value"], joined["key"].shape[self._axis]))
        return self._append_in_place(new["key"], new["value"])

    def attend(
        self,
        query: A,
        attn_mask: Mask | AnyArray | None = None,
        *,
        bias: Bias | AnyArray | None = None,
        is_causal: bool = True,
        scale: float | AnyArray | None = None,
        softcap: float | None = None,
        sinks: AnyArray | None = None,
        dropout_p: float = 0.0,
        rng: Rng | None = None,
        softmax_dtype: Dtype | None = None,
        implementation: Implementation | None = None,
    ) -> A:
        """Return the attention of the last L tokens of the cache over all its tokens.

        Args:
            query: (..., Hq, L, E).
            attn_mask: A mask or an array. This argument and the next ones are as in
                `scaled_dot_product_attention`. The first query is at position S - L, also for masks and
                biases: `sliding_window(255, 0)` means the last 256 tokens.
            bias: A bias, or an array that broadcasts to (..., Hq, L, S).
            is_causal: Query i attends to key j only if j <= i + S - L.
            scale: A number, or an array that broadcasts to (..., Hq, L, 1).
            softcap: A positive number, or None.
            sinks: (..., Hq).
            dropout_p: From 0 to 1.
            rng: Required if dropout_p > 0.
            softmax_dtype: float32, float64 or None.
            implementation: `"xp"` or None.

        Returns:
            (..., Hq, L, Ev), with the query's library, device and dtype.

        Raises:
            TypeError: As for `scaled_dot_product_attention`.
            ValueError: As for `scaled_dot_product_attention`; or there are more queries than tokens, unless
                `is_causal` is False.
        """
        options = CallOptions(
            attn_mask,
            bias,
            is_causal,
            scale,
            softcap,
            sinks,
            dropout_p,
            rng,
            softmax_dtype,
            self._layout,
            implementation,
        )
        function = "KVCache.attend"
        rotated = rotation.rotate(self._rotary, function, "query", query, self._length, self._layout)
        return compute_output(function, cast(A, rotated), self.key, self.value, options, queries_at_end=True)

    def _append_in_place(self, key: Array, value: Array) -> KVCache[A]:
        function, buffers, stop = "KVCache.append", self._buffers, self._length + key.shape[self._axis]
        checks.writeable(function, "`in_place=True`", {"cache.key": buffers.key, "cache.value": buffers.value})
        checks.fits_capacity(function, stop, buffers.key.shape[self._axis])
        checks.is_newest(function, self._length, buffers.filled)
        for buffer, tokens in ((buffers.key, key), (buffers.value, value)):
            buffer[slice_of_axis(self._axis, self._length, stop)] = tokens
        buffers.filled = stop
        return self._with_buffers(buffers)

    def _with_buffers(self, buffers: _Buffers) -> KVCache[A]:
        cache = object.__new__(KVCache)
        cache._layout, cache._axis, cache._rotary = self._layout, self._axis, self._rotary
        cache._buffers, cache._length = buffers, buffers.filled
        return cache

    def _filled(self, buffer: Array) -> Array:
        """Return the part of a buffer that holds this cache's tokens."""
        is_full = buffer.shape[self._axis] == self._length
        return buffer if is_full else buffer[slice_of_axis(self._axis, 0, self._length)]

    def _with_room(self, array: Array, room: int) -> Array:
        xp = namespace_of(array)
        shape = list(array.shape)
        shape[self._axis] = room
        free = xp.zeros(tuple(shape), dtype=array.dtype, device=device_of(array))
        return xp.concat([array, free], axis=self._axis)
