"""What the tokens of a KVCache are stored as, and the methods that make them integers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Generic, Literal, Self, TypeVar, cast

from .._checks.arrays import HLE, Layout
from .._checks.integers import IntegersLike
from .._checks.keywords import check_layout, explains_keywords
from .._checks.messages import brief
from .._display import array_facts
from .._libraries import is_array
from .._libraries.jax_trees import Tree
from .._libraries.protocols import AnyArray, Array, Dtype, Shape
from ..positional.rotation import Positions, Rotation, check_fits_rotation, check_rotary
from .memory import Buffers, TokenSlots, in_context_of_keys, with_room
from .positions import TokenPositionsLike, check_start
from .quantisation import Quantisation, bytes_of, check_stored, new_quantisation, refuse_quantised, wide_shape

A = TypeVar("A", bound=AnyArray)


class Cache(Tree, Generic[A]):
    """What each kind of cache has: how its tokens are laid out, stored and rotated."""

    __slots__ = ("_layout", "_quantisation", "_rotary")
    _layout: Layout
    _quantisation: Quantisation | None
    _rotary: Rotation | None

    @property
    def layout(self) -> Layout:
        """The layout of all inputs and outputs."""
        return self._layout

    def _channels(self) -> dict[str, Array]:
        return {} if self._quantisation is None else self._quantisation.channels_by_name()


@explains_keywords
class StoredTokens(Cache[A]):
    """The keys and values of a KVCache."""

    __slots__ = ("_positions", "_slots")
    _positions: Positions
    _slots: TokenSlots

    def _with(self, slots: TokenSlots, positions: Positions) -> Any:
        """Return a cache with other tokens."""
        raise NotImplementedError

    @property
    def key(self) -> A:
        """The keys of the tokens so far, (..., H, S, E); rotated, if the cache has a `rotary`.

        A quantised cache returns a copy of what it stores, in the dtype of the keys that are appended.
        """
        return cast(A, self._wide("key"))

    @property
    def value(self) -> A:
        """The values of the tokens so far, (..., H, S, Ev); see `key`."""
        return cast(A, self._wide("value"))

    @property
    def nbytes(self) -> int:
        """The bytes of the tokens so far, with the scales of a quantised cache.

        The free space of a `capacity` is not counted.
        """
        return bytes_of(*self.stored.values())

    @property
    def stored(self) -> dict[str, A]:
        """The arrays that the tokens are stored in, by name: "key" and "value".

        Those of a quantised cache are int8, or uint8 with two numbers in a byte, beside "key_scale",
        "value_scale" and, with `per="channel"`, "key_channels": what `from_stored` takes.
        """
        return cast(dict[str, A], {**self._slots.arrays(), **self._channels()})

    @classmethod
    def from_stored(
        cls,
        stored: Mapping[str, A],
        *,
        dtype: Dtype | None = None,
        layout: Layout = "...HLE",
        rotary: Rotation | None = None,
        first_position: IntegersLike = 0,
        positions: TokenPositionsLike | None = None,
    ) -> Self:
        """Return a quantised cache of the arrays that another one has `stored`, from a file or in a graph.

        Args:
            stored: The arrays by name; they are not copied, and keys are stored rotated. All other arguments
                are as in `KVCache`.
            dtype: The dtype of queries and of keys that are appended; None is that of the scales.

        Raises:
            TypeError: The codes are not int8 or uint8, or a scale has a dtype that does not fit.
            ValueError: A name is missing or too many, or the shapes do not fit.

        Examples:
            >>> import numpy as np
            >>> from sdpa_xp import KVCache
            >>> cache = KVCache(np.ones((2, 3, 8)), np.ones((2, 3, 8))).quantised("int8")
            >>> KVCache.from_stored(cache.stored)
            KVCache(key=<float64 (2, 3, 8) as int8>, value=<float64 (2, 3, 8) as int8>, per='token')
        """
        function = "KVCache.from_stored"
        check_layout(function, layout)
        check_rotary(function, rotary)
        axis = -2 if layout == HLE else -3
        arrays, quantisation = check_stored(function, stored, dtype, axis)
        if rotary is not None:
            check_fits_rotation(function, "key", wide_shape(quantisation, arrays["key"]), rotary.width)
        length = arrays["key"].shape[axis]
        cache = object.__new__(cls)
        cache._layout, cache._rotary, cache._quantisation = layout, rotary, quantisation
        cache._positions = check_start(function, first_position, positions, length, arrays["key"])
        cache._slots = TokenSlots(Buffers(arrays, axis, length, are_of_caller=True), 0, length)
        return cache

    def _wide(self, name: str) -> Array:
        tokens = self._slots.tokens(name)
        if self._quantisation is None or not is_array(tokens):
            return tokens
        return self._quantisation.widened(name, tokens, self._slots.tokens(f"{name}_scale"))

    def _shape(self, name: str) -> Shape:
        """Return the shape of the keys or the values."""
        return wide_shape(self._quantisation, self._slots.tokens(name))

    @in_context_of_keys
    def quantised(self, dtype: Literal["int8", "int4"], *, per: Literal["token", "channel"] = "token") -> Self:
        r"""Return a cache that stores its tokens, and those appended to it, as integers.

        int8 takes 1 byte for a number and int4 half a byte, and each token 8 bytes for its scales. A step
        widens a tile at a time, and never the whole cache. Tokens are rotated before they are stored.

        Args:
            dtype: "int8", or "int4" with two numbers in a byte, which needs an even E and Ev.
            per: "token" gives each token one step, its largest magnitude / 127 (/ 7 for int4). "channel" also
                divides keys by the magnitudes of their channels, which are measured now: call it after the
                prompt.

        Returns:
            The new cache, a copy with the same capacity.

        Raises:
            ValueError: `dtype` or `per` is another word, a width is odd, the cache is quantised already, or it
                has no tokens to measure channels on.

        Numerics:
            A stored number is wrong by at most half a step: $|k_{jc} - k'_{jc}| \le \delta_{jc} / 2$, where
            $\delta_{jc}$ is the scale of token j, times the magnitude of channel c. So a score, capped or not,
            is wrong by at most $\epsilon_i = \max_j |scale| \sum_c |q_{ic}| \delta_{jc} / 2$, and an element of
            the output, without dropout, by at most

            $$\max_j \delta^v_j / 2 + \tanh(\epsilon_i / 2) \, (\max_j v_{jc} - \min_j v_{jc})$$

            over the keys j that query i attends to (and a value of 0, if there are sinks), and by what rounding
            adds. A token with a NaN or inf is NaN in all its numbers, and shows in the rows that attend to it.

        Examples:
            >>> import numpy as np
            >>> from sdpa_xp import KVCache
            >>> tokens = np.random.default_rng(0).normal(size=(8, 100, 64)).astype("float32")
            >>> cache = KVCache(tokens, tokens)
            >>> small = cache.quantised("int8")
            >>> cache.nbytes, small.nbytes
            (409600, 108800)
            >>> error = abs(small.attend(tokens[:, -1:]) - cache.attend(tokens[:, -1:]))
            >>> bool(error.max() < 0.02)
            True

        References:
            Liu et al., "KIVI", arXiv 2402.02750, section 3, for keys by channel and values by token.
        """
        function, slots, buffers = "KVCache.quantised", self._slots, self._slots.buffers
        refuse_quantised(function, self._quantisation)
        arrays, axis = slots.arrays(), buffers.axis
        quantisation = new_quantisation(function, dtype, per, arrays, arrays["key"], (axis,))
        stored = quantisation.stored(arrays, axis)
        if not buffers.are_of_caller and buffers.capacity > slots.length:
            room = buffers.capacity - slots.length
            stored = {name: with_room(array, room, axis) for name, array in stored.items()}
        new = TokenSlots(Buffers(stored, axis, slots.length), 0, slots.length)
        cache: Self = self._with(new, self._positions)
        cache._quantisation = quantisation
        return cache

    def _shown(self, name: str) -> str:
        tokens = self._slots.tokens(name)
        return brief(tokens) if self._quantisation is None else self._quantisation.shown(tokens)

    def _facts(self, name: str) -> str:
        tokens = self._slots.tokens(name)
        return array_facts(tokens) if self._quantisation is None else self._quantisation.facts(tokens)

    def _shown_bytes(self) -> str:
        allocated = {**self._slots.buffers.arrays, **self._channels()}.values()
        sizes = [size for array in allocated for size in getattr(array, "shape", [""])]
        # In a tree of JAX anything may stand where an array was, and a length of a graph may be a name.
        if not all(isinstance(size, int) for size in sizes):
            return ""
        used, most = self.nbytes, bytes_of(*allocated)
        shown = f"{used:,}" if used == most else f"{used:,} of {most:,} allocated"
        if self._quantisation is None:
            return shown
        return shown + self._quantisation.shown_saving(used, self._slots.arrays())
