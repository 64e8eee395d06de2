"""A report names what was not tried: numbers that no run goes beyond, and lengths that a layer refuses."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from command import printed, run
from internals import checked_call, left_out, override, trial_settings
from short_runs import agreed

from sdpa_xp import biases, masks, scaled_dot_product_attention
from sdpa_xp_export import TensorSpec, export_attention, save, to_onnx, verify, verify_layer

WINDOW = masks.sliding_window(4096, 0)
NEEDS = "needs 4,098 queries and 4,098 keys, 134 million scores; `thorough=True` tries it"
THOROUGH = "; `thorough=True` tries it"


def lines(
    *shapes: tuple[int | str, ...], blocks: Sequence[int] = (), thorough: bool = False, **rules: Any
) -> tuple[str, ...]:
    """What is left out of the trials of a call of these shapes of the query and of the keys."""
    query, key = (TensorSpec("float32", shape) for shape in (shapes * 2)[:2])
    past = dict.fromkeys(("past_key", "past_value") if rules.pop("cached", False) else (), key)
    past = {name: replace(key, shape=(*key.shape[:2], "P", key.shape[3])) for name in past}
    call = checked_call("test", query, key, key, **rules, **past)
    return left_out(call, blocks, trial_settings(call, blocks, thorough=thorough))


def test_numbers_that_no_run_goes_beyond() -> None:
    eight = ("B", 8, "L", 16)
    assert lines(eight, attn_mask=WINDOW) == (f"sliding_window(left=4096): {NEEDS}",)
    assert lines(eight, attn_mask=WINDOW, thorough=True) == ()
    assert lines(eight, attn_mask=masks.causal() & ~masks.chunked(4096)) == (f"chunked(size=4096): {NEEDS}",)
    both = masks.prefix(4096) | masks.causal(-5000)
    assert [line.partition(":")[0] for line in lines(eight, attn_mask=both)] == [
        "prefix(length=4096)",
        "causal(offset=-5000)",
    ]
    table = TensorSpec("float32", (32, 8))
    assert lines(eight, bias=biases.relative(table, max_distance=4096)) == (
        f"relative(max_distance=4096): {NEEDS}",
    )
    assert lines(eight, attn_mask=masks.padding(np.asarray([7, 4096]))) == (
        f"padding(key_lengths=4096): {NEEDS}",
    )


def test_what_even_a_thorough_run_leaves_out() -> None:
    long = masks.sliding_window(40_000, 0)
    (line,) = lines(("B", 8, "L", 16), attn_mask=long, thorough=True)
    assert line == "sliding_window(left=40000): needs 40,002 queries and 40,002 keys, 12,801 million scores"


@pytest.mark.parametrize(
    ("shapes", "mask"),
    [
        ([("B", 2, "L", 8)], WINDOW),  # few heads, so there is room
        ([("B", 8, "L", 16)], masks.sliding_window(256, 0)),
        ([("B", 8, 6, 16)], WINDOW),  # no lengths of this call are beyond it
        ([("B", 8, "L", 16), ("B", 8, "S", 16)], WINDOW),  # many queries beside a few keys
    ],
)
def test_numbers_that_some_run_goes_beyond(shapes: Any, mask: masks.Mask) -> None:
    assert lines(*shapes, attn_mask=mask) == ()


def test_an_input_that_is_larger_than_the_scores() -> None:
    wide = ("B", 1, "L", 42_000)
    assert lines(wide, attn_mask=masks.causal(900)) == (
        f"causal(offset=900): needs 902 queries and 902 keys, 38 million numbers in an input{THOROUGH}",
    )


def test_a_few_queries_are_beyond_a_number_behind_a_cache() -> None:
    assert lines(("B", 8, "L", 16), attn_mask=WINDOW, cached=True) == ()


def test_a_large_batch_and_a_block() -> None:
    assert lines(("B", 8, 900, 16)) == (
        f"a batch of 7: needs 900 queries and 900 keys, 45 million scores{THOROUGH}",
    )
    assert lines(("B", 4000, "L", 16), blocks=[128]) == (
        "blocks of 128 queries: needs 130 queries and 130 keys, 68 million scores" + THOROUGH,
    )


def test_the_report_the_command_and_the_page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    override(monkeypatch, "DEFAULT_NUMBERS", 2**12)
    qkv = TensorSpec("float32", (1, 2, "L", 8))
    model = save(
        export_attention(qkv, qkv, qkv, masks.sliding_window(60, 0), form="primitive"), tmp_path / "a.onnx"
    )
    report = verify(model)
    line = "sliding_window(left=60): needs 62 queries and 62 keys, 7,688 scores; `thorough=True` tries it"
    assert report.agrees
    assert report.left_out == (line,)
    assert " ".join(str(report).split()).endswith(f"; not tried: {line}")
    page = tmp_path / "r.html"
    out = printed("verify", model, "--html", page)
    with_flag = line.replace("`thorough=True`", "`--thorough`")
    assert f"not tried: {with_flag}\n" in out
    assert f"<dt>not tried</dt><dd>{with_flag}</dd>" in page.read_text()
    assert json.loads(run("verify", model, "--json")[1])["left_out"] == [with_flag]


def attending(x: Any) -> Any:
    return scaled_dot_product_attention(x, x, x, is_causal=True)


X = TensorSpec("float32", (2, "L", 8))


def test_lengths_that_a_layer_refuses() -> None:
    def short(x: Any) -> Any:
        if isinstance(x, np.ndarray) and x.shape[-2] > 7:
            raise IndexError("too long\nby far")
        return attending(x)

    report = agreed(verify_layer(to_onnx(short, X), short))
    assert report.left_out == tuple(f"L={n}: IndexError: too long" for n in (8, 9, 33, 130, 128, 129, 389))
    assert " ".join(str(report).split()).endswith("L=33: IndexError: too long; and 4 more")
    assert verify_layer(to_onnx(attending, X), attending).left_out == ()


def test_lengths_that_what_is_drawn_refuses() -> None:
    def draw(rng: np.random.Generator, shape: tuple[int, ...]) -> Any:
        assert shape[1] < 100
        return rng.standard_normal(shape)

    report = verify_layer(to_onnx(attending, X), attending, draw={"x": draw})
    assert [line.partition(":")[0] for line in report.left_out] == [
        *("L=130", "L=128", "L=129", "L=389"),
        "large tokens",
    ]
    assert "AssertionError" in report.left_out[0]


def test_no_run_does_not_agree() -> None:
    report = verify_layer(to_onnx(attending, X), attending)
    assert not replace(report, runs=()).agrees
