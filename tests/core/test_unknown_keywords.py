"""Arguments that a function does not have: the message says what to write instead."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from internals import names_elsewhere

import sdpa_xp
from sdpa_xp import (
    KVCache,
    PagedKVCache,
    attention_scores,
    attention_weights,
    biases,
    masks,
    positional,
    scaled_dot_product_attention,
)
from sdpa_xp.layers import Linear, MultiHeadAttention

X = np.ones((2, 4, 8))
WRITE = {
    "mask": "Write attn_mask=... instead.",
    "attention_mask": "Write attn_mask=... instead.",
    "causal": "Write is_causal=... instead.",
    "is_casual": "Write is_causal=... instead.",
    "softmax_scale": "Write scale=... instead.",
    "attn_bias": "Write bias=... instead.",
    "enable_gqa": "Leave it out: heads are grouped",
    "need_weights": "`attention_weights` returns the weights",
    "window_size": r"masks.sliding_window\(left, right\)",
    "key_padding_mask": "~key_padding_mask",
    "return_lse": "`attention_state`, .* return the output and the log-sum-exp",
    "deterministic": "the result is the same every time",
}


@pytest.mark.parametrize("keyword", WRITE)
def test_another_name(keyword: str) -> None:
    """Of one function: test_every_argument.py asks each for an argument that it has not."""
    rule = f"scaled_dot_product_attention: there is no argument `{keyword}`; got {keyword}=True."
    with pytest.raises(TypeError, match=f"^{re.escape(rule)} .*{WRITE[keyword]}"):
        scaled_dot_product_attention(X, X, X, **{keyword: True})  # type: ignore[arg-type]


def test_names_of_jax() -> None:
    for keyword, name in {"attn_mask": "mask", "dropout": "", "softmax_scale": "scale"}.items():
        hint = rf" Write {name}=\.\.\. instead\." if name else ""
        with pytest.raises(
            TypeError, match=rf"^dot_product_attention: there is no argument `{keyword}`.*{hint}"
        ):
            sdpa_xp.dot_product_attention(X, X, X, **{keyword: None})  # type: ignore[arg-type]


def test_a_paged_cache_and_a_layer() -> None:
    pool = np.ones((2, 2, 4, 8))
    with pytest.raises(TypeError, match=r"^PagedKVCache\.attend: there is no argument `causal`.*is_causal"):
        PagedKVCache(pool, pool, [[0]], [3]).attend(np.ones((1, 2, 1, 8)), causal=True)  # type: ignore[call-arg]
    layer = MultiHeadAttention.init(np.random.default_rng(0), 8, num_heads=2)
    for keyword, hint in {
        "need_weights": "the method `weights` of a layer",
        "mask": "Write attn_mask=",
    }.items():
        rule = f"^MultiHeadAttention: there is no argument `{keyword}`.*{hint}"
        with pytest.raises(TypeError, match=rule):
            layer(X.astype(np.float32), **{keyword: True})
        with pytest.raises(TypeError, match=rule):
            layer.weights(X.astype(np.float32), **{keyword: True})


def test_constructors_and_appends() -> None:
    cache = KVCache(X, X)
    refused = {
        "KVCache: there is no argument `max_length`.*capacity=": lambda: KVCache(X, X, max_length=9),
        r"KVCache\.append: .*`cache_position`.*positions=": lambda: cache.append(X, X, cache_position=1),
        "PagedKVCache: .*`block_tables`.*block_table=": lambda: PagedKVCache(
            X, X, block_tables=[[0]], lengths=[1]
        ),
        r"MultiHeadAttention\.init: .*`embed_dim`.*query_dim=": lambda: MultiHeadAttention.init(
            np.random.default_rng(0), embed_dim=8, num_heads=2
        ),
    }
    for words, call in refused.items():
        with pytest.raises(TypeError, match=f"^{words}"):
            call()  # type: ignore[no-untyped-call]


def test_the_alignment_of_other_libraries() -> None:
    with pytest.raises(ValueError, match=r"got offset='bottom_right'\. That is 'lower_right' here\.$"):
        masks.causal("bottom_right")  # type: ignore[arg-type]


NAMES_OF_OTHERS: dict[str, tuple[Callable[..., Any], str]] = {
    "theta": (positional.Rotary, "base"),
    "rope_theta": (positional.Rotary, "base"),
    "dim": (positional.Rotary, "width"),
    "traditional": (positional.Rotary, "interleaved"),
    "rope_scaling": (positional.Rotary, "scaling"),
    "rotary_interleaved": (positional.RotaryTables, "interleaved"),
    "original_max_position_embeddings": (positional.YaRNScaling, "original_length"),
    "dims": (positional.sinusoidal, "width"),
    "lengths": (masks.padding, "key_lengths"),
    "slope": (biases.alibi, "slopes"),
    "num_head": (MultiHeadAttention, "num_heads"),
    "in_features": (Linear.init, "in_dim"),
    "out_features": (Linear.init, "out_dim"),
    "statistics": (sdpa_xp.attention_statistics, "of"),
}


@pytest.mark.parametrize("keyword", NAMES_OF_OTHERS)
def test_names_that_constructors_have_elsewhere(keyword: str) -> None:
    function, name = NAMES_OF_OTHERS[keyword]
    with pytest.raises(
        TypeError, match=rf"there is no argument `{keyword}`; got {keyword}=2\. Write {name}=\.\.\. "
    ):
        function(**{keyword: 2})


def test_nothing_is_suggested_for_a_name_that_is_like_none() -> None:
    with pytest.raises(TypeError, match=r"^scaled_dot_product_attention: .*`zzz`; got zzz=1\.$"):
        scaled_dot_product_attention(X, X, X, zzz=1)  # type: ignore[call-arg]


@pytest.mark.parametrize("function", [attention_weights, attention_scores])
def test_no_mask_by_place(function: Callable[..., Any]) -> None:
    """It may have been meant as the value."""
    rule = f"{function.__name__}: only `query` and `key` may be passed without a name; got arguments=3."
    with pytest.raises(TypeError, match=f"^{re.escape(rule)} Name the others: attn_mask="):
        function(X, X, X)
    np.testing.assert_array_equal(function(X, X, attn_mask=masks.causal()), function(X, X, is_causal=True))


def test_too_many_places() -> None:
    with pytest.raises(TypeError, match=r"only `query`, `key`, `value` and `attn_mask` may be.*arguments=5"):
        scaled_dot_product_attention(X, X, X, None, 0.1)  # type: ignore[misc]


def test_too_many_places_of_a_method() -> None:
    with pytest.raises(TypeError, match=r"^KVCache\.append: only `key` and `value` may be.*arguments=3"):
        KVCache(X, X).append(X, X, X)  # type: ignore[call-arg]


def test_what_is_missing_is_said_of_the_class_that_the_caller_knows() -> None:
    pool = np.zeros((2, 1, 4, 8))
    for cache in (KVCache(X, X), sdpa_xp.PagedKVCache(pool, pool, [[0]], [2])):
        rule = rf"^{type(cache).__name__}\.quantised\(\) missing 1 required positional argument: 'dtype'"
        with pytest.raises(TypeError, match=rule):
            cache.quantised()  # type: ignore[call-arg]


def test_an_error_of_the_call_itself_stays_as_it_is() -> None:
    mask = masks.from_function(lambda b, h, i, j: len(1, 2))  # type: ignore[call-arg]
    with pytest.raises(TypeError, match="len"):
        scaled_dot_product_attention(X, X, X, mask)
    with pytest.raises(TypeError, match="missing 1 required positional argument: 'value'"):
        scaled_dot_product_attention(X, X)  # type: ignore[call-arg]


def test_no_argument_of_a_function_is_called_another_name() -> None:
    """A name of one thing has at most one argument of a function, and no argument needs a replacement."""
    synonyms, instead = names_elsewhere()
    for name in sdpa_xp.__all__:
        parameters = (
            inspect.signature(function).parameters if callable(function := getattr(sdpa_xp, name)) else ()
        )
        for names in synonyms:
            assert len(names.intersection(parameters)) <= 1, (name, names)
    parameters = inspect.signature(scaled_dot_product_attention).parameters
    assert not instead.keys() & parameters.keys()


LAYOUTS = {
    "...LHE": ["bshd", "BLHD", "nhd", "thd", "bsnh", "BTNH"],
    "...HLE": ["bhsd", "HND", "bnsh"],
    "": ["x", "", 3],
}


@pytest.mark.parametrize(("name", "here"), [(name, here) for here, names in LAYOUTS.items() for name in names])
def test_layouts_of_other_libraries(name: Any, here: str) -> None:
    hint = f" That is '{re.escape(here)}' here\\." if here else ""
    rule = r"^scaled_dot_product_attention: `layout` must be '\.\.\.HLE' or '\.\.\.LHE'"
    with pytest.raises(ValueError, match=f"{rule}; got layout={name!r}\\.{hint}$"):
        scaled_dot_product_attention(X, X, X, layout=name)


def test_a_flag_in_the_place_of_the_mask() -> None:
    with pytest.raises(TypeError, match=r"got attn_mask=True\. Write is_causal=True for a causal mask"):
        scaled_dot_product_attention(X, X, X, True)  # type: ignore[arg-type]
