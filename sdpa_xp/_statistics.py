"""Statistics of the attention weights, without an L x S array."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Generic, Literal, NamedTuple, TypeAlias, TypeVar, Unpack, cast, get_args

from ._call import PreparedCall, prepare
from ._call.options import CallOptions, StatisticsOptions, takes_options
from ._checks import brief, nearest_hint, shown
from ._checks.keywords import check_block_size, check_integer
from ._chunked import cut_call
from ._libraries import overridden
from ._libraries.protocols import AnyArray, Array, Dtype
from ._programs.statistics import Computed, Request, statistics
from ._sequences.groups import in_groups
from ._sequences.sequences import Sequences
from ._sources.quantised import source_of
from ._tiles import KeyValueSource
from ._tiles.plan import plan_for
from .errors import ArgumentTypeError, ArgumentValueError
from .masks import Mask

A = TypeVar("A", bound=AnyArray)
FUNCTION = "attention_statistics"
StatisticName: TypeAlias = Literal["row_max", "entropy", "key_sums", "top_keys", "block_sums"]
NAMES: tuple[StatisticName, ...] = get_args(StatisticName)


class TopKeys(NamedTuple, Generic[A]):
    """The keys with the largest weights of each query, the largest first."""

    weights: A
    """(..., Hq, L, top_k); 0 if a query has fewer keys."""
    indices: A
    """(..., Hq, L, top_k), integers; -1 if a query has fewer keys."""

    def __repr__(self) -> str:
        return f"TopKeys(weights={brief(self.weights)}, indices={brief(self.indices)})"


class AttentionStatistics(NamedTuple, Generic[A]):
    """The statistics that `of` names; the others are None. They have the dtype of the scores."""

    row_max: A | None = None
    """The largest score of each query, (..., Hq, L); -inf without keys."""
    entropy: A | None = None
    """The entropy of the weights of each query in nats, (..., Hq, L); 0 without keys."""
    key_sums: A | None = None
    """The sum of the weights of each key over all queries, (..., Hq, S)."""
    top_keys: TopKeys[A] | None = None
    """The `top_k` keys with the largest weights of each query."""
    block_sums: A | None = None
    """The sum of the weights in each block, (..., Hq, blocks of queries, blocks of keys)."""

    def __repr__(self) -> str:
        fields = {name: value for name, value in self._asdict().items() if value is not None}
        texts = [f"{name}={x if isinstance(x, TopKeys) else brief(x)}" for name, x in fields.items()]
        return f"AttentionStatistics({', '.join(texts)})"

    def _repr_html_(self) -> str:
        """Return the table that a notebook shows."""
        from ._display import array_facts, table  # only notebooks need it

        arrays: dict[str, object] = {}
        for name, value in self._asdict().items():
            parts = value._asdict() if isinstance(value, TopKeys) else {"": value}
            arrays |= {f"{name}.{part}".rstrip("."): x for part, x in parts.items() if x is not None}
        return table("AttentionStatistics", [(name, array_facts(array)) for name, array in arrays.items()])


@takes_options(StatisticsOptions)
def attention_statistics(
    query: A,
    key: AnyArray,
    *,
    of: StatisticName | Sequence[StatisticName],
    top_k: int | None = None,
    block_size: int | tuple[int, int] | None = None,
    attn_mask: Mask | AnyArray | None = None,
    **keywords: Unpack[StatisticsOptions],
) -> AttentionStatistics[A]:
    r"""Compute statistics of the scores and of the attention weights, without an L x S array.

    "row_max" is $\max_j s_{ij}$, "entropy" is $-\sum_j w_{ij} \log w_{ij}$, and "key_sums" is $\sum_i w_{ij}$,
    of the scores $s_{ij}$ and the weights $w_{ij}$ of query i and key j.

    Args:
        query: (..., Hq, L, E). All other arguments and errors are as in `scaled_dot_product_attention`.
        of: What to compute: one or several of "row_max", "entropy", "key_sums", "top_keys" and "block_sums".
        top_k: The number of keys to find for each query; required for "top_keys". The time grows with it.
        block_size: The queries and keys of a block, or one number for both; required for "block_sums".
        sinks: (..., Hq). They change the weights, but are no keys: `row_max` and `entropy` leave them out.

    Returns:
        The statistics as attributes; see `AttentionStatistics` for their shapes. Of equal weights, the one
            with the lower index comes first.

    Raises:
        TypeError: An array in chunks is asked for "top_keys" or "block_sums".
        ValueError: `of` has an unknown name.

    Numerics:
        A row whose keys are all masked has maximum -inf and entropy 0. If a row attends to a NaN, its
        statistics are NaN, and its indices are -1. Memory grows with L + S, also inside `jax.jit`; other traces
        keep all scores.

    Examples:
        >>> import numpy as np
        >>> query, key = np.zeros((2, 4)), np.ones((2, 4))
        >>> statistics = attention_statistics(query, key, of=("key_sums", "entropy"), is_causal=True)
        >>> statistics.key_sums, statistics.entropy.round(3)
        (array([1.5, 0.5]), array([0.   , 0.693]))

    References:
        Kimi Team, "Kimi K2", arXiv 2507.20534, section 2.1, for the largest score (QK-clip).
        Zhai et al., "Preventing Attention Entropy Collapse", arXiv 2303.06296, section 3, for the entropy.
        Zhang et al., "H2O", arXiv 2306.14048, section 4, for the sums of keys.
    """
    request = check_request(FUNCTION, of, top_k, block_size)
    options = CallOptions.from_keywords(attn_mask, keywords)
    inputs = {"query": query, "key": key}
    others = {"of": of, "top_k": top_k, "block_size": block_size}
    result = overridden(FUNCTION, inputs, lambda: options._asdict() | others)
    if result is not NotImplemented:
        return cast(AttentionStatistics[A], result)
    return returned_statistics(prepare(FUNCTION, inputs, options), request)


def returned_statistics(
    call: PreparedCall, request: Request, sequences: Sequences | None = None
) -> AttentionStatistics[Any]:
    """Return the statistics of a checked call, or of its sequences, as the caller gets them."""
    with call.computing():
        compute = partial(_compute, request)
        computed = compute(call) if sequences is None else in_groups(call, sequences, compute)
        result = _in_caller_form(call, computed)
    return call.checked(result)


def _compute(request: Request, call: PreparedCall, pages: KeyValueSource | None = None) -> Computed:
    """Return the statistics of a call, or of a group of sequences, which may have their keys in pages."""
    function = call.grid.function
    if call.grid.library.chunks is not None:
        if request.top_k or request.block_size:
            rule = "`of` must have neither 'top_keys' nor 'block_sums' for arrays in chunks"
            hint = "Compute the query and the key first."
            raise ArgumentTypeError(function, rule, {"query": shown(call.arrays["query"])}, hint)
        if pages is None and (cut := cut_call(call)) is not None:
            return _reductions(call, request, cut.scores, cut.weights)
    if request.block_size is not None and call.grid.placement is not None:
        rule = "`of` must not have 'block_sums' if a compiler knows a length by its symbol alone"
        raise ArgumentValueError(function, rule, {"L": call.sizes.queries, "S": call.sizes.keys})
    plan = plan_for(call.arrays["key"].dtype, call.grid, call.sizes.group, call.sizes.width)
    source = source_of(call.arrays, "key") if pages is None else pages
    return statistics(call.draw_scores()._replace(key=source), plan, request)


def _reductions(
    call: PreparedCall, request: Request, scores: Callable[[Dtype], Array], weights: Callable[[Dtype], Array]
) -> Computed:
    """Return reductions of lazy scores and weights, whose chunks are never all in memory."""
    xp, dtype, results = call.grid.xp, call.grid.dtype, Computed()
    if request.row_max:
        results["row_max"] = xp.max(scores(dtype), axis=-1, keepdims=True)
    if request.entropy or request.key_sums:
        w = weights(dtype)
        information = xp.where(w > 0, -xp.log(xp.where(w > 0, w, 1.0)), w)  # of a NaN: NaN
        results["entropy"] = xp.sum(w * information, axis=-1, keepdims=True) + 0.0  # which makes 0 of -0
        results["key_sums"] = xp.sum(w, axis=-2, keepdims=True)
    return {name: results[name] for name in results if getattr(request, name)}


def _in_caller_form(call: PreparedCall, results: Computed) -> AttentionStatistics[Array]:
    """Return results with the axes of the caller, and indices of the library's default integer."""

    def finished(name: str) -> Array | None:
        if name not in results:
            return None
        array = call.remove_head_axis(results[name])
        if name in ("row_max", "entropy"):
            array = array[..., 0]
        elif name == "key_sums":
            array = array[..., 0, :]
        return call.attach_zero_gradient(array, call.options.sinks)

    weights = finished("top_weights")
    top = None
    if weights is not None:
        grid = call.grid
        keys = call.remove_head_axis(results["top_indices"])
        if grid.library.has_dtype(grid.function, grid.xp, grid.device, "int64"):
            keys = grid.xp.astype(keys, grid.xp.int64)
        top = TopKeys(weights, keys)
    return AttentionStatistics(
        finished("row_max"), finished("entropy"), finished("key_sums"), top, finished("block_sums")
    )


def check_request(
    function: str, of: object, top_k: object, block_size: object = None, known: Sequence[str] = NAMES
) -> Request:
    """Check that the names in `of` are `known`, and the arguments that some of them need."""
    names = [of] if isinstance(of, str) else of
    if not isinstance(names, Sequence) or not names:
        rule = f"`of` must be one or several of {', '.join(map(repr, known))}"
        kind = ArgumentValueError if isinstance(names, Sequence) else ArgumentTypeError
        raise kind(function, rule, {"of": shown(of)})
    for name in names:
        if not isinstance(name, str) or name not in known:
            rule = f"`of` must have no other names than {', '.join(map(repr, known))}"
            hint = f"attention_statistics has {name!r}, of sequences of one length."
            hint = hint if isinstance(name, str) and name in NAMES else nearest_hint(name, known)
            raise ArgumentValueError(function, rule, {"of": shown(name)}, hint)
    _check_needed(function, "top_k", top_k, "top_keys", names)
    _check_needed(function, "block_size", block_size, "block_sums", names)
    count = 0 if top_k is None else check_integer(function, "top_k", top_k, least=1)
    blocks = None if block_size is None else check_block_size(function, block_size)
    return Request("row_max" in names, "entropy" in names, "key_sums" in names, count, blocks)


def _check_needed(function: str, name: str, value: object, statistic: str, names: Sequence[object]) -> None:
    if (value is None) != (statistic in names):
        return
    rule = f"`{name}` is required for {statistic!r}"
    if value is not None:
        rule = f"`{name}` needs {statistic!r} in `of`"
    raise ArgumentValueError(function, rule, {name: shown(value), "of": shown([*names])})
