r"""Linear attention in chunks: products inside of a chunk, and a state from chunk to chunk.

A state follows $S_t = \mathrm{diag}(a_t) S_{t-1} + k_t u_t^T$ with $a_t = e^{g_t}$. Token i reads what token
j <= i has written, faded by $a_{j+1} \cdots a_i$. The common factoring of this into $e^{G_i} e^{-G_j}$
overflows. So a chunk is halved, and its halves again: between the upper half, the earlier tokens, and the lower
half, the factor is the product from j to the border times the product from the border to i. No factor is above
1, nothing is divided, and a decay of -inf forgets all that was before. Each product of matrices is of tokens of
which one reads the other, and none is masked: a NaN does not move backwards in time.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from .tape import split


class Tokens(NamedTuple):
    """The inputs, or a part of them: each (..., H, G, L, width), with G = 1 but for the query.

    `G` is the number of query heads for each key head.
    """

    query: Any
    key: Any
    value: Any
    decay: Any
    beta: Any


def attend(xp: Any, tokens: Tokens, state: Any, size: int) -> tuple[Any, Any]:
    """Return the output (..., H, G, L, Ev) of whole chunks, and the state (..., H, 1, 1, E, Ev) behind them."""
    length = tokens.key.shape[-2]
    chunks = length // size
    cut: list[Any] = [None if x is None else _cut(xp, x, size) for x in tokens]
    query, key, value, decay, beta = cut
    fading, before, after = _fadings(xp, None if decay is None else xp.exp(decay), size)
    scores: list[Any] = []
    corrections: list[Any] = []
    for n, (to_lower, to_upper) in enumerate(fading):
        half = 2**n
        (upper, lower), lower_query = _halves(xp, key, half), _halves(xp, query, half)[1]
        keys = xp.matrix_transpose(_faded(upper, to_upper))
        scores.append(_faded(lower_query, to_lower) @ keys)
        if beta is not None:
            correction = _halves(xp, beta, half)[1] * (_faded(lower, to_lower) @ keys)
            inner = [_of_lower(xp, smaller, half) for smaller in corrections]
            corrections.append(_corrected(xp, inner, correction))
    removed: Sequence[Any] = [None] * chunks
    if beta is not None:
        widths = [value.shape[-1], key.shape[-1]]
        both = _corrected(xp, corrections, beta * xp.concat([value, _faded(key, before)], axis=-1))
        value, removing = split(both, widths, -1)
        removed = split(removing, [1] * chunks, -3)
    kept = None if before is None else xp.matrix_transpose(_last(before))
    fades: Sequence[Any] = [None] * chunks if kept is None else split(kept, [1] * chunks, -3)
    writing = split(xp.matrix_transpose(_faded(key, after)), [1] * chunks, -3)
    states, values = [], split(value, [1] * chunks, -3)
    for n, (remove, fade, write) in enumerate(zip(removed, fades, writing, strict=True)):
        states.append(state)
        if remove is not None:
            values[n] = values[n] - remove @ state
        state = (state if fade is None else fade * state) + write @ values[n]
    value = value if beta is None else xp.concat(values, axis=-3)
    output = xp.sum(query * key, axis=-1, keepdims=True) * value
    for score in scores:
        upper, lower = _halves(xp, output, score.shape[-1])
        lower = lower + score @ _halves(xp, value, score.shape[-1])[0]
        output = _joined(xp, upper, lower, size)
    output = output + _faded(query, before) @ xp.concat(states, axis=-3)
    return xp.reshape(output, (*output.shape[:-3], length, output.shape[-1])), state


def _fadings(xp: Any, kept: Any, size: int) -> tuple[list[tuple[Any, Any]], Any, Any]:
    """Return the factors between halves of 1, 2, 4, ... tokens, and those before and after each token.

    They are the products from the border to a token of the lower half, and from a token of the upper half to
    the border; from the start of the chunk to each token, and from each token to the end. If all is kept, they
    are None.
    """
    halvings = size.bit_length() - 1
    if kept is None:
        return [(None, None)] * halvings, None, None
    fading, before, after = [], kept, xp.ones_like(kept)
    for n in range(halvings):
        (upper, lower), (upper_after, lower_after) = _halves(xp, before, 2**n), _halves(xp, after, 2**n)
        fading.append((lower, upper_after))
        before = _joined(xp, upper, lower * _last(upper), size)
        after = _joined(xp, upper_after * _last(lower), lower_after, size)
    return fading, before, after


def _corrected(xp: Any, corrections: Sequence[Any], right: Any) -> Any:
    """Return u = (I + A)^-1 right of the delta rule, by halves of 1, 2, 4, ... tokens.

    Between an upper and a lower half, A is C, and the correction is D^-1 C, where D is I + A in the lower half.
    So the lower half, solved by itself, loses the correction times u of the upper half: by halves, the WY form
    of Yang et al., arXiv 2406.06484, section 3.2.
    """
    size = right.shape[-2]
    for correction in corrections:
        upper, lower = _halves(xp, right, correction.shape[-1])
        right = _joined(xp, upper, lower - correction @ upper, size)
    return right


def _of_lower(xp: Any, corrections: Any, half: int) -> Any:
    """Return the corrections (..., blocks, n, n) in lower halves: (..., pairs of halves, half / 2n, n, n)."""
    *leading, blocks, n, _ = corrections.shape
    count = half // (2 * n)
    paired = xp.reshape(corrections, (*leading, blocks // (2 * count), 2 * count, n, n))
    return split(paired, [count, count], -3)[1]


def _faded(array: Any, factor: Any) -> Any:
    return array if factor is None else array * factor


def _cut(xp: Any, array: Any, size: int) -> Any:
    """(..., L, width) -> (..., L / size, size, width)."""
    *leading, length, width = array.shape
    return xp.reshape(array, (*leading, length // size, size, width))


def _halves(xp: Any, array: Any, half: int) -> list[Any]:
    """(..., size, width) -> the upper and the lower halves, each (..., size / (2 half), half, width)."""
    return split(_cut(xp, array, 2 * half), [half, half], -2)


def _joined(xp: Any, upper: Any, lower: Any, size: int) -> Any:
    joined = xp.concat([upper, lower], axis=-2)
    return xp.reshape(joined, (*joined.shape[:-3], size, joined.shape[-1]))


def _last(array: Any) -> Any:
    length = array.shape[-2]
    return array if length == 1 else split(array, [length - 1, 1], -2)[1]
