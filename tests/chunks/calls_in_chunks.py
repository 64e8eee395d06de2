"""Calls that the tests of chunked arrays make, on whole arrays and on arrays cut into chunks."""

from __future__ import annotations

from typing import Any

import numpy as np
from calls import F, draw

from sdpa_xp import biases, masks

B, HQ, H, L, S, E, EV = 2, 4, 2, 13, 17, 8, 6
CHUNKS = ((1, 3, 5, 4), (2, 1, 4, 8), (2, 2, 6, 3))
"""Of query, key and value: no border of one is a border of another, and a group of heads is cut."""
DRAWN = np.random.default_rng(19)
ANY = DRAWN.random((B, 1, L, S)) < 0.5
ANY[:, :, 3] = False
IDS = [0] * 5 + [1] * 8
OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "causal": {"is_causal": True},
    "lower right": {"attn_mask": masks.causal("lower_right")},
    "an offset an entry": {"attn_mask": masks.causal([2, 6])},
    "window": {"attn_mask": masks.sliding_window(3, 2)},
    "padding": {"attn_mask": masks.padding([3, 17], [13, 2])},
    "padding of an array": {"attn_mask": masks.padding(np.asarray([3, 17]))},
    "prefix": {"attn_mask": masks.causal() | masks.prefix(9)},
    "not": {"attn_mask": ~masks.causal() | masks.prefix(2)},
    "documents": {"attn_mask": masks.causal() & masks.document(IDS, [0] * 9 + [1] * 8)},
    "documents of arrays": {"attn_mask": masks.document(np.asarray(IDS), np.asarray([0] * 9 + [1] * 8))},
    "chunked and dilated": {"attn_mask": masks.dilated(2) & masks.chunked(5)},
    "neighbourhood": {"attn_mask": masks.neighbourhood((3, 6), 1, periodic=(False, True))},
    "tree and an array": {"attn_mask": masks.tree([-1, *range(-1, L - 2)], offset=3) & ANY},
    "blocks of heads": {"attn_mask": masks.blocks(DRAWN.random((HQ, 3, 4)) < 0.6, (5, 5))},
    "blocks of entries": {"attn_mask": masks.blocks(DRAWN.random((B, 1, 3, 4)) < 0.6, (5, 5))},
    "tree of each entry": {"attn_mask": masks.tree([[-1, *range(L - 1)], [-1] * L], offset=3)},
    "places behind a token": {"attn_mask": masks.neighbourhood((2, 8), window=2, causal=True, prefix_tokens=1)},
    "function": {"attn_mask": masks.from_function(lambda b, h, i, j: (i * j + h + b) % 3 == 1)},
    "array": {"attn_mask": ANY},
    "array of keys": {"attn_mask": ANY[0, 0, 0] | (np.arange(S) < 2)},
    "array and causal": {"attn_mask": ANY & masks.causal()},
    "no pair": {"attn_mask": masks.padding(0)},
    "bias": {"bias": DRAWN.standard_normal((HQ, L, S)).astype(F)},
    "bias of keys": {"bias": DRAWN.standard_normal((B, 1, 1, S)).astype(F)},
    "bias that masks": {"bias": np.where(ANY, 0, -np.inf).astype(F)},
    "slopes": {"bias": biases.alibi(HQ)},
    "slopes and an array": {
        "bias": biases.alibi(np.arange(4, dtype=F)) + DRAWN.standard_normal((1, L, 1)).astype(F)
    },
    "table": {"bias": biases.relative(DRAWN.standard_normal((8, HQ)).astype(F), max_distance=16)},
    "score function": {"bias": biases.from_function(lambda s, b, h, i, j: s + (i - j) * 0.25 + h)},
    "scale": {"scale": 0.25},
    "scale of rows": {"scale": (DRAWN.random((HQ, L, 1)) + 0.5).astype(F)},
    "softcap": {"softcap": 2.0},
    "sinks": {"sinks": np.arange(HQ, dtype=F), "is_causal": True},
    "sinks alone": {"sinks": np.arange(B * HQ, dtype=F).reshape(B, HQ), "attn_mask": masks.padding(0)},
    "wider softmax": {"softmax_dtype": "float64"},
    "dropout": {"dropout_p": 0.4},
    "dropout and causal": {"dropout_p": 0.4, "is_causal": True},
}


def inputs(seed: int = 0) -> list[np.ndarray]:
    """Query, key and value."""
    return draw(np.random.default_rng(seed), (B, HQ, L, E), (B, H, S, E), (B, H, S, EV))


def cut(arrays: list[np.ndarray], chunks: tuple[tuple[int, ...], ...] = CHUNKS) -> list[Any]:
    """The arrays as arrays of Dask."""
    import dask.array as da

    return [da.from_array(x, chunks=of_array) for x, of_array in zip(arrays, chunks, strict=True)]


def options(name: str, *, lazy: bool = False) -> dict[str, Any]:
    """The options by name, with a new generator; with `lazy`, arrays are Dask's, in chunks of their own."""
    chosen = dict(OPTIONS[name])
    if lazy:
        import dask.array as da

        chosen = {n: da.from_array(x, chunks=2) if isinstance(x, np.ndarray) else x for n, x in chosen.items()}
    return chosen | ({"rng": np.random.default_rng(5)} if "dropout_p" in chosen else {})


def blocks(array: Any, stage: str = "partial") -> set[tuple[int, ...]]:
    """The places of the tasks of a stage in the graph of an array."""
    return {
        key[1:]
        for key in array.__dask_graph__()
        if isinstance(key, tuple) and key[0].startswith(f"attention-{stage}-") and "none" not in key
    }
