"""Which models of transformers use sdpa_xp: those that the guide lists; what is said of the others."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from peers.architectures import HEADS, compared, small_model, types_with
from peers.same_layers import count_calls
from peers.tiny_models import padding, tiny_model, tokens

from sdpa_xp.integrations.transformers import register, uses_sdpa_xp

pytest.importorskip("torch")
pytest.importorskip("transformers")
import torch
import transformers
from internals import transformers_attention

pytestmark = [
    pytest.mark.needs("torch", "transformers"),
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
]
NAMES = Path(__file__).with_name("transformers_models.txt").read_text().split()
SIZES = {"vocab_size": 61, "hidden_size": 32, "num_attention_heads": 4}


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    return count_calls(transformers_attention, monkeypatch.setattr)


@pytest.mark.filterwarnings("ignore:Initializing zero-element tensors:UserWarning")  # of MobileBERT
@pytest.mark.sampled(7)
@pytest.mark.parametrize("name", NAMES)
def test_architectures_of_the_guide(name: str, calls: list[int]) -> None:
    """Each computes with sdpa_xp what it computes with eager attention, for a batch with padding."""
    head = next(head for head in HEADS if name in types_with(head))
    model = small_model(name, head)
    difference, is_finite = compared(model, head)
    assert is_finite
    assert difference < 1e-4
    assert calls[0] > 0
    assert uses_sdpa_xp(model)


def test_the_guide_lists_models() -> None:
    assert len(NAMES) > 100
    assert len(set(NAMES)) == len(NAMES)


def of_type(name: str, implementation: str, **options: Any) -> Any:
    config = transformers.AutoConfig.for_model(name, **(SIZES | options))
    return transformers.AutoModel.from_config(config, attn_implementation=implementation)


def test_a_model_uses_it_while_it_has_the_name() -> None:
    model = tiny_model("Llama")
    assert not uses_sdpa_xp(model)
    model.set_attn_implementation(register())
    assert uses_sdpa_xp(model)
    assert uses_sdpa_xp(torch.nn.Sequential(torch.nn.Identity(), model))
    model.set_attn_implementation("eager")
    assert not uses_sdpa_xp(model)
    with pytest.raises(TypeError, match=r"^uses_sdpa_xp: `model` must be a model of transformers; got model="):
        uses_sdpa_xp(3)


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("bloom", {"n_layer": 1}),
        ("xglm", {"d_model": 32, "num_layers": 1, "attention_heads": 4, "ffn_dim": 32}),
        ("mpnet", {"num_hidden_layers": 1}),
        ("deberta-v2", {"num_hidden_layers": 1}),
    ],
)
def test_models_with_attention_of_their_own_warn(name: str, options: dict[str, Any], calls: list[int]) -> None:
    """Once for each type, also of a model with several parts of it; they compute what eager attention does."""
    said = rf"^xp_attention: models of type `{name}` have attention code of their own, which sdpa_xp"
    torch.manual_seed(0)
    with pytest.warns(UserWarning, match=said):
        model = of_type(name, register(), **options).eval()
    assert not uses_sdpa_xp(model)
    torch.manual_seed(0)
    eager = of_type(name, "eager", **options).eval()  # without a warning
    with torch.no_grad():
        outputs = [x(input_ids=tokens(), attention_mask=padding("right"))[0] for x in (model, eager)]
    assert torch.equal(*outputs)
    assert calls == [0]


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    ("name", "options", "choice"),
    [
        ("gptj", {"n_embd": 32, "n_layer": 1, "n_head": 4, "rotary_dim": 4}, "eager, flash_attention_2"),
        ("falcon", {"num_hidden_layers": 1}, "eager, sdpa, flash_attention_2"),
        ("git", {"num_hidden_layers": 1}, "eager"),
        ("data2vec-vision", {"num_hidden_layers": 1, "intermediate_size": 32}, "eager, sdpa"),
    ],
)
def test_models_that_know_no_other_names_are_refused(name: str, options: dict[str, Any], choice: str) -> None:
    """They look up a class by the name; transformers raises a KeyError that says nothing but the name."""
    said = rf"^xp_attention: `attn_implementation` must be one of {choice} for models of type `{name}`; got"
    for _ in range(2):
        with pytest.raises(ValueError, match=said):
            of_type(name, register(), **options)
    assert not uses_sdpa_xp(of_type(name, "eager", **options))


def test_a_part_of_a_refused_model_stays_usable() -> None:
    """GIT looks up a class for its text, but the vision model beside it asks for its attention."""
    config = transformers.GitVisionConfig(hidden_size=32, num_hidden_layers=1, num_attention_heads=4)
    model = transformers.GitVisionModel._from_config(config, attn_implementation=register())
    assert uses_sdpa_xp(model)


def test_transformers_is_asked_once() -> None:
    ask = transformers.PreTrainedModel.get_correct_attn_implementation
    register()
    assert transformers.PreTrainedModel.get_correct_attn_implementation is ask


def test_the_loss_at_the_first_real_token() -> None:
    """The last padding on the left predicts it. With it the loss is that of `sdpa`, without it of eager."""
    real, losses = padding("left").bool(), {}
    labels = tokens().masked_fill(~real, -100)
    first = real & ~real.roll(1, 1)
    first[:, 0] = False
    model = tiny_model("Llama")
    for name in ("eager", "sdpa", register()):
        model.set_attn_implementation(name)
        for left_out in (False, True):
            y = labels.masked_fill(first, -100) if left_out else labels
            with torch.no_grad():
                losses[name, left_out] = float(model(tokens(), attention_mask=real.long(), labels=y).loss)
    assert losses[register(), True] == pytest.approx(losses["eager", True], rel=1e-5)
    assert losses[register(), False] == pytest.approx(losses["sdpa", False], rel=1e-5)
    assert abs(losses[register(), False] - losses["eager", False]) > 1e-3
