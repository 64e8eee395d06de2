"""Attention for every array: one exact, memory-linear implementation for any array-API library.

If you come from another library: its arguments are on the left, and their names in sdpa_xp on the right.
`biases`, `masks` and `positional` are modules. Arguments with the same name and meaning are left out.

torch, scaled_dot_product_attention
    attn_mask = causal_upper_left, causal_lower_right    masks.causal(), masks.causal("lower_right")
    dropout_p                       dropout_p, with rng=torch.Generator()
    enable_gqa                      always, by the number of heads
    a mask with is_causal           both apply
torch, FlexAttention
    block_mask, from mask_mod       attn_mask=masks.from_function(mask_mod)
    score_mod                       bias=biases.from_function(score_mod)
    and_masks, or_masks             &, |
    create_mask                     masks.to_array
    return_lse, AuxRequest(lse)     attention_state
torch, nn.MultiheadAttention
    the module itself               layers.MultiHeadAttention.from_torch(module)
    attn_mask (True = masked)       attn_mask=~mask; 3-D as (batch, heads, L, S)
    key_padding_mask                attn_mask=~mask[:, None, None, :], or masks.padding(lengths)
    need_weights                    attention_weights
    add_zero_attn                   sinks of 0
jax.nn, dot_product_attention       dot_product_attention, with all its names but
    return_residual                 attention_state(..., layout="...LHE"); lse is (batch, heads, length)
    a residual without gradient     lse, which has its true gradient
    a row with no key: mean(V)      0
keras.ops, dot_product_attention    dot_product_attention
    attn_logits_soft_cap            scaled_dot_product_attention(..., softcap=, layout="...LHE")
flash-attention
    (batch, length, heads, width)   layout="...LHE"
    softmax_scale                   scale
    causal (aligns the last)        masks.causal("lower_right")
    window_size=(left, right), -1   masks.sliding_window(left, right, offset="lower_right"), None
    alibi_slopes                    bias=biases.alibi(slopes, offset="lower_right")
    learnable_sink                  sinks
    softmax_lse                     .lse of attention_state, varlen_attention_state and attend_state
    flash_attn_varlen_func          varlen_attention; max_seqlen_q and max_seqlen_k are not needed
    the same with block_table       PagedKVCache.attend(cu_seqlens_q=)
    flash_attn_with_kvcache         PagedKVCache.append and .attend, which is causal by default
    no block_table                  block_table=[[0], [1], ...], a block for each row of cache_batch_idx
    cache_leftpad                   attn_mask=~masks.prefix(cache_leftpad)
    rotary_cos, rotary_sin, rotary_interleaved    rotary=positional.RotaryTables(cos, sin, interleaved=)
xformers, memory_efficient_attention
    attn_bias, a tensor             bias
    LowerTriangularMask             is_causal=True
    LowerTriangularFromBottomRightMask    masks.causal("lower_right")
    BlockDiagonalMask, ...CausalMask      varlen_attention, is_causal=True; or masks.document(ids)
    p                               dropout_p, with rng
FlashInfer
    kv_layout "NHD", "HND"          layout="...LHE", "...HLE"
    causal (aligns the last)        masks.causal("lower_right")
    window_left                     masks.sliding_window(window_left, None, offset="lower_right")
    sm_scale, logits_soft_cap       scale, softcap
    return_lse (base 2)             attention_state(..., lse_base=2), attend_state; lse is (heads, length)
    merge_states                    merge_states(..., lse_base=2, layout="...LHE")
    qo_indptr, kv_indptr            varlen_attention(cu_seqlens_q=, cu_seqlens_k=)
    paged_kv_indices                PagedKVCache(block_table=), .attend(cu_seqlens_q=qo_indptr)
    append_paged_kv_cache           PagedKVCache.append(cu_seqlens_k=append_indptr)
MLX, mx.fast.scaled_dot_product_attention
    mask="causal" (the last align)  attn_mask=masks.causal("lower_right")
MLX, mx.fast.rope
    dims, traditional               positional.Rotary(width, interleaved=)
    scale                           scaling=positional.LinearScaling(factor=1/scale)
    offset, one for all             positions
ONNX, RotaryEmbedding
    cos_cache, sin_cache            RotaryTables(cos, sin), or Rotary.cos_sin(positions)
    position_ids                    Rotary.apply(x, positions=)
    rotary_embedding_dim            width
ONNX, Attention
    past_key, present_key           KVCache
    is_causal after a past          KVCache.attend, or masks.causal(past length)
    nonpad_kv_seqlen                masks.padding(lengths) & masks.causal([length - L for each])
    left_window_size, right_window_size   masks.sliding_window(left, right, offset=)
    softmax_precision               softmax_dtype
    qk_matmul_output                attention_scores, attention_weights

tests/peers and quality/conformance hold each against its library, or against its formula.
"""

import importlib
import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from sdpa_xp import biases, masks, positional
    from sdpa_xp.attention import attention_state, scaled_dot_product_attention
    from sdpa_xp.caches.kv import KVCache
    from sdpa_xp.caches.paged import PagedKVCache
    from sdpa_xp.dot_product import dot_product_attention
    from sdpa_xp.explanation import Explanation, explain
    from sdpa_xp.forward_mode import scaled_dot_product_attention_jvp
    from sdpa_xp.gradients import scaled_dot_product_attention_vjp
    from sdpa_xp.ring import ring_attention
    from sdpa_xp.states import AttentionState, merge_states
    from sdpa_xp.varlen import varlen_attention, varlen_attention_state
    from sdpa_xp.weights import attention_scores, attention_weights

__version__ = "0.1.0"
"""Of the library and of the exporter, which are released together."""

__all__ = [
    "AttentionState",
    "Explanation",
    "KVCache",
    "PagedKVCache",
    "__version__",
    "attention_scores",
    "attention_state",
    "attention_weights",
    "biases",
    "dot_product_attention",
    "explain",
    "masks",
    "merge_states",
    "positional",
    "ring_attention",
    "scaled_dot_product_attention",
    "scaled_dot_product_attention_jvp",
    "scaled_dot_product_attention_vjp",
    "varlen_attention",
    "varlen_attention_state",
]

_MODULES = {
    "AttentionState": "states",
    "Explanation": "explanation",
    "KVCache": "caches.kv",
    "PagedKVCache": "caches.paged",
    "attention_scores": "weights",
    "attention_state": "attention",
    "attention_weights": "weights",
    "biases": "biases",
    "dot_product_attention": "dot_product",
    "explain": "explanation",
    "masks": "masks",
    "merge_states": "states",
    "positional": "positional",
    "ring_attention": "ring",
    "scaled_dot_product_attention": "attention",
    "scaled_dot_product_attention_jvp": "forward_mode",
    "scaled_dot_product_attention_vjp": "gradients",
    "varlen_attention": "varlen",
    "varlen_attention_state": "varlen",
}
"""The module of each public name, imported when the name is first used: a program loads only what it uses."""

if not TYPE_CHECKING:  # with this function, type checkers would accept every name

    def __getattr__(name: str) -> object:
        """Import a public name (PEP 562)."""
        if name not in _MODULES:
            message = f"module {__name__!r} has no attribute {name!r}"
            raise AttributeError(message, name=name, obj=sys.modules[__name__])
        module = importlib.import_module(f"{__name__}.{_MODULES[name]}")
        globals()[name] = value = module if name == _MODULES[name] else getattr(module, name)
        return value

    def __dir__() -> list[str]:
        return __all__
