"""Calls of each shape, mask, bias and other rule, beside their textbook, for the tests of derivatives."""

from __future__ import annotations

import math
from typing import Any

import autograd
import numpy as np
from autograd import Call
from internals import namespace
from libraries import Library

from sdpa_xp import biases, masks

F = np.float32


BAD = (math.nan, math.inf, -math.inf)
FEW, MANY = 7, 17
"""Tokens: one length is more than twice the other."""


def shapes(
    query: Any = (2, 4, FEW, 8), key: Any = (2, 2, MANY, 8), width: int = 5, **more: Any
) -> dict[str, Any]:
    return {"query": query, "key": key, "value": (*key[:-1], width)} | more


def array(rows: str) -> np.ndarray:
    return np.asarray([[letter == "x" for letter in row] for row in rows.split()])


def tensor(x: Any) -> Any:
    import torch

    return torch.asarray(np.asarray(x))


def per_entry(*numbers: int) -> Any:
    """One number for each batch entry."""
    return tensor(numbers).reshape(-1, 1, 1, 1)


def alibi(leaves: Any, i: Any, j: Any) -> Any:
    return -leaves["bias.slopes"][..., None, None] * abs(i - j)


def t5(leaves: Any, i: Any, j: Any) -> Any:
    """Raffel et al., section 2.1, for 4 buckets a direction up to 8: distances 0, 1, 2 to 3, and all beyond."""
    away = (abs(j - i) >= 1).long() + (abs(j - i) >= 2) + (abs(j - i) >= 4)
    return leaves["bias.table"][away + 4 * (j > i)].permute(2, 0, 1)


HOLES = array(
    """
    xxx.xx...xx.xx.x.
    .................
    .xxxxxxxxx.xxx.xx
    x................
    xxxxxxxxxxxxxx.xx
    ...x.............
    xxxxxxx......x..x
    """
)
"""FEW x MANY, with an empty row; no query attends the last key but two."""


def calls(queries: int, keys: int) -> dict[str, Call]:
    """Each shape, mask, bias and other rule, for FEW queries and MANY keys or the other way round."""
    qkv = shapes((2, 4, queries, 8), (2, 2, keys, 8))
    holes = HOLES if queries < keys else HOLES.T
    rng = np.random.default_rng(8)
    to_rows, to_keys = rng.random((2, 1, queries, 1)) < 0.8, rng.random((keys,)) < 0.6
    ids = [np.sort(rng.integers(0, 4, length)) for length in (queries, keys)]
    shift, lengths = keys - queries, (keys, keys // 2)

    def rank(*leading: int, heads: int = 0, width: int = 5) -> dict[str, Any]:
        """Query, and key and value of `heads`."""
        key = (*leading[:-1], heads, keys, 8) if heads else (*leading, keys, 8)
        return shapes((*leading, queries, 8), key, width)

    def only(mask: Any, allowed: Any, **more: Any) -> Call:
        return Call(qkv | more, {"attn_mask": mask}, allowed=allowed)

    def with_slopes(shape: tuple[int, ...], added: Any, **options: Any) -> Call:
        return Call(
            qkv | {"bias.slopes": shape},
            holds=lambda x: {"bias": biases.alibi(x["bias.slopes"], **options)},
            added=added,
        )

    def with_table(added: Any, **options: Any) -> Call:
        return Call(
            qkv | {"bias.table": (8, 4)},
            holds=lambda x: {"bias": biases.relative(x["bias.table"], max_distance=8, **options)},
            added=added,
        )

    return {
        "2-D": Call(rank()),
        "3-D": Call(rank(4, width=8)),
        "grouped heads": Call(qkv),
        "one key head": Call(rank(2, 6, heads=1)),
        "batches broadcast": Call(
            shapes((3, 1, 4, queries, 8), (2, 4, keys, 8)) | {"value": (1, 1, 4, keys, 5)}
        ),
        "batch of query alone": Call(
            qkv | {"key": (2, keys, 8), "value": (2, keys, 5), "bias": (2, 1, 1, keys)}
        ),
        "batch of value alone": Call(rank(4) | {"value": (2, 4, keys, 5)}),
        "ranks differ": Call(shapes((4, queries, 8), (keys, 8))),
        "one query": Call(shapes((2, 4, 1, 8), (2, 2, keys, 8))),
        "heads behind the length": Call(
            shapes((2, queries, 4, 8), (2, keys, 2, 8)),
            {"layout": "...LHE", "is_causal": True},
            allowed=lambda i, j: j <= i,
        ),
        "causal": Call(qkv, {"is_causal": True}, allowed=lambda i, j: j <= i),
        "causal, lower right": only(masks.causal("lower_right"), lambda i, j: j <= i + shift),
        "causal of each entry": only(masks.causal([shift, 3]), lambda i, j: j <= i + per_entry(shift, 3)),
        "window": only(masks.sliding_window(2, 1, offset=3), lambda i, j: (i + 1 <= j) & (j <= i + 4)),
        "window, lower right": only(
            masks.sliding_window(3, 1, offset="lower_right"),
            lambda i, j: (i + shift - 3 <= j) & (j <= i + shift + 1),
        ),
        "window of each entry": only(
            masks.sliding_window(1, None, offset=[-3, 9]), lambda i, j: j >= i - 1 + per_entry(-3, 9)
        ),
        "padding": only(masks.padding(lengths), lambda i, j: j < per_entry(*lengths)),
        "padding of both": only(
            masks.padding(keys - 1, [0, queries - 2]),
            lambda i, j: (j < keys - 1) & (i < per_entry(0, queries - 2)),
        ),
        "documents": only(
            masks.document(*(x.tolist() for x in ids)), lambda i, j: tensor(ids[0])[i] == tensor(ids[1])[j]
        ),
        "prefix": only(masks.prefix(lengths), lambda i, j: j < per_entry(*lengths)),
        "dilated": only(masks.dilated(5), lambda i, j: (i - j) % 5 == 0),
        "causal or prefix, not chunked": only(
            (masks.causal() | masks.prefix(6)) & ~masks.chunked(3),
            lambda i, j: ((j <= i) | (j < 6)) & (i // 3 != j // 3),
        ),
        "mask function": only(
            masks.from_function(lambda b, h, i, j: (i * j + b + h) % 3 == 1),
            lambda i, j: (i * j + per_entry(0, 1) + tensor(range(4))[:, None, None]) % 3 == 1,
        ),
        "boolean array with an empty row": only(holes, lambda i, j: tensor(holes)),
        "boolean array of queries": only(to_rows, lambda i, j: tensor(to_rows)),
        "boolean array of keys": only(to_keys, lambda i, j: tensor(to_keys)),
        "floating mask": Call(qkv | {"attn_mask": (2, 1, 1, keys)}),
        "bias of each pair": Call(
            qkv | {"bias": (2, 4, queries, keys)}, {"is_causal": True}, allowed=lambda i, j: j <= i
        ),
        "bias of each key": Call(qkv | {"bias": (keys,)}),
        "bias of each query, beside sinks": Call(qkv | {"bias": (4, queries, 1), "sinks": (4,)}),
        "bias of each head, beside sinks": Call(qkv | {"bias": (2, 4, 1, 1), "sinks": (2, 4)}),
        "bias, 2-D": Call(rank() | {"bias": (queries, keys)}),
        "mask and bias": Call(qkv | {"attn_mask": (queries, keys), "bias": (4, 1, keys)}),
        "biases of several kinds": Call(
            qkv | {"bias.array": (queries, keys), "bias.slopes": (4,)},
            holds=lambda x: {"bias": biases.from_array(x["bias.array"]) + biases.alibi(x["bias.slopes"])},
            added=lambda x, i, j: x["bias.array"] + alibi({"bias.slopes": x["bias.slopes"]}, i, j),
        ),
        "slopes of each head": with_slopes((4,), alibi),
        "slopes of each entry": with_slopes((2, 4), alibi),
        "slopes, lower right": with_slopes((4,), lambda x, i, j: alibi(x, i + shift, j), offset="lower_right"),
        "slopes, from an offset of each entry": with_slopes(
            (4,), lambda x, i, j: alibi(x, i + per_entry(-5, 11), j), offset=[-5, 11]
        ),
        "slopes that are numbers": Call(
            qkv,
            {"bias": biases.alibi([0.5, 1, 2, 0.25])},
            added=lambda _, i, j: alibi({"bias.slopes": tensor(np.asarray([0.5, 1, 2, 0.25], F))}, i, j),
        ),
        "relative": with_table(t5),
        "relative, lower right": with_table(lambda x, i, j: t5(x, i + shift, j), offset="lower_right"),
        "function that adds": Call(
            qkv,
            {
                "bias": biases.from_function(
                    lambda s, b, h, i, j: s + namespace(s).astype(b + 2 * h - abs(i - j), s.dtype) * 0.5
                )
            },
            added=lambda _, i, j: per_entry(0, 1) * 0.5 + tensor(range(4))[:, None, None] - abs(i - j) * 0.5,
        ),
        "function that masks": Call(
            qkv,
            {"bias": biases.from_function(lambda s, b, h, i, j: namespace(s).where(j > i + 3, -math.inf, s))},
            allowed=lambda i, j: j <= i + 3,
        ),
        "scale": Call(qkv, {"scale": -0.7}),
        "scale 0": Call(qkv, {"scale": 0.0}),
        "scale of all": Call(qkv | {"scale": ()}),
        "scale of each head": Call(qkv | {"scale": (4, 1, 1)}),
        "scale of each query": Call(qkv | {"scale": (2, 1, queries, 1)}),
        "softcap": Call(qkv, {"softcap": 1.5}),
        "sinks": Call(qkv | {"sinks": (4,)}),
        "sinks of each entry, and an empty row": only(holes, lambda i, j: tensor(holes), sinks=(2, 4)),
        "all": Call(
            qkv | {"scale": (4, 1, 1), "bias": (4, queries, keys), "sinks": (4,)},
            {"attn_mask": holes, "is_causal": True, "softcap": 2.0},
            allowed=lambda i, j: tensor(holes) & (j <= i),
        ),
    }


CALLS = calls(FEW, MANY)
MORE_QUERIES = calls(MANY, FEW)


def placed_in(library: Library, call: Call, arrays: dict[str, np.ndarray]) -> tuple[list[Any], dict[str, Any]]:
    """Query, key and value in the library, and the keywords of the call."""
    placed = {name: library.put(x) for name, x in arrays.items()}
    rules = {k: library.put(x) if isinstance(x, np.ndarray) else x for k, x in call.rules.items()}
    inputs = [placed.pop(name) for name in autograd.INPUTS]
    return inputs, autograd.keywords(call._replace(rules=rules), placed)
