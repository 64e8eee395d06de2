"""One law over a table: what a function gives for a sequence is what the float64 reference gives of it alone.

`CASES` are the rows, keywords and what they mean; `FUNCTIONS` attend within each sequence in their own ways.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from calls import draw_named, moved, sloping
from internals import device, judge, namespace, reference
from libraries import EAGER_JAX, Library

import sdpa_xp
from sdpa_xp import (
    AttentionState,
    AttentionStatistics,
    PagedKVCache,
    attention_scores,
    biases,
    masks,
    scaled_dot_product_attention,
)

F = np.float32
HEADS, SIZE = 4, 4
SLOPES, SINKS = (np.linspace(*ends, 4 * HEADS, dtype=F).reshape(4, HEADS) for ends in ((0, 2), (-3, 4)))
SCALES = np.linspace(0.1, 1, 4 * HEADS, dtype=F).reshape(4, HEADS, 1, 1)
OPEN = (np.arange(4 * HEADS).reshape(4, HEADS, 1, 1) % 3) > 0
OFFSETS, PREFIXES, REAL = [np.asarray(x) for x in ([1, 0, -3, -1], [2, 9, 0, 3], [2, 3, 0, 4])]
OF = ("row_max", "entropy", "key_sums", "top_keys", "block_sums")
OF_CHUNKS = OF[:3]
BLOCK, K = (3, 4), 4
Results = dict[str, np.ndarray]
Sequences = list[dict[str, np.ndarray]]


class Case(NamedTuple):
    """Keywords, and what they mean for sequence b, head h, a query at position i and a key at position j.

    In a cache, i counts from its first token, and is also c; else c is as if the last query were the last key.
    """

    rules: dict[str, Any]
    allowed: Callable[..., Any] = lambda b, h, i, j, c: True
    bias: Callable[..., Any] = lambda b, h, i, j, c: 0.0
    scale: float | None = None
    """What the reference is told beside the rules."""


def slope(h: Any) -> Any:
    return -(2.0 ** (-2 * (h + 1)))


CASES = {
    "plain": Case({}),
    "is_causal": Case({"is_causal": True}, lambda b, h, i, j, c: j <= i),
    "lower right": Case({"attn_mask": masks.causal("lower_right")}, lambda b, h, i, j, c: j <= c),
    "window": Case({"attn_mask": masks.sliding_window(2, 0)}, lambda b, h, i, j, c: (j <= i) & (i - j <= 2)),
    "window, lower right": Case(
        {"attn_mask": masks.sliding_window(2, 0, offset="lower_right")},
        lambda b, h, i, j, c: (j <= c) & (c - j <= 2),
    ),
    "window, offsets": Case(
        {"attn_mask": masks.sliding_window(2, None, offset=OFFSETS.tolist()), "is_causal": True},
        lambda b, h, i, j, c: (j <= i) & (j >= i - 2 + OFFSETS[b]),
    ),
    "offsets or prefixes": Case(
        {"attn_mask": masks.causal(OFFSETS.tolist()) | masks.prefix(PREFIXES.tolist())},
        lambda b, h, i, j, c: (j <= i + OFFSETS[b]) | (j < PREFIXES[b]),
    ),
    "chunks or a prefix": Case(
        {"attn_mask": masks.chunked(4) | masks.prefix(3), "is_causal": True},
        lambda b, h, i, j, c: (j <= i) & ((i // 4 == j // 4) | (j < 3)),
    ),
    "padding": Case({"attn_mask": masks.padding(REAL.tolist())}, lambda b, h, i, j, c: j < REAL[b]),
    "function": Case(
        {"attn_mask": masks.from_function(lambda b, h, q_idx, kv_idx: (q_idx + kv_idx + h) % (b + 2) > 0)},
        lambda b, h, i, j, c: (i + j + h) % (b + 2) > 0,
    ),
    "array": Case({"attn_mask": OPEN}, lambda b, h, i, j, c: OPEN[b, h, 0, 0]),
    "alibi": Case(
        {"bias": biases.alibi(4), "is_causal": True},
        lambda b, h, i, j, c: j <= i,
        lambda b, h, i, j, c: slope(h) * abs(i - j),
    ),
    "alibi, lower right": Case(
        {"bias": biases.alibi(4, offset="lower_right")}, bias=lambda b, h, i, j, c: slope(h) * abs(c - j)
    ),
    "slopes of each sequence": Case({"slopes": SLOPES}, bias=lambda b, h, i, j, c: -SLOPES[b, h] * abs(i - j)),
    "bias array": Case({"bias": SLOPES[:, :, None, None]}, bias=lambda b, h, i, j, c: SLOPES[b, h] + 0 * j),
    "softcap": Case({"softcap": 1.5, "is_causal": True}, lambda b, h, i, j, c: j <= i),
    "sinks": Case({"sinks": SINKS}),
    "sinks of heads": Case(
        {"sinks": np.asarray([-np.inf, 0.0, 30.0, -30.0], F), "is_causal": True}, lambda b, h, i, j, c: j <= i
    ),
    "scale": Case({"scale": SCALES}),
    "all": Case(
        {
            "sinks": SINKS,
            "scale": SCALES,
            "softcap": 1.5,
            "bias": biases.alibi(4),
            "attn_mask": masks.sliding_window(2, 1),
        },
        lambda b, h, i, j, c: (i - j <= 2) & (j - i <= 1),
        lambda b, h, i, j, c: slope(h) * abs(i - j),
    ),
    "function of the scores": Case(
        {"bias": biases.from_function(sloping)},
        bias=lambda b, h, i, j, c: h * b - i + j,
        scale=0.5 / math.sqrt(8),
    ),
}


def cumulative(lengths: Sequence[int]) -> list[int]:
    return [0, *itertools.accumulate(lengths)]


def sequences_of(queries: Sequence[int], keys: Sequence[int], dtype: Any = F) -> Sequences:
    """The query (heads, n, width) of each sequence, its key and its value."""
    rng, drawn = np.random.default_rng(0), []
    for n, s in zip(queries, keys, strict=True):
        drawn.append(draw_named(rng, {"query": (HEADS, n, 8), "key": (2, s, 8), "value": (2, s, 5)}, dtype))
    return drawn


def packed_tokens(sequences: Sequences, name: str, old: Sequence[int] | None = None) -> np.ndarray:
    """The tokens of all sequences; of keys and values without the `old` ones."""
    first = [0] * len(sequences) if old is None or name == "query" else old
    return np.concatenate([x[name][:, o:] for x, o in zip(sequences, first, strict=True)], axis=-2)


def table_of(lengths: Sequence[int]) -> list[list[int]]:
    """Blocks in another order than the sequences; -1 where a sequence needs none."""
    blocks = iter(range(10 * len(lengths), 0, -1))
    return [[next(blocks) for _ in range(-(-length // SIZE))] + [-1] for length in lengths]


def pages_of(
    library: Library, sequences: Sequences, old: Sequence[int], table: Any, layout: Any = "...HLE", **told: Any
) -> PagedKVCache[Any]:
    """A pool of NaN, with the first tokens of each sequence in its blocks."""
    blocks = max([0, *itertools.chain(*table)]) + 1
    pools = []
    for name in ("key", "value"):
        heads, _, width = sequences[0][name].shape
        pool = np.full((blocks, heads, SIZE, width), math.nan, sequences[0][name].dtype)
        for row, x, length in zip(table, sequences, old, strict=True):
            for t in range(length):
                pool[row[t // SIZE], :, t % SIZE] = x[name][:, t]
        pools.append(moved(pool, layout))
    return library.call(PagedKVCache, *pools, block_table=table, lengths=list(old), layout=layout, **told)


def host(library: Library, layout: str = "...HLE", **results: Any) -> Results:
    """Results as NumPy arrays in the default layout; they are of the library, on the device of the call."""
    with library.guard():
        where = device(library.put(np.ones(1, F)))
    for x in results.values():
        assert namespace(x) is library.xp
        assert device(x) == where
    return {
        name: moved(library.get(x), layout if name in ("output", "alone") else "...HLE")
        for name, x in results.items()
    }


def by_sequence(results: Results, lengths: Sequence[int] | None = None) -> list[Results]:
    """The results of each sequence, of (N, ...) or of packed ones."""
    if lengths is None:
        return [{name: x[b] for name, x in results.items()} for b in range(len(next(iter(results.values()))))]
    rows = [slice(*ends) for ends in itertools.pairwise(cumulative(lengths))]
    return [{name: x[:, row] for name, x in results.items()} for row in rows]


def dense(library: Library, sequences: Sequences, layout: str = "...HLE", **rules: Any) -> list[Results]:
    """Sequences of equal lengths as one call."""
    query, key, value = (moved(np.stack([x[name] for x in sequences]), layout) for name in sequences[0])
    rules |= {"layout": layout}
    computed = outputs_of(library, query, key, value, **rules) | pairs_of(library, query, key, **rules)
    return by_sequence(host(library, layout, **computed))


def outputs_of(library: Library, *arrays: np.ndarray, **rules: Any) -> dict[str, Any]:
    """The output and the log-sum-exp, and the output alone."""
    state = library.call(sdpa_xp.attention_state, *arrays, **rules)
    return state._asdict() | {"alone": library.call(scaled_dot_product_attention, *arrays, **rules)}


def pairs_of(library: Library, query: np.ndarray, key: np.ndarray, **rules: Any) -> dict[str, Any]:
    """What follows from queries and keys: weights, scores and statistics."""
    without_sinks = {name: x for name, x in rules.items() if name != "sinks"}
    return {
        "weights": library.call(sdpa_xp.attention_weights, query, key, **rules),
        "scores": library.call(attention_scores, query, key, **without_sinks),
    } | statistics_of(library, query, key, **rules)


def statistics_of(library: Library, query: np.ndarray, key: np.ndarray, **rules: Any) -> dict[str, Any]:
    """All that the library has, by name; Dask lacks two."""
    names = {"of": OF_CHUNKS} if library.lazy else {"of": OF, "top_k": K, "block_size": BLOCK}
    return named(library.call(sdpa_xp.attention_statistics, query, key, **names, **rules))


def named(statistics: AttentionStatistics[Any]) -> dict[str, Any]:
    """The statistics that were asked for, by name."""
    computed = statistics._asdict()
    top = computed.pop("top_keys")
    arrays = {name: x for name, x in computed.items() if x is not None}
    return arrays if top is None else arrays | {"top_weights": top.weights, "top_indices": top.indices}


def varlen(library: Library, sequences: Sequences, layout: str = "...HLE", **rules: Any) -> list[Results]:
    lengths = [[x[name].shape[1] for x in sequences] for name in ("query", "key")]
    arrays = [moved(packed_tokens(sequences, name), layout) for name in ("query", "key", "value")]
    rules |= {"layout": layout, "cu_seqlens_q": cumulative(lengths[0]), "cu_seqlens_k": cumulative(lengths[1])}
    state = library.call(sdpa_xp.varlen_attention_state, *arrays, lse_base=2, **rules)
    assert isinstance(state, AttentionState)
    alone = library.call(sdpa_xp.varlen_attention, *arrays, **rules)
    results = host(library, layout, output=state.output, lse=state.lse, alone=alone)
    results = by_sequence(results | {"lse": results["lse"] * math.log(2)}, lengths[0])
    wanted: Any = {"of": OF_CHUNKS} if library.lazy else {"of": OF[:4], "top_k": K}
    statistics = host(
        library, **named(library.call(sdpa_xp.varlen_attention_statistics, *arrays[:2], **wanted, **rules))
    )
    of_keys = {name: x for name, x in statistics.items() if name == "key_sums"}
    of_rows = {name: x for name, x in statistics.items() if name != "key_sums"}
    of_sequences = zip(by_sequence(of_keys, lengths[1]), by_sequence(of_rows, lengths[0]), strict=True)
    return [x | sums | rows for x, (sums, rows) in zip(results, of_sequences, strict=True)]


def pages(
    library: Library,
    sequences: Sequences,
    old: Sequence[int],
    layout: str = "...HLE",
    *,
    table: Any = None,
    in_place: bool = False,
    rotary: Any = None,
    **rules: Any,
) -> list[Results]:
    """Append the new tokens, and attend with their queries: packed, or a batch if each sequence has as many."""
    lengths = [x["key"].shape[1] for x in sequences]
    cache = pages_of(library, sequences, old, table or table_of(lengths), layout, rotary=rotary)
    new = [n - o for n, o in zip(lengths, old, strict=True)]
    is_batch = len(set(new)) == 1
    of_keys, of_queries = ({} if is_batch else {f"cu_seqlens_{x}": cumulative(new)} for x in "kq")
    arrays = [packed_tokens(sequences, name, old) for name in ("query", "key", "value")]
    if is_batch:
        arrays = [np.stack(np.split(x, len(new), axis=-2)) for x in arrays]
    with library.guard():
        query, key, value = (library.put(moved(x, layout)) for x in arrays)
        rules = {name: library.put(x) if isinstance(x, np.ndarray) else x for name, x in rules.items()}
        cache = cache.append(key, value, **of_keys, in_place=in_place)
        state = cache.attend_state(query, **of_queries, **rules)
        output = cache.attend(query, **of_queries, **rules)
        wanted: Any = {"of": OF_CHUNKS} if library.lazy else {"of": OF[:4], "top_k": K}
        statistics = named(cache.statistics(query, **wanted, **of_queries, **rules))
    assert isinstance(state, AttentionState)
    assert cache.lengths == tuple(lengths)
    sums = host(library, key_sums=statistics.pop("key_sums"))["key_sums"]
    assert not any(x[:, n:].any() for x, n in zip(sums, lengths, strict=True))
    results = host(library, layout, output=state.output, lse=state.lse, alone=output, **statistics)
    of_rows = by_sequence(results, None if is_batch else new)
    return [x | {"key_sums": y[:, :n]} for x, y, n in zip(of_rows, sums, lengths, strict=True)]


def reductions(scores: np.ndarray, weights: np.ndarray) -> Results:
    """The statistics by their definitions, of whole arrays (..., L, S)."""
    with np.errstate(all="ignore"):
        logarithms = np.where(weights > 0, np.log(weights), np.where(np.isnan(weights), np.nan, 0))
    # Stable, so that the lower index of equal weights comes first.
    order = np.argsort(-np.nan_to_num(weights, nan=0), axis=-1, kind="stable")[..., :K]
    chosen = np.take_along_axis(weights, order, axis=-1)
    missing = [(0, 0)] * (weights.ndim - 1) + [(0, K - order.shape[-1])]
    blocks = weights
    for axis, size in zip((-2, -1), BLOCK, strict=True):
        if weights.size:  # of no number there are no blocks
            blocks = np.add.reduceat(blocks, np.arange(0, weights.shape[axis], size), axis=axis)
    return {
        "weights": weights,
        "scores": scores,
        "row_max": np.max(scores, axis=-1, initial=-np.inf),
        "entropy": -np.sum(weights * logarithms, axis=-1),
        "key_sums": np.sum(weights, axis=-2),
        "block_sums": blocks,
        "top_weights": np.pad(chosen, missing),
        "top_indices": np.pad(np.where(chosen > 0, order, -1), missing, constant_values=-1),
    }


def assert_right(
    results: Results, call: Mapping[str, Any], of_query: str = "float32", most: float = math.inf
) -> None:
    """Results are as near to the float64 reference as the house's rule asks, and -inf where it is.

    Outputs and log-sum-exps are at most `most` away. Output, weights and scores have the dtype of the query,
    the others that of its scores.
    """
    of_scores = "float64" if of_query == "float64" else "float32"
    output, lse, weights, scores = reference.attention_and_scores(**call)
    exact = plain = {"output": output, "lse": lse} | reductions(scores, weights)
    if scores.size:
        narrow = {
            name: x.astype(of_scores) if isinstance(x, np.ndarray) and x.dtype != bool else x
            for name, x in call.items()
        }
        with np.errstate(all="ignore"):
            plain = reference.stages(np, **narrow)
        plain = plain | reductions(plain["scores"], plain["weights"])
    for name, result in results.items():
        dtype = of_query if name in ("output", "alone", "weights", "scores") else of_scores
        name = "output" if name == "alone" else name
        assert result.shape == exact[name].shape, name
        if name == "top_indices":
            np.testing.assert_array_equal(result < 0, exact[name] < 0)
            with_none = np.concatenate([exact["weights"], np.zeros_like(exact["entropy"])[..., None]], axis=-1)
            name, result = "top_weights", np.take_along_axis(with_none, result, axis=-1).astype(dtype)
        assert result.dtype.name == dtype, name
        empty = np.isneginf(exact[name])
        np.testing.assert_array_equal(np.isneginf(result), empty, err_msg=name)
        finite = [np.where(empty, 0, x) for x in (result, exact[name], plain[name])]
        # A weight of 1 has a rounding error, and so has its logarithm, though each entropy is 0.
        terms = 1.0 if name == "entropy" and not finite[1].any() else None
        agreement = judge(finite[0].astype(dtype), finite[1], finite[2].astype(dtype), dtype, terms)
        assert agreement.agrees, (name, agreement)
        if name in ("output", "lse") and dtype == "float32":
            # A log-sum-exp is as large as its largest score and as exact.
            size = 8 * 2.0**-23 * float(np.max(np.abs(finite[1]), initial=1.0)) if name == "lse" else math.inf
            assert np.max(np.abs(finite[0] - finite[1]), initial=0.0) <= min(size, most), name


FUNCTIONS: dict[str, Callable[..., list[Results]]] = {"dense": dense, "varlen": varlen, "pages": pages}


def assert_agrees(
    library: Library,
    function: str,
    case: Case,
    sequences: Sequences,
    old: Sequence[int] = (),
    *,
    exact: Sequences | None = None,
    **told: Any,
) -> None:
    """Each sequence against the reference of its own tokens, or of the `exact` ones."""
    rules = keywords(library, case, is_causal=bool(old)) | ({"old": old} if old else {})
    results = FUNCTIONS[function](library, sequences, **rules, **told)
    for b, (result, x) in enumerate(zip(results, exact or sequences, strict=True)):
        h, i, j = np.ogrid[:HEADS, : x["query"].shape[1], : x["key"].shape[1]]
        c = i + j.size - i.size
        call = x | meaning(case, b, h, c if old else i, j, c)
        assert_right(result, call, sequences[b]["query"].dtype.name, most=4e-6)


def keywords(library: Library, case: Case, *, is_causal: bool) -> dict[str, Any]:
    """The rules of a case for a function that `is_causal` by default, as caches are."""
    rules = dict(case.rules)
    if "slopes" in rules:
        with library.guard():
            rules["bias"] = biases.alibi(library.put(rules.pop("slopes")))
    if rules.pop("is_causal", False) != is_causal:
        rules["is_causal"] = not is_causal
    return rules


def meaning(case: Case, b: Any, h: Any, i: Any, j: Any, c: Any) -> dict[str, Any]:
    """The rules of a case as arrays, for sequence b or, if b is an array, for all."""
    pairs = np.broadcast_shapes(*(np.shape(x) for x in (b, h, i, j)))
    entry = b if isinstance(b, int) else slice(None)
    told: dict[str, Any] = {
        "attn_mask": np.broadcast_to(case.allowed(b, h, i, j, c), pairs),
        "bias": np.broadcast_to(np.asarray(case.bias(b, h, i, j, c), float), pairs),
        "scale": case.rules["scale"][entry] if "scale" in case.rules else case.scale,
        "softcap": case.rules.get("softcap"),
    }
    if "sinks" in case.rules:
        told["sinks"] = np.broadcast_to(case.rules["sinks"], SINKS.shape)[entry]
    return told


def assert_call_agrees(
    library: Library,
    arrays: Mapping[str, np.ndarray],
    rules: Mapping[str, Any],
    meaning: Mapping[str, Any] | None = None,
    layout: str = "...HLE",
) -> None:
    """Output, state, weights, scores and statistics of a call; the reference is told what its rules mean."""
    inputs = {name: moved(x, layout) if name in ("query", "key", "value") else x for name, x in arrays.items()}
    told, dtype = dict(rules if meaning is None else meaning), arrays["query"].dtype.name
    if library.name in EAGER_JAX:  # it compiles each operation for each shape, so the output has to do
        output = library.call(scaled_dot_product_attention, **inputs, layout=layout, **rules)
        assert_right(host(library, layout, output=output), {**arrays, **told}, dtype)
        return
    outputs = host(library, layout, **outputs_of(library, **inputs, layout=layout, **rules))
    assert_right(outputs, {**arrays, **told}, dtype)
    del inputs["value"]
    results = host(library, **pairs_of(library, **inputs, layout=layout, **rules))
    assert_right(results, {**arrays, **told, "value": arrays["key"]}, dtype)
