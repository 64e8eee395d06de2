"""Neighbours in space, drafts in a tree and blocks, by their definitions: written apart from the masks."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product
from typing import Any

import numpy as np


def neighbours(
    shape: Sequence[int],
    window: Sequence[int],
    dilation: Sequence[int],
    periodic: Sequence[bool],
    causal: Sequence[bool],
    borders: str,
    prefix_tokens: int = 0,
) -> np.ndarray:
    """Which token attends to which; the first `prefix_tokens` attend to all, and all to them."""
    tokens = [*product(*map(range, shape))]
    allowed = np.ones((prefix_tokens + len(tokens),) * 2, bool)
    axes = [*zip(shape, window, dilation, periodic, causal, strict=True)]
    for row, token in enumerate(tokens):
        near = {*product(*[along(place, *axis, borders) for place, axis in zip(token, axes, strict=True)])}
        allowed[prefix_tokens + row, prefix_tokens:] = [other in near for other in tokens]
    return allowed


def along(
    place: int, length: int, window: int, dilation: int, periodic: bool, causal: bool, borders: str
) -> set[int]:
    """The neighbours of a place along one axis, as NATTEN has them."""
    left = window - 1 if causal else window // 2
    steps = [dilation * n for n in range(-left, window - left)]
    if periodic:
        return {(place + step) % length for step in steps}
    if borders == "shifted" and not causal:  # move the window by whole steps until it lies inside
        while place + steps[0] < 0:
            steps = [step + dilation for step in steps]
        while place + steps[-1] >= length:
            steps = [step - dilation for step in steps]
    return {place + step for step in steps if 0 <= place + step < length}


def ancestors(parents: Sequence[int], context: int, keys: int) -> np.ndarray:
    """Which draft attends to which key: the context, its ancestors and itself."""
    allowed = np.zeros((len(parents), keys), bool)
    allowed[:, :context] = True
    for draft in range(len(parents)):
        ancestor = draft
        while ancestor >= 0:
            allowed[draft, context + ancestor] = True
            ancestor = parents[ancestor]
    return allowed


def drawn_neighbourhoods(count: int) -> list[dict[str, Any]]:
    """Arguments of one to three axes, with neighbours that fit."""
    rng, drawn = np.random.default_rng(7), []
    while len(drawn) < count:
        axes = int(rng.integers(1, 4))
        shape = tuple(map(int, rng.integers(1, (30, 8, 5)[axes - 1], axes)))
        window, dilation = (tuple(map(int, rng.integers(1, most, axes))) for most in (8, 4))
        periodic, causal = (tuple(map(bool, rng.random(axes) < share)) for share in (0.3, 0.4))
        borders = str(rng.choice(["shifted", "cut"]))
        fits = [
            (w * d <= n or borders == "cut" or c) if not p else (w * d <= n and not c)
            for n, w, d, p, c in zip(shape, window, dilation, periodic, causal, strict=True)
        ]
        if all(fits):
            drawn.append(
                {
                    "shape": shape,
                    "window": window,
                    "dilation": dilation,
                    "periodic": periodic,
                    "causal": causal,
                    "borders": borders,
                }
            )
    return drawn
