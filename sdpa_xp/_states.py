"""States: attention over some of the keys, to merge with attention over the other keys."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Generic, NamedTuple, TypeAlias, TypeVar, cast

from ._call import PreparedCall
from ._checks import brief, shown
from ._checks.arrays import (
    HLE,
    Layout,
    check_floating,
    check_known,
    check_one_device,
    check_one_dtype,
    check_one_library,
    explaining_missing_names,
    headed,
    swap_heads_and_length,
)
from ._checks.keywords import check_integer, check_layout, check_lse_base, explains_keywords
from ._libraries import accumulation_dtype, checked, computing, dtype_name, library_of
from ._libraries.protocols import AnyArray, Array, Namespace
from ._programs.softmax import merge
from .errors import ArgumentTypeError, ArgumentValueError

A = TypeVar("A", bound=AnyArray)
KeyRange: TypeAlias = range | tuple[int, int]
"""The keys from the first number up to the second."""
KeyRanges: TypeAlias = Sequence[KeyRange | Sequence[KeyRange]]
"""For each state one range, or several if the state was merged from others."""


class AttentionState(NamedTuple, Generic[A]):
    """Attention over some of the keys, with the log-sum-exp that `merge_states` needs."""

    output: A
    """The output over these keys, (..., Hq, L, Ev), in the dtype of the query."""
    lse: A
    """The logarithm of the sum of exp(score), (..., Hq, L), in the dtype of the scores; with `lse_base=2` to
    base 2."""

    def __repr__(self) -> str:
        return f"AttentionState(output={brief(self.output)}, lse={brief(self.lse)})"

    def _repr_html_(self) -> str:
        """Return the table that a notebook shows."""
        from ._display import array_facts, table  # only notebooks need it

        return table("AttentionState", [(name, array_facts(array)) for name, array in self._asdict().items()])


@explains_keywords
def merge_states(
    states: Iterable[AttentionState[A]],
    *,
    lse_base: float | None = None,
    layout: Layout = "...HLE",
    key_ranges: KeyRanges | None = None,
    keys: int | None = None,
) -> AttentionState[A]:
    r"""Merge attention over parts of the keys into attention over all of these keys.

    $o = \sum_i e^{lse_i - lse}\,o_i$ with $lse = \log \sum_i e^{lse_i}$.

    Args:
        states: The results of `attention_state` for the same queries and disjoint parts of the keys, all of the
            same shapes.
        lse_base: As in `attention_state`, for the states and for the result.
        layout: "...HLE" or "...LHE", of the outputs. `lse` is (..., Hq, L) in both.
        key_ranges: The keys of each state, to check that no key counts twice: a `range` or (start, stop), or a
            list of these for a state that was merged from others.
        keys: The number of all keys, to check that none is missing in `key_ranges`.

    Returns:
        The state over all these keys, in the dtypes of the first state.

    Raises:
        TypeError: An item is not an AttentionState, or the states have several libraries or dtypes.
        ValueError: There is no state, the shapes or devices of the states differ, or a key is in two of
            `key_ranges` or in none of them.

    Examples:
        >>> import numpy as np
        >>> from sdpa_xp import attention_state, scaled_dot_product_attention
        >>> q, k, v = np.ones((1, 2)), np.eye(4, 2), np.eye(4)
        >>> parts = [attention_state(q, k[i : i + 2], v[i : i + 2]) for i in (0, 2)]
        >>> merged, whole = merge_states(parts), scaled_dot_product_attention(q, k, v)
        >>> float(np.abs(merged.output - whole).max()) < 1e-15
        True

    References:
        Ye et al., "FlashInfer", arXiv 2501.01005, section 2.2.
    """
    check_layout("merge_states", layout)
    base = check_lse_base("merge_states", lse_base)
    xp, parts = _check_states(states, layout)
    _check_key_ranges(key_ranges, len(parts), keys)
    with explaining_missing_names("merge_states", parts[0][0], computing(parts[0][0])):
        # `merge` takes the lse as a large and a small part; that of a caller is one number.
        natural_states = [
            (swap_heads_and_length(xp, output, layout), lse if base is None else lse * math.log(base), 0.0)
            for output, lse in parts
        ]
        output, large, small = merge(xp, natural_states)
        output = swap_heads_and_length(xp, xp.astype(output, parts[0][0].dtype, copy=False), layout)
        state = AttentionState(cast(A, output), cast(A, to_base(large + small, base)))
    return checked(library_of(output), "merge_states", state)


def returned_output(call: PreparedCall, compute: Callable[..., Mapping[str, Array]]) -> Any:
    """Return the output of a checked call as the caller gets it, from `compute("output")`."""
    with call.computing():
        output = call.result(compute("output")["output"])
    return call.checked(output)


def returned_state(
    call: PreparedCall, compute: Callable[..., Mapping[str, Array]], base: float | None
) -> AttentionState[Any]:
    """Return the output and the log-sum-exp as the caller gets them, from `compute("output", "lse")`."""
    with call.computing():
        results = compute("output", "lse")
        lse = call.remove_head_axis(to_base(results["lse"], base))
        state = AttentionState(call.result(results["output"]), lse)
    return call.checked(state)


def to_base(lse: Array, base: float | None) -> Array:
    """Convert a natural logarithm to another base; None is e."""
    return lse if base is None else lse * (1 / math.log(base))


def _check_states(value: object, layout: str) -> tuple[Namespace, Sequence[tuple[Array, Array]]]:
    """Check states of one library, dtype, device and shape, and return their namespace and arrays."""
    if not isinstance(value, Iterable):
        rule = "`states` must be the states to merge, each an AttentionState"
        raise ArgumentTypeError("merge_states", rule, {"states": shown(value)})
    parts = list(value)
    if not parts:
        raise ArgumentValueError("merge_states", "`states` must hold at least one state", {"states": "nothing"})
    for index, part in enumerate(parts):
        if not (isinstance(part, tuple) and len(part) == 2):
            rule = f"`states[{index}]` must be an AttentionState, (output, lse)"
            raise ArgumentTypeError("merge_states", rule, {f"states[{index}]": shown(part)})
    pairs = cast(Sequence[tuple[Array, Array]], parts)
    outputs = {f"states[{index}].output": output for index, (output, _) in enumerate(pairs)}
    lses = {f"states[{index}].lse": lse for index, (_, lse) in enumerate(pairs)}
    xp, arrays = check_one_library("merge_states", outputs | lses)
    outputs, lses = ({name: arrays[name] for name in named} for named in (outputs, lses))
    check_one_device("merge_states", arrays)
    for arrays in (outputs, lses):  # each kind by itself: half outputs have a float32 lse
        (first, reference), *_ = arrays.items()
        check_floating("merge_states", first, reference)
        check_one_dtype("merge_states", arrays)
        for name, array in arrays.items():
            check_known("merge_states", name, array.shape)
            if array.shape != reference.shape:
                rule = f"`{first}` and `{name}` must have one shape"
                got = {f"{first}.shape": reference.shape, f"{name}.shape": array.shape}
                raise ArgumentValueError("merge_states", rule, got)
    pairs = list(zip(outputs.values(), lses.values(), strict=True))
    output, lse = pairs[0]
    least = dtype_name(accumulation_dtype(xp, output.dtype))
    if dtype_name(lse.dtype) not in (least, "float64"):  # float64 comes from `softmax_dtype`
        rule = f"`states[0].lse` must be {least} if `states[0].output` is {dtype_name(output.dtype)}"
        raise ArgumentTypeError("merge_states", rule, {"states[0].lse.dtype": lse.dtype})
    rows = output.shape if output.ndim < 3 else headed(output.shape, layout)
    if output.ndim < 2 or lse.shape != rows[:-1]:
        rule = "`states[0].lse` must have the shape of `states[0].output` without its width (axis -1, Ev)"
        rule += "" if layout == HLE else " and with the heads first"
        got = {"states[0].output.shape": output.shape, "states[0].lse.shape": lse.shape}
        raise ArgumentValueError("merge_states", rule, got)
    return xp, pairs


class _Keys(NamedTuple):
    start: int
    stop: int
    state: int
    """The number of the state that is over these keys."""


def _check_key_ranges(value: object, states: int, keys: object) -> None:
    """Check that `value` has the ranges of each state, that none overlap, and that they cover `keys`."""
    # No largest number: the keys of a text may be more than an array on one machine could hold.
    total = None if keys is None else check_integer("merge_states", "keys", keys, least=0, most=math.inf)
    if value is None:
        if total is not None:
            rule, hint = "`keys` needs `key_ranges`", "They say which keys each state is over."
            raise ArgumentValueError("merge_states", rule, {"key_ranges": None}, hint)
        return
    if not isinstance(value, Sequence) or len(value) != states:
        rule = "`key_ranges` must have one item for each state"
        length = len(value) if isinstance(value, Sequence) else shown(value)
        raise ArgumentValueError("merge_states", rule, {"key_ranges": length, "states": states})
    ranges = sorted(keys for number, item in enumerate(value) for keys in _ranges(number, item))
    furthest = _Keys(0, 0, 0)
    for current in ranges:
        if current.start < furthest.stop:
            rule = "each key must be in one state"
            twice = f"{current.start}:{min(current.stop, furthest.stop)}"
            places = f"states[{furthest.state}] and states[{current.state}]"
            hint = "Merge each state only once."
            raise ArgumentValueError("merge_states", rule, {"keys": f"{twice} in {places}"}, hint)
        furthest = current
    if total is not None:
        _check_complete(ranges, total)


def _check_complete(ranges: Iterable[_Keys], total: int) -> None:
    """Check that sorted ranges cover all keys."""
    borders = [_Keys(0, 0, -1), *ranges, _Keys(total, total, -1)]
    if borders[-2].stop > total:
        rule = "no range of keys may end beyond `keys`"
        got = {f"key_ranges[{borders[-2].state}]": f"{borders[-2].start}:{borders[-2].stop}", "keys": total}
        raise ArgumentValueError("merge_states", rule, got)
    lost = [f"{a.stop}:{b.start}" for a, b in itertools.pairwise(borders) if a.stop < b.start]
    if lost:
        rule = f"the states must be over all {total} keys"
        got = {"no state over keys": ", ".join(lost)}
        raise ArgumentValueError("merge_states", rule, got, "A state is missing.")


def _ranges(number: int, item: object) -> Iterator[_Keys]:
    """Return the ranges of one state that have keys."""
    name = f"key_ranges[{number}]"
    is_one = isinstance(item, range) or (isinstance(item, Sequence) and not _is_nested(item))
    parts = [item] if is_one else item
    if not isinstance(parts, Sequence) or isinstance(parts, str):
        rule = f"`{name}` must be a range of keys, (start, stop), or a list of ranges"
        raise ArgumentTypeError("merge_states", rule, {name: shown(item)})
    for part in parts:
        pair = (part.start, part.stop) if isinstance(part, range) and part.step == 1 else part
        if isinstance(pair, range) or not isinstance(pair, Sequence) or len(pair) != 2:
            rule = f"`{name}` must be a range of keys, (start, stop), or a list of ranges"
            raise ArgumentTypeError("merge_states", rule, {name: repr(item)})
        start, stop = (check_integer("merge_states", name, border, least=0, most=math.inf) for border in pair)
        if stop < start:
            raise ArgumentValueError(
                "merge_states", f"`{name}` must not end before it begins", {name: (start, stop)}
            )
        if start < stop:
            yield _Keys(start, stop, number)


def _is_nested(item: Sequence[object]) -> bool:
    return all(isinstance(part, range | Sequence) for part in item)
