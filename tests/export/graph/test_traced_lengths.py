"""What a layer may ask of a length, a dtype and a device while it is traced. No branch is taken unseen."""

from __future__ import annotations

import copy
import importlib
import pickle
from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from graphs import run

from sdpa_xp_export import TensorSpec, to_onnx

X, Y = (TensorSpec("float32", ("B", length, 4)) for length in ("L", "S"))


def answer_to(ask: Callable[[Any, Any], Any]) -> Any:
    """What a layer gets for its question while it is traced."""
    answers = []

    def layer(x: Any, y: Any) -> Any:
        answers.append(ask(x, y))
        return x + 1.0

    to_onnx(layer, X, Y)
    return answers[0]


@pytest.mark.needs("torch")
@pytest.mark.parametrize(
    "ask",
    [
        lambda x, torch: x.shape[1] == torch.tensor(3),
        lambda x, torch: torch.tensor(3) == x.shape[1],
        lambda x, torch: torch.zeros(x.shape[1]),
        lambda x, torch: torch.arange(x.shape[1]),
        lambda x, torch: torch.ones(9, 4)[: x.shape[1]],
    ],
)
def test_torch_gets_no_length(ask: Callable[[Any, Any], Any]) -> None:
    with pytest.raises(TypeError, match="known only when the graph runs"):
        answer_to(lambda x, y: ask(x, importlib.import_module("torch")))


KNOWN: list[tuple[Callable[[Any, Any], Any], Any]] = [
    (lambda x, y: (x.shape[1] == x.shape[1], x.shape == x.shape, x.shape[1] == "L"), (True, True, True)),
    (lambda x, y: (x.shape[1] != x.shape[1], x.shape[1] == None, None in x.shape), (False, False, False)),  # noqa: E711
    (lambda x, y: x.shape[0] + x.shape[1] == x.shape[1] + x.shape[0], True),
    (lambda x, y: x.shape[1] - x.shape[1] == 0, True),
    (lambda x, y: (repr(x.shape), str(sum(x.shape))), ("('B', 'L', 4)", "B+L+4")),
    (lambda x, y: (x.shape[2] == 4, x.shape[-1] in {4, 8}), (True, True)),
    (lambda x, y: (x.dtype == "float32", x.dtype == x.__array_namespace__().float32), (True, True)),
    (lambda x, y: any(x.dtype == other for other in OTHER_DTYPES), False),
    (lambda x, y: x.astype(ml_dtypes.bfloat16).dtype == "bfloat16", True),
    (lambda x, y: (str(x.dtype), float(np.finfo(x.dtype).max)), ("float32", 2**128 - 2**104)),
    (lambda x, y: copy.deepcopy(x.dtype) == pickle.loads(pickle.dumps(x.dtype)) == "float32", True),
    (lambda x, y: hasattr(x.dtype, "kind"), False),
    (lambda x, y: (x.device == y.device, x.device != y.device, x.device == None), (True, False, False)),  # noqa: E711
]
OTHER_DTYPES = (np.float64, "bfloat16", ml_dtypes.bfloat16, np.complex64, np.bool_, None)


@pytest.mark.parametrize(("ask", "answer"), KNOWN)
def test_what_is_known_while_a_layer_is_traced(ask: Callable[[Any, Any], Any], answer: Any) -> None:
    """A length and a dtype are themselves, and no None; a copy of a dtype has no name at first."""
    assert answer_to(ask) == answer


def test_the_hints_work() -> None:
    """A choice in the graph, and the first rows of a table and of a triangle."""
    table, triangle = np.arange(36, dtype=np.float32).reshape(9, 4), np.tril(np.ones((9, 9), np.float32))

    def layer(x: Any) -> Any:
        xp = x.__array_namespace__()
        rows = xp.arange(x.shape[1])
        first = xp.take(xp.take(triangle, rows, axis=0), rows, axis=1)
        chosen = xp.where(xp.asarray(x.shape[1]) == 1, x, -x)
        return chosen + xp.take(table, rows, axis=0) + first @ x

    model = to_onnx(layer, TensorSpec("float32", ("B", "L", 4)))
    for length in (1, 3):
        x = np.full((2, length, 4), 0.5, np.float32)
        expected = (x if length == 1 else -x) + table[:length] + triangle[:length, :length] @ x
        np.testing.assert_array_equal(run(model, {"x": x})["output"], expected)


FLOAT32 = {
    "numpy": lambda: (np.float32, np.dtype("float32")),
    "torch": lambda: (importlib.import_module("torch").float32,),
    "jax": lambda: (importlib.import_module("jax").numpy.float32,),
    "mlx": lambda: (importlib.import_module("mlx.core").float32,),
}


@pytest.mark.parametrize("module", [pytest.param(name, marks=pytest.mark.needs(name)) for name in FLOAT32])
def test_a_dtype_equals_what_astype_takes(module: str) -> None:
    for dtype in FLOAT32[module]():
        assert answer_to(lambda x, y, d=dtype: (x.dtype == d, x.dtype != d)) == (True, False)
        assert module == "mlx" or answer_to(lambda x, y, d=dtype: d == x.dtype)  # MLX says no without asking
        assert module == "mlx" or answer_to(lambda x, y, d=dtype: x.dtype in (d,))
        half = answer_to(lambda x, y, d=dtype: y.astype("float16").dtype == d)
        assert not half
        assert answer_to(lambda x, y, d=dtype: x.astype("float16").astype(d).dtype == "float32")
        assert answer_to(lambda x, y, d=dtype: x.__array_namespace__().result_type(x, y) == d)


def test_a_loop_over_a_known_length() -> None:
    x = np.arange(8, dtype=np.float32).reshape(2, 4)
    model = to_onnx(lambda x: sum(x), TensorSpec("float32", (2, "L")))
    np.testing.assert_array_equal(run(model, {"x": x})["output"], x.sum(axis=0))
