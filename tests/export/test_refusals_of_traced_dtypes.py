"""What the array API leaves undefined is refused, in its words, when a function is traced."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import onnx
import pytest

from sdpa_xp_export import TensorSpec, to_onnx, verify_layer


def xp(value: Any) -> Any:
    return value.__array_namespace__()


REFUSED: dict[str, tuple[Callable[[Any, Any], Any], type[Exception], str]] = {
    "an integer plus a float": (
        lambda i, x: i + x,
        TypeError,
        "the operands of `add` must have dtypes that the array API promotes to one",
    ),
    "a joint dtype of kinds": (
        lambda i, x: xp(i).result_type(i, x) and x,
        TypeError,
        "the arguments must have dtypes that the array API promotes to one",
    ),
    "an integer to the power of -1": (
        lambda i, x: i**-1,
        ValueError,
        "an integer must not be raised to a negative power",
    ),
}


@pytest.mark.parametrize(("function", "error", "words"), REFUSED.values(), ids=REFUSED)
def test_refused(function: Callable[[Any, Any], Any], error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        to_onnx(function, TensorSpec("int64", ("N",)), TensorSpec("float32", ("N",)))


@pytest.mark.parametrize("wrong", [7, None, onnx.GraphProto()], ids=lambda x: type(x).__name__)
def test_a_model_that_to_onnx_did_not_return(wrong: Any) -> None:
    with pytest.raises(TypeError, match=r"^verify_layer: `model` must be what to_onnx returned"):
        verify_layer(wrong, lambda x: x)
