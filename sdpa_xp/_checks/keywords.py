"""Keywords: flags, words and functions; keywords that a function does not have; attributes that are set."""

from __future__ import annotations

import functools
import inspect
import math
import numbers
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import FrozenInstanceError, fields
from difflib import get_close_matches
from traceback import walk_tb
from types import FunctionType
from typing import Any, Literal, NoReturn, TypeAlias, TypeVar, cast

from sdpa_xp._checks.messages import shown, type_name
from sdpa_xp._checks.shapes import LAYOUTS
from sdpa_xp._libraries.base import Library
from sdpa_xp._libraries.torch import is_compiling
from sdpa_xp.errors import ArgumentTypeError, ArgumentValueError, Message

Implementation: TypeAlias = Literal["xp", "native"]
"""The portable implementation in array-API calls, or a kernel of the arrays' own library."""
F = TypeVar("F", bound=Callable[..., Any])


def check_flag(function: str, name: str, value: object) -> bool:
    """Check a bool of Python or NumPy, and return it as a bool."""
    if type(value).__name__ == "bool":  # NumPy's has that name too, and is no bool of Python
        return bool(value)
    raise ArgumentTypeError(function, f"`{name}` must be True or False", {name: repr(value)})


def refuse_missing_kernel(function: str, reason: str) -> NoReturn:
    """Refuse "native" if no kernel computes the call."""
    rule = f"`implementation` must be None or 'xp', because {reason}"
    raise ArgumentValueError(function, rule, {"implementation": "'native'"})


def check_choice(
    function: str, name: str, value: object, choices: Sequence[str], otherwise: str = "", hint: str = ""
) -> None:
    """Check that `value` is one of the names in `choices`; `otherwise` says what else is allowed."""
    if not (isinstance(value, str) and value in choices):
        rule = f"`{name}` must be " + " or ".join(
            [repr(choice) for choice in choices] + [otherwise] * bool(otherwise)
        )
        raise ArgumentValueError(function, rule, {name: repr(value)}, hint)


def check_instance(function: str, name: str, value: object, kind: type, word: str = "", hint: str = "") -> None:
    """Check that `value` is an instance of `kind`, called `word` in the message, or None."""
    if value is not None and not isinstance(value, kind):
        rule = f"`{name}` must be a {word or kind.__name__} or None"
        raise ArgumentTypeError(function, rule, {name: shown(value)}, hint)


def check_layout(function: str, value: object) -> None:
    """Check the name of a layout; those of other libraries, such as "bshd", get their name here."""
    if not (isinstance(value, str) and value in LAYOUTS):
        letters = value.lower() if isinstance(value, str) else ""
        # The length is L, S (flash-attention, ONNX) or T (jax.nn).
        length = max(map(letters.find, "lst"))
        # N is the heads of "bnsh" (ONNX), and the length of "nhd" (FlashInfer).
        heads = letters.find("n" if length >= 0 and "n" in letters else "h")
        length = letters.find("n") if length < 0 else length
        hint = f"That is {LAYOUTS[heads > length]!r} here." if min(heads, length) >= 0 else ""
        rule = f"`layout` must be {' or '.join(map(repr, LAYOUTS))}"
        raise ArgumentValueError(function, rule, {"layout": repr(value)}, hint)


def check_lse_base(function: str, value: object) -> float | None:
    """Check the base of the logarithm, None for e or 2, and return it."""
    if value is None or (
        not isinstance(value, bool) and isinstance(value, numbers.Real) and value in (2, math.e)
    ):
        return None if value in (None, math.e) else 2.0
    raise ArgumentValueError(function, "`lse_base` must be None (e) or 2", {"lse_base": repr(value)})


def check_function(public_function: str, name: str, value: object, arguments: Sequence[str]) -> None:
    """Check that `value` is a function of these arguments, if its signature can be read.

    `public_function` is named in messages.
    """
    if not callable(value):
        raise ArgumentTypeError(public_function, f"`{name}` must be a function", {name: shown(value)})
    if is_compiling():  # torch.compile cannot trace `inspect`
        return
    try:
        # A wrapper is called with the arguments that it takes itself, whatever it wraps.
        signature = inspect.signature(value, follow_wrapped=False)
    except (TypeError, ValueError):  # a builtin has no signature
        return
    try:
        signature.bind(*arguments)
    except TypeError:
        rule = f"`{name}` must be a function of {len(arguments)} arguments ({', '.join(arguments)})"
        written = getattr(value, "__name__", type_name(value))
        raise ArgumentTypeError(public_function, rule, {name: f"{written}{signature}"}) from None


def check_rng(function: str, value: object, library: Library, *, needed: bool) -> None:
    """Check a generator of `library`. It may be None if none is `needed`."""
    name = library.generators.name
    if value is None and needed:
        hint = "Pass one, so that you can reproduce the result."
        raise ArgumentValueError(function, f"`dropout_p` > 0 needs `rng`, a {name}", {"rng": None}, hint)
    if value is not None and not library.generators.owns(value):
        raise ArgumentTypeError(function, f"`rng` must be a {name}", {"rng": shown(value)})
    if value is not None and not library.generators.can_draw():
        rule = "`rng` cannot be used inside torch.compile"
        hint = "torch.compile does not support torch.Generator: call this outside of the compiled function."
        raise ArgumentTypeError(function, rule, {"rng": name}, hint)


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
    """Have a public function, or all public methods of a class, say what to write instead of unknown names."""
    if isinstance(function, type):
        for name, member in [*vars(function).items()]:
            is_public = name in ("__init__", "__call__") or not name.startswith("_")
            if is_public and isinstance(member, FunctionType):
                setattr(function, name, explains_keywords(member))
            elif is_public and isinstance(member, classmethod):
                setattr(function, name, classmethod(explains_keywords(member.__func__)))
        return function

    body = inspect.unwrap(function).__code__

    @functools.wraps(function)
    def call(*arguments: Any, **keywords: Any) -> Any:
        try:
            return function(*arguments, **keywords)
        except TypeError as error:
            # Python's own refusal of the arguments comes before the first line of the function.
            if any(frame.f_code is body for frame, _ in walk_tb(error.__traceback__)):
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


class Immutable:
    """The base class of frozen dataclasses with slots. Their own refusal fails on Python 3.11, in `super()`."""

    __slots__ = ()

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        # The second class that dataclass makes has slots, and its two methods, which mypy takes for `object`'s.
        if "__setattr__" in vars(cls):
            cls.__setattr__ = _refuse_to_set  # type: ignore[method-assign]
            cls.__delattr__ = _refuse_to_delete  # type: ignore[method-assign]


def _refuse_to_set(self: Any, name: str, value: object) -> None:
    if _is_of_subclass(self, name):
        object.__setattr__(self, name, value)
    else:
        raise FrozenInstanceError(_refusal_to_change(self, name, "set", {name: shown(value)}))


def _refuse_to_delete(self: Any, name: str) -> None:
    if _is_of_subclass(self, name):
        object.__delattr__(self, name)
    else:
        raise FrozenInstanceError(_refusal_to_change(self, name, "deleted", {"attribute": repr(name)}))


def _is_of_subclass(value: Any, name: str) -> bool:
    """Return whether a class that is no such dataclass, but derived from one, may set the attribute."""
    return vars(type(value)).get("__setattr__") is not _refuse_to_set and name not in _field_names(value)


def _refusal_to_change(value: Any, name: str, done: str, got: dict[str, str]) -> str:
    kind, names = type(value).__name__, _field_names(value)
    rule = f"`{name}` cannot be {done}, because instances of {kind} never change"
    hint = f"Write dataclasses.replace(x, {name}=...) for a changed copy of x."
    return Message(kind, rule, got, hint if name in names else f"Its fields are {', '.join(names)}.")


def _field_names(value: Any) -> list[str]:
    return [field.name for field in fields(value) if field.init]
