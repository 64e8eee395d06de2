"""What a layer may ask of a length, a dtype and a device while it is traced. No branch is taken unseen."""

from __future__ import annotations

import copy
import functools
import importlib
import math
import pickle
from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from graphs import run

from sdpa_xp_export import TensorSpec, to_onnx

X, Y = (TensorSpec("float32", ("B", length, 4)) for length in ("L", "S"))
REFUSED = r"to_onnx: .*known only when the graph runs cannot be used as a Python number; got length=.*"
COMPARED = f"{REFUSED}Write a number in the spec if the length is fixed.*xp.where"


def answer_to(ask: Callable[[Any, Any], Any]) -> Any:
    """What a layer gets for its question while it is traced."""
    answers = []

    def layer(x: Any, y: Any) -> Any:
        answers.append(ask(x, y))
        return x + 1.0

    to_onnx(layer, X, Y)
    return answers[0]


QUESTIONS: dict[str, Callable[[Any, Any], Any]] = {
    "==": lambda x, y: x.shape[1] == 1,
    "== on the right": lambda x, y: 1 == x.shape[1],  # noqa: SIM300
    "!=": lambda x, y: x.shape[1] != 7,
    "of a batch": lambda x, y: x.shape[0] == 1,
    "of two names": lambda x, y: x.shape[1] == y.shape[1],
    "another name as text": lambda x, y: x.shape[1] == "S",
    "in a tuple": lambda x, y: x.shape[1] in (1, 2),
    "in the shape": lambda x, y: 1 in x.shape,
    "count": lambda x, y: x.shape.count(1),
    "of shapes": lambda x, y: x.shape == y.shape,
    "of a shape and numbers": lambda x, y: x.shape == (2, 3, 4),
    "of a sum": lambda x, y: x.shape[1] + 1 == 2,
    "of two sums": lambda x, y: x.shape[1] + 1 == x.shape[1] + x.shape[0],
    "a float": lambda x, y: x.shape[1] == 1.0,
    "a bool": lambda x, y: x.shape[1] == True,  # noqa: E712
    "a number of NumPy": lambda x, y: x.shape[1] == np.int64(3),
    "on its right": lambda x, y: np.int64(3) == x.shape[1],
    "an array": lambda x, y: np.arange(3) == x.shape[1],
    "numpy.equal": lambda x, y: np.equal(x.shape[1], 1),
    "<": lambda x, y: x.shape[1] < 5,
    "max": lambda x, y: max(x.shape),
    "bool": lambda x, y: bool(x.shape[1]),
    "not": lambda x, y: not x.shape[1],
    "or": lambda x, y: x.shape[1] or 1,
    "in a set": lambda x, y: x.shape[1] in {1, 2},
    "a key": lambda x, y: {1: 2}.get(x.shape[1]),
    "a key, of another name": lambda x, y: {"S": 2}.get(x.shape[1]),
    "a set": lambda x, y: {*x.shape},
    "a cached function": lambda x, y: functools.cache(lambda n: n)(x.shape[1]),
}


@pytest.mark.parametrize("name", QUESTIONS)
def test_a_comparison_of_a_length_is_refused(name: str) -> None:
    with pytest.raises(TypeError, match=COMPARED):
        answer_to(QUESTIONS[name])


@pytest.mark.parametrize(
    "ask",
    [
        lambda x, y: range(x.shape[1]),
        lambda x, y: [1, 2][x.shape[1]],
        lambda x, y: math.gcd(x.shape[1], 2),
        lambda x, y: divmod(x.shape[1], 2),
        lambda x, y: x.shape[1] & 1,
        lambda x, y: round(x.shape[1]),
        lambda x, y: np.asarray(x.shape),
        lambda x, y: np.prod(x.shape),
        lambda x, y: np.zeros(x.shape),
        lambda x, y: np.arange(x.shape[1]),
        lambda x, y: np.ones((9, 4))[: x.shape[1]],
        lambda x, y: np.tril(np.ones((9, 9)))[: x.shape[1], : x.shape[1]],
        lambda x, y: np.tile(np.ones(2), x.shape[1]),
        lambda x, y: math.sqrt(x.shape[1]),
        lambda x, y: math.floor(x.shape[1] / 2),
        lambda x, y: np.log(x.shape[1] + x.shape[0]),
        lambda x, y: np.max([x.shape[1], 3]),
        lambda x, y: np.stack([x.shape[1], x.shape[0]]),
        lambda x, y: np.float32(x.shape[1]),
        lambda x, y: np.float32(2) * x.shape[1],
        lambda x, y: np.ones(4, "float32") * x.shape[1],
        lambda x, y: float(x.shape[1]),
    ],
)
def test_a_length_as_a_number_is_refused(ask: Callable[[Any, Any], Any]) -> None:
    words = REFUSED.replace("length=", "") + "Compute with.*xp.take"
    with pytest.raises(TypeError, match=words) as caught:
        answer_to(ask)
    assert str(caught.value).count("; got ") == 1


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
    with pytest.raises(TypeError, match="known only when the graph runs cannot be used as a Python number"):
        answer_to(lambda x, y: ask(x, importlib.import_module("torch")))


def test_what_is_known_of_a_length() -> None:
    """It is itself, and no None."""
    assert answer_to(lambda x, y: (x.shape[1] == x.shape[1], x.shape == x.shape)) == (True, True)
    assert answer_to(lambda x, y: (x.shape[1] != x.shape[1], x.shape[1] == "L")) == (False, True)
    assert answer_to(lambda x, y: x.shape[0] + x.shape[1] == x.shape[1] + x.shape[0])
    assert answer_to(lambda x, y: x.shape[1] - x.shape[1] == 0)
    assert answer_to(lambda x, y: repr(x.shape)) == "('B', 'L', 4)"
    assert answer_to(lambda x, y: (x.shape[1] == None, None in x.shape)) == (False, False)  # noqa: E711
    assert answer_to(lambda x, y: (x.shape[2] == 4, x.shape[-1] in {4, 8}, str(sum(x.shape)))) == (
        True,
        True,
        "B+L+4",
    )


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


def test_dtypes_by_name() -> None:
    assert answer_to(lambda x, y: (x.dtype == "float32", x.dtype == x.__array_namespace__().float32)) == (
        True,
        True,
    )
    others = (np.float64, "bfloat16", ml_dtypes.bfloat16, np.complex64, np.bool_, None)
    assert not answer_to(lambda x, y: any(x.dtype == other for other in others))
    assert answer_to(lambda x, y: x.astype(ml_dtypes.bfloat16).dtype == "bfloat16")
    assert answer_to(lambda x, y: (str(x.dtype), float(np.finfo(x.dtype).max))) == ("float32", 2**128 - 2**104)


@pytest.mark.parametrize(
    ("ask", "words"),
    [
        (lambda x, y: x.dtype == float, "must be compared with a dtype; got compared with=<class 'float'>"),
        (lambda x, y: x.dtype == "f4", "must be compared with a dtype; got compared with='f4'"),
        (lambda x, y: x.dtype == 32, "must be compared with a dtype; got compared with=32"),
        (
            lambda x, y: x.dtype in {np.float32, np.float64},
            "cannot be a key, or be in a set; got dtype=float32",
        ),
        (lambda x, y: {np.dtype("float32"): 1}.get(x.dtype), "as a key, use str"),
        (lambda x, y: x.astype("single"), "`dtype` must be one of bool"),
        (lambda x, y: x.device == "cpu", "has no device to be compared"),
        (lambda x, y: x.device in ("cpu", "cuda"), "has no device to be compared"),
        (lambda x, y: {"cpu": 1}.get(x.device), "has no device to be compared"),
    ],
)
def test_refused_of_dtypes_and_devices(ask: Callable[[Any, Any], Any], words: str) -> None:
    with pytest.raises(TypeError, match=f"to_onnx: .*{words}"):
        answer_to(ask)


@pytest.mark.parametrize("name", ["kind", "itemsize", "is_floating_point", "type"])
def test_a_dtype_without_an_attribute(name: str) -> None:
    words = rf"^to_onnx: a dtype of a graph has no attribute '{name}'; got dtype=float32\. Write xp.isdtype\("
    with pytest.raises(AttributeError, match=words):
        answer_to(lambda x, y: getattr(x.dtype, name))


def test_a_dtype_can_be_copied() -> None:
    """Python asks for attributes of a dtype that has no name yet."""
    assert answer_to(lambda x, y: copy.deepcopy(x.dtype) == pickle.loads(pickle.dumps(x.dtype)) == "float32")
    assert not answer_to(lambda x, y: hasattr(x.dtype, "kind"))


LOOPS: dict[str, Callable[[Any], Any]] = {
    "for": lambda x: [row for row in x],  # noqa: C416, the loop of a caller
    "sum": sum,
    "max": max,
    "list": list,
    "zip": lambda x: [*zip(x, x, strict=True)],
    "unpacked": lambda x: (lambda one, *more: one)(*x),
}


@pytest.mark.parametrize("name", LOOPS)
def test_a_loop_over_an_open_length(name: str) -> None:
    words = (
        r"^to_onnx: a loop over a length that is known only when the graph runs cannot be exported; "
        r"got shape=\('B', 'L', 4\)\..*xp\.sum\(x, axis=0\) for sum\(x\); or fix the length\.$"
    )
    with pytest.raises(TypeError, match=words):
        answer_to(lambda x, y: LOOPS[name](x))


def test_a_loop_over_a_known_length() -> None:
    x = np.arange(8, dtype=np.float32).reshape(2, 4)
    model = to_onnx(lambda x: sum(x), TensorSpec("float32", (2, "L")))
    np.testing.assert_array_equal(run(model, {"x": x})["output"], x.sum(axis=0))


@pytest.mark.parametrize("name", ["any", "all"])
def test_a_method_whose_answer_an_if_wants(name: str) -> None:
    """The hint says both how to write it, and that no `if` can ask for it."""
    words = (
        rf"has no attribute '{name}'.*xp\.{name}\(x\)\. No `if` can choose by it: combine .* with `where`\.$"
    )
    with pytest.raises(AttributeError, match=words):
        answer_to(lambda x, y: x if getattr(x > 0, name)() else y)


def test_values_share_a_device() -> None:
    assert answer_to(lambda x, y: (x.device == y.device, x.device != y.device)) == (True, False)
    assert not answer_to(lambda x, y: x.device == None)  # noqa: E711
