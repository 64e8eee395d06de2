"""Attention for every array: one exact, memory-linear implementation for any array-API library."""

from sdpa_xp import biases, masks
from sdpa_xp.attention import attention_state, scaled_dot_product_attention
from sdpa_xp.cache import KVCache
from sdpa_xp.dot_product import dot_product_attention
from sdpa_xp.paged import PagedKVCache
from sdpa_xp.states import AttentionState, merge_states
from sdpa_xp.varlen import varlen_attention
from sdpa_xp.weights import attention_scores, attention_weights

__version__ = "0.1.0"

__all__ = [
    "AttentionState",
    "KVCache",
    "PagedKVCache",
    "__version__",
    "attention_scores",
    "attention_state",
    "attention_weights",
    "biases",
    "dot_product_attention",
    "masks",
    "merge_states",
    "scaled_dot_product_attention",
    "varlen_attention",
]
