"""What the tokens of a PagedKVCache are stored as, and the method that makes them integers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal, Self, TypeVar, cast

from .._checks.keywords import explains_keywords
from .._libraries import computing, is_array, rows_at
from .._libraries.protocols import AnyArray, Array, Shape
from .blocks import Row
from .quantisation import QUANTISED_NAMES, bytes_of, new_quantisation, refuse_quantised, wide_shape
from .stored import Cache

A = TypeVar("A", bound=AnyArray)


@explains_keywords
class StoredBlocks(Cache[A]):
    """The keys and values of a PagedKVCache."""

    __slots__ = (
        "_key_blocks",
        "_lengths",
        "_positions",
        "_scales",
        "_table",
        "_token_axis",
        "_value_blocks",
    )
    _key_blocks: Array
    _lengths: tuple[int, ...]
    _positions: tuple[Row, ...]
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
        return bytes_of(*self._pools().values(), *self._channels().values())

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

    def _wide(self, name: str, blocks: Array) -> Array:
        if self._quantisation is None or not is_array(blocks):
            return blocks
        return self._quantisation.widened(name, blocks, self._scales[f"{name}_scale"])

    def _block_shapes(self, batch: Shape) -> list[Shape]:
        """Return the shapes of key and value blocks, with the axes `batch` in place of that of the blocks."""
        shapes = [wide_shape(self._quantisation, x) for x in (self._key_blocks, self._value_blocks)]
        return [(*batch, *shape[1:]) for shape in shapes]
