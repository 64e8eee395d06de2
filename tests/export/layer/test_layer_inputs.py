"""`verify_layer` draws integers that the attention calls of a layer accept, or calls `draw`."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import numpy as np
import pytest
from internals import metadata_of
from short_runs import agreed

from sdpa_xp import masks, scaled_dot_product_attention
from sdpa_xp_export import TensorSpec, to_onnx, verify_layer

pytestmark = pytest.mark.usefixtures("short_verify")

X = TensorSpec("float32", ("B", 2, "L", 8))
MEMORY = TensorSpec("float32", ("B", 2, "S", 8))
OF_BATCH = TensorSpec("int64", ("B",))


def padded(x: Any, lengths: Any) -> Any:
    return scaled_dot_product_attention(x, x, x, masks.padding(lengths))


def crossed(x: Any, memory: Any, lengths: Any) -> Any:
    return scaled_dot_product_attention(x, memory, memory, masks.padding(lengths))


def crossed_twice(x: Any, memory: Any, lengths: Any) -> Any:
    """The lengths are at most S and at most L."""
    output = crossed(x, memory, lengths)
    return scaled_dot_product_attention(output, memory, memory, masks.padding(lengths, lengths))


def narrowed(x: Any, lengths: Any) -> Any:
    xp = x.__array_namespace__()
    return padded(x, xp.reshape(xp.astype(lengths, xp.int32), (-1,)))


def prefixed(x: Any, length: Any) -> Any:
    return scaled_dot_product_attention(x, x, x, masks.prefix(length) | masks.causal())


def shifted(x: Any, offset: Any) -> Any:
    return scaled_dot_product_attention(x, x, x, masks.causal(offset))


def of_documents(x: Any, ids: Any) -> Any:
    return scaled_dot_product_attention(x, x, x, masks.document(ids, ids))


LAYERS: dict[str, tuple[Callable[..., Any], tuple[TensorSpec, ...]]] = {
    "padded": (padded, (X, OF_BATCH)),
    "padded, narrow": (padded, (X, TensorSpec("uint8", ("B",)))),
    "padded, of fixed shapes": (padded, (TensorSpec("float32", (3, 2, 5, 8)), TensorSpec("int64", (3,)))),
    "crossed": (crossed, (X, MEMORY, OF_BATCH)),
    "crossed twice": (crossed_twice, (X, MEMORY, OF_BATCH)),
    "narrowed": (narrowed, (X, TensorSpec("int64", ("B", 1)))),
    "prefixed": (prefixed, (X, OF_BATCH)),
    "shifted": (shifted, (X, OF_BATCH)),
    "of documents": (of_documents, (X, TensorSpec("int64", ("B", "L")))),
}


@pytest.mark.parametrize("name", LAYERS)
def test_integers_are_within_what_the_attention_accepts(name: str) -> None:
    layer, inputs = LAYERS[name]
    report = agreed(verify_layer(to_onnx(layer, *inputs), layer))
    assert report.left_out == ()


@pytest.mark.parametrize("name", LAYERS)
def test_a_layer_that_ignores_its_integers_disagrees(name: str) -> None:
    layer, inputs = LAYERS[name]

    def unmasked(*arguments: Any) -> Any:
        x, memory = arguments[0], arguments[len(arguments) > 2]
        output = scaled_dot_product_attention(x, memory, memory)
        return scaled_dot_product_attention(output, memory, memory) if layer is crossed_twice else output

    names = dict(zip(layer.__annotations__, inputs, strict=False))
    wrong = to_onnx(eval(f"lambda {', '.join(names)}: f({', '.join(names)})", {"f": unmasked}), *inputs)
    assert not verify_layer(wrong, layer).agrees


def test_a_mask_among_the_keywords() -> None:
    def plain(x: Any, attn_mask: Any = None) -> Any:
        return scaled_dot_product_attention(x, x, x, attn_mask)

    mask = masks.padding(OF_BATCH)
    model = to_onnx(plain, X, attn_mask=mask)
    report = agreed(verify_layer(model, plain, attn_mask=mask))
    assert report.left_out == ()
    later = masks.padding(OF_BATCH) & masks.causal()
    assert not verify_layer(model, plain, attn_mask=later).agrees


@pytest.mark.parametrize("change", [-1, 1])
def test_a_length_that_is_off_by_one(change: int) -> None:
    def wrong(x: Any, lengths: Any) -> Any:
        xp = x.__array_namespace__()
        return padded(x, xp.maximum(xp.minimum(lengths + change, xp.asarray(x.shape[2])), 0))

    assert not verify_layer(to_onnx(wrong, X, OF_BATCH), padded).agrees


def test_a_layer_that_cannot_be_traced() -> None:
    """Then the model states what its inputs are, and the report says that nothing else does."""

    def plain(x: Any, lengths: Any) -> Any:
        return padded(np.asarray(x), np.asarray(lengths))

    model = to_onnx(padded, X, OF_BATCH)
    report = agreed(verify_layer(model, plain))
    (line,) = report.left_out
    assert "the layer cannot be traced, scaled_dot_product_attention: " in line


@pytest.mark.parametrize(
    "stated",
    [
        [[["B", "2", "L", "1"], {}, [["lengths", "key_lengths"]]]],
        [[["B", "2", "L", "9" * 40], {}, [["lengths", "key_lengths"], ["x", "offset"], ["none", "none"]]]],
        [[["B", "2", "L", "L"], {}, [["lengths"]]]],
        [[["B", "2", "L", "L"], {}]],
    ],
)
def test_a_file_does_not_choose_the_integers(stated: Any) -> None:
    """The layer does, if it can be traced."""

    def wrong(x: Any, lengths: Any) -> Any:
        return padded(x, x.__array_namespace__().minimum(lengths, 1))

    model = to_onnx(wrong, X, OF_BATCH)
    assert "sdpa_xp.numbers" in metadata_of(model)
    for entry in model.metadata_props:
        if entry.key.startswith("sdpa_xp.numbers."):
            entry.value = json.dumps(stated)
    assert not verify_layer(model, padded).agrees


def test_what_a_layer_refuses_ends_with_a_hint() -> None:
    """No attention says what is added to the lengths."""

    def longer(x: Any, lengths: Any) -> Any:
        return padded(x, lengths + 1)

    model = to_onnx(longer, X, OF_BATCH)
    with pytest.raises(ValueError, match=r'Pass draw=\{"lengths": \.\.\.\}'):
        verify_layer(model, longer)

    def drawn(rng: np.random.Generator, shape: tuple[int, ...], lengths: Mapping[str, int]) -> Any:
        return rng.integers(0, lengths["L"], shape)

    assert verify_layer(model, longer, draw={"lengths": drawn}).agrees

    def of_floats(x: Any) -> Any:
        raise IndexError(f"too few axes: {x.ndim}")

    with pytest.raises(IndexError, match=r'(?s)^too few axes: 4.*Pass draw=\{"x": \.\.\.\}'):
        verify_layer(to_onnx(lambda x: x + x, X), of_floats)
    with pytest.raises(IndexError, match=r"^too few axes: 4$"):
        verify_layer(to_onnx(lambda x: x + x, X), of_floats, draw={"x": lambda rng, shape: np.ones(shape)})


class Zeros:
    def __call__(self, rng: np.random.Generator, shape: tuple[int, ...], lengths: Mapping[str, int]) -> Any:
        assert {*lengths} == {"B", "L"}
        return rng.integers(0, 1, shape)


@pytest.mark.parametrize(
    "draw",
    [
        lambda rng, shape: np.zeros(shape),
        lambda rng, shape, number=0: np.full(shape, number),
        lambda *arguments: np.zeros(arguments[1]) if len(arguments) == 2 else None,
        lambda rng, shape, lengths: np.full(shape, 0 * lengths["L"]),
        lambda rng, shape, lengths=None: np.full(shape, 0 * lengths["L"]),
        lambda rng, shape, *, lengths: np.full(shape, 0 * lengths["L"]),
        lambda rng, shape, sizes: np.full(shape, 0 * sizes["L"]),
        partial(lambda number, rng, shape: np.full(shape, number), 0),
        Zeros(),
    ],
)
def test_draw_takes_the_lengths_if_it_has_an_argument_for_them(draw: Any) -> None:
    def layer(x: Any, lengths: Any) -> Any:
        assert x.__array_namespace__() is not np or not np.any(lengths)
        return padded(x, lengths)

    assert verify_layer(to_onnx(layer, X, OF_BATCH), layer, draw={"lengths": draw}).agrees
