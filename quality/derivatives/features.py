"""The calls whose derivatives are measured: each has one feature, and its textbook formula beside it."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import numpy as np
from autograd import Call
from differentiable_calls import CALLS, FEW, HOLES, MANY, shapes, tensor

from sdpa_xp import KVCache, attention_state, biases, masks, scaled_dot_product_attention, varlen_attention

PARENTS = (-1, 0, 0, 1, 1, -1, 5)
"""Of each draft in a tree."""
LINES = ({0}, {0, 1}, {0, 2}, {0, 1, 3}, {0, 1, 4}, {5}, {5, 6})
"""Each draft with its ancestors."""
ANCESTORS = np.asarray([[j in line for j in range(FEW)] for line in LINES])
OPEN_BLOCKS = np.asarray([[True, False, True], [False, True, True]])


LOSSES = "none: Losses and kernels derives the log-sum-exp"


class Feature(NamedTuple):
    """A call with its formula, and how sdpa_xp computes it."""

    call: Call
    attend: Callable[..., Any] = scaled_dot_product_attention
    """(query, key, value, **keywords) -> the array that is differentiated."""
    instead: str = ""
    """What the functions of sdpa_xp that return derivatives take instead of the call; empty if they take it."""
    dropout_p: float = 0.0
    is_poisoned: bool = False
    """Whether a query without keys, and a key without queries, hold NaN and inf."""


def features() -> dict[str, Feature]:
    """Return the features by the names that the site has for them."""
    return {name: Feature(call) for name, call in _calls().items()} | {
        "dropout": Feature(CALLS["grouped heads"], dropout_p=0.4),
        "masked NaN": Feature(CALLS["boolean array with an empty row"], is_poisoned=True),
        "attention_state": Feature(CALLS["causal"]._replace(with_lse=True), _state, LOSSES),
        "varlen_attention": Feature(_packed(), _varlen, "none: use `masks.document`"),
        "KVCache.attend": Feature(
            Call(shapes(), {"is_causal": True}, allowed=lambda i, j: j <= i + MANY - FEW),
            lambda query, key, value, **rules: KVCache(key, value).attend(query, **rules),
            "none: pass the keys and values of the cache",
        ),
    }


def _calls() -> dict[str, Call]:
    """Return the calls of `scaled_dot_product_attention` by feature."""
    names = {
        "plain": "3-D",
        "two axes": "2-D",
        "grouped heads": "grouped heads",
        'layout="...LHE"': "heads behind the length",
        "is_causal": "causal",
        'masks.causal("lower_right")': "causal, lower right",
        "masks.sliding_window": "window",
        "masks.padding": "padding",
        "masks.padding, of queries too": "padding of both",
        "masks.document": "documents",
        "masks.prefix": "prefix",
        "masks.dilated": "dilated",
        "masks combined": "causal or prefix, not chunked",
        "masks.from_function": "mask function",
        "boolean mask with empty rows": "boolean array with an empty row",
        "floating mask": "floating mask",
        "bias": "bias of each pair",
        "mask and bias": "mask and bias",
        "biases.alibi": "slopes of each head",
        "biases.relative": "relative",
        "a sum of biases": "biases of several kinds",
        "biases.from_function that adds": "function that adds",
        "scale": "scale",
        "learned scale": "scale of each head",
        "softcap": "softcap",
        "sinks": "sinks",
        "all of it": "all",
    }
    more = {
        "masks.blocks": _masked(
            masks.blocks(OPEN_BLOCKS.tolist(), (4, 6)), lambda i, j: tensor(OPEN_BLOCKS)[i // 4, j // 6]
        ),
        "masks.tree": _masked(
            masks.tree(PARENTS, offset="lower_right"),
            lambda i, j: (j < MANY - FEW) | tensor(ANCESTORS)[i, (j - MANY + FEW).clip(0)],
        ),
        "masks.neighbourhood": _masked(
            masks.neighbourhood((3, 6), 1, borders="cut"),
            lambda i, j: (abs(i // 6 - j // 6) <= 1) & (abs(i % 6 - j % 6) <= 1),
        ),
        "biases.from_function that scales": Call(
            shapes(),
            {"bias": biases.from_function(lambda score, *_indices: score * 0.5), "scale": 1.0},
            added=_minus_half,
        ),
    }
    return {name: CALLS[call] for name, call in names.items()} | more


def _masked(mask: Any, allowed: Callable[[Any, Any], Any]) -> Call:
    return Call(shapes(), {"attn_mask": mask}, allowed=allowed)


def _minus_half(leaves: Mapping[str, Any], _i: Any, _j: Any) -> Any:
    key = leaves["key"].repeat_interleave(2, dim=-3)
    return -0.5 * leaves["query"] @ key.transpose(-1, -2)


def _state(*inputs: Any, **rules: Any) -> Any:
    """Return the output, to which the log-sum-exp of each row is added."""
    output, lse = attention_state(*inputs, **rules)
    return output + lse[..., None]


def _packed() -> Call:
    ids = [np.repeat([0, 1], lengths) for lengths in ((3, 4), (9, 8))]
    return Call(
        {"query": (FEW, 4, 8), "key": (MANY, 2, 8), "value": (MANY, 2, 5)},
        {"layout": "...LHE"},
        allowed=lambda i, j: tensor(ids[0])[i] == tensor(ids[1])[j],
    )


def _varlen(*inputs: Any, **rules: Any) -> Any:
    return varlen_attention(*inputs, [0, 3, 7], [0, 9, 17], **rules)


def poisoned(arrays: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Return the inputs with NaN and inf in queries and keys that have none of the other in `HOLES`."""
    changed = {name: x.copy() for name, x in arrays.items()}
    changed["query"][..., ~HOLES.any(axis=1), :] = math.nan
    changed["key"][..., ~HOLES.any(axis=0), :] = math.inf
    changed["value"][..., ~HOLES.any(axis=0), :] = math.nan
    return changed
