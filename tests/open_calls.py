"""Calls whose lengths only a run knows: each mask that has a formula, each bias and each option, by name.

A row says along which axes its arrays lie, and what they are to a call. A tool traces it at `TRACED`, and the
program has to agree with the eager call at `LENGTHS`, where that takes the call.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import numpy as np
from internals import namespace

import sdpa_xp
from sdpa_xp import KVCache, attention_scores, attention_statistics, biases, masks, scaled_dot_product_attention
from sdpa_xp.errors import ArgumentValueError
from sdpa_xp.layers import MultiHeadAttention

TRACED = {"B": 2, "L": 5, "S": 7}
LENGTHS = [{"B": 3, "L": 6, "S": 9}, {"B": 2, "L": 12, "S": 4}, {"B": 1, "L": 1, "S": 1}, TRACED | {"S": 17}]
FIXED = {"H": 4, "h": 2, "E": 8, "V": 6, "T": 16, "1": 1}
INPUTS = ("BHLE", "BhSE", "BhSV")


@dataclass(frozen=True)
class Row:
    """Arrays of a call besides its inputs, and what makes its keywords of them."""

    keywords: Callable[..., dict[str, Any]]
    arrays: tuple[str, ...] = ()
    """The axes of each array and, behind a blank, what it holds: numbers below a length, ids or booleans."""
    fixed: str = ""
    """The letters of the lengths that the call itself fixes."""
    most: float = math.inf
    """The most queries and keys that it takes."""

    @property
    def symbols(self) -> str:
        """The letters of the lengths that a compiler may know by their symbols."""
        return "".join(letter for letter in "BLS" if letter not in self.fixed)

    @property
    def axes(self) -> list[str]:
        """The axes of the inputs and of the arrays, a letter each."""
        return [*INPUTS, *(array.partition(" ")[0] for array in self.arrays)]

    def draw(self, lengths: Mapping[str, int]) -> list[np.ndarray]:
        """The inputs and the arrays at some lengths."""
        rng, sizes = np.random.default_rng(sum(lengths.values())), FIXED | dict(lengths)
        kinds = [*[""] * len(INPUTS), *(array.partition(" ")[2] for array in self.arrays)]
        return [
            _drawn(rng, kind, tuple(sizes[letter] for letter in axes), lengths)
            for axes, kind in zip(self.axes, kinds, strict=True)
        ]

    def runs(
        self, call: Callable[..., Any], as_array: Callable[[np.ndarray], Any], symbols: str = "BLS"
    ) -> Iterator[tuple[list[Any], Any]]:
        """Arrays of other lengths than the traced ones, and the results of the call.

        A program cannot refuse lengths that the call refuses: these are left out.
        """
        compared = 0
        for of_run in LENGTHS:
            lengths = {n: of_run[n] if n in symbols and n not in self.fixed else TRACED[n] for n in TRACED}
            arrays = [as_array(x) for x in self.draw(lengths)]
            with suppress(ArgumentValueError):
                yield arrays, call(*arrays)
                compared += 1
        assert compared >= 2


def _drawn(
    rng: np.random.Generator, kind: str, shape: tuple[int, ...], lengths: Mapping[str, int]
) -> np.ndarray:
    if kind == "lengths":
        return rng.integers(1, min(lengths["L"], lengths["S"]) + 1, shape).astype(np.int32)
    if kind == "ids":
        return rng.integers(0, 2, shape).astype(np.int32)
    if kind == "booleans":
        return rng.random(shape) < 0.7
    return rng.standard_normal(shape).astype(np.float32)


def _is_third(batch: Any, head: Any, i: Any, j: Any) -> Any:
    return (batch + head + i + j) % 3 != 0


def _sloping(score: Any, batch: Any, head: Any, i: Any, j: Any) -> Any:
    return score * 0.5 + (head * batch - i + j)


def _masked(mask: masks.Mask, **row: Any) -> Row:
    return Row(lambda: {"attn_mask": mask}, **row)


TREE = [-1, 0, 0, 1, -1]
MASKS = {
    "causal": _masked(masks.causal()),
    "causal, moved": _masked(masks.causal(3)),
    "causal, moved back": _masked(masks.causal(-2)),
    "causal, lower right": _masked(masks.causal("lower_right")),
    "causal, a list": _masked(masks.causal([1, 2]), fixed="B"),
    "causal, an array": Row(lambda x: {"attn_mask": masks.causal(x)}, ("B lengths",)),
    "window": _masked(masks.sliding_window(2, 1)),
    "window, lower right": _masked(masks.sliding_window(2, None, offset="lower_right")),
    "prefix": _masked(masks.prefix(2)),
    "prefix or causal": _masked(masks.prefix(2) | masks.causal()),
    "padding, a list": _masked(masks.padding([3, 1]), fixed="B"),
    "padding": Row(
        lambda x, y: {"attn_mask": masks.padding(x, y), "is_causal": True}, ("B lengths", "B lengths")
    ),
    "documents": Row(lambda x, y: {"attn_mask": masks.document(x, y)}, ("BL ids", "BS ids")),
    "chunked": _masked(masks.chunked(3)),
    "dilated": _masked(masks.dilated(2)),
    "strided": _masked(masks.causal() & (masks.sliding_window(2, 0) | masks.dilated(3))),
    "blocks": _masked(masks.blocks([[True, False, True], *[[False, True, True]] * 2], 8), most=24),
    "blocks, of a number": _masked(masks.blocks([[True, False], [True, True]])),
    "tree": _masked(masks.tree(TREE, offset="lower_right"), fixed="L"),
    "tree, moved": _masked(masks.tree(TREE, offset=2), fixed="L"),
    "neighbourhood": _masked(masks.neighbourhood((4, 5), 1), most=20),
    "neighbourhood, even and causal": _masked(
        masks.neighbourhood((4, 5), window=(2, 3), causal=(True, False), prefix_tokens=1), most=21
    ),
    "blocks, of entries": _masked(
        masks.blocks([[[[True, False, True]]], [[[False, True, True]]]], 24), fixed="B"
    ),
    "tree, of each entry": _masked(masks.tree([TREE, [-1, 0, 1, 2, 3]], offset=2), fixed="BL"),
    "keys": Row(lambda x: {"attn_mask": masks.keys(x)}, ("B1LT ids",)),
    "keys, blocks": Row(lambda x: {"attn_mask": masks.keys(x, (1, 2)) & masks.causal()}, ("BHLE ids",)),
    "function": _masked(masks.from_function(_is_third)),
    "array": Row(lambda x: {"attn_mask": masks.from_array(x)}, ("B1LS booleans",)),
    "array of keys": Row(lambda x: {"attn_mask": x, "is_causal": True}, ("S booleans",)),
    "all pairs": _masked(masks.sliding_window(None, None)),
    "no pair": _masked(masks.prefix(0)),
    "together": Row(
        lambda x: {"attn_mask": (masks.sliding_window(1, 1) & masks.padding(x)) | masks.chunked(2)},
        ("B lengths",),
    ),
}
NOT = {"complement": _masked(~(masks.sliding_window(1, 1) & masks.prefix(4)))}
"""What torch.compile does not trace, where the mask is made inside."""

BIASES = {
    "ALiBi": Row(lambda: {"bias": biases.alibi(4)}),
    "ALiBi, lower right": Row(
        lambda x: {"bias": biases.alibi(x, offset="lower_right"), "is_causal": True}, ("H",)
    ),
    "T5": Row(lambda x: {"bias": biases.relative(x, max_distance=9)}, ("TH",)),
    "T5, one way": Row(
        lambda x: {"bias": biases.relative(x, bidirectional=False, offset="lower_right")}, ("TH",)
    ),
    "function of the scores": Row(lambda: {"bias": biases.from_function(_sloping)}),
    "array of a bias": Row(lambda x: {"bias": x}, ("HLS",)),
    "sum": Row(
        lambda x, y: {"bias": biases.alibi(y) + biases.from_array(x), "attn_mask": masks.causal(1)},
        ("HLS", "H"),
    ),
}
OPTIONS = {
    "plain": Row(dict),
    "is_causal": Row(lambda: {"is_causal": True}),
    "softcap, sinks": Row(lambda x: {"softcap": 2.0, "sinks": x, "is_causal": True}, ("H",)),
    "scale": Row(lambda x: {"scale": x, "attn_mask": masks.sliding_window(3, 0)}, ("HL1",)),
}
ROWS = MASKS | NOT | BIASES | OPTIONS


def call_of(row: Row, **options: Any) -> Callable[..., Any]:
    def call(query: Any, key: Any, value: Any, *arrays: Any) -> Any:
        return scaled_dot_product_attention(query, key, value, **row.keywords(*arrays), **options)

    return call


def _table(like: Any) -> Any:
    xp = namespace(like)
    return xp.reshape(xp.arange(32, dtype=like.dtype), (8, 4))


def _appended(query: Any, key: Any, value: Any, **keywords: Any) -> Any:
    """Attention of a cache with 4 tokens of its own before `key`."""
    past = namespace(key).ones((*key.shape[:2], 4, key.shape[-1]))
    new = KVCache(past, past[..., : value.shape[-1]]).append(key, value)
    return new.attend(query, **keywords)


def _pulled(query: Any, key: Any, value: Any) -> list[Any]:
    bias = biases.alibi(namespace(query).ones(4) * 0.3) + biases.relative(_table(query), max_distance=5)
    mask = masks.sliding_window(2, 1) | masks.prefix(1)
    output, pullback = sdpa_xp.scaled_dot_product_attention_vjp(query, key, value, mask, bias=bias)
    return [*pullback(output).values()]


def functions(like: Any) -> dict[str, Callable[..., Any]]:
    """Other functions than attention, of query, key and value in the library of an array."""
    layer = MultiHeadAttention.init(np.random.default_rng(1), 8, num_heads=4, num_kv_heads=2, like=like)
    names = ("row_max", "entropy", "key_sums")
    return {
        "state": lambda q, k, v: [*sdpa_xp.attention_state(q, k, v, masks.causal("lower_right"))],
        "weights": lambda q, k, v: sdpa_xp.attention_weights(q, k, attn_mask=masks.sliding_window(2, 1)),
        "scores": lambda q, k, v: attention_scores(q, k, attn_mask=masks.prefix(2), bias=biases.alibi(4)),
        "statistics": lambda q, k, v: [*attention_statistics(q, k, of=names, is_causal=True)[:3]],
        "top keys": lambda q, k, v: attention_statistics(q, k, of="top_keys", top_k=3).top_keys.indices,
        "statistics of no key": lambda q, k, v: (
            attention_statistics(q, k, of="key_sums", attn_mask=masks.prefix(0)).key_sums
        ),
        "gradients": _pulled,
        "tangent": lambda q, k, v: sdpa_xp.scaled_dot_product_attention_jvp(
            q, k, v, {"query": q}, masks.causal(1)
        )[1],
        "cache": _appended,
        "cache, window": lambda q, k, v: _appended(q, k, v, attn_mask=masks.sliding_window(2, 0)),
        "cache, chunks": lambda q, k, v: _appended(
            q, k, v, attn_mask=masks.chunked(3) & masks.padding(None, 1)
        ),
        "cache, T5": lambda q, k, v: _appended(q, k, v, bias=biases.relative(_table(q), max_distance=5)),
        "layer": lambda q, k, v: layer(q[:, 0], k[:, 0], is_causal=True),
        "layout": lambda q, k, v: scaled_dot_product_attention(
            *(x.swapaxes(1, 2) for x in (q, k, v)), masks.sliding_window(2, 1), layout="...LHE"
        ),
        "two axes": lambda q, k, v: scaled_dot_product_attention(
            q[0, 0], k[0, 0], v[0, 0], masks.sliding_window(2, 1)
        ),
    }
