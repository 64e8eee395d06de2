"""Each argument of each public function refuses an object of no sensible type, by its name.

The functions and their arguments are read from the packages, so a new one has to be given a call here, or, if
it is a mask, in tests/public_masks.py.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
from public_masks import CALLS as MASK_CALLS

import sdpa_xp
from sdpa_xp import KVCache, PagedKVCache, attention_state, biases, layers, masks, positional
from sdpa_xp.layers import Linear, MultiHeadAttention, SingleHeadAttention

F = np.float32
Q, K, V = (np.ones(shape, F) for shape in ((2, 4, 3, 8), (2, 2, 5, 8), (2, 2, 5, 6)))
CALL = {"query": Q, "key": K, "value": V}
PACKED = {name: x[0].swapaxes(0, 1) for name, x in CALL.items()} | {
    "cu_seqlens_q": [0, 3],
    "cu_seqlens_k": [0, 5],
}
PACKED_KEYS = {name: x for name, x in PACKED.items() if name != "value"}
ROTARY = positional.Rotary(8)
LINEAR = Linear(np.ones((8, 8), F))
BLOCKS = np.ones((3, 2, 4, 8), F)
CACHE, PAGED = KVCache(K, V), PagedKVCache(BLOCKS, BLOCKS, [[0], [1]], [1, 2])
NEW = {"key": np.ones((2, 2, 1, 8), F)}
HEADS = MultiHeadAttention(LINEAR, LINEAR, LINEAR, LINEAR, num_heads=2)
SINGLE = SingleHeadAttention(LINEAR, LINEAR, LINEAR)
MAPPING = {f"{name}.weight": np.ones((8, 8), F) for name in ("query", "key", "value", "out")}
TOKENS = np.ones((2, 3, 8), F)
LINEAR_CALL = {"query": K, "key": K, "value": K, "decay": -K, "beta": K[..., :1]}

CALLS: list[tuple[Callable[..., Any], dict[str, Any]]] = [
    *((f, CALL) for f in (sdpa_xp.scaled_dot_product_attention, sdpa_xp.scaled_dot_product_attention_vjp)),
    *((f, CALL) for f in (attention_state, sdpa_xp.explain)),
    (sdpa_xp.scaled_dot_product_attention_jvp, CALL | {"tangents": {}}),
    (sdpa_xp.jvp, {"function": lambda x: x, "primals": (Q,), "tangents": (Q,)}),
    (sdpa_xp.scaled_dot_product_attention_laplacian, CALL | {"tangents": {"query": Q[None]}}),
    *((f, {"query": Q, "key": K}) for f in (sdpa_xp.attention_weights, sdpa_xp.attention_scores)),
    (sdpa_xp.attention_statistics, {"query": Q, "key": K, "of": "top_keys", "top_k": 1}),
    (sdpa_xp.attention_statistics, {"query": Q, "key": K, "of": "block_sums", "block_size": 2}),
    (sdpa_xp.top_keys, {"query": Q, "key": K, "top_k": 1}),
    *((f, PACKED) for f in (sdpa_xp.varlen_attention, sdpa_xp.varlen_attention_state)),
    (sdpa_xp.varlen_attention_statistics, PACKED_KEYS | {"of": "top_keys", "top_k": 1}),
    (sdpa_xp.dot_product_attention, {name: x.swapaxes(-2, -3) for name, x in CALL.items()}),
    *((f, LINEAR_CALL) for f in (sdpa_xp.linear_attention, sdpa_xp.linear_attention_vjp)),
    (
        sdpa_xp.causal_conv_with_state,
        {"input": np.ones((2, 3, 5)), "weight": np.ones((3, 1, 4)), "activation": "silu"},
    ),
    (sdpa_xp.merge_states, {"states": [attention_state(**CALL)] * 2}),
    (KVCache, {"key": K, "value": V}),
    (CACHE.append, NEW | {"value": np.ones((2, 2, 1, 6), F)}),
    *((attend, {"query": Q}) for attend in (CACHE.attend, CACHE.attend_state)),
    (CACHE.statistics, {"query": Q, "of": "top_keys", "top_k": 1}),
    (CACHE.statistics, {"query": Q, "of": "block_sums", "block_size": 2}),
    *((drop, {"count": 1}) for drop in (CACHE.drop_first, CACHE.drop_last)),
    (CACHE.take_tokens, {"slots": [0]}),
    (CACHE.take_entries, {"entries": [0]}),
    (
        PagedKVCache,
        {"key_blocks": BLOCKS, "value_blocks": BLOCKS, "block_table": [[0], [1]], "lengths": [1, 2]},
    ),
    (PAGED.append, {"key": np.ones((2, 3, 8), F), "value": np.ones((2, 3, 8), F), "cu_seqlens_k": [0, 1, 3]}),
    (PAGED.attend, {"query": np.ones((4, 2, 8), F), "cu_seqlens_q": [0, 1, 2]}),
    (
        PAGED.statistics,
        {"query": np.ones((4, 2, 8), F), "cu_seqlens_q": [0, 1, 2], "of": "top_keys", "top_k": 1},
    ),
    (PAGED.drop_first, {"count": 0}),
    (PAGED.drop_last, {"count": [0, 1]}),
    (PAGED.take_entries, {"entries": [0]}),
    (PAGED.attend_state, {"query": np.ones((4, 2, 8), F), "cu_seqlens_q": [0, 1, 2]}),
    *MASK_CALLS.items(),
    (masks.to_array, {"mask": masks.causal(), "shape": (3, 5)}),
    (biases.alibi, {"slopes": 4}),
    (biases.from_array, {"array": np.ones((3, 5), F)}),
    (biases.from_function, {"score_mod": lambda s, b, h, i, j: s}),
    (biases.relative, {"table": np.ones((8, 4), F)}),
    (biases.to_array, {"bias": biases.alibi(4), "shape": (4, 3, 5)}),
    *((getattr(positional, f"{name}Scaling"), {"factor": 2.0}) for name in ("Linear", "NTK", "Llama3")),
    (positional.YaRNScaling, {"factor": 2.0, "original_length": 64}),
    (positional.Rotary, {"width": 8}),
    *((rotate, {"x": K, "positions": 0}) for rotate in (ROTARY.apply, ROTARY.inverse)),
    (ROTARY.cos_sin, {"positions": [0, 1]}),
    (positional.RotaryTables, {"cos": np.ones((9, 4), F), "sin": np.ones((9, 4), F)}),
    (positional.alibi_slopes, {"heads": 4}),
    (positional.learned, {"table": np.ones((9, 8), F), "positions": [0, 1]}),
    (positional.sinusoidal, {"positions": 3, "width": 8}),
    (layers.Linear, {"weight": np.ones((8, 8), F)}),
    (LINEAR.to, {"like": np.ones(1)}),
    (LINEAR.with_parameters, {"parameters": LINEAR.parameters}),
    (Linear.init, {"rng": np.random.default_rng(0), "in_dim": 4, "out_dim": 4}),
    (Linear.from_mapping, {"mapping": {"weight": np.ones((8, 8), F)}}),
    (layers.MultiHeadAttention, {"query": LINEAR, "key": LINEAR, "value": LINEAR, "num_heads": 2}),
    (MultiHeadAttention.init, {"rng": np.random.default_rng(0), "query_dim": 8, "num_heads": 2}),
    (MultiHeadAttention.from_mapping, {"mapping": MAPPING, "num_heads": 2}),
    (MultiHeadAttention.from_torch, {"module": None}),
    (HEADS.combine, {"heads": np.ones((2, 2, 3, 4), F)}),
    (HEADS.with_parameters, {"parameters": HEADS.parameters}),
    (layers.SingleHeadAttention, {"query": LINEAR, "key": LINEAR, "value": LINEAR}),
    (SingleHeadAttention.init, {"rng": np.random.default_rng(0), "embedding_dim": 8, "attention_dim": 8}),
    (SingleHeadAttention.from_mapping, {"mapping": MAPPING}),
    (SINGLE.weights, {"query": TOKENS}),
]


WITHOUT = [
    "AttentionState",
    "AttentionStatistics",
    "CausalConvState",
    "Explanation",
    "Layer",
    "LinearAttentionState",
]
WITHOUT += ["Mask", "Bias", "Rotation", "Scaling"]
"""What is returned, or what one's own is derived from."""


ELSEWHERE = ["ring_attention"]
"""What needs JAX: tests/mesh/test_mesh_refusals.py has the calls."""


class Odd:
    """An object that is nothing that a function takes."""

    def __repr__(self) -> str:
        return "Odd()"


FOREIGN = {("to", "device")}
"""What is for another library to know."""


def cases() -> Iterator[Any]:
    for function, valid in CALLS:
        for name, parameter in inspect.signature(function).parameters.items():
            if parameter.kind is not inspect.Parameter.VAR_KEYWORD and (function.__name__, name) not in FOREIGN:
                yield pytest.param(function, valid, name, id=f"{function.__qualname__}-{name}")


def used(mask_or_bias: object) -> None:
    """Masks and biases look at some of what they hold when they meet a call."""
    if isinstance(mask_or_bias, masks.Mask):
        masks.to_array(mask_or_bias, (2, 4, 5, 5))
    if isinstance(mask_or_bias, biases.Bias):
        biases.to_array(mask_or_bias, (2, 4, 3, 5))


@pytest.mark.parametrize(("function", "valid", "name"), list(cases()))
def test_an_odd_object_is_refused_by_name(
    function: Callable[..., Any], valid: dict[str, Any], name: str
) -> None:
    with pytest.raises((TypeError, ValueError), match=rf"^[\w. ]+: .*`([\w.]+\.)?{name}\b.*Odd"):
        used(function(**(valid | {name: Odd()})))


@pytest.mark.parametrize(("function", "valid"), CALLS, ids=[f.__qualname__ for f, _ in CALLS])
def test_an_argument_that_there_is_not_is_refused_by_name(
    function: Callable[..., Any], valid: dict[str, Any]
) -> None:
    with pytest.raises(TypeError, match=r"^[\w.]+: there is no argument `zzz`; got zzz=1\."):
        function(**valid, zzz=1)


def test_each_public_function_has_a_call() -> None:
    called = {getattr(function, "__self__", function) for function, _ in CALLS} | {f for f, _ in CALLS}
    for module in (sdpa_xp, masks, biases, positional, layers):
        for name in module.__all__:
            member = getattr(module, name)
            if callable(member) and name not in WITHOUT + ELSEWHERE:
                assert member in called, f"{module.__name__}.{name} has no call here"


@pytest.mark.parametrize(
    "function", [sdpa_xp.scaled_dot_product_attention_vjp, sdpa_xp.scaled_dot_product_attention_jvp]
)
def test_derivatives_take_what_the_forward_pass_takes(function: Callable[..., Any]) -> None:
    ours, theirs = (inspect.signature(f).parameters for f in (function, sdpa_xp.scaled_dot_product_attention))
    mine = {name: p for name, p in ours.items() if name != "tangents"}
    assert mine == {name: p for name, p in theirs.items() if name != "reproducible"}  # not of derivatives
