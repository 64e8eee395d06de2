"""What the tokens of a cache are stored as, and the methods that make them integers."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Generic, Literal, Self, TypeVar, cast

from sdpa_xp._libraries import computing, is_array, rows_at
from sdpa_xp._libraries.jax_trees import Tree
from sdpa_xp._libraries.protocols import AnyArray, Array, Shape
from sdpa_xp.caches.blocks import Row
from sdpa_xp.caches.memory import Buffers, TokenSlots, in_context_of_keys, with_room
from sdpa_xp.caches.quantisation import (
    QUANTISED_NAMES,
    Quantisation,
    bytes_of,
    new_quantisation,
    refuse_quantised,
    wide_shape,
)
from sdpa_xp.positional.rotation import Positions

A = TypeVar("A", bound=AnyArray)


class StoredTokens(Tree, Generic[A]):
    """The keys and values of a KVCache."""

    __slots__ = ("_positions", "_quantisation", "_slots")
    _positions: Positions
    _quantisation: Quantisation | None
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
        """The bytes of the tokens' keys and values, and of the scales of a quantised cache."""
        channels = None if self._quantisation is None else self._quantisation.key_channels
        return bytes_of(*self._slots.arrays().values(), channels)

    @property
    def stored(self) -> dict[str, A]:
        """The arrays that the tokens are stored in, by name: "key" and "value".

        Those of a quantised cache are int8, or uint8 with two numbers in a byte, beside "key_scale",
        "value_scale" and, with `per="channel"`, "key_channels": what `from_stored` takes.
        """
        quantisation = self._quantisation
        channels = {} if quantisation is None else quantisation.channels_by_name()
        return cast(dict[str, A], {**self._slots.arrays(), **channels})

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

    def _shown(self, name: str, show: Callable[[object], str]) -> str:
        tokens = self._slots.tokens(name)
        return show(tokens) if self._quantisation is None else self._quantisation.shown(tokens)


class StoredBlocks(Tree, Generic[A]):
    """The keys and values of a PagedKVCache."""

    __slots__ = (
        "_key_blocks",
        "_lengths",
        "_positions",
        "_quantisation",
        "_scales",
        "_table",
        "_token_axis",
        "_value_blocks",
    )
    _key_blocks: Array
    _lengths: tuple[int, ...]
    _positions: tuple[Row, ...]
    _quantisation: Quantisation | None
    _scales: dict[str, Array]
    """The scales of keys and values in the blocks, (P, H, size, 1), if they are quantised."""
    _table: list[list[int]]
    _token_axis: int
    _value_blocks: Array

    def _with(self, table: list[list[int]], positions: tuple[Row, ...], pools: Mapping[str, Array]) -> Any:
        """Return a cache with other sequences, or over other pools."""
        raise NotImplementedError

    @property
    def block_size(self) -> int:
        """The number of tokens that fit into a block."""
        return self._key_blocks.shape[self._token_axis]

    @property
    def key_blocks(self) -> A:
        """The keys of all blocks in the pool, (P, H, size, E); of a quantised cache a copy."""
        return cast(A, self._wide("key", self._key_blocks))

    @property
    def value_blocks(self) -> A:
        """The values of all blocks in the pool, (P, H, size, Ev); see `key_blocks`."""
        return cast(A, self._wide("value", self._value_blocks))

    @property
    def nbytes(self) -> int:
        """The bytes of all blocks in the pool, and of the scales of a quantised cache."""
        channels = None if self._quantisation is None else self._quantisation.key_channels
        return bytes_of(*self._pools().values(), channels)

    def quantised(self, dtype: Literal["int8", "int4"], *, per: Literal["token", "channel"] = "token") -> Self:
        """Return a cache over a new pool, whose blocks store tokens as integers; see `KVCache.quantised`.

        Make caches of other sequences over the new pool `with_table`.

        Args:
            dtype: "int8" or "int4".
            per: "token" or "channel". The channels are measured on the blocks of the sequences.

        Raises:
            ValueError: As for `KVCache.quantised`.

        Examples:
            >>> import numpy as np
            >>> from sdpa_xp import PagedKVCache
            >>> pool = np.zeros((4, 1, 16, 64), "float32")
            >>> cache = PagedKVCache(pool, pool, block_table=[[2]], lengths=[0]).quantised("int4")
            >>> pool.nbytes * 2, cache.nbytes
            (32768, 4608)
            >>> cache.with_table([[2, 0], [3]], lengths=[0, 0])
            PagedKVCache(key_blocks=<float32 (4, 1, 16, 64) as int4>, lengths=(0, 0), per='token')
        """
        function, pools = "PagedKVCache.quantised", self._pools()
        refuse_quantised(function, self._quantisation)
        size = self.block_size
        with computing(self._key_blocks):
            used = [
                n
                for row, length in zip(self._table, self._lengths, strict=True)
                for n in row[: -(-length // size)]
            ]
            measured = rows_at(self._key_blocks, used) if used else self._key_blocks[:0, ...]
            quantisation = new_quantisation(function, dtype, per, pools, measured, (0, self._token_axis))
            stored = quantisation.stored({"key": self._key_blocks, "value": self._value_blocks}, -4)
        names = ("key_blocks", "value_blocks", *QUANTISED_NAMES[2:])
        cache: Self = self._with(self._table, self._positions, dict(zip(names, stored.values(), strict=True)))
        cache._quantisation = quantisation
        return cache

    def _pools(self) -> dict[str, Array]:
        """Return all arrays that have blocks."""
        return {"key_blocks": self._key_blocks, "value_blocks": self._value_blocks, **self._scales}

    def _channels(self) -> dict[str, Array]:
        return {} if self._quantisation is None else self._quantisation.channels_by_name()

    def _wide(self, name: str, blocks: Array) -> Array:
        if self._quantisation is None or not is_array(blocks):
            return blocks
        return self._quantisation.widened(name, blocks, self._scales[f"{name}_scale"])

    def _block_shapes(self, batch: Shape) -> list[Shape]:
        """Return the shapes of key and value blocks, with the axes `batch` in place of that of the blocks."""
        shapes = [wide_shape(self._quantisation, x) for x in (self._key_blocks, self._value_blocks)]
        return [(*batch, *shape[1:]) for shape in shapes]
