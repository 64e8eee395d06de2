"""Calls whose lengths are all different, more than twice as many keys as queries and the other way round.

A length in the place of another one changes nothing where the two are alike, and little where they are close.
"""

from __future__ import annotations

from typing import Any

import autograd
import numpy as np
import pytest
from autograd import Call
from internals import TileSize, judge_together, namespace, override
from libraries import Library

from sdpa_xp import attention_state, attention_weights, biases, masks, scaled_dot_product_attention
from sdpa_xp import scaled_dot_product_attention_vjp as vjp

pytestmark = [pytest.mark.mathematics, pytest.mark.needs("torch")]  # the formula is by its autograd

F = np.float32
B, H, HQ, E, EV = 3, 2, 4, 7, 5
FEW, MANY = 6, 17
LENGTHS = {"many keys": (FEW, MANY), "many queries": (MANY, FEW)}


def tensor(*values: Any) -> Any:
    import torch

    return torch.asarray(np.asarray(values))


def per_entry(*values: int) -> Any:
    """One number per batch entry."""
    return tensor(*values).reshape(-1, 1, 1, 1)


def t5(leaves: Any, i: Any, j: Any) -> Any:
    """Raffel et al., section 2.1, for 8 buckets a direction up to 20: 0 to 3, then from 4, 6, 9 and 14 on."""
    away = sum((abs(j - i) >= least).long() for least in (1, 2, 3, 4, 6, 9, 14))
    return leaves["bias.table"][away + 8 * (j > i)].permute(2, 0, 1)


def calls(queries: int, keys: int) -> dict[str, Call]:
    """Each mask, bias and other rule, for so many queries and keys."""
    shapes = {"query": (B, HQ, queries, E), "key": (B, H, keys, E), "value": (B, H, keys, EV)}
    rng = np.random.default_rng(8)
    pairs = rng.random((B, HQ, queries, keys)) < 0.7
    to_rows, to_keys = rng.random((B, 1, queries, 1)) < 0.8, rng.random((keys,)) < 0.6
    ids = [np.sort(rng.integers(0, 4, length)) for length in (queries, keys)]
    shift, entries = keys - queries, (0, keys, keys // 2)

    def only(mask: Any, allowed: Any) -> Call:
        return Call(shapes, {"attn_mask": mask}, allowed=allowed)

    def added(name: str, shape: tuple[int, ...]) -> Call:
        return Call(shapes | {name: shape})

    return {
        "all pairs": Call(shapes),
        "causal": Call(shapes, {"is_causal": True}, allowed=lambda i, j: j <= i),
        "causal, lower right": only(masks.causal("lower_right"), lambda i, j: j <= i + shift),
        "causal of each entry": only(masks.causal([0, shift, 3]), lambda i, j: j <= i + per_entry(0, shift, 3)),
        "window": only(masks.sliding_window(4, 2), lambda i, j: (i - 4 <= j) & (j <= i + 2)),
        "window, lower right": only(
            masks.sliding_window(3, 1, offset="lower_right"),
            lambda i, j: (i + shift - 3 <= j) & (j <= i + shift + 1),
        ),
        "window of each entry": only(
            masks.sliding_window(1, None, offset=[-3, 2, 9]), lambda i, j: j >= i - 1 + per_entry(-3, 2, 9)
        ),
        "lengths of keys": only(masks.padding(entries), lambda i, j: j < per_entry(*entries)),
        "lengths of both": only(
            masks.padding(keys - 1, [queries, 0, queries - 2]),
            lambda i, j: (j < keys - 1) & (i < per_entry(queries, 0, queries - 2)),
        ),
        "documents": only(
            masks.document(*(x.tolist() for x in ids)),
            lambda i, j: tensor(*ids[0])[i] == tensor(*ids[1])[j],
        ),
        "prefix": only(masks.prefix(list(entries)), lambda i, j: j < per_entry(*entries)),
        "chunks": only(masks.chunked(3), lambda i, j: i // 3 == j // 3),
        "dilated": only(masks.dilated(5), lambda i, j: (i - j) % 5 == 0),
        "array of pairs": Call(shapes, {"attn_mask": pairs}, allowed=lambda i, j: tensor(*pairs)),
        "array of queries": Call(shapes, {"attn_mask": to_rows}, allowed=lambda i, j: tensor(*to_rows)),
        "array of keys": Call(shapes, {"attn_mask": to_keys}, allowed=lambda i, j: tensor(*to_keys)),
        "function of the indices": only(
            masks.from_function(lambda b, h, i, j: (b + 2 * h + 3 * i + 5 * j) % 7 > 1),
            lambda i, j: (per_entry(0, 1, 2) + 2 * tensor(0, 1, 2, 3)[:, None, None] + 3 * i + 5 * j) % 7 > 1,
        ),
        "causal, and not a chunk, or a prefix": only(
            (masks.causal(2) & ~masks.chunked(4)) | masks.prefix(2),
            lambda i, j: ((j <= i + 2) & (i // 4 != j // 4)) | (j < 2),
        ),
        "floating mask": added("attn_mask", (B, 1, queries, keys)),
        "bias of keys": added("bias", (keys,)),
        "bias of queries, beside sinks": Call(shapes | {"bias": (HQ, queries, 1), "sinks": (HQ,)}),
        "bias of heads, beside sinks": Call(shapes | {"bias": (B, HQ, 1, 1), "sinks": (B, HQ)}),
        "slopes": Call(
            shapes | {"bias.slopes": (B, HQ)},
            holds=lambda x: {"bias": biases.alibi(x["bias.slopes"])},
            added=lambda x, i, j: -x["bias.slopes"][..., None, None] * abs(i - j),
        ),
        "slopes, lower right": Call(
            shapes | {"bias.slopes": (HQ,)},
            holds=lambda x: {"bias": biases.alibi(x["bias.slopes"], offset="lower_right")},
            added=lambda x, i, j: -x["bias.slopes"][..., None, None] * abs(i + shift - j),
        ),
        "slopes, from an offset of each entry": Call(
            shapes | {"bias.slopes": (HQ,)},
            holds=lambda x: {"bias": biases.alibi(x["bias.slopes"], offset=[2, -5, 11])},
            added=lambda x, i, j: -x["bias.slopes"][..., None, None] * abs(i + per_entry(2, -5, 11) - j),
        ),
        "table": Call(
            shapes | {"bias.table": (16, HQ)},
            holds=lambda x: {"bias": biases.relative(x["bias.table"], max_distance=20)},
            added=t5,
        ),
        "table, lower right": Call(
            shapes | {"bias.table": (16, HQ)},
            holds=lambda x: {"bias": biases.relative(x["bias.table"], max_distance=20, offset="lower_right")},
            added=lambda x, i, j: t5(x, i + shift, j),
        ),
        "function of the scores": Call(
            shapes,
            {
                "bias": biases.from_function(
                    lambda s, b, h, i, j: s + namespace(s).astype(b + 2 * h + 3 * i - 2 * j, s.dtype) / 8
                )
            },
            added=lambda _, i, j: (
                (per_entry(0, 1, 2) + 2 * tensor(0, 1, 2, 3)[:, None, None] + 3 * i - 2 * j) / 8
            ),
        ),
        "scale of queries": added("scale", (B, HQ, queries, 1)),
        "scale of heads": added("scale", (HQ, 1, 1)),
        "softcap": Call(shapes, {"softcap": 1.5, "is_causal": True}, allowed=lambda i, j: j <= i),
        "sinks": added("sinks", (B, HQ)),
        "heads behind the length": Call(
            {"query": (B, queries, HQ, E), "key": (B, keys, H, E), "value": (B, keys, H, EV)},
            {"layout": "...LHE", "is_causal": True},
            allowed=lambda i, j: j <= i,
        ),
        "batch of query alone": Call(
            shapes | {"key": (H, keys, E), "value": (H, keys, EV), "bias": (B, 1, 1, keys)}
        ),
        "batch of key alone": Call(shapes | {"query": (HQ, queries, E), "value": (H, keys, EV)}),
        "two axes": Call(
            {"query": (queries, E), "key": (keys, E), "value": (keys, EV), "bias": (queries, keys)}
        ),
    }


CALLS = {f"{name}, {sizes}": call for sizes, pair in LENGTHS.items() for name, call in calls(*pair).items()}


@pytest.fixture(autouse=True)
def several_tiles(library: Library, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tiles of 4 x 5; on JAX, which compiles each shape anew, one of all pairs."""
    if not library.name.startswith("jax"):
        for name in ("ONE_CORE", "ALL_CORES", "DEVICE"):
            override(monkeypatch, name, TileSize(4, 5, 2**22 if name == "DEVICE" else 20))


def put_in(
    library: Library, call: Call, arrays_of_call: dict[str, np.ndarray]
) -> tuple[list[Any], dict[str, Any]]:
    """Query, key and value in the library, and the keywords of the call."""
    placed = {name: library.put(x) for name, x in arrays_of_call.items()}
    rules = {k: library.put(x) if isinstance(x, np.ndarray) else x for k, x in call.rules.items()}
    inputs = [placed.pop(name) for name in autograd.INPUTS]
    return inputs, autograd.keywords(call._replace(rules=rules), placed)


def by_formula(call: Call, arrays_of_call: dict[str, np.ndarray], dtype: str) -> list[np.ndarray]:
    """Output and weights of whole arrays, by torch."""
    import torch

    leaves = {name: torch.tensor(x, dtype=getattr(torch, dtype)) for name, x in arrays_of_call.items()}
    return [x.double().numpy() for x in autograd.attention(call, leaves)]


def assert_agrees(
    result: np.ndarray, expected: np.ndarray, plain: np.ndarray, size: float = 1.0, what: str = ""
) -> None:
    run = (
        result,
        expected.reshape(result.shape),
        plain.reshape(result.shape),
    )  # the formula's weights have heads
    (agreement,) = judge_together([run], "float32", size)
    assert agreement.agrees, (what, agreement)


@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
def test_output_and_weights(library: Library, rng: np.random.Generator, call: Call) -> None:
    arrays_of_call = autograd.arrays(call, rng, F)
    (output, weights), (plain_output, plain_weights) = (
        by_formula(call, arrays_of_call, dtype) for dtype in ("float64", "float32")
    )
    with library.guard():
        inputs, rules = put_in(library, call, arrays_of_call)
        default = scaled_dot_product_attention(*inputs, **rules)
        state = attention_state(*inputs, **rules)
        of_pairs = attention_weights(*inputs[:2], **rules)
    assert_agrees(library.get(default), output, plain_output)
    assert_agrees(library.get(state.output), output, plain_output)
    assert_agrees(library.get(of_pairs), weights, plain_weights)


@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
def test_gradients(library: Library, rng: np.random.Generator, call: Call) -> None:
    if library.lazy and "function" in str(call.rules.get("bias")):
        pytest.skip("it cannot be tried whether a function only adds")
    arrays_of_call = autograd.arrays(call, rng, F)
    with library.guard():
        inputs, rules = put_in(library, call, arrays_of_call)
        output, pullback = vjp(*inputs, **rules)
        cotangent = rng.standard_normal(output.shape).astype(F)
        gradients = pullback(library.put(cotangent))
    expected, plain = (
        autograd.gradients(call, arrays_of_call, cotangent, dtype) for dtype in ("float64", "float32")
    )
    size = max(1.0, np.abs(expected["weights"]).max())
    assert gradients.keys() == arrays_of_call.keys()
    for name, gradient in gradients.items():
        assert_agrees(library.get(gradient), expected[name], plain[name], size, name)
