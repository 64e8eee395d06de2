"""Models of transformers on sdpa_xp, beside the same models with transformers' own eager attention."""

from __future__ import annotations

import copy
import json
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from internals import judge_together
from peers.tiny_models import ARCHITECTURES, LENGTH, WINDOW, padding, tiny_model, tokens

from sdpa_xp.integrations.transformers import register

pytest.importorskip("torch")
pytest.importorskip("transformers")
import torch
import transformers

pytestmark = [
    pytest.mark.needs("torch", "transformers"),
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
]
DECODERS = [name for name in ARCHITECTURES if name != "Bert"]


def in_float64(model: Any, run: Callable[[Any], Any]) -> Any:
    """Return what `run` makes of a copy of the model in float64, with eager attention.

    transformers' eager attention takes its softmax in float32, and -1.8e308 is -inf there.
    """

    wide = copy.deepcopy(model).double()
    wide.set_attn_implementation("eager")
    with pytest.MonkeyPatch.context() as patch:
        softmax = torch.softmax
        patch.setattr("torch.nn.functional.softmax", lambda x, dim, dtype=None: softmax(x, dim))
        return run(wide)


def assert_agree(model: Any, run: Callable[[Any], Any]) -> None:
    """On sdpa_xp, `run` is as near to float64 as with eager attention in float32; it returns NumPy arrays."""
    expected = in_float64(model, run)
    model.set_attn_implementation("eager")
    eager = run(model)
    model.set_attn_implementation(register())
    arrays = run(model)
    assert arrays.keys() == expected.keys()
    runs = [(array, expected[name], eager[name]) for name, array in arrays.items()]
    for name, agreement in zip(arrays, judge_together(runs, "float32"), strict=True):
        assert agreement.agrees, (name, agreement)
        assert agreement.bound < 1e-4 * np.max(np.abs(expected[name])), (name, agreement)


def logits(model: Any, real: Any, **options: Any) -> dict[str, Any]:
    """The logits of the real tokens; those of padding mean nothing."""
    with torch.no_grad():
        outputs = model(tokens(), attention_mask=real, **options).logits
    return {"logits": outputs[real.bool()].numpy()}


@pytest.mark.parametrize("side", ["none", "left", "right"])
@pytest.mark.parametrize("name", ARCHITECTURES)
def test_logits(name: str, side: str) -> None:
    real = padding(side)
    assert_agree(tiny_model(name), lambda model: logits(model, real))


def generated(model: Any, **options: Any) -> list[Any]:
    """The tokens that eager attention chooses, which sdpa_xp chooses as well."""
    results = []
    for implementation in ("eager", register()):
        model.set_attn_implementation(implementation)
        results.append(model.generate(tokens(), do_sample=False, **options).tolist())
    assert results[0] == results[1]
    return results[0]


@pytest.mark.parametrize("cache", ["dynamic", "static"])
@pytest.mark.parametrize("side", ["none", "left"])
@pytest.mark.parametrize("name", DECODERS)
def test_greedy_generation(name: str, side: str, cache: str) -> None:
    """Token by token; the prompt and what follows are longer than the window."""
    options = {"attention_mask": padding(side), "cache_implementation": cache}
    rows = generated(tiny_model(name), max_new_tokens=2 * WINDOW, **options)
    assert [len(row) for row in rows] == [LENGTH + 2 * WINDOW] * 3
    assert all(len(set(row[LENGTH:])) > 3 for row in rows)


def test_beams() -> None:
    generated(tiny_model("Llama"), num_beams=3, max_new_tokens=5)


@pytest.mark.parametrize("kind", ["dynamic", "windowed", "static"])
@pytest.mark.parametrize("name", DECODERS)
def test_steps_of_several_tokens_with_a_cache(name: str, kind: str) -> None:
    """A prompt in pieces: the cache has tokens, and several queries stand behind them."""

    def run(model: Any) -> dict[str, Any]:
        cache = {
            "dynamic": lambda: transformers.DynamicCache(),
            "windowed": lambda: transformers.DynamicCache(config=model.config),
            "static": lambda: transformers.StaticCache(config=model.config, max_cache_len=LENGTH + 3),
        }[kind]()
        with torch.no_grad():
            pieces = [model(x, past_key_values=cache).logits for x in tokens().split([6, 1, 3, 1, 1], dim=1)]
        return {"logits": torch.cat(pieces, dim=1).numpy()}

    assert_agree(tiny_model(name), run)


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_gradients(name: str) -> None:
    """Of all but the bias of BERT's keys: it adds the same to all scores of a row, so its gradient is 0."""
    real = padding("left")

    def run(model: Any) -> dict[str, Any]:
        model.zero_grad()
        model(tokens(), attention_mask=real).logits[real.bool()].square().mean().backward()
        parameters = dict(model.named_parameters())
        return {
            key: x.grad.numpy()
            for key, x in parameters.items()
            if x.grad is not None and not key.endswith("key.bias")
        }

    assert_agree(tiny_model(name), run)


@pytest.mark.parametrize("name", ["Bert", "GptOss", "Gemma2"])
def test_attention_weights(name: str) -> None:
    def run(model: Any) -> dict[str, Any]:
        with torch.no_grad():
            layers = model(tokens(), output_attentions=True).attentions
        return {str(layer): weights.numpy() for layer, weights in enumerate(layers)}

    assert_agree(tiny_model(name), run)


def test_packed_sequences() -> None:
    """Two texts in a row, told apart by their positions: logits are those of the texts alone."""
    positions = torch.tensor([[*range(5), *range(LENGTH - 5)]] * 3)

    def run(model: Any) -> dict[str, Any]:
        with torch.no_grad():
            return {"logits": model(tokens(), position_ids=positions, use_cache=False).logits.numpy()}

    model = tiny_model("Llama")
    assert_agree(model, run)
    with torch.no_grad():
        alone = model(tokens()[:, 5:], use_cache=False).logits.numpy()
    np.testing.assert_allclose(run(model)["logits"][:, 5:], alone, rtol=0, atol=1e-4)


@pytest.mark.parametrize("dtype", ["bool", "float32"])
def test_masks_of_the_user(dtype: str) -> None:
    """With 4 axes they go to attention as they are: True may attend, and floats are added."""
    allowed = torch.ones(3, 1, LENGTH, LENGTH, dtype=torch.bool).tril()
    allowed[:, :, 4:, 2] = False
    added = torch.where(allowed, 0.0, torch.finfo(torch.float32).min)
    model = tiny_model("Llama")
    with torch.no_grad():
        expected = model(tokens(), attention_mask=added).logits
        model.set_attn_implementation(register())
        output = model(tokens(), attention_mask=allowed if dtype == "bool" else added).logits
    torch.testing.assert_close(output, expected, rtol=0, atol=1e-4)


def test_relative_positions_of_t5() -> None:
    config = transformers.T5Config(
        vocab_size=61, d_model=32, d_kv=8, d_ff=48, num_layers=2, num_heads=4, decoder_start_token_id=0
    )
    torch.manual_seed(0)
    model = transformers.T5ForConditionalGeneration(config).eval()
    for layer, parameter in model.named_parameters():
        if "relative_attention_bias" in layer:
            torch.nn.init.normal_(parameter)
    assert_agree(model, lambda model: logits(model, padding("right"), decoder_input_ids=tokens()))


def test_training_with_dropout_and_checkpoints() -> None:
    """What is computed a second time for the gradients drops the same weights."""
    model = tiny_model("Llama", attention_dropout=0.3).train()
    model.set_attn_implementation(register())

    def gradients(seed: int) -> list[Any]:
        torch.manual_seed(seed)
        model.zero_grad()
        model(tokens(), use_cache=False).logits.square().mean().backward()
        return [x.grad.clone() for x in model.parameters()]

    stored, other = gradients(0), gradients(1)
    model.activation_checkpointing_enable()
    recomputed = gradients(0)
    for x, y in zip(stored, recomputed, strict=True):
        torch.testing.assert_close(x, y, rtol=0, atol=1e-4 * float(x.abs().max()))
    assert not torch.allclose(stored[1], other[1], rtol=0.1)


def compiled(model: Any, _inputs: dict[str, Any]) -> Any:
    """Without graph breaks: the masks are tensors with elements there."""
    return torch.compile(model, backend="eager", fullgraph=True)


def exported(model: Any, inputs: dict[str, Any]) -> Any:
    return torch.export.export(model, (), kwargs=inputs, strict=False).module()


@pytest.mark.filterwarnings("ignore:Dynamo detected a call to a `functools.lru_cache`-wrapped function")
@pytest.mark.parametrize(("name", "traced"), [("Mistral", compiled), ("Llama", exported)])
def test_inside_torch_compile_and_export(name: str, traced: Callable[[Any, dict[str, Any]], Any]) -> None:
    model = tiny_model(name, num_hidden_layers=1)
    model.set_attn_implementation(register())
    inputs = {"input_ids": tokens(), "attention_mask": padding("left"), "use_cache": False}
    with torch.no_grad():
        expected, output = (x(**inputs).logits for x in (model, traced(model, inputs)))
    real = padding("left").bool()
    torch.testing.assert_close(output[real], expected[real], rtol=0, atol=1e-4)


def test_transformers_is_imported_when_asked_only() -> None:
    code = "import json, sys, sdpa_xp.integrations.transformers; print(json.dumps(list(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert not {"torch", "transformers"} & set(json.loads(done.stdout))


def test_the_name_stays() -> None:
    """transformers takes "sdpa" in a name for its own, and refuses some models by that."""
    assert register() == register() == "xp_attention"
    for interface in (transformers.AttentionInterface(), transformers.AttentionMaskInterface()):
        assert interface[register()].__module__.startswith("sdpa_xp.")
