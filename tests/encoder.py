"""What the sentence encoder of examples/minilm.py should give: its embeddings by plain torch in float64."""

from __future__ import annotations

import math
from functools import cache
from typing import Any

import minilm
import numpy as np

CLOSE = 1e-5
"""Entries of embeddings, which have length 1, may differ by so much; asked for by the project."""


@cache
def tokens() -> tuple[np.ndarray, np.ndarray]:
    ids, mask = minilm.tokenized(minilm.SENTENCES)
    return ids, mask


@cache
def expected() -> np.ndarray:
    """Embeddings by torch in float64: matrix products, one softmax, and torch's own layer norm and GELU."""
    import torch
    from safetensors.torch import load_file

    weights = {k: w.double() for k, w in load_file(minilm.folder() / "model.safetensors").items()}
    ids, mask = map(torch.asarray, tokens())

    def linear(x: Any, name: str) -> Any:
        return torch.nn.functional.linear(x, weights[f"{name}.weight"], weights[f"{name}.bias"])

    def norm(x: Any, name: str) -> Any:
        return torch.nn.functional.layer_norm(
            x, (384,), weights[f"{name}.weight"], weights[f"{name}.bias"], 1e-12
        )

    x = weights["embeddings.word_embeddings.weight"][ids]
    x = x + weights["embeddings.position_embeddings.weight"][: ids.shape[1]]
    x = norm(x + weights["embeddings.token_type_embeddings.weight"][0], "embeddings.LayerNorm")
    for number in range(6):
        layer = f"encoder.layer.{number}"
        query, key, value = (
            linear(x, f"{layer}.attention.self.{name}").unflatten(-1, (12, 32)).transpose(1, 2)
            for name in ("query", "key", "value")
        )
        scores = query @ key.mT / math.sqrt(32) + torch.where(mask, 0.0, -math.inf)[:, None, None, :]
        attended = (scores.softmax(-1) @ value).transpose(1, 2).flatten(2)
        x = norm(x + linear(attended, f"{layer}.attention.output.dense"), f"{layer}.attention.output.LayerNorm")
        inner = torch.nn.functional.gelu(linear(x, f"{layer}.intermediate.dense"))
        x = norm(x + linear(inner, f"{layer}.output.dense"), f"{layer}.output.LayerNorm")
    mean = torch.stack([row[real].mean(0) for row, real in zip(x, mask, strict=True)])
    return (mean / mean.norm(dim=-1, keepdim=True)).numpy()
