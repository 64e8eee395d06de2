"""The keys that a query should attend to: those with the largest scores of an indexer."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, TypeVar, cast

from ._call import prepare
from ._call.options import CallOptions
from ._checks import shown
from ._checks.arrays import check_floating, check_one_device, check_one_library
from ._checks.keywords import check_integer, explains_keywords
from ._checks.score_arrays import ONE_A_ROW, check_broadcasts
from ._libraries import overridden
from ._libraries.protocols import AnyArray
from ._programs import Scores
from ._programs.index_scores import largest_keys
from ._tiles import ArraySource
from ._tiles.plan import plan_tiles
from .errors import ArgumentTypeError
from .masks import Mask

A = TypeVar("A", bound=AnyArray)
FUNCTION = "top_keys"


@explains_keywords
def top_keys(
    query: A,
    key: AnyArray,
    top_k: int,
    *,
    weights: AnyArray | None = None,
    score: Callable[[Any], Any] | None = None,
    attn_mask: Mask | AnyArray | None = None,
    is_causal: bool = False,
) -> A:
    r"""Find the keys with the largest index scores of each query, for `masks.keys`.

    The index score of query i and key j joins all heads:
    $I_{ij} = \sum_h w_{hi} \, \max(0, q_{hi} \cdot k_j)$.

    Args:
        query: (..., Hq, L, E), of the indexer.
        key: (..., H, S, E). With one head, all query heads share the keys.
        top_k: The number of keys of each query, at least 1. The time grows with it.
        weights: Floating numbers that broadcast to (..., Hq, L, 1), w; None is 1.
        score: A function that returns an array of the same shape, in place of max(0, x). It is called with the
            products of each tile, (..., Hq, rows, columns), of which it must change each one by itself.
        attn_mask: As in `scaled_dot_product_attention`, for all heads: an array broadcasts to (..., 1, L, S).
            Masked keys are not chosen.
        is_causal: Likewise.

    Returns:
        Integers (..., 1, L, top_k), or (L, top_k) for 2-D inputs. The key with the largest score comes first,
            and of equal scores the first key. -1 stands behind the keys of a query that may attend to fewer. A
            key whose score is NaN or -inf is not chosen.

    Raises:
        TypeError: `score` is no function, `weights` are not floating or of another library, or an array is in
            chunks.
        ValueError: `top_k` is below 1, or the shapes do not fit.

    Examples:
        >>> import numpy as np
        >>> query, key = np.ones((2, 1)), np.asarray([[1.0], [3.0], [2.0]])
        >>> top_keys(query, key, 2, is_causal=True)
        array([[ 0, -1],
               [ 1,  0]])

    References:
        DeepSeek-AI, "DeepSeek-V3.2", arXiv 2512.02556, section 2.1, the lightning indexer.
    """
    top_k = check_integer(FUNCTION, "top_k", top_k, least=1)
    if score is not None and not callable(score):
        rule = "`score` must be None or a function of the products of queries and keys"
        raise ArgumentTypeError(FUNCTION, rule, {"score": shown(score)})
    inputs = {"query": query, "key": key}
    options = CallOptions(attn_mask, is_causal=is_causal, scale=1.0)
    others = {"top_k": top_k, "weights": weights, "score": score}
    if (result := overridden(FUNCTION, inputs, lambda: options._asdict() | others)) is not NotImplemented:
        return cast(A, result)
    call = prepare(FUNCTION, inputs, options, has_entries=True)
    if call.options.biases:
        rule = "`attn_mask` must be a mask or a boolean array"
        raise ArgumentTypeError(FUNCTION, rule, {"attn_mask": shown(attn_mask)})
    if call.grid.library.chunks is not None:
        rule, hint = "`query` must not be in chunks", "Compute the query and the key first."
        raise ArgumentTypeError(FUNCTION, rule, {"query": shown(query)}, hint)
    xp, grid = call.grid.xp, replace(call.grid, heads=1)
    with call.computing():
        factors = None
        if weights is not None:
            _, arrays = check_one_library(FUNCTION, {"query": query, "weights": weights})
            check_floating(FUNCTION, "weights", arrays["weights"])
            check_one_device(FUNCTION, arrays)
            shape = (*call.grid.caller_shapes()[0][:-1], 1)
            check_broadcasts(FUNCTION, "weights", arrays["weights"].shape, shape, ONE_A_ROW)
            factors = grid.in_all_axes(xp.astype(arrays["weights"], grid.dtype, copy=False))
        scores = Scores(grid, call.arrays["query"], ArraySource(call.arrays["key"]), call.bind(grid))
        plan = plan_tiles(call.grid, call.sizes.group, call.sizes.width)
        # A score joins the heads, so no part has some of them.
        slices = dict.fromkeys((*batch, range(1)) for *batch, _ in plan.leading_slices)
        plan = replace(plan, leading_slices=(*slices,))
        indices = largest_keys(scores.for_tiles(), plan, score, factors, top_k)
        if grid.library.has_dtype(FUNCTION, xp, grid.device, "int64"):
            indices = xp.astype(indices, xp.int64)
        return cast(A, call.remove_head_axis(indices))
