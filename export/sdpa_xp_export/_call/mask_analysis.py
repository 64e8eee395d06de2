"""Questions that the forms ask about the masks of a call, one a function."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import cast

from sdpa_xp.biases import Bias
from sdpa_xp.masks import Mask
from sdpa_xp_export._call.call import ExportCall
from sdpa_xp_export._call.operands import kind_of


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
        offset = 0 if isinstance(fields["offset"], str) else cast(int, fields["offset"])
        left, right = cast("tuple[int | None, int | None]", (fields.get("left"), fields.get("right", 0)))
        before += [] if left is None else [left - offset]
        after += [] if right is None else [right + offset]
    return min(before, default=None), min(after, default=None)


def is_lower_triangle(call: ExportCall) -> bool:
    """Return whether the masks let each query attend to its own key and to all before it, and L is S."""
    if call.past_lengths is not None or call.sizes.queries != call.sizes.keys:
        return False
    return all(map(is_window, call.masks)) and key_window(call.masks) == (None, 0)


def may_mask(bias: Bias) -> bool:
    """Return whether a bias may be -inf for some pair."""
    return any(map(may_mask, bias.parts)) if bias.parts else bias.can_mask


def only_causal(call: ExportCall) -> bool:
    """Return whether nothing but the diagonal masks."""
    return call.past_lengths is None and is_only_causal(call.masks, call.biases)


def is_only_causal(masks: Sequence[Mask], biases: Iterable[Bias]) -> bool:
    """Return whether these mask with the diagonal, and with nothing else."""
    return bool(masks) and all(map(is_causal, masks)) and not any(map(may_mask, biases))


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


def only_appends(call: ExportCall) -> bool:
    """Return whether a cache gets as many new keys as there are queries, and nothing but the diagonal masks."""
    if not call.cached or call.past_lengths is not None or call.biases or call.query.ndim != 4:
        return False
    return _as_many_new(call) and all(is_causal(mask) for mask in call.masks)


def counts_real_keys(call: ExportCall) -> bool:
    """Return whether only the number of real keys per batch entry masks; in a cache, also the diagonal."""
    # The operator that counts keys takes 4 axes, and a length for each entry of the first.
    if call.biases or call.query.ndim != 4:
        return False
    if call.past_lengths is not None:
        return _as_many_new(call) and all(is_causal(mask) for mask in call.masks)
    if call.cached or len(call.masks) != 1 or kind_of(call.masks[0]) != "padding":
        return False
    lengths = call.masks[0].arguments
    return lengths["query_lengths"] is None and getattr(lengths["key_lengths"], "shape", ()) == call.sizes.batch


def _as_many_new(call: ExportCall) -> bool:
    """Return whether a cache gets as many new keys as there are queries."""
    return call.key.shape[call.length_axis] == call.sizes.queries
