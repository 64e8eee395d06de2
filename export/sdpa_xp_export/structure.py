"""What the masks of a call amount to, as the forms ask it: one question a function."""

from __future__ import annotations

from sdpa_xp.masks import Mask
from sdpa_xp_export.call import Call


def is_causal(mask: Mask) -> bool:
    """Whether query i attends key j iff j <= i, counted from where the first query stands."""
    return mask.name == "causal" and mask.arguments["offset"] == 0


def only_causal(call: Call) -> bool:
    """Whether the diagonal is the one thing that masks."""
    masks = bool(call.masks) and all(is_causal(mask) for mask in call.masks)
    return masks and not call.biases and call.past_lengths is None


def unmasked(call: Call) -> bool:
    """Whether every pair may attend, whatever the values."""
    return not call.masks and not call.biases and call.past_lengths is None


def more_keys(call: Call) -> bool:
    """Whether S > L cannot be ruled out now."""
    queries, keys = call.sizes.queries, call.sizes.keys
    if isinstance(queries, int) and isinstance(keys, int):
        return keys > queries
    return queries != keys


def cuts_keys(call: Call) -> bool:
    """Whether keys behind the last query, which is_causal hides, are cut off before anything is computed."""
    return only_causal(call) and not call.cached and more_keys(call) and call.outputs == ("output",)


def hides_keys(call: Call) -> bool:
    """Whether some key, which is not cut off, may be attended by no query: a NaN in it must not matter."""
    if unmasked(call) or cuts_keys(call):
        return False
    return not only_causal(call) or (more_keys(call) and not call.cached)
