"""Every bias of the library as nodes of a graph, and a scale and sinks, held against the library."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from graphs import BATCH, LONGER, SHORTER, Rules, check, check_forms, operands, qkv, run

from sdpa_xp import biases, masks, scaled_dot_product_attention
from sdpa_xp_export import TensorSpec, export_attention

pytestmark = pytest.mark.usefixtures("small_blocks")

F = np.float32
TABLE = np.linspace(-2, 2, 32, dtype=F).reshape(8, 4)
SLOPES = np.linspace(0.1, 1, 12, dtype=F).reshape(3, 4)


def added(value: Any) -> dict[str, Any]:
    return {"bias": value}


BIASES: dict[str, Rules] = {
    "array": lambda bias: {"bias": bias},
    "from_array": lambda bias: {"bias": biases.from_array(bias)},
    "alibi": lambda: added(biases.alibi(4)),
    "alibi, causal": lambda: {"bias": biases.alibi(4), "is_causal": True},
    "alibi, ahead": lambda: added(biases.alibi(4, offset=2)),
    "alibi, lower right": lambda: added(biases.alibi(4, offset="lower_right")),
    "alibi, slopes": lambda slopes, offset: added(biases.alibi(slopes, offset=offset)),
    "alibi, numbers": lambda: added(biases.alibi([0.5, 0.25, 1, -0.125])),
    "relative": lambda table: added(biases.relative(table, max_distance=5)),
    "relative, one way": lambda table: {
        "bias": biases.relative(table, bidirectional=False, max_distance=7, offset=1),
        "scale": 1,
    },
    "relative, lower right": lambda table: added(biases.relative(table, offset="lower_right")),
    "relative, numbers": lambda: added(biases.relative(TABLE, max_distance=6)),
    "sum": lambda bias, slopes: {"bias": biases.from_array(bias) + biases.alibi(slopes)},
    "sum of three": lambda table, bias: {"bias": biases.alibi(4) + biases.relative(table) + bias},
    "masked sum": lambda attn_mask, bias: {
        "bias": biases.alibi(4) + bias,
        "attn_mask": masks.from_array(attn_mask) & masks.sliding_window(3, 3),
    },
    "softcap": lambda slopes: {"softcap": 1.5, "bias": biases.alibi(slopes), "attn_mask": masks.causal(1)},
    "scale": lambda scale: {"scale": scale},
    "scale 0": lambda: {"scale": 0},
    "scale < 0": lambda: {"scale": -0.3, "is_causal": True},
    "scale, numbers, softcap": lambda: {
        "scale": np.asarray([0.5, 0.1, -1, 0], F).reshape(4, 1, 1),
        "softcap": 1.5,
    },
    "sinks": lambda sinks: {"sinks": sinks},
    "sinks, causal": lambda sinks: {"sinks": sinks, "attn_mask": masks.causal(-2)},
    "sinks, numbers": lambda: {"sinks": np.asarray([0.5, -3, -np.inf, 4], F), "bias": biases.alibi(4)},
}
BY_ENTRY: dict[str, Rules] = {
    "alibi, offsets": lambda: added(biases.alibi(SLOPES, offset=[0, 1, -2])),
    "sinks": lambda: {"sinks": SLOPES, "is_causal": True},
    "scale": lambda: {"scale": SLOPES[:, :, None, None]},
}


@pytest.mark.sampled(3)
@pytest.mark.parametrize(("queries", "keys"), [LONGER, SHORTER])
@pytest.mark.parametrize("rules", BIASES.values(), ids=BIASES)
def test_forms(rng: np.random.Generator, rules: Rules, queries: int, keys: int) -> None:
    arguments = operands(rules, rng, queries, keys)
    check_forms(qkv(rng, queries, keys), rules, arguments, names={BATCH: "B", queries: "L", keys: "S"})


@pytest.mark.sampled(3)
@pytest.mark.parametrize("opset", [17, 18, 21, 24])
@pytest.mark.parametrize("rules", BIASES.values(), ids=BIASES)
def test_opsets(rng: np.random.Generator, rules: Rules, opset: int) -> None:
    arguments = operands(rules, rng, *LONGER)
    check(qkv(rng), rules, arguments, names={}, form="primitive", opset=opset, outputs=("output", "lse"))


@pytest.mark.parametrize("rules", BY_ENTRY.values(), ids=BY_ENTRY)
def test_numbers_by_entry(rng: np.random.Generator, rules: Rules) -> None:
    check_forms(qkv(rng), rules, {}, names={5: "L", 9: "S"})


@pytest.mark.parametrize(
    "shape", [(), (9,), (5, 1), (5, 9), (4, 1, 1), (4, 5, 9), (3, 1, 1, 9), (3, 4, 5, 1), (3, 4, 5, 9)]
)
def test_arrays_of_every_shape(rng: np.random.Generator, shape: tuple[int, ...]) -> None:
    """A floating mask and a bias beside it; a pair that one of them makes -inf is masked."""
    arguments = {
        "attn_mask": np.where(rng.random(shape) < 0.7, rng.standard_normal(shape), -np.inf).astype(F),
        "bias": rng.standard_normal((5, 9)).astype(F),
    }
    check_forms(qkv(rng), lambda **options: options, arguments, names={BATCH: "B", 5: "L", 9: "S"})


OF_SHAPES: dict[str, tuple[Rules, list[tuple[int, ...]], tuple[str, ...]]] = {
    "scale": (
        lambda scale: {"scale": scale, "softcap": 3.0, "is_causal": True},
        [(), (1,), (4, 1, 1), (5, 1), (3, 1, 1, 1), (3, 4, 5, 1)],
        ("output",),
    ),
    "sinks": (lambda sinks: {"sinks": sinks}, [(), (1,), (4,), (3, 1), (3, 4)], ("output", "lse")),
}


@pytest.mark.parametrize(("name", "shape"), [(name, n) for name, row in OF_SHAPES.items() for n in row[1]])
def test_scales_and_sinks_of_every_shape(rng: np.random.Generator, name: str, shape: tuple[int, ...]) -> None:
    rules, _, outputs = OF_SHAPES[name]
    arguments = {name: np.asarray(rng.standard_normal(shape), F)}
    check_forms(qkv(rng), rules, arguments, names={BATCH: "B", 5: "L", 9: "S"}, outputs=outputs)


def test_sinks_far_above_and_below_the_scores(rng: np.random.Generator) -> None:
    """exp(200) is no float32."""

    def rules(sinks: Any) -> dict[str, Any]:
        return {"sinks": sinks, "attn_mask": masks.causal(-1)}

    arguments = {"sinks": np.asarray([200, -200, 0, -np.inf], F)}
    check_forms(qkv(rng), rules, arguments, names={BATCH: "B", 5: "L", 9: "S"}, outputs=("output", "lse"))


def test_smallest_finite_number_does_not_mask(rng: np.random.Generator) -> None:
    """A row of it is the mean; twice of it is no -inf; beside a real score it weighs nothing."""
    least = np.full((5, 9), np.finfo(F).min, F)
    least[1, 4] = 0
    arrays = qkv(rng)
    for form in ("attention", "primitive", "tiled"):
        specs = [TensorSpec("float32", arrays[name].shape) for name in ("query", "key", "value")]
        added = TensorSpec("float32", (5, 9))
        model = export_attention(*specs, added, bias=added, form=form)
        output = run(model, arrays | {"attn_mask": least, "bias": least})["output"]
        expected = scaled_dot_product_attention(**arrays, attn_mask=least, bias=least)
        np.testing.assert_allclose(output, expected, rtol=0, atol=1e-6)


def test_minus_inf_beside_inf_is_masked(rng: np.random.Generator) -> None:
    """-inf + inf would be NaN."""
    arrays, masked, high = qkv(rng), np.zeros((1, 9), F), np.zeros((1, 9), F)
    masked[0, 3], high[0, 3] = -np.inf, np.inf
    specs = [TensorSpec("float32", arrays[name].shape) for name in ("query", "key", "value")]
    added = TensorSpec("float32", (1, 9))
    expected = scaled_dot_product_attention(**arrays, attn_mask=masked)
    for form in ("primitive", "tiled"):
        model = export_attention(*specs, added, bias=added, form=form)
        output = run(model, arrays | {"attn_mask": masked, "bias": high})["output"]
        np.testing.assert_allclose(output, expected, rtol=0, atol=1e-6)
