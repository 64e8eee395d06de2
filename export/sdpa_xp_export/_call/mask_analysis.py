"""What the masks and biases of a call amount to: the questions of the forms, and the numbers in them.

At these numbers something changes with a length, and the file of a layer keeps them: the widths, sizes, steps,
distances, lengths and offsets of masks and biases.
"""

from __future__ import annotations

import json
import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import numpy as np

from sdpa_xp.biases import Bias
from sdpa_xp.masks import Mask

from .._dtypes.dtype import INTEGERS
from ..spec import SymbolicShape, evaluated, shared
from .call import ExportCall
from .operands import Initializer, argument_of, kind_of

LONGEST_NAME = 1000
"""Characters of a length in a file, which may hold anything."""
MOST_OF_AN_ARRAY = 4
"""Of an array of integers, as many of the smallest and of the largest numbers count."""


def is_causal(mask: Mask) -> bool:
    """Return whether the mask is j <= i, with i counted from where the first query stands."""
    return kind_of(mask) == "causal" and mask.arguments["offset"] == 0


def is_window(mask: Mask) -> bool:
    """Return whether the mask is a range of keys around the query's own, of as many keys as queries."""
    return kind_of(mask) in ("causal", "sliding_window") and isinstance(mask.arguments["offset"], int | str)


def key_window(masks: Iterable[Mask]) -> tuple[int | None, int | None]:
    """Return how many keys before and after its own each query attends to under all windows; None is open.

    A sliding window with right 0 is causal, and so is any other whose offset ends it at the query's own key.
    Only for as many keys as queries, where the offset "lower_right" is 0.
    """
    before, after = [], []
    for mask in filter(is_window, masks):
        fields = mask.arguments
        # `is_window` leaves ints and "lower_right"; the fields of a mask are typed as what a caller may pass.
        offset = 0 if isinstance(fields["offset"], str) else cast(int, fields["offset"])
        left, right = cast("tuple[int | None, int | None]", (fields.get("left"), fields.get("right", 0)))
        before += [] if left is None else [left - offset]
        after += [] if right is None else [right + offset]
    return min(before, default=None), min(after, default=None)


def holds_own_key(call: ExportCall, mask: Mask) -> bool:
    """Return whether the mask is a window that the query's own key is in, which Attention-25 can state."""
    if not is_window(mask) or any(side is not None and side < 0 for side in key_window([mask])):
        return False
    # "lower_right" is 0 for as many keys as queries, and in a cache, where the queries are the last tokens.
    lower_right_is_0 = call.cached or call.sizes.queries == call.sizes.keys
    return lower_right_is_0 or isinstance(mask.arguments["offset"], int)


def is_lower_triangle(call: ExportCall) -> bool:
    """Return whether the masks let each query attend to its own key and to all before it, and L is S."""
    if call.past_lengths is not None or call.sizes.queries != call.sizes.keys:
        return False
    return all(map(is_window, call.masks)) and key_window(call.masks) == (None, 0)


def may_mask(bias: Bias) -> bool:
    """Return whether a bias may be -inf for some pair."""
    return any(map(may_mask, bias.parts)) if bias.parts else bias.can_mask


def is_additive(bias: Bias) -> bool:
    """Return whether the bias is known to add a term that does not depend on the scores."""
    return all(map(is_additive, bias.parts)) if bias.parts else bias.only_adds


def only_causal(call: ExportCall) -> bool:
    """Return whether nothing but the diagonal masks."""
    return call.past_lengths is None and is_only_causal(call.masks, call.biases)


def is_only_causal(masks: Sequence[Mask], biases: Iterable[Bias]) -> bool:
    """Return whether these mask with the diagonal, and with nothing else."""
    return bool(masks) and all(map(is_causal, masks)) and not any(map(may_mask, biases))


def heads_share_masks(call: ExportCall) -> bool:
    """Return whether all heads have the same masks, which take little time for each block of queries.

    Windows are not among them: their blocks meet few keys. Nor are a cache, which meets few queries, and arrays
    of pairs.
    """
    has_others = call.cached or call.biases or call.sinks is not None or not isinstance(call.scale, float | int)
    return not has_others and all(map(_is_of_keys, call.masks))


def _is_of_keys(mask: Mask) -> bool:
    if mask.parts:
        return all(map(_is_of_keys, mask.parts))
    is_array_of_keys = kind_of(mask) == "from_array" and mask.hides_whole_keys
    return kind_of(mask) in ("causal", "padding", "prefix") or is_array_of_keys


def unmasked(call: ExportCall) -> bool:
    """Return whether every pair may attend, whatever numbers the inputs hold."""
    return not call.masks and call.past_lengths is None and not any(map(may_mask, call.biases))


def more_keys(call: ExportCall) -> bool:
    """Return whether S may be greater than L."""
    queries, keys = call.sizes.queries, call.sizes.keys
    if isinstance(queries, int) and isinstance(keys, int):
        return keys > queries
    return queries != keys


def cuts_keys(call: ExportCall) -> bool:
    """Return whether the keys behind the last query, which is_causal hides, are cut off before the scores."""
    return only_causal(call) and not call.cached and more_keys(call) and call.outputs == ("output",)


def has_empty_rows(call: ExportCall) -> bool:
    """Return whether some query may have no key to attend; under `is_causal` each has its own or the first."""
    if unmasked(call):
        return False
    return not only_causal(call) or (call.cached and not _as_many_new(call))


def hides_keys(call: ExportCall) -> bool:
    """Return whether some key that stays may be attended by no query: a NaN in it must not matter."""
    if unmasked(call) or cuts_keys(call):
        return False
    return not only_causal(call) or (more_keys(call) and not call.cached)


def only_appends(call: ExportCall, is_stated: Callable[[Mask], bool] = is_causal) -> bool:
    """Return whether a cache gets as many new keys as there are queries, and only stated masks mask."""
    if not call.cached or call.past_lengths is not None or call.biases or call.query.ndim != 4:
        return False
    return _as_many_new(call) and all(map(is_stated, call.masks))


def counts_real_keys(call: ExportCall, is_stated: Callable[[Mask], bool] = is_causal) -> bool:
    """Return whether only the number of real keys per batch entry masks; in a cache, also stated masks."""
    # The operator that counts keys takes 4 axes, and a length for each entry of the first.
    if call.biases or call.query.ndim != 4:
        return False
    if call.past_lengths is not None:
        return _as_many_new(call) and all(map(is_stated, call.masks))
    if call.cached or len(call.masks) != 1 or kind_of(call.masks[0]) != "padding":
        return False
    lengths = call.masks[0].arguments
    return lengths["query_lengths"] is None and getattr(lengths["key_lengths"], "shape", ()) == call.sizes.batch


def real_keys(call: ExportCall) -> object:
    """Return the numbers of real keys of a call that `counts_real_keys` without a cache."""
    return call.masks[0].arguments["key_lengths"]


def _as_many_new(call: ExportCall) -> bool:
    """Return whether a cache gets as many new keys as there are queries."""
    return call.key.shape[call.length_axis] == call.sizes.queries


def constants(call: ExportCall) -> list[int]:
    """Return the numbers above 0 at which something changes with a length, without their signs, in order."""
    return sorted(constant_names(call))


def constant_names(call: ExportCall) -> dict[int, str]:
    """Return what these numbers are in the call, such as `sliding_window(left=256)`, by the number."""
    names: dict[int, str] = {}
    modifiers: list[Mask | Bias] = [*call.masks, *call.biases]
    for value in modifiers:
        for name, number in _named(value):
            names.setdefault(abs(number), f"{name}={number})")
    names.pop(0, None)  # nothing changes at a length of 0
    return names


def _named(value: Mask | Bias) -> Iterator[tuple[str, int]]:
    """Yield each number of a mask or a bias, with `sliding_window(left` and the like as its name."""
    for argument, parts in value.arguments.items():
        for part in parts if isinstance(parts, tuple | list) else (parts,):
            if isinstance(part, Mask | Bias):
                yield from _named(part)
            elif argument != "slopes":  # a number of slopes is the number of heads
                yield from ((f"{value.name}({argument}", number) for number in _numbers(part))


def _numbers(value: object) -> Iterator[int]:
    if isinstance(value, tuple | list):
        for element in value:
            yield from _numbers(element)
    elif isinstance(value, Initializer) and value.numbers.dtype.kind in "iu":
        numbers = np.unique(value.numbers).tolist()
        yield from sorted({*numbers[:MOST_OF_AN_ARRAY], *numbers[-MOST_OF_AN_ARRAY:]})
    elif isinstance(value, int) and not isinstance(value, bool):
        yield value


@dataclass(frozen=True, slots=True)
class CallNumbers:
    """The numbers of a call, the shape of its scores, and the inputs of the layer that its masks use."""

    scores_shape: SymbolicShape
    names: Mapping[int, str]
    """What each number is in the call, such as `sliding_window(left=256)`."""
    operands: tuple[tuple[str, str], ...] = ()
    """Each integer input of the layer that the call uses, and as what: `("lengths", "key_lengths")`."""
    block: int = 1
    """The keys of a block, of which lists of keys have the numbers."""

    def lengths(self, queries: int, keys: int, names: Sequence[str]) -> dict[str, int]:
        """Return lengths for this many queries and keys, as far as `names` allow it; others are 1."""
        chosen: dict[str, int] = {}
        for length, total in zip(self.scores_shape[-2:], (queries, keys), strict=True):
            chosen |= shared(length, total, chosen, names)
        return {name: chosen.get(name, 1) for name in names}

    def sizes(self, lengths: Mapping[str, int]) -> list[int]:
        """Return the shape of the scores; a name that no input has counts as 1."""
        known = defaultdict(lambda: 1, lengths)
        return [evaluated(length, known) for length in self.scores_shape]

    def count(self, lengths: Mapping[str, int]) -> float:
        """Return the number of scores."""
        return math.prod(map(float, self.sizes(lengths)))


def keys_of_a_block(call: ExportCall) -> int:
    """Return the keys of a block of the largest `masks.keys` in the masks of a call; 1 if there is none."""
    return max((size for mask in call.masks for size in _block_sizes(mask)), default=1)


def _block_sizes(mask: object) -> Iterator[int]:
    if isinstance(mask, Mask):
        arguments: Mapping[str, Any] = mask.arguments
        if mask.name == "keys":
            yield arguments["block_size"][1]
        for part in arguments.values():
            for inner in part if isinstance(part, tuple) else (part,):
                yield from _block_sizes(inner)


def numbers_of(call: ExportCall, sources: Mapping[str, str]) -> CallNumbers:
    """Return the numbers of a call; `sources` maps its inputs to the inputs of the layer that they are."""
    operands = tuple(
        (sources[name], argument_of(name))
        for name, spec in call.inputs.items()
        if spec.dtype in INTEGERS and name in sources
    )
    block = keys_of_a_block(call)
    return CallNumbers(tuple(call.sizes.scores_shape), constant_names(call), operands, block)


def numbers_as_json(calls: Iterable[CallNumbers]) -> str:
    """Return the numbers of calls as text, each different call once."""
    # Layers repeat a call, and JSON has no tuples: equal texts are equal calls.
    written = [
        [
            [*map(str, call.scores_shape)],
            {str(n): name for n, name in call.names.items()},
            call.operands,
            *([call.block] if call.block > 1 else []),
        ]
        for call in calls
    ]
    return json.dumps([json.loads(text) for text in dict.fromkeys(map(json.dumps, written))])


def numbers_from_json(text: str) -> list[CallNumbers]:
    """Return what `numbers_as_json` wrote; nothing if it did not write this text."""
    try:
        return [
            CallNumbers(
                tuple(map(str, shape)),
                # A file may hold any number.
                {int(n): str(name) for n, name in names.items() if 0 < int(n) < 2**31},
                tuple((str(name), str(operand)) for pairs in more[:1] for name, operand in pairs),
                next((block for block in more[1:2] if isinstance(block, int) and block > 1), 1),
            )
            for shape, names, *more in json.loads(text)
            if len(shape) >= 2 and all(len(str(length)) <= LONGEST_NAME for length in shape)
        ]
    except (AttributeError, RecursionError, TypeError, ValueError):
        return []
