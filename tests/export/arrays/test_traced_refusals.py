"""Errors that a traced function itself raises, and torch modules that are array-API code."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from sdpa_xp_export import TensorSpec, to_onnx

X = TensorSpec("float32", ("B", 4))


@pytest.mark.needs("torch")
def test_a_torch_module_in_array_api_code_is_traced() -> None:
    import torch

    class Twice(torch.nn.Module):
        def forward(self, x: Any) -> Any:
            return x.__array_namespace__().tanh(x + x)

    assert [node.op_type for node in to_onnx(Twice(), X).graph.node] == ["Add", "Tanh"]
    with pytest.raises(TypeError, match=r"torch\.onnx\.export") as caught:
        to_onnx(torch.nn.Linear(4, 4), X)
    assert caught.value.__cause__ is not None


def test_an_error_of_the_function_itself_stays_as_it_is() -> None:
    def wrong(x: Any) -> Any:
        raise TypeError(f"{x.ndim} wheels are no car")

    with pytest.raises(TypeError, match=r"^2 wheels are no car$"):
        to_onnx(wrong, X)
    with pytest.raises(TypeError, match=r"^arange\(\) not supported"):  # NumPy's, with the word "not supported"
        to_onnx(lambda x: x + np.arange("3"), X)  # type: ignore[call-overload]
