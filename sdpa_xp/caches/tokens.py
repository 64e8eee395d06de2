"""The tokens of a KVCache, and where the queries and the options of a call stand among them."""

from __future__ import annotations

from typing import Any, TypeVar, cast

from .._call.options import CallOptions
from .._checks.arrays import HLE, check_plain_array, headed
from .._libraries import is_array
from .._libraries.protocols import AnyArray
from ..positional.positions import Consecutive
from ..positional.rotation import Positions, rotate
from .memory import Buffers, TokenSlots, in_context_of_keys
from .positions import (
    check_in_cache,
    check_positions,
    count_positions,
    last_positions,
    options_at,
    positions_array,
)
from .quantisation import QUANTISED_NAMES, check_query_of_cache
from .stored import StoredTokens

A = TypeVar("A", bound=AnyArray)


class CachedTokens(StoredTokens[A]):
    """The tokens of a KVCache."""

    __slots__ = ()

    def __len__(self) -> int:
        """Return the number of tokens in the cache."""
        return self._slots.length

    @property
    @in_context_of_keys
    def positions(self) -> A:
        """The positions of the tokens so far, int32: (S,), or (..., S) if batch entries differ."""
        key = self._slots.buffers.arrays["key"]
        return cast(A, positions_array("KVCache", key, self._positions, self._slots.length))

    def _tree_state(self) -> dict[str, object]:
        positions = self._positions
        if isinstance(positions, Consecutive) and is_array(positions.first) and positions.shift:
            # What is not in an array is static, and a cache that a scan carries has to stay the same.
            positions = Consecutive(positions.first + positions.shift)
        state: dict[str, object] = {"positions": positions, "layout": self._layout, "rotary": self._rotary}
        if self._quantisation is not None:  # what a cache is not does not change the tree that it is
            state["quantisation"] = self._quantisation
        return {**self._slots.arrays(), **state}

    def _set_tree_state(self, state: dict[str, Any]) -> None:
        axis = -2 if state["layout"] == HLE else -3
        shape = getattr(state["key"], "shape", ())  # JAX may have put something else where arrays were
        length = shape[axis] if len(shape) >= -axis else 0
        self._quantisation = state.get("quantisation")
        names = ("key", "value") if self._quantisation is None else QUANTISED_NAMES
        # A transform of JAX made the arrays, or put others in their place: none is written to.
        buffers = Buffers({name: state[name] for name in names}, axis, length, are_of_caller=True)
        self._slots, self._positions = TokenSlots(buffers, 0, length), state["positions"]
        self._layout, self._rotary = state["layout"], state["rotary"]

    @in_context_of_keys
    def _placed(
        self, function: str, query: AnyArray, positions: object, options: CallOptions
    ) -> tuple[AnyArray, CallOptions]:
        """Return the query, rotated by its positions, and the options with masks and biases that know them."""
        length = self._slots.length

        def positions_of(queries: int) -> Positions:
            if positions is not None:
                return check_positions(function, positions, queries, array.shape[:-3], array, "query")
            if not isinstance(self._positions, Consecutive):
                check_in_cache(function, queries, length)
            return last_positions(self._positions, length, queries)

        array = check_plain_array(function, "query", query)
        check_query_of_cache(
            function, array, "cache.key", self._slots.buffers.arrays["key"], self._quantisation
        )
        if len(array.shape) < 3:  # refused later, as in every call
            return array, options
        is_consecutive = positions is None and isinstance(self._positions, Consecutive)
        has_slots = is_consecutive and cast(Consecutive, self._positions).is_from_zero
        rotated = rotate(self._rotary, function, "query", array, positions_of, self._layout)
        if has_slots:  # most steps of a decoder
            return rotated, options
        queries = headed(array.shape, self._layout)[-2]
        if positions is not None:  # refused also where nothing reads them
            positions_of(queries)
        if not count_positions(options, consecutive=is_consecutive):
            return rotated, options
        tokens = (positions_of(queries), queries), (self._positions, length)
        places = (positions_array(function, array, *part) for part in tokens)
        return rotated, options_at(options, *places, consecutive=is_consecutive)
