"""Arguments that a function does not have: what to write instead of another name, or of a misspelling."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterable, Mapping
from difflib import get_close_matches
from typing import Any, TypeVar, cast

from sdpa_xp._checks.messages import shown
from sdpa_xp.errors import ArgumentTypeError

F = TypeVar("F", bound=Callable[..., Any])

SYNONYMS = (
    {"query", "q", "queries", "Q"},
    {"key", "k", "keys", "K"},
    {"value", "v", "values", "V"},
    {"attn_mask", "mask", "attention_mask", "atten_mask"},
    {"bias", "attn_bias", "attention_bias", "position_bias"},
    {"is_causal", "causal", "use_causal_mask"},
    {"scale", "softmax_scale", "sm_scale", "scaling"},
    {"softcap", "soft_cap", "softcapping", "logits_soft_cap", "attn_logits_soft_cap"},
    {"dropout_p", "dropout", "dropout_rate", "p_dropout", "p"},
    {"rng", "dropout_rng", "generator", "seed"},
    {"sinks", "sink", "s_aux", "learnable_sink"},
    {"layout", "qkv_format", "kv_layout"},
    {"capacity", "max_length", "max_cache_len", "max_seq_len"},
    {"block_table", "block_tables", "page_table"},
    {"positions", "cache_position", "position_ids"},
    {"base", "theta", "rope_theta"},
    {"width", "dim", "dims", "rotary_dim", "head_dim"},
    {"interleaved", "traditional", "rotary_interleaved"},
    {"scaling", "rope_scaling"},
    {"original_length", "original_max_position_embeddings"},
    {"query_dim", "embedding_dim", "embed_dim", "d_model", "hidden_size"},
    {"in_dim", "in_features"},
    {"out_dim", "out_features"},
)
"""Names of one thing in torch, JAX, Keras, flash-attention, FlashInfer, MLX and transformers."""

_WEIGHTS = "`attention_weights` returns the weights, and so does the method `weights` of a layer."
_LSE = "`attention_state`, `varlen_attention_state` and `attend_state` return the output and the log-sum-exp."
_WINDOW = "Write attn_mask=masks.sliding_window(left, right) instead."
_LENGTHS = "Write attn_mask=masks.padding(key_lengths, query_lengths) instead."
_PACKED = "`varlen_attention` takes packed sequences."
_LONGEST = "Leave it out: it follows from cu_seqlens_q and cu_seqlens_k, which `varlen_attention` takes."
_SAME = "Leave it out: the result is the same every time."
_NO_DROPOUT = "Leave it out: nothing is dropped unless you pass dropout_p and rng."
INSTEAD = {
    "enable_gqa": "Leave it out: heads are grouped if the query has more of them than the key.",
    **dict.fromkeys(
        ("need_weights", "output_attentions", "return_attention_scores", "return_attn_probs", "return_weights"),
        _WEIGHTS,
    ),
    **dict.fromkeys(("return_lse", "return_residual", "return_softmax_lse", "return_aux"), _LSE),
    **dict.fromkeys(("window_size", "local_window_size", "sliding_window", "window", "window_left"), _WINDOW),
    **dict.fromkeys(
        ("key_value_seq_lengths", "query_seq_lengths", "key_lengths", "seqlens", "valid_lens"), _LENGTHS
    ),
    **dict.fromkeys(("cu_seqlens", "cu_seqlens_q", "cu_seqlens_k"), _PACKED),
    **dict.fromkeys(("max_seqlen", "max_seqlen_q", "max_seqlen_k"), _LONGEST),
    **dict.fromkeys(("seqused_k", "cache_seqlens", "kv_lengths"), _LENGTHS),
    "deterministic": _SAME,
    **dict.fromkeys(("training", "train", "is_training", "inference"), _NO_DROPOUT),
    "key_padding_mask": "Write attn_mask=~key_padding_mask[:, None, None, :] instead: True means may attend.",
    **dict.fromkeys(("mask_mod", "block_mask"), "Write attn_mask=masks.from_function(mask_mod) instead."),
    "score_mod": "Write bias=biases.from_function(score_mod) instead.",
    "alibi_slopes": "Write bias=biases.alibi(slopes) instead.",
    "segment_ids": "Write attn_mask=masks.document(query_ids, key_ids) instead.",
    **dict.fromkeys(("backend", "flash_attention", "use_flash"), "Write implementation='native' instead."),
}
"""What to do about a keyword that no argument replaces one to one."""


def explains_keywords(function: F) -> F:
    """Have a public function, or a class, say what to write instead of arguments that it does not have."""
    if isinstance(function, type):
        constructor: Any = function
        constructor.__init__ = explains_keywords(constructor.__init__)
        return function

    @functools.wraps(function)
    def call(*arguments: Any, **keywords: Any) -> Any:
        try:
            return function(*arguments, **keywords)
        except TypeError as error:
            # Python's own refusal of the arguments comes before the first line of the function.
            if error.__traceback__ is None or error.__traceback__.tb_next is not None:
                raise
            refusal = _refusal(function, arguments, keywords)
            if refusal is None:
                raise
        raise refusal

    return cast(F, call)


def refuse_unknown_keywords(function: str, keywords: Mapping[str, object], names: Iterable[str]) -> None:
    """Refuse keywords that are not among the names."""
    if (refusal := _unknown(function, keywords, names)) is not None:
        raise refusal


def _unknown(function: str, keywords: Mapping[str, object], names: Iterable[str]) -> ArgumentTypeError | None:
    for keyword, value in keywords.items():
        if keyword not in names:
            hint = _hint(keyword, names)
            rule = f"there is no argument `{keyword}`"
            return ArgumentTypeError(function, rule, {keyword: shown(value)}, hint)
    return None


def _refusal(
    function: Callable[..., Any], arguments: tuple[object, ...], keywords: Mapping[str, object]
) -> ArgumentTypeError | None:
    """Return what is wrong with the names or the number of the arguments; None if it is something else."""
    parameters = inspect.signature(function).parameters
    owner = next(iter(parameters), "")
    is_method, name = owner in ("self", "cls"), function.__name__
    if is_method:
        kind = cast(type, arguments[0]) if owner == "cls" else type(arguments[0])
        name = kind.__name__ if name in ("__init__", "__call__") else f"{kind.__name__}.{name}"
    if (refusal := _unknown(name, keywords, parameters)) is not None:
        return refusal
    places = [key for key, parameter in parameters.items() if parameter.kind is parameter.POSITIONAL_OR_KEYWORD]
    if len(arguments) > len(places):
        rule = f"only {_listed(places[is_method:])} may be passed without a name"
        others = [key for key in parameters if key not in places]
        hint = f"Name the others: {', '.join(f'{key}=...' for key in others[:3])}." if others else ""
        return ArgumentTypeError(name, rule, {"arguments": len(arguments) - is_method}, hint)
    return None


def _hint(keyword: str, parameters: Iterable[str]) -> str:
    for names in SYNONYMS:
        if keyword in names and (here := names.intersection(parameters)):
            return f"Write {here.pop()}=... instead."
    if keyword in INSTEAD:
        return INSTEAD[keyword]
    close = get_close_matches(keyword, [*parameters], n=1)
    return f"Write {close[0]}=... instead." if close else ""


def _listed(names: list[str]) -> str:
    words = [f"`{name}`" for name in names]
    return " and ".join([", ".join(words[:-1])] * (len(words) > 1) + words[-1:])
