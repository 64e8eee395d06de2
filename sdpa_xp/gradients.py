"""Attention with its gradients, where no framework differentiates: check, compute, and a way back."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeAlias, TypeVar, cast

from sdpa_xp import checks, streaming
from sdpa_xp._libraries import FLOATING, astype_if_needed, dtype_name
from sdpa_xp._libraries.overrides import override
from sdpa_xp._libraries.protocols import AnyArray, Array
from sdpa_xp.arguments import Call, Rules, arrays_of, check
from sdpa_xp.backward import Forward, gradients
from sdpa_xp.biases import Bias
from sdpa_xp.masks import Mask
from sdpa_xp.scores import Scores
from sdpa_xp.sources import Layout, Whole, swapped
from sdpa_xp.tiles import plan
from sdpa_xp.totals import Learned

A = TypeVar("A", bound=AnyArray)
Pullback: TypeAlias = Callable[[AnyArray], dict[str, A]]

FUNCTION = "scaled_dot_product_attention_vjp"
PROBED = 8
"""Queries and keys of the tile that a function of the caller is tried on before anything is computed."""


def scaled_dot_product_attention_vjp(
    query: A,
    key: AnyArray,
    value: AnyArray,
    attn_mask: Mask | AnyArray | None = None,
    *,
    bias: Bias | AnyArray | None = None,
    is_causal: bool = False,
    scale: float | AnyArray | None = None,
    softcap: float | None = None,
    sinks: AnyArray | None = None,
    dropout_p: float = 0.0,
    rng: object = None,
    softmax_dtype: object = None,
    layout: Layout = "...HLE",
    implementation: str | None = None,
) -> tuple[A, Pullback[A]]:
    r"""Attention, and the function that takes a gradient of its output back to its inputs.

    This needs no framework that differentiates: NumPy can train with it. As in the forward pass no scores are
    kept: a pullback makes them once more, tile by tile, and memory grows with L + S.

    Shapes:
        As for `scaled_dot_product_attention`.

    Args:
        query: (..., Hq, L, E), as for `scaled_dot_product_attention`; so are all that follow.
        key: (..., H, S, E).
        value: (..., H, S, Ev).
        attn_mask: A mask, or an array that broadcasts to (..., Hq, L, S).
        bias: A bias, or an array that broadcasts to (..., Hq, L, S). The function of `biases.from_function`
            may only add to the score.
        is_causal: Query i attends key j only if j <= i.
        scale: A number, or an array that broadcasts to (..., Hq, L, 1).
        softcap: A positive number, or None.
        sinks: (..., Hq).
        dropout_p: From 0 to 1.
        rng: Needed if dropout_p > 0. It is drawn from once: each pullback drops what the output dropped.
        softmax_dtype: float32, float64 or None.
        layout: "...HLE" or "...LHE".
        implementation: `"xp"` or None.

    Returns:
        The output, (..., Hq, L, Ev), and `pullback`. `pullback(cotangent)`, with the gradient of some number
            in the output, like the output in shape, dtype, library and device, returns the gradients of that
            number by name: "query", "key" and "value", and whichever of "attn_mask", "bias", "scale" and
            "sinks" was given as a floating array. What a bias holds is called as messages call it:
            "bias.array", "bias.slopes" of ALiBi, "bias.table" of relative positions. Each gradient has the
            shape and the dtype of its array. It may be called several times; it reads the inputs and the
            output again, which must not be written to before.

    Raises:
        TypeError: As for `scaled_dot_product_attention`; likewise `pullback`, for its `cotangent`.
        ValueError: As for `scaled_dot_product_attention`; or a function as bias that does more than to add.
            `pullback`, for a `cotangent` of another shape or device.

    Numerics:
        Gradients are summed in the accumulation dtype and rounded once. A row without a key to attend has the
        gradient 0. A pair that is masked adds nothing, even when its query, key, value or cotangent is NaN or
        inf: one that may be attended shows in the gradients of exactly the rows that attend it, and of the
        keys and values that these rows attend. Inside a jit or a lazy graph this holds for keys that no query
        attends, and all pairs are one tile, so that memory is the compiler's.

    Examples:
        >>> import numpy as np
        >>> query, key, value = np.zeros((1, 2)), np.eye(2), np.asarray([[1.0], [3.0]])
        >>> output, pullback = scaled_dot_product_attention_vjp(query, key, value, scale=1)
        >>> gradients = pullback(np.ones_like(output))
        >>> gradients["query"], gradients["value"]
        (array([[-0.5,  0.5]]), array([[0.5],
               [0.5]]))

    References:
        Dao, "FlashAttention-2", arXiv 2307.08691, section 3.1, algorithm 2.
    """
    rules = Rules(
        attn_mask, bias, is_causal, scale, softcap, sinks, dropout_p, rng, softmax_dtype, layout, implementation
    )
    inputs: dict[str, Any] = {"query": query, "key": key, "value": value}
    if (answer := override(query, key, value)) is not None:
        return cast(tuple[A, Pullback[A]], answer(FUNCTION, inputs, rules._asdict()))
    call = check(FUNCTION, inputs, rules)
    added = {
        name: array for name, array in arrays_of(rules) if dtype_name(cast(Array, array).dtype) in FLOATING
    }
    given = cast(dict[str, Array], inputs | added)
    with call.quiet():
        forward = _forward(call, given)
        output = call.result(forward.output)
    shape = output.shape

    def pullback(cotangent: AnyArray) -> dict[str, A]:
        array = checks.cotangent(FUNCTION, cotangent, given["query"], shape)
        with call.quiet():
            return cast(dict[str, A], _backward(call, forward, given, array))

    return cast(A, output), pullback


def _forward(call: Call, given: Mapping[str, Array]) -> Forward:
    """What the gradients follow from, the output among it."""
    if call.biases and not _is_empty(call):
        _try_functions(call.without_dropout(call.whole))
    (scores,) = call.bind([call.whole])
    value = Whole(call.arrays["value"])
    tiles = plan(call.pairs, scores.group, call.sizes.width + value.width)
    output, lse = streaming.attend(scores, value, tiles, call.pairs.dtype)
    learned = {
        "query": Learned(scores.query.shape, ("rows", None)),
        "key": Learned(call.arrays["key"].shape, ("columns", None), scores.group),
        "value": Learned(value.array.shape, ("columns", None), scores.group),
    }
    names = [name for name in given if name not in (*learned, "scale", "sinks")]
    terms = tuple(None if term.learned is None else names.pop(0) for term in scores.biases)
    learned |= {
        name: term.learned for name, term in zip(terms, scores.biases, strict=True) if name and term.learned
    }
    if "scale" in given:
        of_scale = (*[1] * (3 - given["scale"].ndim), *given["scale"].shape)
        learned["scale"] = Learned(of_scale, ("rows" if of_scale[-2] > 1 else None, None))
    if scores.sinks is not None:
        learned["sinks"] = Learned((*[1] * (3 - scores.sinks.ndim), *scores.sinks.shape))
    lse = call.pairs.xp.expand_dims(cast(Array, lse), axis=-1)
    return Forward(scores, value, output, lse, learned, terms, tiles)


def _try_functions(scores: Scores) -> None:
    """Refuse, before anything is computed, a bias whose function does more than to add to some scores."""
    pairs = scores.pairs
    tile = scores.tile(range(min(PROBED, pairs.queries)), range(min(PROBED, pairs.keys)))
    distance = pairs.xp.astype(tile.key_index - tile.query_index, pairs.dtype)
    some = pairs.xp.broadcast_to(distance * 0.75 + 0.5, tile.shape)
    for term in scores.biases:
        term.gradient(tile, some, some)


def _backward(call: Call, forward: Forward, given: Mapping[str, Array], cotangent: Array) -> dict[str, Array]:
    """The gradient of each array that was given, in its own shape, layout and dtype."""
    xp = call.pairs.xp
    if _is_empty(call):
        return {name: xp.zeros_like(array) for name, array in given.items()}
    heads_first = xp.expand_dims(cotangent, axis=0) if call.sizes.flat else swapped(xp, cotangent, call.layout)
    found = gradients(forward, heads_first)
    for name in call.arrays:
        found[name] = found[name][0, ...] if given[name].ndim == 2 else swapped(xp, found[name], call.layout)
    return {
        name: astype_if_needed(xp, forward.learned[name].as_given(xp, found[name], array.shape), array.dtype)
        for name, array in given.items()
    }


def _is_empty(call: Call) -> bool:
    """Whether there is no pair, or nothing in the output."""
    return 0 in (*call.pairs.scores, call.arrays["value"].shape[-1])
