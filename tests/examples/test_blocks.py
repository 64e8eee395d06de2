"""The blocks of the example as graphs: word by word in onnxruntime, against one causal call of the library."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import blocks
import numpy as np
import onnx
import onnxruntime
import pytest
from internals import judge

from quality.runtime.outcomes import runtime_of
from quality.runtime.releases import REDUCED, run_graphs
from sdpa_xp import masks
from sdpa_xp_export import TensorSpec, save, to_onnx, verify_layer

pytestmark = pytest.mark.usefixtures("short_verify")

FORMS = ["auto", "attention", "tiled", "primitive"]
STEPS = [(0, 3), (3, 4), (4, 6), (6, 7)]
RNG = np.random.default_rng(20170612)
LIKE = np.ones(1, np.float32)


def learned(layer: Any) -> Any:
    """With biases and norms that do something."""
    noise = {name: x + 0.1 * RNG.standard_normal(x.shape, np.float32) for name, x in layer.parameters.items()}
    return layer.with_parameters(noise)


ENCODER, DECODER = (learned(kind.init(RNG, LIKE)) for kind in (blocks.EncoderBlock, blocks.DecoderBlock))
SOURCE, TARGET = (RNG.standard_normal((2, n, blocks.WIDTH), np.float32) for n in (5, 7))


def words(length: str) -> TensorSpec:
    return TensorSpec("float32", ("B", length, blocks.WIDTH))


def heads(length: str) -> TensorSpec:
    return TensorSpec("float32", ("B", blocks.HEADS, length, blocks.WIDTH // blocks.HEADS))


def exported(layer: Any = DECODER, **keywords: Any) -> onnx.ModelProto:
    """The graph of one step."""
    return to_onnx(layer.graph, words("L"), heads("P"), heads("P"), heads("S"), heads("S"), **keywords)


def wide(layer: Any) -> Any:
    return layer.with_parameters({name: np.asarray(x, np.float64) for name, x in layer.parameters.items()})


def assert_decoded(outputs: list[np.ndarray]) -> None:
    """What all steps gave is what one call gives, as near as the call itself is to float64."""
    exact = wide(DECODER)(TARGET.astype(np.float64), SOURCE.astype(np.float64))
    assert judge(np.concatenate(outputs, axis=1), exact, DECODER(TARGET, SOURCE), "float32").agrees


@pytest.mark.sampled(2)
@pytest.mark.parametrize("form", FORMS)
def test_the_encoder(form: str) -> None:
    model = to_onnx(ENCODER, words("L"), form=form)
    report = verify_layer(model, ENCODER)
    assert report.agrees, str(report)
    names = {tensor.name for tensor in model.graph.initializer}
    assert names >= ENCODER.parameters.keys()


def test_the_encoder_with_padding() -> None:
    model = to_onnx(ENCODER, words("L"), masks.padding(TensorSpec("int64", ("B",))))
    assert [tensor.name for tensor in model.graph.input] == ["x", "key_lengths"]

    def padded(x: Any, key_lengths: Any) -> Any:
        return (ENCODER if x.dtype == np.float32 else wide(ENCODER))(x, masks.padding(key_lengths))

    drawn = {"key_lengths": lambda rng, shape: rng.integers(1, 2, shape)}
    assert verify_layer(model, padded, draw=drawn).agrees


@pytest.mark.sampled(2)
@pytest.mark.parametrize("form", FORMS)
def test_the_decoder_at_once(form: str) -> None:
    report = verify_layer(to_onnx(DECODER, words("L"), words("S"), form=form), DECODER)
    assert report.agrees, str(report)


@pytest.mark.parametrize("form", FORMS)
def test_the_decoder_word_by_word(form: str, tmp_path: Path) -> None:
    """From an empty past; each cache goes into the next run as the graph returned it."""
    path = tmp_path / "step.onnx"
    path = blocks.export(DECODER, path) if form == "auto" else save(exported(form=form), path)
    model = onnx.load(path)
    assert [tensor.name for tensor in model.graph.output] == ["output", "present_key", "present_value"]
    session = onnxruntime.InferenceSession(path)
    memory, empty = DECODER.memory(SOURCE), DECODER.empty(TARGET)
    past, outputs = [empty.key, empty.value], []
    for start, stop in STEPS:
        names = ("x", "past_key", "past_value", "memory_key", "memory_value")
        inputs = (TARGET[:, start:stop], *past, memory.key, memory.value)
        output, *past = session.run(None, dict(zip(names, inputs, strict=True)))
        outputs.append(output)
        assert past[0].shape[-2] == stop
    assert_decoded(outputs)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("form", FORMS)
def test_a_step_verifies(form: str) -> None:
    report = verify_layer(exported(form=form), DECODER.graph)
    assert report.agrees, str(report)
    assert {run.output for run in report.runs} == {"output", "present_key", "present_value"}


def test_another_step_does_not_verify() -> None:
    other = DECODER.with_parameters({"attention.key.bias": DECODER.attention.key.bias + 0.01})
    assert not verify_layer(exported(), other.graph).agrees


def test_each_weight_is_held_once_under_its_name() -> None:
    used = {name for name in DECODER.parameters if not name.startswith(("cross.key", "cross.value"))}
    names = [tensor.name for tensor in exported().graph.initializer if "." in tensor.name]
    assert sorted(names) == sorted(used)


@pytest.mark.parametrize("module", ["torch", "jax.numpy"])
def test_weights_of_any_library_give_the_same_graph(module: str) -> None:
    moved = DECODER.to(pytest.importorskip(module))
    assert exported(moved).graph == exported().graph


@pytest.mark.sampled(2)
@pytest.mark.parametrize("release", REDUCED)
def test_releases(release: str, tmp_path: Path) -> None:
    """The caches are those of the library."""
    memory, cache, feeds = DECODER.memory(SOURCE), DECODER.empty(TARGET), []
    for start, stop in STEPS:
        x = TARGET[:, start:stop]
        inputs = {"x": x, "past_key": cache.key, "past_value": cache.value}
        feeds.append(inputs | {"memory_key": memory.key, "memory_value": memory.value})
        _, cache = DECODER.step(x, cache, memory)
    graphs = {form: (exported(form=form, runtime=runtime_of(release)), feeds) for form in ("auto", "primitive")}
    for runs in run_graphs(release, graphs, tmp_path).values():
        assert not isinstance(runs, str), runs
        assert_decoded([outputs["output"] for outputs in runs])
        np.testing.assert_allclose(runs[-1]["present_key"], cache.key, rtol=0, atol=1e-5)


def test_a_block_is_where_its_input_is() -> None:
    torch = pytest.importorskip("torch")
    like = torch.ones((1, 3, blocks.WIDTH), dtype=torch.float64, device="meta")
    for kind in (blocks.EncoderBlock, blocks.DecoderBlock):
        arrays = kind.init(RNG, like).parameters.values()
        assert {(x.device.type, x.dtype) for x in arrays} == {("meta", torch.float64)}
