"""Gradients without a framework, against torch's autograd of the textbook and against finite differences."""

from __future__ import annotations

import math
from typing import Any

import autograd
import numpy as np
import pytest
from autograd import Call
from libraries import Library

from sdpa_xp import biases, masks
from sdpa_xp import scaled_dot_product_attention_vjp as vjp
from sdpa_xp.namespace import device, namespace
from sdpa_xp.tiles import Cut
from sdpa_xp_export.agreement import judge_together

F = np.float32


def shapes(query: Any = (2, 4, 7, 8), key: Any = (2, 2, 11, 8), width: int = 5, **more: Any) -> dict[str, Any]:
    return {"query": query, "key": key, "value": (*key[:-1], width)} | more


def array(rows: str) -> np.ndarray:
    return np.asarray([[each == "x" for each in row] for row in rows.split()])


def tensor(x: np.ndarray) -> Any:
    import torch

    return torch.asarray(x)


def alibi(leaves: Any, i: Any, j: Any) -> Any:
    return -leaves["bias.slopes"][..., None, None] * abs(i - j)


def t5(leaves: Any, i: Any, j: Any) -> Any:
    """Raffel et al., section 2.1, for 4 buckets a direction up to 8: distances 0, 1, 2 to 3, and all beyond."""
    away = (abs(j - i) >= 1).long() + (abs(j - i) >= 2) + (abs(j - i) >= 4)
    return leaves["bias.table"][away + 4 * (j > i)].permute(2, 0, 1)


HOLES = array("xxx.xx...xx ........... .xxxxxxxxx. x.......... xxxxxxxxxxx ...x....... xxxxxxx....")
"""7 x 11, with an empty row; no query attends the last key but three."""
IDS = [0, 0, 1, 1, 1, 3, 3], [0, 0, 0, 0, 1, 1, 2, 2, 3, 3, 3]
LENGTHS = np.asarray([11, 6])[:, None, None, None]

CALLS = {
    "2-D": Call(shapes((7, 8), (11, 8))),
    "3-D": Call(shapes((4, 7, 8), (4, 11, 8), 8)),
    "grouped heads": Call(shapes()),
    "one key head": Call(shapes((2, 6, 7, 8), (2, 1, 11, 8))),
    "batches broadcast": Call(shapes((3, 1, 4, 7, 8), (2, 4, 11, 8)) | {"value": (1, 1, 4, 11, 5)}),
    "batch of value alone": Call(shapes((4, 7, 8), (4, 11, 8)) | {"value": (2, 4, 11, 5)}),
    "ranks differ": Call(shapes((4, 7, 8), (11, 8))),
    "one query": Call(shapes((2, 4, 1, 8))),
    "heads behind the length": Call(shapes((2, 7, 4, 8), (2, 11, 2, 8)), {"layout": "...LHE"}),
    "causal": Call(shapes(), {"is_causal": True}, allowed=lambda i, j: j <= i),
    "causal, from the lower right": Call(
        shapes((2, 4, 7, 8), (2, 2, 5, 8)),
        {"attn_mask": masks.causal("lower_right")},
        allowed=lambda i, j: j <= i - 2,
    ),
    "window": Call(
        shapes(),
        {"attn_mask": masks.sliding_window(2, 1, offset=3)},
        allowed=lambda i, j: (i + 1 <= j) & (j <= i + 4),
    ),
    "padding": Call(shapes(), {"attn_mask": masks.padding([11, 6])}, allowed=lambda i, j: j < tensor(LENGTHS)),
    "documents": Call(
        shapes(),
        {"attn_mask": masks.document(*IDS)},
        allowed=lambda i, j: tensor(np.equal.outer(*map(np.asarray, IDS))),
    ),
    "causal or prefix, not chunked": Call(
        shapes(),
        {"attn_mask": (masks.causal() | masks.prefix(6)) & ~masks.chunked(3)},
        allowed=lambda i, j: ((j <= i) | (j < 6)) & (i // 3 != j // 3),
    ),
    "mask function": Call(
        shapes(),
        {"attn_mask": masks.from_function(lambda b, h, i, j: (i * j + h) % 3 == 1)},
        allowed=lambda i, j: (i * j + tensor(np.arange(4))[:, None, None]) % 3 == 1,
    ),
    "boolean array with an empty row": Call(shapes(), {"attn_mask": HOLES}, allowed=lambda i, j: tensor(HOLES)),
    "floating mask": Call(shapes(attn_mask=(2, 1, 1, 11))),
    "bias of each pair": Call(shapes(bias=(2, 4, 7, 11)), {"is_causal": True}, allowed=lambda i, j: j <= i),
    "bias of each key": Call(shapes(bias=(11,))),
    "bias of each query, beside sinks": Call(shapes(bias=(4, 7, 1), sinks=(4,))),
    "bias, 2-D": Call(shapes((7, 8), (11, 8), bias=(7, 11))),
    "mask and bias": Call(shapes(attn_mask=(7, 11), bias=(4, 1, 11))),
    "biases of several kinds": Call(
        shapes(**{"bias.array": (7, 11), "bias.slopes (2)": (4,)}),
        holds=lambda x: {"bias": biases.from_array(x["bias.array"]) + biases.alibi(x["bias.slopes (2)"])},
        added=lambda x, i, j: x["bias.array"] + alibi({"bias.slopes": x["bias.slopes (2)"]}, i, j),
    ),
    "slopes of each head": Call(
        shapes(**{"bias.slopes": (4,)}), holds=lambda x: {"bias": biases.alibi(x["bias.slopes"])}, added=alibi
    ),
    "slopes of each entry": Call(
        shapes(**{"bias.slopes": (2, 4)}), holds=lambda x: {"bias": biases.alibi(x["bias.slopes"])}, added=alibi
    ),
    "slopes that are numbers": Call(
        shapes(),
        {"bias": biases.alibi([0.5, 1, 2, 0.25])},
        added=lambda _, i, j: alibi({"bias.slopes": tensor(np.asarray([0.5, 1, 2, 0.25], F))}, i, j),
    ),
    "relative": Call(
        shapes(**{"bias.table": (8, 4)}),
        holds=lambda x: {"bias": biases.relative(x["bias.table"], max_distance=8)},
        added=t5,
    ),
    "function that adds": Call(
        shapes(),
        {
            "bias": biases.from_function(
                lambda s, b, h, i, j: s + namespace(s).astype(2 * h - abs(i - j), s.dtype) * 0.5
            )
        },
        added=lambda _, i, j: tensor(np.arange(4))[:, None, None] - abs(i - j) * 0.5,
    ),
    "function that masks": Call(
        shapes(),
        {"bias": biases.from_function(lambda s, b, h, i, j: namespace(s).where(j > i + 3, -math.inf, s))},
        allowed=lambda i, j: j <= i + 3,
    ),
    "scale": Call(shapes(), {"scale": -0.7}),
    "scale 0": Call(shapes(), {"scale": 0.0}),
    "scale of all": Call(shapes(scale=())),
    "scale of each head": Call(shapes(scale=(4, 1, 1))),
    "scale of each query": Call(shapes(scale=(2, 1, 7, 1))),
    "softcap": Call(shapes(), {"softcap": 1.5}),
    "sinks": Call(shapes(sinks=(4,))),
    "sinks of each entry, and an empty row": Call(
        shapes(sinks=(2, 4)), {"attn_mask": HOLES}, allowed=lambda i, j: tensor(HOLES)
    ),
    "all": Call(
        shapes(scale=(4, 1, 1), bias=(4, 7, 11), sinks=(4,)),
        {"attn_mask": HOLES, "is_causal": True, "softcap": 2.0},
        allowed=lambda i, j: tensor(HOLES) & (j <= i),
    ),
}
each_call = pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)


def attend(library: Library, call: Call, given: dict[str, np.ndarray], **more: Any) -> tuple[Any, Any]:
    """Output and pullback, of arrays of the library."""
    with library.guard():
        placed = {name: library.put(x) for name, x in given.items()}
        rules = {k: library.put(x) if isinstance(x, np.ndarray) else x for k, x in call.rules.items()}
        inputs = [placed.pop(name) for name in autograd.INPUTS]
        return vjp(*inputs, **autograd.keywords(call._replace(rules=rules), placed), **more)


def pull(library: Library, pullback: Any, cotangent: np.ndarray) -> dict[str, Any]:
    with library.guard():
        found: dict[str, Any] = pullback(library.put(cotangent))
        return found


@pytest.fixture
def several_tiles(library: Library, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tiles of 4 x 6; on JAX, which compiles each shape anew, one of all pairs."""
    if not library.name.startswith("jax"):
        cut_small(monkeypatch)


def cut_small(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("CORES", "SHARED", "DEVICE"):
        monkeypatch.setattr(f"sdpa_xp.tiles.{name}", Cut(4, 6, 2**22 if name == "DEVICE" else 24))


def assert_agree(library: Library, call: Call, rng: np.random.Generator, dtype: Any = F) -> None:
    """Each gradient is like its array, and as near to autograd's as the house's rule asks.

    Those of the scores are differences of those of the weights, and have roundings of their size.
    """
    given = autograd.arrays(call, rng, dtype)
    output, pullback = attend(library, call, given)
    cotangent = rng.standard_normal(output.shape).astype(dtype)
    found = pull(library, pullback, cotangent)
    name_of_dtype = np.dtype(dtype).name
    expected = autograd.gradients(call, given, cotangent)
    textbook = autograd.gradients(call, given, cotangent, name_of_dtype)
    size = max(1.0, np.abs(expected["weights"]).max())
    assert found.keys() == given.keys()
    for name, gradient in found.items():
        with library.guard():
            like = library.put(given[name])
        assert namespace(gradient) is library.xp
        assert (gradient.dtype, gradient.shape, device(gradient)) == (like.dtype, like.shape, device(like))
        run = library.get(gradient), expected[name], textbook[name]
        (agreement,) = judge_together([run], name_of_dtype, size)
        assert agreement.agrees, (name, agreement)


@pytest.mark.usefixtures("several_tiles")
@each_call
def test_float32(library: Library, rng: np.random.Generator, call: Call) -> None:
    if library.lazy and "function" in repr(call.rules.get("bias")):
        pytest.skip("a lazy graph cannot try a function: test_functions_are_refused_where_they_cannot_be_tried")
    assert_agree(library, call, rng)
