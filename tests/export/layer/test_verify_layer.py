"""`verify_layer` sees wrong windows and mask constants, takes files and keywords, and shows the failure."""

from __future__ import annotations

from functools import cache, partial
from typing import Any

import numpy as np
import onnx
import pytest
from edits import graphs
from internals import CallNumbers, LayerLengths
from onnx import numpy_helper
from short_runs import agreed

from sdpa_xp import masks, scaled_dot_product_attention
from sdpa_xp.layers import MultiHeadAttention
from sdpa_xp_export import TensorSpec, export_attention, to_onnx, verify, verify_layer

pytestmark = pytest.mark.usefixtures("short_verify")

LAYER = MultiHeadAttention.init(np.random.default_rng(0), 64, num_heads=8, like=np.ones(1, np.float32))
X = TensorSpec("float32", ("B", "L", 64))


def changed(model: Any, old: float, new: float) -> Any:
    """The model with another number in place of a single one, and of its negative."""
    edited = onnx.ModelProto()
    edited.CopyFrom(model)
    count = 0
    for tensor in (tensor for graph in graphs(edited.graph) for tensor in graph.initializer):
        array = numpy_helper.to_array(tensor)
        if array.size == 1 and (number := array.item()) in (old, -old):
            full = np.full(array.shape, new if number == old else -new, array.dtype)
            tensor.CopyFrom(numpy_helper.from_array(full, tensor.name))
            count += 1
    assert count
    return edited


def without_metadata(model: Any, *keys: str) -> Any:
    kept = [entry for entry in model.metadata_props if entry.key.rpartition(".")[0] not in keys]
    assert len(kept) == len(model.metadata_props) - len(keys)
    del model.metadata_props[:]
    model.metadata_props.extend(kept)
    return model


WINDOW = masks.sliding_window(255, 0)


@cache
def right(form: Any, **keywords: Any) -> Any:
    """A model that agrees, with its report."""
    model = to_onnx(LAYER, X, form=form, **keywords)
    return model, agreed(verify_layer(model, LAYER, **keywords))


@pytest.mark.sampled(3)
@pytest.mark.parametrize("wrong", [256, 200, 254, 150])
@pytest.mark.parametrize("form", ["tiled", "primitive"])
def test_a_wrong_window(wrong: int, form: Any) -> None:
    """Its number follows from the layer, not from the file."""
    model, report = right(form, attn_mask=WINDOW)
    assert {"B=1 L=255", "B=1 L=257", "B=1 L=513"} <= {one_run.inputs for one_run in report.runs}
    edited = without_metadata(changed(model, 255, wrong), "sdpa_xp.numbers")
    assert not verify_layer(edited, LAYER, attn_mask=WINDOW).agrees


def test_a_wrong_window_of_a_layer_that_cannot_be_traced() -> None:
    """Then the number follows from what `to_onnx` wrote."""
    model = to_onnx(LAYER, X, attn_mask=WINDOW)

    def plain(query: Any) -> Any:
        array = np.asarray(query)
        weights = {name: x.astype(array.dtype) for name, x in LAYER.parameters.items()}
        return LAYER.with_parameters(weights)(array, attn_mask=WINDOW)

    report = agreed(verify_layer(model, plain))
    start = "numbers of the layer that the file does not state: the layer cannot be traced, Linear: "
    assert any(line.startswith(start) for line in report.left_out), report.left_out
    assert not verify_layer(changed(model, 255, 200), plain).agrees


def test_numbers_beyond_the_first_few_are_not_tried() -> None:
    """The largest would need too many scores, so that no length goes beyond those between."""
    calls = [CallNumbers(("B", 8, "L", "L"), {n: f"window {n}" for n in (*range(20, 30), 10**5)})]
    specs = {"x": TensorSpec("float32", ("B", 8, "L", 4))}
    fast, thorough = (LayerLengths(calls, specs, [], thorough=thorough) for thorough in (False, True))
    *between, largest = fast.left_out(fast.around())
    longest = max(lengths["L"] for lengths in fast.around())
    assert between == [
        f"window {n}: only the 6 smallest numbers are tried; `thorough=True` tries it"
        for n in range(longest - 1, 30)
    ]
    assert largest.startswith("window 100000: needs 100,002 queries and 100,002 keys, ")
    assert [*thorough.left_out(thorough.around())] == [largest]


def test_a_number_that_is_too_long_to_run() -> None:
    mask = masks.sliding_window(4096, 0)
    report = verify_layer(to_onnx(LAYER, X, attn_mask=mask), LAYER, attn_mask=mask)
    line = "sliding_window(left=4096): needs 4,098 queries and 4,098 keys, 134 million scores"
    assert report.left_out == (f"{line}; `thorough=True` tries it",)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("constant", [-1e9, -1e4, -100.0, -50.0, -30.0])
@pytest.mark.parametrize("form", ["tiled", "primitive"])
def test_a_finite_number_in_place_of_a_mask(constant: float, form: Any) -> None:
    model, _ = right(form, is_causal=True)
    report = verify_layer(changed(model, -np.inf, constant), LAYER, is_causal=True)
    assert not report.agrees
    assert any("large tokens" in one_run.inputs for one_run in report.failing)


@pytest.mark.parametrize("dtype", ["float16", "float64"])
def test_large_tokens_of_other_dtypes_agree(dtype: str) -> None:
    layer = MultiHeadAttention.init(np.random.default_rng(0), 32, num_heads=4, like=np.ones(1, dtype))
    model = to_onnx(layer, TensorSpec(dtype, ("B", "L", 32)), is_causal=True)
    for seed in range(4):
        report = agreed(verify_layer(model, layer, seed=seed, is_causal=True))
        assert any("large tokens" in one_run.inputs for one_run in report.runs)
    if dtype == "float64":
        assert not verify_layer(changed(model, -np.inf, -1e4), layer, is_causal=True).agrees


def test_a_layer_that_overflows() -> None:
    def grown(x: Any) -> Any:
        return x.__array_namespace__().exp(x * 4.0)

    report = agreed(verify_layer(to_onnx(grown, X), grown))
    assert report.left_out == ("large tokens: the outputs overflow, or no floating input has tokens to draw",)


def test_keywords_are_those_of_to_onnx() -> None:
    keywords: dict[str, Any] = {"attn_mask": masks.padding(TensorSpec("int64", ("B",))), "is_causal": True}
    model = to_onnx(LAYER, X, **keywords)
    draw = {"key_lengths": lambda rng, shape: rng.integers(1, 2, shape)}
    report = agreed(verify_layer(model, LAYER, draw=draw, **keywords))
    assert report.notes == ()
    unlike = {"attn_mask": masks.padding(TensorSpec("int64", ("B",))) & masks.sliding_window(1, 0)}
    assert not verify_layer(model, LAYER, draw=draw, **unlike).agrees
    with pytest.raises(ValueError, match="each spec"):
        verify_layer(to_onnx(LAYER, X), LAYER, **keywords)


def test_missing_keywords_are_named() -> None:
    model = to_onnx(LAYER, X, is_causal=True)
    report = verify_layer(model, LAYER)
    assert not report.agrees
    (note,) = report.notes
    assert note == "to_onnx was called with is_causal, and verify_layer was not; pass the same arguments"
    assert note in " ".join(str(report).split())
    assert note in report._repr_html_()
    assert verify_layer(model, partial(LAYER, is_causal=True)).notes == ()
    assert verify_layer(changed(model, -np.inf, -30), partial(LAYER, is_causal=True)).notes == ()


SHAPES: dict[str, tuple[Any, Any, str]] = {
    "a shorter axis": (lambda x: x[:, 1:], lambda x: x * 1, "output.shape (1, 0, 64) instead of (1, 1, 64)"),
    "a longer axis": (lambda x: x * 1, lambda x: x[:, :-1], "output.shape (1, 1, 64) instead of (1, 0, 64)"),
    "another axis": (lambda x: x[..., None], lambda x: x, "output.shape (1, 1, 64, 1) instead of (1, 1, 64)"),
    "integers": (lambda x: (x > 0)[:, 1:], lambda x: x > 0, "output.shape (1, 0, 64) instead of (1, 1, 64)"),
    "one of two": (
        lambda x: (x * 2, x[:, :, 1:]),
        lambda x: (x * 2, x),
        "output_1.shape (1, 1, 63) instead of (1, 1, 64)",
    ),
}


@pytest.mark.parametrize("name", SHAPES)
def test_an_output_of_another_shape_disagrees(name: str) -> None:
    exported, layer, words = SHAPES[name]
    report = verify_layer(to_onnx(exported, X), layer, seed=0)
    assert not report.agrees
    assert words in " ".join(str(report).split())
    agreed = {run.output for run in report.runs if run.agreement.agrees}
    assert agreed <= {"output_0"}
    assert ("output_0" in agreed) == (name == "one of two")


def test_failures_are_sorted_and_the_smallest_is_named() -> None:
    qkv = TensorSpec("float32", ("B", 4, "L", 16))
    model = export_attention(qkv, qkv, qkv, masks.sliding_window(19, 0), form="primitive")
    stated = export_attention(qkv, qkv, qkv, masks.sliding_window(18, 0), form="primitive")
    call = {"query": qkv, "key": qkv, "value": qkv, "attn_mask": masks.sliding_window(19, 0)}
    report = verify(stated, call=call)
    first = report.failing[0]
    assert first.inputs.startswith("B=1 L=21")
    plain = [one_run.is_plain for one_run in report.failing]
    assert plain == sorted(plain, reverse=True)
    longest = [one_run.longest for one_run in report.failing if one_run.is_plain]
    assert longest == sorted(longest)
    assert report.smallest_failure.startswith("smallest failing run: B=1 L=21, batch 0, head ")
    assert int(first.where.rpartition("query ")[2]) >= 19
    assert report.smallest_failure in " ".join(str(report).split())
    assert verify(model).smallest_failure == ""


def test_the_smallest_failure_of_a_layer_is_where_it_is() -> None:
    x = TensorSpec("float32", (1, 2, 6, 8))

    def right(x: Any) -> Any:
        return scaled_dot_product_attention(x, x, x)

    def wrong(x: Any) -> Any:
        output = right(x)
        output[0, 1, 4, 3] += 1
        return output

    report = verify_layer(to_onnx(right, x), wrong)
    assert report.smallest_failure == "smallest failing run: x[1,2,6,8], output[0, 1, 4, 3] (error 1)"


@pytest.mark.parametrize("seed", [22, 31, 41])
def test_a_lucky_call_of_the_layer_is_no_bound(seed: int) -> None:
    """One number has all rounding errors, and the first calls of the layer are nearly exact there."""

    def layer(x: Any) -> Any:
        return (x / 3) * 3000 - 999 * x

    def in_another_order(x: Any) -> Any:
        return (x / 7) * 7000 - 999 * x

    def wrong(x: Any) -> Any:
        return (x / 7) * 7000 - 998.998 * x

    def one_number(rng: np.random.Generator, shape: tuple[int, ...], lengths: dict[str, int]) -> Any:
        x = np.zeros(shape, np.float32)
        if lengths["L"] == 33:
            x[0] = rng.uniform(1, 2)
        return x

    for function, agrees in ((in_another_order, True), (wrong, False)):
        model = to_onnx(function, TensorSpec("float32", ("L",)))
        report = verify_layer(model, layer, draw={"x": one_number}, seed=seed)
        assert report.agrees is agrees, str(report)


def test_a_layer_that_differs_at_each_call() -> None:
    """Its graph is only one of the results, so that no comparison with it says anything."""
    rng = np.random.default_rng(0)

    def dropped(x: Any) -> Any:
        return scaled_dot_product_attention(x, x, x, dropout_p=0.1, rng=rng)

    def noisy(x: Any) -> Any:
        return x + np.random.default_rng().standard_normal(64).astype(np.float32)

    def seeded(x: Any) -> Any:
        return x + np.random.default_rng(1).standard_normal(64).astype(np.float32)

    model = to_onnx(lambda x: x * 1.0, X)
    for layer in (dropped, noisy):
        with pytest.raises(ValueError, match="Switch off dropout"):
            verify_layer(model, layer)
    assert verify_layer(to_onnx(seeded, X), seeded).agrees
