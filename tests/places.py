"""Neighbours in space, drafts in a tree and blocks, by their definitions: written apart from the masks."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product
from typing import Any

import numpy as np


def neighbours(
    shape: Sequence[int], radius: Sequence[int], dilation: Sequence[int], periodic: Sequence[bool], borders: str
) -> np.ndarray:
    """Which token attends to which, (places, places)."""
    tokens = [*product(*map(range, shape))]
    allowed = np.zeros((len(tokens), len(tokens)), bool)
    axes = [*zip(shape, radius, dilation, periodic, strict=True)]
    for row, token in enumerate(tokens):
        near = [along(place, *axis, borders) for place, axis in zip(token, axes, strict=True)]
        for other in product(*near):
            allowed[row, tokens.index(other)] = True
    return allowed


def along(place: int, length: int, radius: int, dilation: int, periodic: bool, borders: str) -> set[int]:
    """The neighbours of a place along one axis."""
    steps = [dilation * n for n in range(-radius, radius + 1)]
    if periodic:
        return {(place + step) % length for step in steps}
    if borders == "shifted":  # move the window by whole steps until it lies inside
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


def drawn_neighbourhoods(count: int) -> list[tuple[Any, ...]]:
    """Shapes of one to three axes, with neighbours that fit."""
    rng, drawn = np.random.default_rng(7), []
    while len(drawn) < count:
        axes = int(rng.integers(1, 4))
        shape = tuple(map(int, rng.integers(1, (30, 8, 5)[axes - 1], axes)))
        radius, dilation = (tuple(map(int, rng.integers(*most, axes))) for most in ((0, 4), (1, 4)))
        periodic, borders = tuple(map(bool, rng.random(axes) < 0.3)), str(rng.choice(["shifted", "cut"]))
        fits = [(2 * r + 1) * d <= n for n, r, d in zip(shape, radius, dilation, strict=True)]
        if all(fit or (borders == "cut" and not p) for fit, p in zip(fits, periodic, strict=True)):
            drawn.append((shape, radius, dilation, periodic, borders))
    return drawn
