"""Our own list of what a call may ask: each feature alone, some together."""

from __future__ import annotations

from typing import Any

from internals import ExportCall, checked_call

from sdpa_xp import biases, masks
from sdpa_xp_export import TensorSpec

Calls = dict[str, ExportCall]
DTYPES = ("float32", "float16", "bfloat16", "float64")
HEADS, WIDTH = 8, 32


def features(dtype: str) -> Calls:
    """The calls by what they are about; batch and lengths are symbols where nothing else is said."""
    return (
        basic_calls(dtype)
        | _of_itself(dtype)
        | _of_a_batch(dtype)
        | _masks(dtype)
        | _biases(dtype)
        | _rules(dtype)
        | _caches(dtype)
        | _padded_caches(dtype)
        | _outputs(dtype)
        | _shapes(dtype)
        | _long(dtype)
        | _fixed(dtype)
    )


def basic_calls(dtype: str) -> dict[str, ExportCall]:
    """Return calls with one feature each, then one with all; batch and lengths are names."""
    query, key = _tokens(dtype, "L"), _tokens(dtype, "S")
    shared, narrow = _tokens(dtype, "S", heads=2), TensorSpec(dtype, ("B", 2, "S", 16))
    padding, pairs, term = (
        TensorSpec("bool", ("B", 1, 1, "S")),
        TensorSpec("bool", ("L", "S")),
        TensorSpec(dtype, (8, "L", "S")),
    )
    together = {"attn_mask": padding, "bias": term, "is_causal": True, "scale": -0.3, "softcap": 5.0}
    return {
        "plain": _call(query, key),
        "is_causal": _call(query, key, is_causal=True),
        "padding mask (B, 1, 1, S)": _call(query, key, attn_mask=padding),
        "boolean mask with empty rows": _call(query, key, attn_mask=pairs),
        "floating mask": _call(query, key, attn_mask=term),
        "boolean mask and bias": _call(query, key, attn_mask=pairs, bias=term),
        "grouped heads, Ev != E": _call(query, shared, narrow),
        "scale": _call(query, key, scale=0.5),
        "softcap": _call(query, key, softcap=5.0),
        "all of it": _call(query, shared, narrow, **together),
    }


def _call(query: TensorSpec, key: TensorSpec, value: TensorSpec | None = None, **rules: Any) -> ExportCall:
    return checked_call("features", query, key, key if value is None else value, **rules)


def _tokens(dtype: str, length: int | str, heads: int = HEADS, batch: int | str = "B") -> TensorSpec:
    return TensorSpec(dtype, (batch, heads, length, WIDTH))


def _per_entry(dtype: str = "int64") -> TensorSpec:
    return TensorSpec(dtype, ("B",))


def _of_itself(dtype: str) -> Calls:
    """As many keys as queries, which is what fused operators are written for."""
    query, shared = _tokens(dtype, "L"), _tokens(dtype, "L", heads=2)
    padding, window = masks.padding(_per_entry()), masks.sliding_window(3, 0)
    return {
        "of itself": _call(query, query),
        "of itself, causal": _call(query, query, is_causal=True),
        "of itself, causal, grouped heads": _call(query, shared, is_causal=True),
        "of itself, window": _call(query, shared, attn_mask=window),
        "of itself, padding": _call(query, query, attn_mask=padding),
        "of itself, padding, causal": _call(query, shared, attn_mask=padding, is_causal=True),
        "of itself, padding, window": _call(query, shared, attn_mask=padding & window),
        "of itself, floating mask": _call(query, query, attn_mask=TensorSpec(dtype, (HEADS, "L", "L"))),
    }


def _of_a_batch(dtype: str) -> Calls:
    """Likewise, in a batch of two: some of these operators end the process when a batch is empty."""
    query, shared, one = (_tokens(dtype, "L", heads=heads, batch=2) for heads in (HEADS, 2, 1))
    causal: dict[str, Any] = {"is_causal": True}
    near = causal | {"attn_mask": masks.sliding_window(3, 0)}
    sinks, swapped = TensorSpec("float32", (HEADS,)), TensorSpec(dtype, (2, "L", HEADS, WIDTH))
    fixed = _tokens(dtype, 5, batch=2)
    return {
        "batch of two": _call(query, query),
        "batch of two, scale": _call(query, query, scale=-0.3),
        "batch of two, other keys": _call(query, _tokens(dtype, "S", batch=2)),
        "batch of two, causal": _call(query, query, **causal),
        "batch of two, causal, scale": _call(query, shared, **causal, scale=0.3),
        "batch of two, causal, scale negative": _call(query, shared, **causal, scale=-0.3),
        "batch of two, causal, one head for all": _call(query, one, **causal),
        "batch of two, causal, softcap": _call(query, shared, **causal, softcap=2.0),
        "batch of two, causal, sinks": _call(query, shared, **causal, sinks=sinks),
        "batch of two, causal, layout": _call(swapped, swapped, **causal, layout="...LHE"),
        "batch of two, window": _call(query, shared, **near),
        "batch of two, window of one": _call(query, shared, attn_mask=masks.sliding_window(0, 0), **causal),
        "batch of two, window, sinks, softcap": _call(query, shared, **near, sinks=sinks, softcap=2.0),
        "batch of two, fixed": _call(fixed, fixed),
        "batch of two, fixed, causal": _call(fixed, _tokens(dtype, 5, heads=2, batch=2), **causal),
        "batch of two, fixed, window": _call(fixed, fixed, **near),
    }


def _masks(dtype: str) -> Calls:
    query, key, shared = _tokens(dtype, "L"), _tokens(dtype, "S"), _tokens(dtype, "S", heads=2)
    masks_by_name = {
        "causal, lower right": masks.causal("lower_right"),
        "causal, an offset an entry": masks.causal(_per_entry()),
        "window": masks.sliding_window(3, 0),
        "window, an offset an entry": masks.sliding_window(4, 2, offset=_per_entry("int32")),
        "padding": masks.padding(_per_entry()),
        "padding, of queries, too": masks.padding(_per_entry("int32"), _per_entry()),
        "padding and causal": masks.padding(_per_entry()) & masks.causal(),
        "padding, causal, an offset an entry": masks.padding(_per_entry()) & masks.causal(_per_entry()),
        "padding, window": masks.padding(_per_entry()) & masks.sliding_window(4, 0),
        "prefix or causal": masks.prefix(_per_entry()) | masks.causal(),
        "documents": masks.document(TensorSpec("int64", ("B", "L")), TensorSpec("int64", ("B", "S"))),
        "chunked or dilated": masks.causal() & (masks.chunked(4) | masks.dilated(3)),
        "not a window": ~masks.sliding_window(1, 1),
        "array and causal": masks.from_array(TensorSpec("bool", ("B", 1, 1, "S"))) & masks.causal(),
        "function": masks.from_function(lambda batch, head, i, j: (i + j + head) % 3 != 0),
    }
    calls = {f"mask: {name}": _call(query, key, attn_mask=mask) for name, mask in masks_by_name.items()}
    grouped = {name: masks_by_name[name] for name in ("causal, lower right", "padding", "padding and causal")}
    return calls | {
        f"mask, grouped heads: {name}": _call(query, shared, attn_mask=mask) for name, mask in grouped.items()
    }


def _biases(dtype: str) -> Calls:
    query, key = _tokens(dtype, "L"), _tokens(dtype, "S")
    pairs, table = TensorSpec(dtype, (HEADS, "L", "S")), TensorSpec(dtype, (16, HEADS))
    # Twice the smallest number of float64 is -inf to the reference, which adds in float64.
    other = TensorSpec(dtype, ("S",) if dtype == "float64" else ("B", 1, "L", "S"))
    return {
        "bias: alibi": _call(query, key, bias=biases.alibi(HEADS), is_causal=True),
        "bias: alibi, slopes and an offset given": _call(
            query, key, bias=biases.alibi(TensorSpec("float32", (HEADS,)), offset=_per_entry())
        ),
        "bias: relative": _call(
            query, key, bias=biases.relative(TensorSpec(dtype, (16, HEADS)), max_distance=8)
        ),
        "bias: function of the scores": _call(
            query, key, bias=biases.from_function(lambda score, batch, head, i, j: score * 0.5), is_causal=True
        ),
        "bias: two": _call(query, key, attn_mask=pairs, bias=other),
        "bias: a sum, with padding": _call(
            query,
            key,
            attn_mask=masks.padding(_per_entry()),
            bias=biases.relative(table, bidirectional=False) + biases.alibi(HEADS),
        ),
        "bias, softcap, padding": _call(
            query, key, attn_mask=masks.padding(_per_entry()), bias=pairs, softcap=2.0
        ),
    }


def _rules(dtype: str) -> Calls:
    query, key, shared = _tokens(dtype, "L"), _tokens(dtype, "S"), _tokens(dtype, "S", heads=2)
    sinks, scale = TensorSpec("float32", (HEADS,)), TensorSpec("float32", (HEADS, 1, 1))
    calls = {
        "sinks": _call(query, key, sinks=sinks),
        "sinks, grouped heads, causal": _call(query, shared, sinks=sinks, is_causal=True),
        "sinks, padding": _call(query, key, sinks=sinks, attn_mask=masks.padding(_per_entry())),
        "scale an input": _call(query, key, scale=scale),
        "scale 0": _call(query, key, scale=0.0, is_causal=True),
        "scale negative": _call(query, key, scale=-0.25, is_causal=True),
        "softcap, causal": _call(query, key, softcap=2.0, is_causal=True),
        "softcap, padding": _call(query, key, softcap=2.0, attn_mask=masks.padding(_per_entry())),
    }
    if dtype == "float64":
        return calls
    return calls | {"softmax in float64": _call(query, key, softmax_dtype="float64", is_causal=True)}


def _caches(dtype: str) -> Calls:
    query, key, shared = (_tokens(dtype, "L", heads=heads) for heads in (HEADS, HEADS, 2))
    past = {f"past_{name}": _tokens(dtype, "P") for name in ("key", "value")}
    past_shared = {f"past_{name}": _tokens(dtype, "P", heads=2) for name in ("key", "value")}
    keys = TensorSpec("bool", ("B", 1, 1, "P+L"))
    return {
        "cache": _call(query, key, **past),
        "cache, causal": _call(query, key, **past, is_causal=True),
        "cache, causal, grouped heads": _call(query, shared, **past_shared, is_causal=True),
        "cache, window": _call(query, shared, **past_shared, attn_mask=masks.sliding_window(3, 0)),
        "cache, causal, softcap": _call(query, key, **past, is_causal=True, softcap=2.0),
        "cache, mask of all keys": _call(query, key, **past, attn_mask=keys, is_causal=True),
        "cache, padding": _call(query, key, **past, attn_mask=masks.padding(_per_entry())),
        "cache, alibi, sinks": _call(
            query, key, **past, bias=biases.alibi(HEADS), sinks=TensorSpec("float32", (HEADS,)), is_causal=True
        ),
    }


def _padded_caches(dtype: str) -> Calls:
    query, key, shared = (_tokens(dtype, "L", heads=heads) for heads in (HEADS, HEADS, 2))
    past: dict[str, Any] = {f"past_{name}": _tokens(dtype, "R") for name in ("key", "value")}
    past_shared: dict[str, Any] = {f"past_{name}": _tokens(dtype, "R", heads=2) for name in ("key", "value")}
    past |= {"past_lengths": _per_entry()}
    past_shared |= {"past_lengths": _per_entry("int32")}
    return {
        "padded cache": _call(query, key, **past),
        "padded cache, causal": _call(query, key, **past, is_causal=True),
        "padded cache, causal, grouped heads": _call(query, shared, **past_shared, is_causal=True),
        "padded cache, window": _call(query, shared, **past_shared, attn_mask=masks.sliding_window(3, 0)),
        "padded cache, softcap": _call(query, shared, **past_shared, softcap=2.0, is_causal=True),
    }


def _outputs(dtype: str) -> Calls:
    query, key, shared = _tokens(dtype, "L"), _tokens(dtype, "S"), _tokens(dtype, "S", heads=2)
    padding, sinks = masks.padding(_per_entry()), TensorSpec("float32", (HEADS,))
    return {
        "lse": _call(query, key, outputs=("output", "lse")),
        "lse, causal, grouped heads": _call(query, shared, is_causal=True, outputs=("output", "lse")),
        "lse, padding, sinks": _call(query, key, attn_mask=padding, sinks=sinks, outputs=("output", "lse")),
        "weights": _call(query, shared, is_causal=True, outputs=("output", "weights")),
        "scores": _call(query, shared, attn_mask=padding, softcap=2.0, outputs=("scores",)),
        "all outputs": _call(
            query, key, attn_mask=padding, outputs=("output", "lse", "weights", "scores"), scale=0.3
        ),
    }


def _shapes(dtype: str) -> Calls:
    """Layouts, numbers of axes, and batches that broadcast."""

    def specs(*shapes: tuple[int | str, ...]) -> list[TensorSpec]:
        return [TensorSpec(dtype, shape) for shape in shapes]

    query, key, shared = specs(("B", "L", 8, WIDTH), ("B", "S", 8, WIDTH), ("B", "S", 2, WIDTH))
    (past,) = specs(("B", "P", 2, WIDTH))
    new = TensorSpec(dtype, ("B", "L", 2, WIDTH))
    rows, keys, values = specs(("L", WIDTH), ("S", WIDTH), ("S", 8))
    flat, flat_keys = specs((HEADS, "L", WIDTH), (HEADS, "S", WIDTH))
    deep, deep_keys = specs(("A", "B", 4, "L", WIDTH), ("A", "B", 2, "S", WIDTH))
    one, shared_batch = specs((1, HEADS, "S", WIDTH), (HEADS, "S", WIDTH))
    swapped: dict[str, Any] = {"layout": "...LHE"}
    return {
        "layout": _call(query, key, **swapped),
        "layout, causal, grouped heads": _call(query, shared, is_causal=True, **swapped),
        "layout, padding": _call(query, key, attn_mask=masks.padding(_per_entry()), **swapped),
        "layout, cache": _call(query, new, past_key=past, past_value=past, is_causal=True, **swapped),
        "two axes": _call(rows, keys, values, is_causal=True, outputs=("output", "lse")),
        "three axes": _call(flat, flat_keys, is_causal=True),
        "five axes": _call(deep, deep_keys, is_causal=True),
        "one batch for all": _call(_tokens(dtype, "L"), one, shared_batch),
    }


def _long(dtype: str) -> Calls:
    """More queries than a block has, where a form computes in blocks; few heads, to be quick."""
    query, key, shared, past = (
        TensorSpec(dtype, (1, heads, length, 8))
        for heads, length in ((2, 150), (2, 160), (1, "S+140"), (1, "P"))
    )
    several, one = TensorSpec(dtype, (1, 2, "L+130", 8)), TensorSpec(dtype, (1, 1, "L+130", 8))
    whole, shared_whole = TensorSpec(dtype, (1, 2, 300, 8)), TensorSpec(dtype, (1, 1, 300, 8))
    lengths = TensorSpec("int64", (1,))
    return {
        "long": _call(query, key, outputs=("output", "lse")),
        "long, causal, softcap": _call(query, shared, is_causal=True, softcap=2.0),
        "long, window": _call(several, one, attn_mask=masks.sliding_window(5, 0)),
        "long, padding, alibi": _call(several, shared, attn_mask=masks.padding(lengths), bias=biases.alibi(2)),
        "long, cache, sinks": _call(
            several, one, past_key=past, past_value=past, is_causal=True, sinks=TensorSpec("float32", (2,))
        ),
        "long, mask": _call(several, shared, attn_mask=TensorSpec("bool", ("L+130", "S+140"))),
        "long, of itself": _call(whole, whole),
        "long, of itself, causal": _call(whole, shared_whole, is_causal=True),
        "long, of itself, window": _call(
            whole, shared_whole, attn_mask=masks.sliding_window(40, 0), is_causal=True
        ),
    }


def _fixed(dtype: str) -> Calls:
    """Lengths that are numbers: a runtime may optimise these otherwise."""
    query, key, shared = (_tokens(dtype, *size, batch=2) for size in ((5, 8), (7, 8), (7, 2)))
    step, step_shared = _tokens(dtype, 1, batch=2), _tokens(dtype, 1, heads=2, batch=2)
    past = {f"past_{name}": _tokens(dtype, 6, heads=2, batch=2) for name in ("key", "value")}
    lengths = TensorSpec("int64", (2,))
    return {
        "fixed": _call(query, key),
        "fixed, causal": _call(query, shared, is_causal=True),
        "fixed, padding": _call(query, key, attn_mask=masks.padding(lengths)),
        "fixed, mask": _call(query, key, attn_mask=TensorSpec("bool", (5, 7)), softcap=3.0),
        "fixed, one query": _call(step, shared, attn_mask=masks.padding(lengths)),
        "fixed, one query, cache": _call(step, step_shared, **past, is_causal=True),
        "fixed, one query, padded cache": _call(
            step, step_shared, **past, past_lengths=lengths, is_causal=True
        ),
    }
