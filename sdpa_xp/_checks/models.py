"""Checks of the keywords that a model of another library passes to its attention."""

from __future__ import annotations

from collections.abc import Mapping

from sdpa_xp._checks.messages import type_name
from sdpa_xp.errors import ArgumentValueError

UNSUPPORTED = {
    "cache": ("the cache of continuous batching", "Use `generate`, whose caches are supported."),
    "sinks": ("sinks that differ between tokens", 'Use `attn_implementation="eager"` for this model.'),
    "block_indices": ("lists of blocks", 'Use `attn_implementation="eager"` for this model.'),
}
"""Keywords of transformers' attention functions that change the result, and that sdpa_xp does not compute."""


def refuse_model_keywords(function: str, keywords: Mapping[str, object]) -> None:
    """Refuse keywords that would change the result and are not computed."""
    for name, (rule, hint) in UNSUPPORTED.items():
        if keywords.get(name) is not None:
            got = {name: f"<{type_name(keywords[name])}>"}
            raise ArgumentValueError(function, f"sdpa_xp does not support {rule} (`{name}`)", got, hint)
