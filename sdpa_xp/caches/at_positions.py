"""Options whose masks and biases count positions of tokens, which are not their places in the arrays."""

from __future__ import annotations

from sdpa_xp._call.options import CallOptions
from sdpa_xp._libraries.protocols import Array
from sdpa_xp._tiles.modifier import ScoreModifier
from sdpa_xp.biases import Bias
from sdpa_xp.biases.positioned import bias_at
from sdpa_xp.masks import Mask
from sdpa_xp.masks.positioned import mask_at, reads_positions


def count_positions(options: CallOptions, *, consecutive: bool) -> bool:
    """Return whether a mask or a bias of the options counts positions, which are not the slots."""
    return any(
        isinstance(option, ScoreModifier) and reads_positions(option, consecutive=consecutive)
        for option in (options.attn_mask, options.bias)
    )


def options_at(options: CallOptions, queries: Array, keys: Array, *, consecutive: bool) -> CallOptions:
    """Return options whose masks and biases count positions of the queries, (..., L), and keys, (..., S)."""
    mask, bias = options.attn_mask, options.bias
    if isinstance(mask, Mask):
        mask = mask_at(mask, queries, keys, consecutive=consecutive)
    if isinstance(bias, Bias):
        bias = bias_at(bias, queries, keys, consecutive=consecutive)
    return options._replace(attn_mask=mask, bias=bias)
