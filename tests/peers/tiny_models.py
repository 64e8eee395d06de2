"""Small models of transformers for tests: their weights are random, and nothing is downloaded."""

from __future__ import annotations

from typing import Any

VOCABULARY, LENGTH = 61, 12
WINDOW = 5
SIZES = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 64,
    "initializer_range": 0.5,  # large enough that attention decides what comes out
}
DECODER = {"num_key_value_heads": 2, "pad_token_id": 0, "bos_token_id": None, "eos_token_id": None}
WINDOWED = {"head_dim": 8, "sliding_window": WINDOW}
ARCHITECTURES: dict[str, tuple[str, dict[str, Any]]] = {
    "Bert": ("ForMaskedLM", {}),
    "Llama": ("ForCausalLM", DECODER),
    "Mistral": ("ForCausalLM", DECODER | WINDOWED),
    "GptOss": ("ForCausalLM", DECODER | WINDOWED | {"num_local_experts": 3, "num_experts_per_tok": 2}),
    # A soft cap that scores reach, a scale that is not 1 / sqrt(head_dim), and tokens that vary.
    "Gemma2": (
        "ForCausalLM",
        DECODER
        | WINDOWED
        | {"attn_logit_softcapping": 2.0, "query_pre_attn_scalar": 3, "tie_word_embeddings": False},
    ),
}


def tiny_model(name: str, **changes: Any) -> Any:
    """Return a model of an architecture, ready to evaluate."""
    import torch
    import transformers

    head, options = ARCHITECTURES[name]
    config = getattr(transformers, f"{name}Config")(**(SIZES | options | changes))
    torch.manual_seed(1)
    model = getattr(transformers, name + head)(config).eval()
    for layer, parameter in model.named_parameters():
        if layer.endswith("sinks"):
            torch.nn.init.normal_(parameter)
    if hasattr(config, "num_local_experts"):
        model.set_experts_implementation("eager")  # the one for float64, too
    return model


def tokens(batch: int = 3, length: int = LENGTH) -> Any:
    import torch

    generator = torch.Generator().manual_seed(0)
    return torch.randint(1, VOCABULARY, (batch, length), generator=generator)


def padding(side: str) -> Any:
    """Return where 3 rows of `LENGTH` tokens have real ones: 12, 8 and 3 of them."""
    import torch

    real = torch.arange(LENGTH) < torch.tensor([[LENGTH], [8], [3]])
    return {"none": torch.ones_like(real), "right": real, "left": real.flip(-1)}[side].long()
