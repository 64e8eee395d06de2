"""Small models with random weights, of any type of transformers: `python -m peers.architectures` tries all.

Prints the types of model whose results with sdpa_xp are those of eager attention, and which did call it.
"""

from __future__ import annotations

import warnings
from typing import Any

HEADS = ("CausalLM", "MaskedLM", "Seq2SeqLM", "ImageClassification")
LARGEST = 10_000_000
"""Parameters of a model that is tried: a size that the table below does not know leaves a model large."""
SIZES = {
    61: ("vocab_size",),
    32: ("hidden_size", "d_model", "n_embd", "embed_dim", "embedding_size", "dim"),
    48: ("intermediate_size", "ffn_dim", "d_ff", "encoder_ffn_dim", "decoder_ffn_dim", "hidden_dim", "n_inner"),
    2: (
        *("num_hidden_layers", "num_layers", "n_layer", "n_layers", "encoder_layers", "decoder_layers"),
        *("num_decoder_layers", "num_key_value_heads", "num_experts_per_tok", "moe_topk"),
    ),
    4: (
        *(
            "num_attention_heads",
            "n_head",
            "n_heads",
            "num_heads",
            "attention_heads",
            "encoder_attention_heads",
        ),
        *("decoder_attention_heads", "num_experts", "num_local_experts", "n_routed_experts", "patch_size"),
    ),
    8: ("head_dim", "d_kv", "attention_head_size", "image_size"),
    16: ("moe_intermediate_size", "shared_expert_intermediate_size"),
    64: ("max_position_embeddings", "n_positions", "max_sequence_length"),
    0: ("pad_token_id",),
}


def small_config(model_type: str) -> Any:
    import transformers

    usual = transformers.AutoConfig.for_model(model_type)
    return transformers.AutoConfig.for_model(model_type, **_small_sizes(usual))


def _small_sizes(usual: Any) -> dict[str, Any]:
    options: dict[str, Any] = {name: size for size, names in SIZES.items() for name in names}
    kinds = list(getattr(usual, "layer_types", None) or ())
    options |= {"bos_token_id": 1, "eos_token_id": 1, "layer_types": kinds[-2:]}
    if hasattr(usual, "qk_rope_head_dim"):  # latent attention: a part of each head is rotated
        options |= {"qk_rope_head_dim": 4, "qk_nope_head_dim": 4, "head_dim": 4, "v_head_dim": 8}
        options |= {"kv_lora_rank": 8, "q_lora_rank": 8}
    for name in list(options):
        is_unset = getattr(usual, name, None) is None and name not in ("num_key_value_heads", "head_dim")
        if is_unset or not hasattr(usual, name) or isinstance(getattr(type(usual), name, None), property):
            del options[name]
    parts = {name: getattr(usual, name, None) for name in usual.sub_configs}
    return options | {name: _small_sizes(part) for name, part in parts.items() if part is not None}


def small_model(model_type: str, head: str) -> Any:
    """Return a model, or None if it stays large."""
    import torch
    import transformers

    config = small_config(model_type)
    auto = getattr(transformers, f"AutoModelFor{head}")
    with torch.device("meta"):
        if sum(x.numel() for x in auto.from_config(config, attn_implementation="eager").parameters()) > LARGEST:
            return None
    torch.manual_seed(0)
    model = auto.from_config(config, attn_implementation="eager").eval()
    generator = torch.Generator().manual_seed(0)
    for parameter in model.parameters():  # large enough that attention decides what comes out
        if parameter.ndim > 1 and parameter.is_floating_point():
            parameter.data = 0.3 * torch.randn(parameter.shape, generator=generator)
    return model


def inputs(model: Any, head: str) -> dict[str, Any]:
    import torch

    generator = torch.Generator().manual_seed(0)
    if head == "ImageClassification":
        config = getattr(model.config, "vision_config", model.config)
        return {"pixel_values": torch.randn(3, 3, config.image_size, config.image_size, generator=generator)}
    ids = torch.randint(2, 61, (3, 12), generator=generator)
    real = torch.arange(12) < torch.tensor([[12], [8], [3]])
    more = {"decoder_input_ids": ids.flip(-1)} if head == "Seq2SeqLM" else {}
    return {"input_ids": ids, "attention_mask": real.long()} | more


def compared(model: Any, head: str) -> tuple[float, bool]:
    """Return how far the logits of real tokens are from eager attention, and whether they are finite."""
    import torch

    from sdpa_xp.integrations.transformers import register

    arguments = inputs(model, head)
    logits = {}
    for name in ("eager", register()):
        model.set_attn_implementation(name)
        with torch.no_grad():
            logits[name] = model(**arguments).logits
    if head in ("CausalLM", "MaskedLM"):
        logits = {name: x[arguments["attention_mask"].bool()] for name, x in logits.items()}
    eager, ours = logits.values()
    return float((eager - ours).abs().max() / eager.abs().max()), bool(torch.isfinite(eager).all())


def types_with(head: str) -> list[str]:
    from transformers.models.auto import modeling_auto

    names = {"CausalLM": "CAUSAL_LM", "MaskedLM": "MASKED_LM", "Seq2SeqLM": "SEQ_TO_SEQ_CAUSAL_LM"}
    name = names.get(head, "IMAGE_CLASSIFICATION")
    return list(getattr(modeling_auto, f"MODEL_FOR_{name}_MAPPING_NAMES"))


if __name__ == "__main__":
    import resource
    import sys

    from internals import transformers_attention
    from peers.same_layers import count_calls

    from sdpa_xp.integrations.transformers import uses_sdpa_xp

    resource.setrlimit(resource.RLIMIT_AS, (12 * 2**30,) * 2)
    warnings.simplefilter("ignore")
    number = count_calls(transformers_attention)
    for head in sys.argv[1:] or HEADS:
        for model_type in types_with(head):
            number[0] = 0
            try:
                model = small_model(model_type, head)
                result = "large" if model is None else compared(model, head)
                used = model is not None and uses_sdpa_xp(model)
            except Exception as error:
                result, used = f"{type(error).__name__}: {str(error)[:90]!r}", None
            print(head, model_type, number[0], used, result, flush=True)
