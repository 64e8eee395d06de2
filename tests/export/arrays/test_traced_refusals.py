"""What a traced function must not do: a row a message."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import onnx
import pytest

from sdpa_xp_export import TensorSpec, to_onnx, verify_layer

OPEN = ("unstack", "range", "bits", "exp", "scalar", "take")
"""The rows whose first length is known only when the graph runs."""

REFUSED: dict[str, tuple[Callable[[Any, Any], Any], type[Exception], str]] = {
    "kinds": (lambda xp, x: x + xp.arange(4), TypeError, "operands of `add` must have dtypes.*int64.*`astype`"),
    "halves": (lambda xp, x: xp.astype(x, "float16") + xp.astype(x, "bfloat16"), TypeError, "operands of `add`"),
    "scalar": (lambda xp, x: xp.arange(x.shape[0]) * 0.5, TypeError, "scalar in `multiply` must fit the kind"),
    "huge": (lambda xp, x: x * 10**400, OverflowError, "integer in `multiply` must be within the range of the dtype"),
    "wide": (lambda xp, x: xp.astype(x, xp.int8) + 128, OverflowError, "within the range of the dtype.*got integer=128, dtype=int8"),
    "condition": (lambda xp, x: (x > 0) + 1, TypeError, "scalar in `add` must fit the kind.*dtype=bool"),
    "exp": (lambda xp, x: xp.exp(xp.arange(x.shape[0])), TypeError, "the arguments of `exp` must have dtypes that are floating"),
    "where": (lambda xp, x: xp.where(x, 1, 0), TypeError, "condition of `where` must be a boolean array"),
    "axis": (lambda xp, x: xp.sum(x, axis=2), ValueError, "`axis` must be one of 2 axes; got axis=2"),
    "twice": (lambda xp, x: xp.max(x, axis=(0, -2)), ValueError, "`axis` must name each axis once"),
    "squeeze": (lambda xp, x: xp.squeeze(x, axis=1), ValueError, "`axis` must name axes of length 1"),
    "perm": (lambda xp, x: xp.permute_dims(x, (0,)), ValueError, "`axes` must name each axis"),
    "take": (lambda xp, x: xp.take(x, xp.arange(x.shape[0])), ValueError, "`axis` must be given if the array has more than one axis"),
    "indices": (lambda xp, x: xp.take(x, x[0, :], axis=0), TypeError, "`indices` must be integers"),
    "index": (lambda xp, x: x[0, 4], IndexError, "index must be within its axis; got index=4, length=4"),
    "more": (lambda xp, x: x[0, 0, 0], IndexError, "as many entries as the array has axes"),
    "bool": (lambda xp, x: x[True], TypeError, "an index must be made of integers"),
    "concat": (lambda xp, x: xp.concat([x, x.mT], axis=0), ValueError, "must have the same shape, except"),
    "stack": (lambda xp, x: xp.stack([x, x[:1, :]]), ValueError, "joined must have the same shape; got"),
    "unstack": (lambda xp, x: xp.unstack(xp.ones_like(x), axis=0), TypeError, "axis whose length is known"),
    "no axes": (lambda xp, x: x[0, 0] @ x, ValueError, "the operands of `matmul` must have axes"),
    "vector": (lambda xp, x: xp.matrix_transpose(x[0, :]), ValueError, "needs at least two axes"),
    "dtype": (lambda xp, x: xp.astype(x, "complex64"), TypeError, "`dtype` must be one of.*got dtype='complex64'"),
    "moves": (lambda xp, x: xp.moveaxis(x, (0, 1), 0), ValueError, "`source` and `destination` must have the same number"),
    "range": (lambda xp, x: xp.arange(0.5, x.shape[0]), TypeError, "a range to or from a length must have integer bounds"),
    "list": (lambda xp, x: xp.asarray([x, x]), TypeError, "`obj` must be an array, or numbers.*`stack`"),
    "bits": (lambda xp, x: xp.arange(x.shape[0]) & 1, ValueError, "`opset` must be at least 18 for `bitwise_and`"),
    "vecdot": (lambda xp, x: xp.vecdot(x, x, axis=1), ValueError, "`axis` of `vecdot` must be negative"),
    "tensordot": (lambda xp, x: xp.tensordot(x, x, axes=1), ValueError, "axes that `tensordot` sums over must have the same lengths"),
    "repeats": (lambda xp, x: xp.repeat(x, x[0, :], axis=1), TypeError, "`repeats` must be an integer, or an array of integers"),
    "along": (lambda xp, x: xp.take_along_axis(x, xp.argmax(x, axis=0)), ValueError, "`indices` must have as many axes as the array"),
    "nonzero": (lambda xp, x: xp.nonzero(x[0, 0]), ValueError, "`nonzero` needs an array with axes"),
    "searched": (lambda xp, x: xp.searchsorted(x, 1.0), ValueError, "first argument of `searchsorted` must have one axis"),
    "side": (lambda xp, x: xp.searchsorted(x[0, :], x, side="up"), ValueError, "`side` must be 'left' or 'right'; got shape=.*side=up"),
    "shifts": (lambda xp, x: xp.roll(x, (1, 2, 3), axis=(0, 1)), ValueError, "`shift` must be one number, or one for each axis"),
    "grid": (lambda xp, x: xp.meshgrid(x, x), ValueError, "the arrays of `meshgrid` must have one axis"),
    "triangle": (lambda xp, x: xp.tril(x[0, :]), ValueError, "`tril` needs at least two axes"),
    "accumulated": (lambda xp, x: xp.cumulative_sum(x), ValueError, "`cumulative_sum` must be along an axis"),
    "next": (lambda xp, x: xp.nextafter(xp.astype(x, xp.float16), 1.0), TypeError, "arguments of `nextafter` must be float32 or float64"),
    "kind": (lambda xp, x: xp.isdtype(x.dtype, "float"), ValueError, "`kind` must be one of bool, signed integer"),
    "limits": (lambda xp, x: xp.iinfo(x), TypeError, "the dtype must be one of int8.*got dtype=float32"),
    "name": (lambda xp, x: xp.imag(x), AttributeError, "has no `imag`, since no graph holds complex numbers"),
    "unknown": (lambda xp, x: xp.einsum(x), AttributeError, "a value of a graph has no function `einsum`, and the array API has none"),
    "function of NumPy": (lambda xp, x: np.tanh(x), TypeError, r"must not go to `numpy.tanh`.*xp = x.__array_namespace__\(\), xp.tanh\(x\)"),
    "other function of NumPy": (lambda xp, x: np.concatenate([x, x]), TypeError, r"must not go to `numpy.concatenate`.*xp.concat\("),
    "method": (lambda xp, x: x.reshape(-1), AttributeError, r"no attribute 'reshape'.*xp.reshape\(x, shape\)"),
    "nothing": (lambda xp, x: xp.result_type(1.0), ValueError, "there must be an array or a dtype"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_refused(name: str) -> None:
    function, error, words = REFUSED[name]
    spec = TensorSpec("float32", ("N" if name in OPEN else 3, 4))
    with pytest.raises(error, match=words):
        to_onnx(lambda x: function(x.__array_namespace__(), x), spec, opset=17 if name == "bits" else None)


PROMOTED: dict[str, tuple[Callable[[Any, Any], Any], type[Exception], str]] = {
    "an integer plus a float": (lambda i, x: i + x, TypeError, "the operands of `add` must have dtypes that the array API promotes to one"),
    "a joint dtype of kinds": (lambda i, x: i.__array_namespace__().result_type(i, x) and x, TypeError, "the arguments must have dtypes that the array API promotes to one"),
    "an integer to the power of -1": (lambda i, x: i**-1, ValueError, "an integer must not be raised to a negative power"),
}  # fmt: skip


@pytest.mark.parametrize(("function", "error", "words"), PROMOTED.values(), ids=PROMOTED)
def test_dtypes_that_have_no_joint_one(
    function: Callable[[Any, Any], Any], error: type[Exception], words: str
) -> None:
    with pytest.raises(error, match=words):
        to_onnx(function, TensorSpec("int64", ("N",)), TensorSpec("float32", ("N",)))


@pytest.mark.parametrize("wrong", [7, None, onnx.GraphProto()], ids=lambda x: type(x).__name__)
def test_a_model_that_to_onnx_did_not_return(wrong: Any) -> None:
    with pytest.raises(TypeError, match=r"^verify_layer: `model` must be what to_onnx returned"):
        verify_layer(wrong, lambda x: x)


X = TensorSpec("float32", ("B", 4))
FOREIGN = r"^to_onnx: `layer` must be array-API code, which takes its functions from `x.__array_namespace__\(\)`; got layer="


@pytest.mark.needs("torch")
@pytest.mark.parametrize("kind", ["module", "method", "of another shape", "of attributes", "of sizes"])
def test_a_torch_module_is_sent_to_the_exporter_of_torch(kind: str) -> None:
    import torch

    class Unsqueezed(torch.nn.Module):
        def forward(self, x: Any) -> Any:
            return x.unsqueeze(0)

    class Sized(torch.nn.Module):
        def forward(self, x: Any) -> Any:
            return x.size()

    whys = {
        "of attributes": "layer=Unsqueezed, its error=a value of a graph has no attribute 'unsqueeze'",
        "of sizes": "layer=Sized, its error='Length' object is not callable",
    }
    linear = torch.nn.Linear(4, 4)
    layers = {
        "module": linear,
        "method": linear.forward,
        "of another shape": torch.nn.Conv2d(1, 1, 3),
        "of attributes": Unsqueezed(),
        "of sizes": Sized(),
    }
    with pytest.raises(TypeError, match=rf"{FOREIGN}.*, its error=.*`torch\.onnx\.export`") as caught:
        to_onnx(layers[kind], X)
    assert caught.value.__cause__ is not None
    assert f"{whys.get(kind, '')}. Export a torch module" in str(caught.value)


@pytest.mark.needs("torch")
def test_a_torch_module_in_array_api_code_is_traced() -> None:
    import torch

    class Twice(torch.nn.Module):
        def forward(self, x: Any) -> Any:
            return x.__array_namespace__().tanh(x + x)

    class Wrong(torch.nn.Module):
        def forward(self, x: Any) -> Any:
            return x + "1"

    assert [node.op_type for node in to_onnx(Twice(), X).graph.node] == ["Add", "Tanh"]
    with pytest.raises(
        TypeError, match=r"^to_onnx: values of a graph must be computed with arrays and numbers"
    ):
        to_onnx(Wrong(), X)


@pytest.mark.needs("torch")
def test_a_function_of_torch() -> None:
    import torch

    with pytest.raises(TypeError, match=rf"{FOREIGN}function, .*xp\.tanh"):
        to_onnx(lambda x: torch.tanh(x), X)
    with pytest.raises(
        TypeError, match=r"^to_onnx: `layer` must be a function with a signature; got layer=tanh\. .*lambda x"
    ):
        to_onnx(torch.tanh, X)


def test_a_function_of_another_library() -> None:
    with pytest.raises(
        TypeError, match=rf"{FOREIGN}builtin_function_or_method, its error=.*x\.__array_namespace__"
    ):
        to_onnx(ord, X)


def test_an_error_of_the_function_itself_stays_as_it_is() -> None:
    def wrong(x: Any) -> Any:
        raise TypeError(f"{x.ndim} wheels are no car")

    with pytest.raises(TypeError, match=r"^2 wheels are no car$"):
        to_onnx(wrong, X)


def test_arguments_that_do_not_fit_the_layer() -> None:
    words = r"^to_onnx: the arguments must fit `layer`; got its error=.*'scale'.*, its signature=\(x, \*, scale\)\. Pass a TensorSpec"
    with pytest.raises(TypeError, match=words):
        to_onnx(lambda x, *, scale: x * scale, X)


@pytest.mark.parametrize(
    ("key", "error"), [(1, TypeError), (None, TypeError), (b"y", TypeError), ("", ValueError)]
)
def test_outputs_have_names(key: Any, error: type[Exception]) -> None:
    with pytest.raises(error, match=f"to_onnx: the keys of the mapping that `layer` returns.*got key={key!r}"):
        to_onnx(lambda x: {key: x * 2.0}, TensorSpec("float32", ("B", 4)))
