"""Masks from the caller's own array, or from a function of the indices; and a mask as an array."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

from .._checks import brief, shown
from .._checks.arrays import broadcast, check_plain_array
from .._checks.keywords import check_function, explains_keywords
from .._checks.score_arrays import check_boolean, frozen
from .._libraries import computing, dtype_name, is_array, namespace_of, numpy_array
from .._libraries.protocols import AnyArray, Array, Namespace, Shape
from .._tiles import Allowed, Tile, collapse_uniform
from .._tiles.grid import grid_of
from .._tiles.modifier import ScoreModifier
from ..errors import ArgumentTypeError, ArgumentValueError, Message, message_of
from .algebra import ArrayMask, FormulaMask, Mask

MaskFunction: TypeAlias = Callable[[Any, Any, Any, Any], Any]
"""mask_mod(batch, head, query_index, key_index) -> boolean, as in torch's FlexAttention."""
_REWORDED: dict[type[Exception], Any] = {
    TypeError: ArgumentTypeError,
    ValueError: ArgumentValueError,
    RuntimeError: RuntimeError,
    IndexError: IndexError,
}
"""What an error of Python's own, raised by a function of a caller, becomes when it names that function."""
_INDEX_ONCE = "The indices are arrays: index a table once, as in table[b, q_idx], not table[b][q_idx]."
"""FlexAttention calls a function with single numbers, of which each may index what the one before left."""


@explains_keywords
def from_array(boolean: AnyArray) -> Mask:
    """Convert a boolean array to a mask, which combines with other masks. `attn_mask`, `&` and `|` also take
    the array.

    Args:
        boolean: A boolean array that broadcasts to (..., Hq, L, S); True = may attend.

    Raises:
        TypeError: `boolean` is not a boolean array.
        ValueError: The shape does not broadcast to (..., Hq, L, S) of a call.

    Examples:
        >>> import numpy as np
        >>> from sdpa_xp import masks
        >>> masks.causal() | masks.from_array(np.asarray([False, True, False]))
        causal() | from_array([0, 1, 0])
    """
    array = check_plain_array("from_array", "boolean", boolean)
    check_boolean("from_array", "boolean", array)
    return ArrayMask(frozen(array))


@explains_keywords
def from_function(mask_mod: MaskFunction) -> Mask:
    """Return the mask of a function: query i of head h and batch entry b attends to key j if mask_mod(b, h, i,
    j).

    Args:
        mask_mod: A function with the signature of FlexAttention's mask_mod. It is called for each tile, with
            int32 arrays of shape (..., 1, 1, 1), (Hq, 1, 1), (rows, 1) and (1, columns), and returns a
            boolean array or a bool. Combine conditions with `&` and `|`, not with `and` and `or`. If the batch
            has several axes, b counts through all of them. With a cache, i and j are positions, and may have
            axes for the batch, (..., 1, rows, 1) and (..., 1, 1, columns). For NumPy arrays, several threads
            call the function at the same time.

    Returns:
        The mask. Tiles in which the function is False everywhere are skipped, except on a GPU.

    Raises:
        TypeError: `mask_mod` cannot be called, or its result is not boolean.
        ValueError: The result does not broadcast to the tile.

    Examples:
        >>> from sdpa_xp import masks
        >>> even = masks.from_function(
        ...     lambda b, h, q_idx, kv_idx: (kv_idx % 2 == 0) & (kv_idx <= q_idx)
        ... )
        >>> masks.to_array(even, (3, 3)).astype(int)
        array([[1, 0, 0],
               [1, 0, 0],
               [1, 0, 1]])

    References:
        Dong et al., "Flex Attention", arXiv 2412.05496, section 3.1.
    """
    check_function("from_function", "mask_mod", mask_mod, ("b", "h", "q_idx", "kv_idx"))
    return FunctionMask(mask_mod)


@explains_keywords
def to_array(mask: Mask, shape: tuple[int, ...], *, rows: range | None = None, like: Any = None) -> Any:
    """Convert a mask to a boolean array.

    Args:
        mask: A mask.
        shape: (L, S), or (..., Hq, L, S) if the mask differs between batch entries or heads.
        rows: The queries to convert, as a range with step 1; by default all. A few rows need little memory.
        like: An array with the library and the device of the result. By default the first array in the mask, or
            NumPy if there is none.

    Returns:
        A boolean array of `shape`, with len(rows) instead of L; True = may attend.

    Raises:
        TypeError: `mask` is not a mask, its arrays belong to another library, or `rows` is not a range.
        ValueError: The mask does not fit the `shape`, or `rows` are not among the L queries.

    Examples:
        >>> from sdpa_xp import masks
        >>> masks.to_array(masks.causal(), (2, 3)).tolist()
        [[True, False, False], [True, True, False]]
        >>> masks.to_array(masks.causal(), (10**6, 3), rows=range(1, 2)).tolist()
        [[True, True, False]]
    """
    return as_boolean("to_array", mask, shape, rows=rows, like=like)


def as_boolean(
    function: str, mask: object, shape: tuple[int, ...], *, rows: range | None = None, like: Any = None
) -> Any:
    """Convert a mask as `to_array` does, for the public function that messages name."""
    if not isinstance(mask, Mask):
        raise ArgumentTypeError(function, "`mask` must be a mask", {"mask": brief(mask)})

    def allowed_in(tile: Tile) -> Array:
        allowed, xp = mask.bind(tile.grid).allowed_in(tile), tile.grid.xp
        if not isinstance(allowed, bool):
            return allowed
        return xp.full((1, 1), allowed, dtype=xp.bool, device=tile.grid.device)

    try:
        return array_of_rows(function, "mask", mask, shape, rows, like, allowed_in)
    except (ArgumentTypeError, ArgumentValueError) as error:
        if (message := message_of(error)) is None:
            raise
        # Masks name the argument that most functions have for them.
        renamed = message.renamed(function, {"attn_mask": "mask"})
        raise type(error)(*renamed.parts) from error.__cause__


def array_of_rows(
    function: str,
    name: str,
    modifier: ScoreModifier,
    shape: tuple[int, ...],
    rows: range | None,
    like: Any,
    compute: Callable[[Tile], Array],
) -> Array:
    """Return what `compute` returns for the tile of some rows; messages call the mask or the bias `name`."""
    if modifier.has_code_of_caller():
        from .._libraries.jet_library import in_jvp  # few calls need it

        arrays = [array for _, array in modifier.arrays()] if like is None else [like]
        like = in_jvp(arrays[0] if arrays else numpy_array())  # the function may add what has derivatives
    grid = grid_of(function, name, shape, modifier.arrays(), like)
    xp, dtype = grid.xp, grid.xp.bool if isinstance(modifier, Mask) else grid.dtype
    rows = range(grid.queries) if rows is None else rows
    if not isinstance(rows, range) or rows.step != 1:
        raise ArgumentTypeError(function, "`rows` must be a range with step 1", {"rows": repr(rows)})
    if not 0 <= rows.start <= rows.stop <= grid.queries:
        rule = f"`rows` must be among the {grid.queries} queries (L)"
        raise ArgumentValueError(function, rule, {"rows": rows})
    tile = Tile(rows, range(grid.keys), grid)
    shape = (*shape[:-2], len(tile.rows), shape[-1])
    with computing(next((array for _, array in modifier.arrays()), like)):
        if 0 in shape:
            return xp.zeros(shape, dtype=dtype, device=grid.device)
        whole = xp.reshape(xp.broadcast_to(compute(tile), tile.shape), shape)
        return xp.astype(whole, dtype, copy=True)  # no view: neither read-only nor the caller's own


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class FunctionMask(FormulaMask):
    """Made by `from_function`."""

    name = "from_function"
    mask_mod: MaskFunction

    def allowed_in(self, tile: Tile) -> Allowed:
        allowed = apply_caller_function(tile.grid.function, "attn_mask", self.mask_mod, tile.indices)
        if isinstance(allowed, bool):
            return allowed
        array = check_function_result(tile.grid.function, "attn_mask", allowed, tile.shape, tile.grid.xp)
        if not dtype_name(array.dtype).startswith("bool"):
            rule = "the function of `attn_mask` must return booleans (True = may attend)"
            hint = "Return a condition, such as `kv_idx <= q_idx`."
            raise ArgumentTypeError(tile.grid.function, rule, {"result.dtype": array.dtype}, hint)
        # A tile in which the function is False everywhere is skipped, as with the library's masks.
        return collapse_uniform(tile, array)


def apply_caller_function(
    function: str, name: str, caller_function: Callable[..., object], arguments: Sequence[Array]
) -> object:
    """Call a caller's function of the indices, and return its result.

    If it raises an error, the message names the argument. An error of a class of the caller keeps its class.
    """
    try:
        return caller_function(*arguments)
    except Exception as error:  # a caller's function may raise anything; all of it goes on, with a name
        kind = _REWORDED.get(type(error), type(error))
        if kind not in _REWORDED.values():
            error.add_note(f"{function}: it was raised by the function of `{name}`.")
            raise
        rule = f"the function of `{name}` must compute with arrays of indices"
        hint, text = "", str(error).lower()
        if kind is IndexError:
            hint = _INDEX_ONCE if "bounds" in text or "too many" in text else ""
        elif any(word in text for word in ("truth", "ambiguous", "bool", "length-1")):
            hint = "Conditions combine with `&`, `|` and `~`, not with `and`, `or` and `not`."
        parts = function, rule, {"its error": error}, hint
        raise (kind(*parts) if issubclass(kind, TypeError | ValueError) else kind(Message(*parts))) from error


def check_function_result(function: str, name: str, result: object, target: Shape, xp: Namespace) -> Array:
    """Check that the result of a caller's function of the indices fits its tile, and return it."""
    if not is_array(result):
        rule = f"the function of `{name}` must return an array"
        hint = "`&`, `|` and `~` combine conditions." if isinstance(result, bool) else ""
        raise ArgumentTypeError(function, rule, {"result": shown(result)}, hint)
    namespace = namespace_of(result)
    if getattr(namespace, "root", namespace) is not getattr(xp, "root", xp):  # jets are hidden from functions
        rule = f"`query` and what the function of `{name}` returns must be arrays of one library"
        raise ArgumentTypeError(function, rule, {"result": shown(result)})
    if broadcast(result.shape, target) != target:
        rule = f"what the function of `{name}` returns must broadcast to (..., Hq, rows, columns) of its tile"
        hint = _INDEX_ONCE if len(result.shape) > len(target) else ""
        raise ArgumentValueError(function, rule, {"result.shape": result.shape, "tile": target}, hint)
    return result
