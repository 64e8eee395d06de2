"""A graph with a cache attends as the library's caches do, and returns the cache with the new tokens."""

from __future__ import annotations

from typing import Any

import graphs
import numpy as np
import onnx
import onnx.numpy_helper
import pytest
from calls import moved
from graphs import BATCH, Arrays, Rules, held_by, in_each_form, operands, qkv, run, run_in, session_of, spec
from short_runs import assert_right

from sdpa_xp import KVCache, PagedKVCache, biases, masks
from sdpa_xp_export import TensorSpec, export_attention, verify

pytestmark = pytest.mark.usefixtures("small_blocks")

F = np.float32


def mask(value: Any, *, is_causal: bool = False) -> dict[str, Any]:
    return {"attn_mask": value, "is_causal": is_causal}


RULES: dict[str, Rules] = {
    "not causal": lambda: {"is_causal": False},
    "is_causal": lambda: {"is_causal": True},
    "causal, lower right": lambda: mask(masks.causal("lower_right")),
    "causal, behind": lambda: mask(masks.causal(-2)),
    "causal, by entry": lambda offset: mask(masks.causal(offset)),
    "window": lambda: mask(masks.sliding_window(3, 0), is_causal=True),
    "window, ahead": lambda: mask(masks.sliding_window(1, 1)),
    "window, by entry": lambda offset: mask(masks.sliding_window(2, None, offset=offset), is_causal=True),
    "prefix LM": lambda length: mask(masks.causal() | masks.prefix(length)),
    "padding, queries": lambda query_lengths: mask(masks.padding(None, query_lengths), is_causal=True),
    "chunked": lambda: mask(masks.chunked(3), is_causal=True),
    "dilated": lambda: mask(masks.causal() & ~masks.dilated(2)),
    "function": lambda: mask(masks.from_function(lambda b, h, i, j: (i + j + h) % (b + 2) > 0), is_causal=True),
    "alibi": lambda slopes: {"bias": biases.alibi(slopes), "is_causal": True},
    "alibi, offset": lambda offset: {"bias": biases.alibi(4, offset=offset), "is_causal": False},
    "alibi, lower right": lambda: {"bias": biases.alibi(4, offset="lower_right"), "is_causal": False},
    "relative": lambda table: {"bias": biases.relative(table, max_distance=5), "is_causal": False},
    "relative, offset": lambda table: {"bias": biases.relative(table, offset=2), "is_causal": True},
    "bias of each head": lambda: {
        "bias": biases.from_array(np.asarray([0.5, -1, 2, 0], F).reshape(4, 1, 1)),
        "is_causal": True,
    },
    "score function": lambda: {
        "bias": biases.from_function(lambda s, b, h, i, j: s - abs(i - j) % 3 * (h + b + 1) / 4),
        "is_causal": True,
    },
    "sum": lambda table: {
        "bias": biases.relative(table) + biases.from_function(lambda s, b, h, i, j: s * 0.5 - i / 4),
        "is_causal": True,
    },
    "sinks, softcap, scale": lambda scale, sinks: {
        "sinks": sinks,
        "scale": scale,
        "softcap": 2.0,
        "is_causal": True,
    },
}
CONCATENATED: dict[str, Rules] = {  # these know of all keys, of which there are as many in each entry
    "padding": lambda key_lengths, query_lengths: mask(
        masks.padding(key_lengths, query_lengths), is_causal=True
    ),
    "document": lambda query_ids, key_ids: mask(masks.document(query_ids, key_ids), is_causal=True),
    "array": lambda attn_mask: mask(attn_mask, is_causal=True),
    "array | prefix": lambda attn_mask: mask(masks.from_array(attn_mask) | masks.prefix(2)),
    "bias": lambda bias: {"bias": biases.alibi(4) + bias, "is_causal": False},
}
STEPS = {"prefill": (5, 6), "step": (1, 7), "first step": (1, 1)}
"""L and P."""


def past_of(rng: np.random.Generator, tokens: int) -> Arrays:
    arrays = qkv(rng, 1, tokens)
    return {f"past_{name}": arrays[name] for name in ("key", "value")}


def assert_close(result: np.ndarray, expected: np.ndarray) -> None:
    graphs.assert_close({"output": result}, {"output": expected})


def operands_of(
    rules: Rules, rng: np.random.Generator, queries: int, keys: int, dtype: str = "float32"
) -> Arrays:
    drawn = operands(rules, rng, queries, keys, dtype)
    return drawn | {name: np.minimum(x, keys) for name, x in drawn.items() if name == "key_lengths"}


@pytest.mark.sampled(4)
@pytest.mark.parametrize(("queries", "before"), STEPS.values(), ids=STEPS)
@pytest.mark.parametrize("rules", (RULES | CONCATENATED).values(), ids=RULES | CONCATENATED)
def test_concatenated(rng: np.random.Generator, rules: Rules, queries: int, before: int) -> None:
    """`KVCache.attend` of the same tokens; P is known when the graph runs."""
    arrays, past = qkv(rng, queries, queries), past_of(rng, before)
    arguments = operands_of(rules, rng, queries, before + queries)
    names: dict[int, int | str] = {BATCH: "B", 5: "L", 6: "P", 7: "P", 11: "P+L", 8: "P+1"}
    specs = {name: spec(x, names) for name, x in (arrays | past).items()}  # type: ignore[arg-type]
    argument_specs = rules(**{name: spec(x, names) for name, x in arguments.items()})  # type: ignore[arg-type]
    whole = {name: np.concatenate([past[f"past_{name}"], arrays[name]], axis=-2) for name in ("key", "value")}
    wanted = KVCache(**whole).attend(arrays["query"], **rules(**arguments))
    for model in in_each_form(**specs, **argument_specs):
        session = session_of(model)
        outputs = run_in(session, arrays | past | arguments)
        assert_close(outputs["output"], wanted)
        for name in ("key", "value"):
            np.testing.assert_array_equal(outputs[f"present_{name}"], whole[name], strict=True)
        assert_right(model, session=session, **held_by(argument_specs))


def paged(past: Arrays, filled: np.ndarray, size: int = 4) -> PagedKVCache[np.ndarray]:
    """A cache of the real tokens in blocks, with room for all others of `past`."""
    batch, heads, room, _ = past["past_key"].shape
    blocks = -(-room // size)
    pools = []
    for name in ("past_key", "past_value"):
        pool = np.zeros((batch * blocks, heads, size, past[name].shape[-1]), past[name].dtype)
        for entry, count in enumerate(filled):
            for token in range(count):
                pool[entry * blocks + token // size, :, token % size] = past[name][entry, :, token]
        pools.append(pool)
    table = np.arange(batch * blocks).reshape(batch, blocks).tolist()
    return PagedKVCache(*pools, block_table=table, lengths=filled.tolist())


@pytest.mark.sampled(3)
@pytest.mark.parametrize(("queries", "room"), [(5, 14), (1, 11)])
@pytest.mark.parametrize("name", RULES)
def test_padded(rng: np.random.Generator, name: str, queries: int, room: int) -> None:
    """`PagedKVCache.attend` of the same tokens, none of which is in the first entry; behind them is NaN.

    Each rule stands beside each layout and each number of queries, and each of these beside each other.
    """
    rules, layout = RULES[name], ["...HLE", "...LHE"][([*RULES].index(name) + queries // 5) % 2]
    arrays, past = qkv(rng, queries, queries), past_of(rng, room)
    filled = np.asarray([0, room - queries, 4])
    arguments = operands_of(rules, rng, queries, room)
    names = {BATCH: "B", 5: "L", room: "R"}
    for entry, count in enumerate(filled):
        for x in past.values():
            x[entry, :, count:] = np.nan
    cache = paged(past, filled).append(arrays["key"], arrays["value"])
    wanted = cache.attend(arrays["query"], **rules(**arguments))
    feeds = {name: moved(x, layout) for name, x in (arrays | past).items()} | {"past_lengths": filled}
    specs = {name: spec(x, names) for name, x in feeds.items()}
    argument_specs = rules(**{name: spec(x, names) for name, x in arguments.items()})
    for model in in_each_form(**specs, **argument_specs, layout=layout):
        session = session_of(model)
        outputs = {name: moved(x, layout) for name, x in run_in(session, feeds | arguments).items()}
        assert_close(outputs["output"], wanted)
        assert_written(outputs, arrays, past, filled)
        assert_right(model, session=session, **held_by(argument_specs))


def assert_written(outputs: Arrays, arrays: Arrays, past: Arrays, filled: np.ndarray) -> None:
    """The new tokens stand behind the real ones, and nothing else has changed."""
    for name in ("key", "value"):
        whole = past[f"past_{name}"].copy()
        for entry, count in enumerate(filled):
            whole[entry, :, count : count + arrays[name].shape[-2]] = arrays[name][entry]
        np.testing.assert_array_equal(outputs[f"present_{name}"], whole, strict=True)


@pytest.mark.parametrize("rules", CONCATENATED.values(), ids=CONCATENATED)
def test_padded_by_entry(rng: np.random.Generator, rules: Rules) -> None:
    """Arrays are as long as the cache; of an entry counts what belongs to its real tokens."""
    queries, room, filled = 5, 14, np.asarray([0, 9, 4])
    arrays, past = qkv(rng, queries, queries), past_of(rng, room)
    arguments = operands_of(rules, rng, queries, room)
    names = {BATCH: "B", 5: "L", room: "R"}
    feeds = arrays | past | {"past_lengths": filled}
    argument_specs = rules(**{name: spec(x, names) for name, x in arguments.items()})
    for model in in_each_form(**{name: spec(x, names) for name, x in feeds.items()}, **argument_specs):
        session = session_of(model)
        outputs = run_in(session, feeds | arguments)
        for entry, count in enumerate(filled):
            whole = {
                name: np.concatenate([past[f"past_{name}"][entry, :, :count], arrays[name][entry]], axis=-2)
                for name in ("key", "value")
            }
            entry_arguments = {
                name: x[entry][..., : count + queries] for name, x in arguments.items() if x.ndim > 1
            }
            entry_arguments |= {
                name: np.minimum(x[entry], count + queries) for name, x in arguments.items() if x.ndim == 1
            }
            wanted = KVCache(**whole).attend(arrays["query"][entry], **rules(**entry_arguments))
            assert_close(outputs["output"][entry], wanted)
        assert_right(model, session=session, **held_by(argument_specs))


@pytest.mark.parametrize("dtype", ["float16", "float64"])
@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("opset", [17, 24])
def test_other_dtypes(rng: np.random.Generator, dtype: str, padded: bool, opset: int) -> None:
    arrays, past = qkv(rng, 3, 3, dtype=dtype), {name: x.astype(dtype) for name, x in past_of(rng, 6).items()}
    filled = np.asarray([0, 3, 2] if padded else [6, 6, 6], np.int32)
    feeds = arrays | past | ({"past_lengths": filled} if padded else {})
    specs = {name: spec(x, {}) for name, x in feeds.items()}
    for form in graphs.EVERY_CALL:
        outputs = ("output", "lse")
        model = export_attention(**specs, is_causal=True, form=form, opset=opset, outputs=outputs)
        session = session_of(model)
        result = run_in(session, feeds)
        for entry, count in enumerate(filled):
            whole = [
                np.concatenate([past[f"past_{name}"][entry, :, :count], arrays[name][entry]], axis=-2)
                for name in ("key", "value")
            ]
            assert_close(result["output"][entry], KVCache(*whole).attend(arrays["query"][entry]))
        assert_right(model, session=session)


def test_prefill_of_an_empty_cache(rng: np.random.Generator) -> None:
    """P = 0 in a run of the graph that makes the steps, too."""
    arrays = qkv(rng, 5, 5)
    names = {BATCH: "B", 5: "L"}
    specs = {name: spec(x, names) for name, x in arrays.items()}
    specs |= {
        f"past_{name}": TensorSpec("float32", ("B", 2, "P", arrays[name].shape[-1]))
        for name in ("key", "value")
    }
    empty = {f"past_{name}": arrays[name][..., :0, :] for name in ("key", "value")}
    mask, bias = masks.sliding_window(3, 0), biases.alibi(4)
    wanted = KVCache(arrays["key"], arrays["value"]).attend(arrays["query"], mask, bias=bias)
    for model in in_each_form(**specs, attn_mask=mask, bias=bias, is_causal=True):
        outputs = run(model, arrays | empty)
        assert_close(outputs["output"], wanted)
        np.testing.assert_array_equal(outputs["present_key"], arrays["key"])


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize(
    ("rule", "queries", "new", "past", "offsets"),
    [
        (masks.causal, 260, 5, 0, [2**29, 200]),  # queries before the first key, moved beyond the last
        (masks.causal, 1, 1, 399, [-200, -(2**29)]),
        (lambda offset: masks.sliding_window(3, 0, offset=offset), 1, 1, 399, [-200, -(2**29)]),
        (lambda offset: masks.sliding_window(3, 200, offset=offset), 260, 5, 0, [2**29, 100]),
    ],
)
def test_offsets_of_any_size_beside_a_cache(
    rng: np.random.Generator, rule: Any, queries: int, new: int, past: int, offsets: list[int], padded: bool
) -> None:
    """A block of queries takes a range of keys, which must have all that some query attends."""
    shapes = {"query": ("L", queries), "key": ("N", new), "value": ("N", new)}
    shapes |= {"past_key": ("P", past + new * padded), "past_value": ("P", past + new * padded)}
    specs = {name: TensorSpec("float32", ("B", 2, length, 8)) for name, (length, _) in shapes.items()}
    feeds: Arrays = {
        name: rng.standard_normal((2, 2, count, 8)).astype(F) for name, (_, count) in shapes.items()
    }
    feeds["offset"] = np.asarray(offsets)
    if padded:
        specs["past_lengths"], feeds["past_lengths"] = TensorSpec("int64", ("B",)), np.asarray([past, past])
    mask = rule(TensorSpec("int64", ("B",)))
    tiled, primitive = (
        run(export_attention(**specs, attn_mask=mask, form=form), feeds)["output"]
        for form in ("tiled", "primitive")
    )
    assert np.any(primitive)
    np.testing.assert_allclose(tiled, primitive, rtol=0, atol=3e-6)


@pytest.mark.usefixtures("short_verify")
def test_verify_wants_a_cache_bit_by_bit() -> None:
    """A present_key that is off by a rounding is none that the next step may have."""
    qkv, past = TensorSpec("float32", ("B", 2, "L", 8)), TensorSpec("float32", ("B", 2, "P", 8))
    model = export_attention(qkv, qkv, qkv, past_key=past, past_value=past, is_causal=True, form="primitive")
    assert_right(model)
    for node in model.graph.node:
        node.input[:] = ["joined" if name == "present_key" else name for name in node.input]
        node.output[:] = ["joined" if name == "present_key" else name for name in node.output]
    more = onnx.numpy_helper.from_array(np.asarray(1 + 2**-23, F), "more")
    model.graph.initializer.append(more)
    model.graph.node.append(onnx.helper.make_node("Mul", ["joined", "more"], ["present_key"]))
    assert not verify(model).agrees
