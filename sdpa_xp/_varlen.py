"""Attention of packed sequences: a ragged batch in one row, without padding."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, TypeVar, Unpack, cast

from ._call import PreparedCall, prepare
from ._call.options import AttentionOptions, CallOptions, StatisticsOptions, takes_options
from ._checks.arrays import HLE, LHE, check_axes
from ._checks.integers import check_cumulative_lengths, check_same_length, read_together
from ._checks.keywords import check_lse_base
from ._libraries.protocols import AnyArray, Array
from ._programs import ResultName
from ._sequences import groups
from ._sequences.sequences import Sequences, lengths_of
from ._states import AttentionState, returned_output, returned_state
from ._statistics import NAMES, AttentionStatistics, StatisticName, check_request, returned_statistics
from .masks import Mask

A = TypeVar("A", bound=AnyArray)


@takes_options(AttentionOptions, layout="...LHE")
def varlen_attention(
    query: A,
    key: AnyArray,
    value: AnyArray,
    cu_seqlens_q: Sequence[int] | AnyArray,
    cu_seqlens_k: Sequence[int] | AnyArray,
    attn_mask: Mask | AnyArray | None = None,
    **keywords: Unpack[AttentionOptions],
) -> A:
    """Compute attention of N sequences that are packed into one array; each attends only to itself.

    The queries of sequence n are rows cu_seqlens_q[n] to cu_seqlens_q[n + 1] - 1 of the T queries;
    `cu_seqlens_k` gives its part of the U keys and values. A NaN in one sequence has no effect on the others.
    Memory is linear in T + U.

    Args:
        query: (T, Hq, E), as flash-attention packs it; (Hq, T, E) with `layout="...HLE"`. All other arguments
            and errors are as in `scaled_dot_product_attention`.
        key: (U, H, E).
        value: (U, H, Ev).
        cu_seqlens_q: The cumulative numbers of queries: N + 1 integers from 0 to T, as a list or an integer
            array of any library, static inside a jit. Sequences of 2 and 3 queries have [0, 2, 5].
        cu_seqlens_k: The cumulative numbers of keys, from 0 to U.
        attn_mask: A mask, which applies within each sequence: i and j count from its first query and key, and
            "lower_right" aligns its last ones. Lengths and other arrays in a mask have 1 or N batch entries. An
            array must broadcast to (N, Hq, 1, 1).
        bias: A bias or an array, likewise.
        is_causal: Query i of a sequence attends to its key j only if j <= i. flash-attention aligns the last
            query and key instead: use `attn_mask=masks.causal("lower_right")`.
        scale: A number, or an array that broadcasts to (N, Hq, 1, 1).
        sinks: (Hq,), or (N, Hq).
        layout: "...LHE" or "...HLE", of query, key, value and the result.
        implementation: `"xp"` or None.

    Returns:
        (T, Hq, Ev), with the library, device and dtype of the query. A sequence without keys has output 0.

    Raises:
        TypeError: The lengths are not integers, or are not static inside a jit.
        ValueError: The cumulative lengths do not begin with 0, do not end with T or U (slice off the rows after
            the last sequence), or decrease.

    Examples:
        >>> import numpy as np
        >>> rows = np.asarray([1.0, 3.0, 5.0]).reshape(3, 1, 1)
        >>> varlen_attention(0 * rows, rows, rows, [0, 2, 3], [0, 2, 3])[:, 0, 0]
        array([2., 2., 5.])

    References:
        Dao, "FlashAttention-2", arXiv 2307.08691; flash_attn_varlen_func of its code.
    """
    options = CallOptions.from_keywords(attn_mask, keywords, layout=LHE)
    inputs = {"query": query, "key": key, "value": value}
    call = _prepare("varlen_attention", inputs, options)
    return cast(A, returned_output(call, partial(_attend, call, inputs, cu_seqlens_q, cu_seqlens_k)))


@takes_options(AttentionOptions, layout="...LHE")
def varlen_attention_state(
    query: A,
    key: AnyArray,
    value: AnyArray,
    cu_seqlens_q: Sequence[int] | AnyArray,
    cu_seqlens_k: Sequence[int] | AnyArray,
    attn_mask: Mask | AnyArray | None = None,
    *,
    lse_base: float | None = None,
    **keywords: Unpack[AttentionOptions],
) -> AttentionState[A]:
    """Compute `varlen_attention` and the log-sum-exp of its scores.

    `merge_states(..., layout=)` merges it with states over other keys, such as a prefix that all sequences
    share.

    Args:
        query: (T, Hq, E). All other arguments and errors are as in `varlen_attention`.
        sinks: (Hq,), or (N, Hq), for only one of the states that you merge.
        lse_base: As in `attention_state`.

    Returns:
        `output`, (T, Hq, Ev), as from `varlen_attention`, and `lse`, (Hq, T) in both layouts, in the dtype of
            the scores. A query without keys has output 0 and lse -inf.

    Examples:
        >>> import numpy as np
        >>> rows = np.zeros((3, 1, 1))
        >>> varlen_attention_state(rows, rows, rows, [0, 2, 3], [0, 2, 3]).lse.round(3)
        array([[0.693, 0.693, 0.   ]])

    References:
        Ye et al., "FlashInfer", arXiv 2501.01005, section 2.2.
    """
    function = "varlen_attention_state"
    options = CallOptions.from_keywords(attn_mask, keywords, layout=LHE)
    base = check_lse_base(function, lse_base)
    inputs = {"query": query, "key": key, "value": value}
    call = _prepare(function, inputs, options)
    return returned_state(call, partial(_attend, call, inputs, cu_seqlens_q, cu_seqlens_k), base)


@takes_options(StatisticsOptions, layout="...LHE")
def varlen_attention_statistics(
    query: A,
    key: AnyArray,
    cu_seqlens_q: Sequence[int] | AnyArray,
    cu_seqlens_k: Sequence[int] | AnyArray,
    attn_mask: Mask | AnyArray | None = None,
    *,
    of: StatisticName | Sequence[StatisticName],
    top_k: int | None = None,
    **keywords: Unpack[StatisticsOptions],
) -> AttentionStatistics[A]:
    """Compute statistics of the scores and weights of `varlen_attention`, without an L x S array.

    Args:
        query: (T, Hq, E). All other arguments and errors are as in `varlen_attention`.
        of: As in `attention_statistics`, but for "block_sums".
        top_k: As in `attention_statistics`.

    Returns:
        The statistics as attributes, in the dtype of the scores. Those of queries are (Hq, T), `top_keys` (Hq,
            T, top_k) and `key_sums` (Hq, U). Indices count from the first key of their sequence.

    Examples:
        >>> import numpy as np
        >>> rows = np.zeros((3, 1, 1))
        >>> statistics = varlen_attention_statistics(rows, rows, [0, 2, 3], [0, 1, 3], of="key_sums")
        >>> statistics.key_sums
        array([[2. , 0.5, 0.5]])

    References:
        Zhang et al., "H2O", arXiv 2306.14048, section 4, for the sums of keys.
    """
    function = "varlen_attention_statistics"
    request = check_request(function, of, top_k, known=NAMES[:-1])
    options = CallOptions.from_keywords(attn_mask, keywords, layout=LHE)
    inputs = {"query": query, "key": key}
    call = _prepare(function, inputs, options)
    return returned_statistics(call, request, _sequences_of(call, inputs, cu_seqlens_q, cu_seqlens_k))


def _prepare(function: str, inputs: Mapping[str, Any], options: CallOptions) -> PreparedCall:
    call = prepare(function, inputs, options, has_entries=True)
    check_axes(function, {name: array.shape for name, array in inputs.items()}, 3)
    return call


def _attend(
    call: PreparedCall,
    inputs: Mapping[str, Any],
    cu_seqlens_q: object,
    cu_seqlens_k: object,
    *names: ResultName,
) -> dict[str, Array]:
    """Return what is named: the packed output (Hq, T, Ev), the log-sum-exp (Hq, T)."""
    return groups.attend(call, _sequences_of(call, inputs, cu_seqlens_q, cu_seqlens_k), *names)


def _sequences_of(
    call: PreparedCall, inputs: Mapping[str, Any], cu_seqlens_q: object, cu_seqlens_k: object
) -> Sequences:
    """Check where the sequences begin and end."""
    function, axis = call.grid.function, -2 if call.layout == HLE else -3
    keys = {name: array for name, array in inputs.items() if name != "query"}
    # Together, so that a device is waited for once.
    cu_seqlens_q, cu_seqlens_k = read_together(inputs["query"], cu_seqlens_q, cu_seqlens_k)
    starts_q = check_cumulative_lengths(
        function, "cu_seqlens_q", cu_seqlens_q, {"query": inputs["query"]}, axis
    )
    starts_k = check_cumulative_lengths(function, "cu_seqlens_k", cu_seqlens_k, keys, axis)
    check_same_length(function, {"cu_seqlens_q": starts_q, "cu_seqlens_k": starts_k})

    lengths = [*zip(lengths_of(starts_q), lengths_of(starts_k), strict=True)]
    return Sequences(lengths, (starts_q, starts_k))
