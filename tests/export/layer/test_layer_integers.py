"""`verify_layer` tries negative and large integers, and says which inputs have none."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from short_runs import agreed

from sdpa_xp import masks, scaled_dot_product_attention
from sdpa_xp_export import TensorSpec, to_onnx, verify_layer

pytestmark = pytest.mark.usefixtures("short_verify")

IDS = TensorSpec("int64", ("B", "L"))
NO_LARGE_TOKENS = "large tokens: the outputs overflow, or no floating input has tokens to draw"
TABLE = np.random.default_rng(0).standard_normal((50, 4)).astype(np.float32)


def xp_of(x: Any) -> Any:
    return x.__array_namespace__()


def through(dtype: str) -> Callable[[Any], Any]:
    """A graph that computes in a narrower dtype."""

    def narrowed(ids: Any) -> Any:
        xp = xp_of(ids)
        return xp.astype(xp.astype(ids, getattr(xp, dtype)), xp.int64) * 3

    return narrowed


def truncated(ids: Any) -> Any:
    return xp_of(ids).where(ids < 0, -((-ids) // 3), ids // 3)


def fmod(ids: Any) -> Any:
    return ids - 3 * truncated(ids)


def rows(ids: Any) -> Any:
    return xp_of(ids).take(TABLE, ids, axis=0)


def halved(ids: Any) -> Any:
    return xp_of(ids).astype(ids, xp_of(ids).float32) * 0.5


def tripled(ids: Any) -> Any:
    return ids * 3


@pytest.mark.parametrize(
    ("layer", "wrong"),
    [
        (lambda ids: ids // 3, truncated),
        (lambda ids: ids % 3, fmod),
        (lambda ids: abs(ids) + 0, lambda ids: ids + 0),
        (lambda ids: xp_of(ids).where(ids < 0, -1, ids), lambda ids: ids + 0),
        (lambda ids: ids >> 1, truncated),
        (tripled, lambda ids: xp_of(ids).minimum(ids, 10**9) * 3),
        (lambda ids: ids < -5, lambda ids: ids != ids),
        (halved, lambda ids: halved(xp_of(ids).maximum(ids, 0))),
        *((tripled, through(dtype)) for dtype in ("int32", "int16", "int8", "uint8", "float32", "float64")),
        (lambda ids: rows(ids[0, :] // 3 % 50), lambda ids: rows(truncated(ids[0, :]) % 50)),
    ],
)
def test_wrong_graphs_of_integers(layer: Any, wrong: Any) -> None:
    report = agreed(verify_layer(to_onnx(layer, IDS), layer))
    assert {"negative integers", "large integers"} <= {run.inputs.rpartition(", ")[2] for run in report.runs}
    assert report.left_out == (NO_LARGE_TOKENS,)
    assert not verify_layer(to_onnx(wrong, IDS), layer).agrees


@pytest.mark.parametrize("dtype", ["int8", "int16", "int32", "uint8", "uint16", "uint32", "uint64"])
def test_other_dtypes(dtype: str) -> None:
    """Unsigned ones have no negative values; all have large ones."""
    spec = TensorSpec(dtype, ("B", "L"))
    report = agreed(verify_layer(to_onnx(lambda ids: ids // 3 + ids % 7, spec), lambda ids: ids // 3 + ids % 7))
    kinds = {run.inputs.rpartition(", ")[2] for run in report.runs}
    assert "large integers" in kinds
    assert ("negative integers" in kinds) == dtype.startswith("int")
    most = 2 ** (np.iinfo(dtype).bits - 4)
    wrong = to_onnx(lambda ids: xp_of(ids).minimum(ids, most) // 3 + ids % 7, spec)
    assert not verify_layer(wrong, lambda ids: ids // 3 + ids % 7).agrees


def test_rows_of_a_table_stay_rows() -> None:
    def layer(ids: Any, steps: Any) -> Any:
        xp = xp_of(ids)
        return xp.take(TABLE, xp.reshape(ids, (-1,)), axis=0), steps * 2

    report = agreed(verify_layer(to_onnx(layer, IDS, IDS), layer))
    assert report.left_out[0] == "negative and large integers in ids: it numbers the 50 rows of a table"
    assert any(run.inputs.endswith(", large integers") for run in report.runs)  # of the others


def test_what_the_layer_refuses_is_left_out_and_the_rest_is_tried() -> None:
    def layer(ids: Any, steps: Any) -> Any:
        xp = xp_of(ids)
        return xp.take(TABLE, xp.reshape(ids, (-1,)) + 1, axis=0), steps // 3

    model = to_onnx(layer, IDS, IDS)
    report = agreed(verify_layer(model, layer))
    assert any(line.startswith("large integers in ids: IndexError: index ") for line in report.left_out)
    assert not any("integers in steps" in line for line in report.left_out)

    def wrong(ids: Any, steps: Any) -> Any:
        return layer(ids, steps)[0], truncated(steps)

    assert not verify_layer(to_onnx(wrong, IDS, IDS), layer).agrees


def test_a_float_that_no_integer_holds_is_left_out() -> None:
    """What it becomes is undefined, so that NumPy and onnxruntime may differ."""

    def layer(ids: Any) -> Any:
        xp = xp_of(ids)
        return xp.astype(xp.astype(ids, xp.float32) * 0.5, xp.int32)

    report = agreed(verify_layer(to_onnx(layer, IDS), layer))
    assert any(line.startswith("large integers in ids: FloatingPointError") for line in report.left_out)


def test_integers_of_attention_are_tried_at_both_ends() -> None:
    x, offset = TensorSpec("float32", ("B", 1, "L", 8)), TensorSpec("int64", ("B",))

    def layer(x: Any, offset: Any) -> Any:
        return scaled_dot_product_attention(x, x, x, masks.causal(offset))

    def wrong(x: Any, offset: Any) -> Any:
        xp = xp_of(x)
        return layer(x, xp.astype(xp.astype(offset, xp.int16), xp.int64))

    report = agreed(verify_layer(to_onnx(layer, x, offset), layer))
    assert {"least integers", "most integers"} <= {run.inputs.rpartition(", ")[2] for run in report.runs}
    assert not verify_layer(to_onnx(wrong, x, offset), layer).agrees


def test_integers_that_the_caller_draws_stay_so() -> None:
    def layer(ids: Any) -> Any:
        assert xp_of(ids) is not np or ((ids >= 0) & (ids < 5)).all()
        return ids // 3

    draw = {"ids": lambda rng, shape: rng.integers(0, 5, shape)}
    report = agreed(verify_layer(to_onnx(layer, IDS), layer, draw=draw))
    assert {run.inputs.rpartition(", ")[2] for run in report.runs}.isdisjoint({"large integers"})
