"""A KVCache of values of a graph: one graph for the prompt and for each step, against one causal call."""

from __future__ import annotations

import json
from functools import partial
from typing import Any

import array_api_compat
import numpy as np
import onnx
import pytest
from graphs import run
from internals import judge, metadata_of
from short_runs import agreed

from sdpa_xp import KVCache, attention_state, biases, masks, scaled_dot_product_attention
from sdpa_xp.positional import Rotary
from sdpa_xp_export import TensorSpec, to_onnx, verify_layer

pytestmark = pytest.mark.usefixtures("short_verify")

F = np.float32
TOKENS, WIDTH = 7, 8
STEPS = [(0, 3), (3, 4), (4, 6), (6, 7)]
QUERY, NEW, PAST = (
    TensorSpec("float32", ("B", heads, length, WIDTH)) for heads, length in ((4, "L"), (2, "L"), (2, "P"))
)
RULES: dict[str, dict[str, Any]] = {
    "causal": {},
    "window and alibi": {"attn_mask": masks.sliding_window(2, 0), "bias": biases.alibi(4)},
    "softcap and sinks": {"softcap": 5.0, "sinks": [0.5, -1.0, 2.0, 0.0], "scale": 0.3},
    "function": {"attn_mask": masks.from_function(lambda b, h, i, j: (i - j) % 3 < 2)},
}
ROTARIES = {"plain": None, "halves": Rotary(WIDTH), "neighbours": Rotary(6, base=100.0, interleaved=True)}


def drawn(tokens: int = TOKENS, batch: int = 2) -> list[np.ndarray]:
    rng = np.random.default_rng(20210420)
    return [rng.standard_normal((batch, heads, tokens, WIDTH)).astype(F) for heads in (4, 2, 2)]


def chosen(model: onnx.ModelProto) -> str:
    return str(json.loads(metadata_of(model)["sdpa_xp.forms"])[0]["form"])


def as_arrays(query: Any, rules: dict[str, Any]) -> dict[str, Any]:
    """The rules with an array for a list of numbers, of the dtype of the query."""
    xp = array_api_compat.array_namespace(query)
    return {k: xp.asarray(x, dtype=query.dtype) if isinstance(x, list) else x for k, x in rules.items()}


def stepping(rotary: Rotary | None = None, layout: Any = "...HLE", **rules: Any) -> Any:
    def step(query: Any, key: Any, value: Any, past_key: Any, past_value: Any) -> dict[str, Any]:
        cache = KVCache(past_key, past_value, rotary=rotary, rotated=True, layout=layout).append(key, value)
        return {
            "output": cache.attend(query, **as_arrays(query, rules)),
            "present_key": cache.key,
            "present_value": cache.value,
        }

    return step


def at_once(arrays: list[Any], rotary: Rotary | None, rules: dict[str, Any]) -> np.ndarray:
    """One causal call over all tokens."""
    query, key, value = arrays
    if rotary is not None:
        query, key = rotary.apply(query, 0), rotary.apply(key, 0)
    rules = as_arrays(query, rules)
    return np.asarray(scaled_dot_product_attention(query, key, value, is_causal=True, **rules))


def decoded(model: onnx.ModelProto, arrays: list[np.ndarray], layout: str = "...HLE") -> np.ndarray:
    """The outputs of all steps; the first has an empty past."""
    axis = -2 if layout == "...HLE" else -3
    arrays = [np.moveaxis(x, -2, axis) for x in arrays]
    past = [x[(..., slice(0), *[slice(None)] * (-1 - axis))] for x in arrays[1:]]
    outputs = []
    for start, stop in STEPS:
        cut = [x[(..., slice(start, stop), *[slice(None)] * (-1 - axis))] for x in arrays]
        inputs = dict(zip(("query", "key", "value", "past_key", "past_value"), [*cut, *past], strict=True))
        output, *past = run(model, inputs).values()
        assert [x.shape[axis] for x in past] == [stop, stop]
        outputs.append(np.moveaxis(output, axis, -2))
    return np.concatenate(outputs, axis=-2)


FORMS = ("auto", "attention", "tiled", "primitive")


@pytest.mark.sampled(5)
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("name", RULES)
def test_prompt_and_steps_by_one_graph(name: str, form: str) -> None:
    """Each rotary embedding beside each form and each rule: it turns what any attention gets."""
    rules, arrays = RULES[name], drawn()
    rotary = [*ROTARIES.values()][([*RULES].index(name) + FORMS.index(form)) % 3]
    export = partial(to_onnx, stepping(rotary, **rules), QUERY, NEW, NEW, PAST, PAST, form=form)
    if form == "attention" and "sinks" in rules:
        with pytest.raises(ValueError, match="no sinks"):
            export()
        return
    model = export()
    assert form in ("auto", chosen(model))
    wide = [x.astype(np.float64) for x in arrays]
    exact, rounded = at_once(wide, rotary, rules), at_once(arrays, rotary, rules)
    assert judge(decoded(model, arrays), exact, rounded, "float32").agrees
    agreed(verify_layer(model, stepping(rotary, **rules)))


@pytest.mark.parametrize("form", FORMS)
def test_queries_wider_than_the_cache(form: str) -> None:
    """A graph widens the keys and values that it keeps in float16."""
    half = [TensorSpec("float16", spec.shape) for spec in (NEW, NEW, PAST, PAST)]
    model = to_onnx(stepping(**RULES["window and alibi"]), QUERY, *half, form=form)
    query, *narrow = (x.astype(np.float16) for x in drawn())
    wide = [query.astype(F), *(x.astype(F) for x in narrow)]
    exact, rounded = (
        at_once([x.astype(kind) for x in wide], None, RULES["window and alibi"]) for kind in (float, F)
    )
    assert judge(decoded(model, [wide[0], *narrow]), exact, rounded, "float32").agrees
    agreed(verify_layer(model, stepping(**RULES["window and alibi"])))


def test_statistics_of_each_step() -> None:
    """The functions of the array API write them, for a cache of any length."""

    def step(query: Any, key: Any, value: Any, past_key: Any, past_value: Any) -> Any:
        cache = KVCache(past_key, past_value).append(key, value)
        return cache.statistics(query, masks.sliding_window(2, 0), of=("row_max", "entropy", "key_sums"))

    model = to_onnx(step, QUERY, NEW, NEW, PAST, PAST)
    agreed(verify_layer(model, step))


@pytest.mark.parametrize("form", ["auto", "tiled", "primitive"])
def test_the_log_sum_exp_of_each_step(form: str) -> None:
    """`attend_state` in a graph, in base 2, against one causal call."""
    rotary = ROTARIES["halves"]

    def step(query: Any, key: Any, value: Any, past_key: Any, past_value: Any) -> dict[str, Any]:
        cache = KVCache(past_key, past_value, rotary=rotary, rotated=True).append(key, value)
        state = cache.attend_state(query, masks.sliding_window(2, 0), lse_base=2)
        return {"lse": state.lse, "present_key": cache.key, "present_value": cache.value}

    model = to_onnx(step, QUERY, NEW, NEW, PAST, PAST, form=form)
    query, key, value = arrays = drawn()
    past, lses = [x[..., :0, :] for x in arrays[1:]], []
    for start, stop in STEPS:
        cut = [x[..., start:stop, :] for x in arrays]
        names = ("query", "key", "value", "past_key", "past_value")
        lse, *past = run(model, dict(zip(names, [*cut, *past], strict=True))).values()
        lses.append(lse)
    turned = (Rotary(WIDTH).apply(x.astype(np.float64), 0) for x in (query, key))
    whole = attention_state(*turned, value.astype(np.float64), masks.sliding_window(2, 0), lse_base=2)
    np.testing.assert_allclose(np.concatenate(lses, axis=-1), whole.lse, rtol=0, atol=4e-6)
    agreed(verify_layer(model, step))


@pytest.mark.parametrize("rotary", ROTARIES.values(), ids=ROTARIES)
def test_heads_behind_the_length(rotary: Rotary | None) -> None:
    turned = ((x.shape[axis] for axis in (0, 2, 1, 3)) for x in (QUERY, NEW, PAST))
    query, new, past = (TensorSpec("float32", tuple(shape)) for shape in turned)
    model = to_onnx(stepping(rotary, "...LHE"), query, new, new, past, past)
    arrays = drawn()
    exact = at_once([x.astype(np.float64) for x in arrays], rotary, {})
    output = decoded(model, arrays, "...LHE")
    assert judge(output, exact, at_once(arrays, rotary, {}), "float32").agrees


@pytest.mark.parametrize("form", ["attention", "tiled", "primitive"])
def test_a_cache_is_joined_once(form: str) -> None:
    """What attention joins is what the graph returns."""
    model = to_onnx(stepping(), QUERY, NEW, NEW, PAST, PAST, form=form)
    nodes = (node for node in model.graph.node if node.op_type == "Concat" and "past_" in str(node.input))
    joins = [node.output[0] for node in nodes]
    assert joins == ([] if form == "attention" else ["present_key", "present_value"])
    shapes = [
        [dim.dim_param or dim.dim_value for dim in output.type.tensor_type.shape.dim]
        for output in model.graph.output[1:]
    ]
    assert shapes == [["B", 2, "P+L", WIDTH]] * 2


def several(query: Any, key: Any, value: Any, past_key: Any, past_value: Any) -> tuple[Any, ...]:
    """Attended to more than once, in between too, and by fewer queries than were appended."""
    first = KVCache(past_key, past_value).append(key, value)
    second = first.append(key * 2.0, value)
    outputs = [cache.attend(query) for cache in (first, second)]
    return *outputs, second.attend(query[:, :, -1:, :], is_causal=False), second.key


def not_appended_to(query: Any, past_key: Any, past_value: Any, key_lengths: Any) -> tuple[Any, ...]:
    """One query is its last token; without `is_causal` queries are of any number, and none of its tokens."""
    cache = KVCache(past_key, past_value)
    may = masks.padding(key_lengths)
    apart = cache.attend(query, is_causal=False), cache.attend(query, may, is_causal=False)
    return *apart, cache.attend(query[:, :, :1, :])


def joined(query: Any, short: Any, long: Any) -> Any:
    """By the caller, each of parts of its own."""
    xp = query.__array_namespace__()
    return attended(query, xp.concat([short, long], axis=-2), xp.concat([long, short], axis=-2))


def attended(query: Any, key: Any, value: Any) -> Any:
    return KVCache(key, value).attend(query)


def prompt(query: Any, key: Any, value: Any) -> tuple[Any, Any]:
    """Its keys are turned where nothing says that they are."""
    cache = KVCache(key, value, rotary=ROTARIES["halves"])
    return cache.attend(query), cache.key


def turned_at_the_end(query: Any, past: Any) -> Any:
    """The position of its query is the number of tokens less 1, which the graph computes."""
    return KVCache(past, past, rotary=Rotary(WIDTH)).attend(query)


def specs(heads: Any, *lengths: Any, batch: Any = 2) -> list[TensorSpec]:
    heads = heads if isinstance(heads, tuple) else (heads,) * len(lengths)
    return [TensorSpec("float32", (batch, h, n, WIDTH)) for h, n in zip(heads, lengths, strict=True)]


LAYERS: list[tuple[Any, list[TensorSpec]]] = [
    (several, [QUERY, NEW, NEW, PAST, PAST]),
    (not_appended_to, [QUERY, PAST, PAST, TensorSpec("int64", ("B",))]),
    (attended, specs((4, 2, 2), "L", 9, 9)),
    (joined, specs(2, 2, 3, 5, batch=1)),
    (prompt, [QUERY, NEW, NEW]),
    (turned_at_the_end, specs(1, 1, "P")),
]


@pytest.mark.parametrize(("layer", "inputs"), LAYERS, ids=[layer.__name__ for layer, _ in LAYERS])
def test_a_layer_with_a_cache(layer: Any, inputs: list[TensorSpec]) -> None:
    lengths = {"key_lengths": lambda rng, shape: rng.integers(1, 2, shape)}
    agreed(verify_layer(to_onnx(layer, *inputs), layer, draw=lengths if layer is not_appended_to else {}))


def test_as_many_queries_as_tokens_are_a_plain_causal_call() -> None:
    model = to_onnx(attended, QUERY, NEW, NEW, form="attention")
    (node,) = (node for node in model.graph.node if node.op_type == "Attention")
    assert len(node.input) == 3
    assert {node_attribute.name: node_attribute.i for node_attribute in node.attribute}["is_causal"] == 1


def test_heads_of_a_batch_that_is_not_known() -> None:
    """(B, L, E) without an axis of heads."""
    query, past = (TensorSpec("float32", ("B", length, WIDTH)) for length in "LP")
    model = to_onnx(stepping(), query, query, query, past, past)
    assert verify_layer(model, stepping()).agrees
    assert len(model.graph.output[1].type.tensor_type.shape.dim) == 3


def test_lengths_that_are_numbers() -> None:
    """`len` tells them; a name it cannot tell."""
    texts = []

    def step(query: Any, past_key: Any) -> Any:
        cache = KVCache(past_key, past_key).append(query, query)
        texts.extend([len(cache), repr(cache)])
        return cache.attend(query)

    query, past = specs(1, 1, 4)
    assert verify_layer(to_onnx(step, query, past), step).agrees
    assert texts[:2] == [5, "KVCache(key=<float32 (2, 1, 5, 8)>, value=<float32 (2, 1, 5, 8)>)"]
    with pytest.raises(TypeError, match="length=P"):
        to_onnx(step, *specs(1, 1, "P"))


@pytest.mark.sampled(3)
@pytest.mark.parametrize("opset", [17, 24])
@pytest.mark.parametrize("dtype", ["float16", "float64"])
def test_dtypes_and_opsets(dtype: str, opset: int) -> None:
    query, new, past = (TensorSpec(dtype, spec.shape) for spec in (QUERY, NEW, PAST))
    step = stepping(ROTARIES["halves"])
    agreed(verify_layer(to_onnx(step, query, new, new, past, past, opset=opset), step))


def test_a_cache_of_an_open_length_shows_itself() -> None:
    shown: list[str] = []

    def layer(x: Any) -> Any:
        cache = KVCache(x, x)
        shown.extend((repr(cache), cache._repr_html_()))
        return cache.attend(x)

    to_onnx(layer, TensorSpec("float32", ("B", 2, "L", 8)))
    assert shown[0] == "KVCache(key=<float32 ('B', 2, 'L', 8)>, value=<float32 ('B', 2, 'L', 8)>)"
    assert "<th>tokens</th><td>L</td>" in shown[1]
