"""Attention for every array: one exact, memory-linear implementation for any array-API library."""

from sdpa_xp.attention import (
    AttentionState,
    attention_state,
    attention_weights,
    merge_states,
    scaled_dot_product_attention,
)

__version__ = "0.1.0"

__all__ = [
    "AttentionState",
    "__version__",
    "attention_state",
    "attention_weights",
    "merge_states",
    "scaled_dot_product_attention",
]
