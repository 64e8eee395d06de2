"""What pictures refuse, by a message that names function, argument, rule and what came."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from libraries import Library

from sdpa_xp import masks, plot

pytest.importorskip("matplotlib")
pytestmark = pytest.mark.slow

F = np.float32
X = np.random.default_rng(20170612).dirichlet(np.ones(4), (2, 3))
REFUSED: list[tuple[Callable[[], object], type[Exception], str]] = [
    (lambda: plot.mask(np.ones((2, 2), bool), (2, 2)), TypeError, "^plot.mask: `mask` must be a mask; got mask="),
    (lambda: plot.mask(masks.causal(), (3,)), ValueError, r"^plot.mask: `shape` must be \(L, S\) or \(..., Hq, L, S\); got shape=\(3,\)"),
    (lambda: plot.mask(masks.causal(), 3), TypeError, r"^plot.mask: `shape` must be \(L, S\) or .*got shape=3"),
    (lambda: plot.mask(masks.causal(), (2, 0)), ValueError, r"plot.mask: `shape` must have no axis of length 0; got"),
    (lambda: plot.mask(masks.causal(), (2, 2), theme="grey"), ValueError, "plot.mask: `theme` must be 'light' or 'd"),
    (lambda: plot.attention(X[0].tolist()), TypeError, "plot.attention: `weights` must be a plain array"),
    (lambda: plot.attention(X[0] > 0), TypeError, "`weights` must be one of float16"),
    (lambda: plot.attention(X[:, :0]), ValueError, r"`weights.shape` must have no axis of length 0"),
    (lambda: plot.attention(-X), ValueError, r"`weights` must not be below 0; got smallest weight=-0\..* scores"),
    (lambda: plot.attention(X, query_tokens=["a"] * 4), ValueError, r"`query_tokens` must have one string.* \(L\); got .*=4, L=3"),
    (lambda: plot.attention(X, key_tokens=["a"]), ValueError, r"`key_tokens` must have one string.* \(S\); got .*=1, S=4"),
    (lambda: plot.attention(X, key_tokens="abcd"), TypeError, "`key_tokens` must be a list of strings; got .*'abcd'"),
    (lambda: plot.attention(X, mask=X), TypeError, "plot.attention: `mask` must be boolean"),
    (lambda: plot.attention(X, mask=[True]), TypeError, "plot.attention: `mask` must be a mask or a plain array"),
    (lambda: plot.attention(X, mask=np.ones(3, bool)), ValueError, r"`mask` must broadcast to \(Hq, L, S\)"),
    (lambda: plot.attention(X, heads=2), ValueError, "`heads` must be below Hq, .*; got heads=2, Hq=2"),
    (lambda: plot.attention(X, heads=-1), ValueError, "`heads` must be at least 0"),
    (lambda: plot.attention(X, heads=[]), ValueError, "`heads` must hold at least one integer"),
    (lambda: plot.attention(X, heads=0.5), TypeError, "`heads` must be an integer"),
    (lambda: plot.attention(X, theme="grey"), ValueError, "plot.attention: `theme` must be 'light' or 'dark'"),
    (lambda: plot.saturation(rng=None), TypeError, "plot.saturation: `rng` must be a numpy.random.Generator; got"),
    (lambda: plot.saturation([], rng=np.random.default_rng(0)), ValueError, "`widths` must hold at least one"),
    (lambda: plot.saturation([0], rng=np.random.default_rng(0)), ValueError, r"`widths\[0\]` must be at least 1"),
    (lambda: plot.saturation([1.5], rng=np.random.default_rng(0)), TypeError, r"`widths\[0\]` must be an integer"),
    (lambda: plot.saturation(keys=1, rng=np.random.default_rng(0)), ValueError, "`keys` must be at least 2"),
    (lambda: plot.memory([]), ValueError, "plot.memory: `lengths` must hold at least one integer"),
    (lambda: plot.memory(width=0), ValueError, "`width` must be at least 1"),
    (lambda: plot.memory(like=np.ones(1, int)), TypeError, "plot.memory: `like` must be one of float16"),
    (lambda: plot.memory(theme="grey"), ValueError, "plot.memory: `theme` must be 'light' or 'dark'"),
]  # fmt: skip


@pytest.mark.parametrize(("draw", "error", "words"), REFUSED, ids=[words for _, _, words in REFUSED])
def test_refused(draw: Callable[[], object], error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        draw()


def test_the_hint_for_a_batch_comes_for_a_batch_alone() -> None:
    hint = "One entry of a batch is weights[0, ...]."
    maps = np.full((2, 2, 3, 3), 1 / 3, F)
    with pytest.raises(ValueError, match=r"^plot.attention: ") as several:
        plot.attention(maps)
    with pytest.raises(ValueError, match=r"^plot.attention: ") as one:
        plot.attention(maps[0, 0, 0])
    assert hint in str(several.value)
    assert hint not in str(one.value)


def test_inside_a_jit_there_is_nothing_to_draw(library: Library) -> None:
    library.needs_jit()
    with pytest.raises(TypeError, match="`weights` must have numbers that can be read"):
        library.jit(lambda x: plot.attention(x) and x)(library.put(np.full((2, 2), 0.5, F)))
