"""Functions of the indices, and of a score, become nodes by being called: what they may do, and may not."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from graphs import BATCH, LONGER, SHORTER, check, check_forms, qkv

from sdpa_xp import biases, masks
from sdpa_xp_export import TensorSpec, export_attention, verify

pytestmark = pytest.mark.usefixtures("small_blocks")

F = np.float32


def xp(index: Any) -> Any:
    return index.__array_namespace__()


MASK_MODS: dict[str, Callable[..., Any]] = {
    "True": lambda b, h, i, j: True,
    "False": lambda b, h, i, j: False,
    "<=": lambda b, h, i, j: j <= i,
    "% below 0": lambda b, h, i, j: (i - j) % -3 == -1,
    "& a number": lambda b, h, i, j: True & (j <= i) | False,
    "head": lambda b, h, i, j: h != 1,
    "entry": lambda b, h, i, j: j > b,
    "all four": lambda b, h, i, j: (i + j + h) % (b + 2) > 0,
    "where": lambda b, h, i, j: j <= xp(i).where(h < 2, i, i - 1),
    "where, numbers": lambda b, h, i, j: j <= i + xp(i).where(h < 2, 1, -1),
    "where, a number first": lambda b, h, i, j: j <= xp(i).where(b > 0, 4, i),
    "logical": lambda b, h, i, j: xp(i).logical_or(
        xp(i).logical_and(i >= j, xp(j).logical_not(j == 1)), h == 3
    ),
    "real": lambda b, h, i, j: (i * 0.5 >= j / 3) & (i**2 > j - 1.5),
    "conditions add up": lambda b, h, i, j: (j <= i) * (j > 0) + (h > 1) > 0,
    "bits": lambda b, h, i, j: ((i & 5) == (j ^ 1)) | ((i | ~j) < -3),
    "where, True": lambda b, h, i, j: xp(i).where(h < 2, True, i >= j),
    "NumPy numbers": lambda b, h, i, j: np.int64(2) * j <= i + np.float32(1),
}
SCORE_MODS: dict[str, Callable[..., Any]] = {
    "as it is": lambda s, b, h, i, j: s,
    "less by distance": lambda s, b, h, i, j: s * 0.5 - abs(i - j),
    "-inf": lambda s, b, h, i, j: xp(s).where(j <= i + h - b, s, -float("inf")),
    "tanh": lambda s, b, h, i, j: xp(s).tanh(s) * (h + 1),
    "log, exp": lambda s, b, h, i, j: xp(s).log(1 + xp(s).exp(-abs(s))) + (j - i) / 4,
    "// %": lambda s, b, h, i, j: s + (j - i) // 2 - (j * 1.0) % 1.5 + (i * 0.5) // 2,
    "condition": lambda s, b, h, i, j: s + (j <= i),
    "**": lambda s, b, h, i, j: s - 0.1 * (j - i) ** 2 + 2.0 ** (-h),
    "without the score": lambda s, b, h, i, j: xp(s).astype(h * j, xp(s).float32) / 4,
    "of the head alone": lambda s, b, h, i, j: xp(s).astype(h, xp(s).float32),
    "clip": lambda s, b, h, i, j: xp(s).clip(s, -0.5, 0.5) - xp(s).minimum(s, j),
}


CALLS = {f"mask, {name}": {"attn_mask": masks.from_function(f)} for name, f in MASK_MODS.items()} | {
    f"score, {name}": {"bias": biases.from_function(f)} for name, f in SCORE_MODS.items()
}


@pytest.mark.sampled(3)
@pytest.mark.parametrize(("queries", "keys"), [LONGER, SHORTER])
@pytest.mark.parametrize("rules", CALLS.values(), ids=CALLS)
def test_functions(rng: np.random.Generator, rules: dict[str, Any], queries: int, keys: int) -> None:
    check_forms(qkv(rng, queries, keys), lambda: rules, {}, names={BATCH: "B", queries: "L", keys: "S"})


@pytest.mark.parametrize("dtype", ["float16", "float32", "float64"])
@pytest.mark.parametrize("opset", [17, 24])
def test_dtypes_and_opsets(rng: np.random.Generator, opset: int, dtype: str) -> None:
    mask = masks.from_function(MASK_MODS["all four"]) | masks.from_function(MASK_MODS["real"])
    bias = biases.alibi(4) + biases.from_function(SCORE_MODS["**"])
    arrays, outputs = qkv(rng, dtype=dtype), ("output", "scores")
    check(
        arrays,
        lambda: {"attn_mask": mask, "bias": bias},
        {},
        names={},
        form="primitive",
        opset=opset,
        outputs=outputs,
    )


def test_a_batch_of_several_axes_is_counted_through(rng: np.random.Generator) -> None:
    mask = masks.from_function(lambda b, h, i, j: (j + b) % 3 > 0)
    bias = biases.from_function(lambda s, b, h, i, j: s - b * j / 4)
    arrays = qkv(rng, batch=(3, 2))
    check_forms(arrays, lambda: {"attn_mask": mask, "bias": bias}, {}, names={3: "A", 5: "L", 9: "S"})


def test_each_function_of_a_sum_gets_what_those_before_made(rng: np.random.Generator) -> None:
    """And -inf stays masked, whatever comes after."""
    doubled = biases.from_function(lambda s, b, h, i, j: 2 * s)
    masked = biases.from_function(lambda s, b, h, i, j: xp(s).where(j == i, -float("inf"), s))
    reset = biases.from_function(lambda s, b, h, i, j: xp(s).where(j == i, 1.0, s))

    def rules(bias: Any) -> dict[str, Any]:
        return {"bias": biases.from_array(bias) + doubled + masked + reset}

    arguments = {"bias": rng.standard_normal((5, 9)).astype(F)}
    check_forms(qkv(rng), rules, arguments, names={BATCH: "B", 5: "L", 9: "S"})


def test_verify_asks_for_the_function() -> None:
    """It cannot be written to the metadata."""
    qkv, mask = TensorSpec("float32", (2, 4, 9, 8)), masks.from_function(lambda b, h, i, j: j <= i)
    model = export_attention(qkv, qkv, qkv, mask)
    with pytest.raises(ValueError, match="from_function"):
        verify(model)
    assert verify(model, attn_mask=mask).agrees
    assert not verify(model, attn_mask=masks.from_function(lambda b, h, i, j: j < i)).agrees
