"""The rules of CuPy refuse what CuPy refuses, and count what it waits for, copies and launches."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from internals import find_backends
from standins import counts

from sdpa_xp import PagedKVCache, biases, masks, scaled_dot_product_attention, varlen_attention
from sdpa_xp.layers import Linear

pytestmark = pytest.mark.needs("cupy")

F, BF16 = np.float32, ml_dtypes.bfloat16


@pytest.fixture
def cp() -> Any:
    import cupy

    if cupy.is_available():
        pytest.skip("this is CuPy itself")
    return cupy


WORK: dict[str, tuple[Callable[[Any, Any], Any], tuple[int, int, int]]] = {
    "views": (lambda cp, x: cp.broadcast_to(x[..., :1].T, (4, 3, 2)), (0, 0, 0)),
    "an operation": (lambda cp, x: x + 1, (0, 0, 1)),
    "in place": (lambda cp, x: x.__iadd__(1), (0, 0, 1)),
    "a product": (lambda cp, x: x @ x.T, (0, 0, 1)),
    "a list of numbers": (lambda cp, x: cp.asarray([1, 2]), (0, 1, 0)),
    "an array of NumPy": (lambda cp, x: cp.asarray(np.ones(3)), (0, 1, 0)),
    "a range": (lambda cp, x: cp.arange(3), (0, 0, 1)),
    "memory": (lambda cp, x: cp.empty((3,)), (0, 0, 0)),
    "from the device": (lambda cp, x: cp.asnumpy(x), (1, 0, 0)),
    "to a dtype": (lambda cp, x: x.astype(np.float64), (0, 0, 1)),
    "to the same dtype": (lambda cp, x: x.astype(F, copy=False), (0, 0, 0)),
    "a number": (lambda cp, x: float(x[0, 0]), (1, 0, 0)),
    "numbers": (lambda cp, x: x.tolist(), (1, 0, 0)),
    "a condition": (lambda cp, x: bool(cp.any(x > 1)), (1, 0, 2)),
    "as many as are True": (lambda cp, x: x[x > 1], (1, 0, 2)),
    "an index in a list": (lambda cp, x: x[[1, 0]], (0, 1, 1)),
    "an index in an array": (lambda cp, x: cp.take(x, cp.arange(2), axis=0), (0, 0, 2)),
    "numbers of a generator": (lambda cp, x: cp.random.default_rng(0).random((3,)), (0, 0, 1)),
}


@pytest.mark.parametrize("name", WORK)
def test_work_is_counted(cp: Any, name: str) -> None:
    function, expected = WORK[name]
    x = cp.asarray(np.arange(6, dtype=F).reshape(2, 3))
    with counts.counted() as counted:
        function(cp, x)
    assert (counted.waits.total(), counted.copies.total(), counted.launches.total()) == expected, counted


REFUSED: dict[str, tuple[Callable[[Any, Any], Any], str]] = {
    "an operand of NumPy": (lambda cp, x: x + np.ones(3, F), "Unsupported type <class 'numpy.ndarray'>"),
    "a first operand of NumPy": (lambda cp, x: np.ones(3, F) * x, "Unsupported type <class 'numpy.ndarray'>"),
    "a product with NumPy": (lambda cp, x: x @ np.ones((3, 3), F), "expected cupy.ndarray"),
    "a choice of NumPy's": (lambda cp, x: cp.where(x > 0, x, np.ones(3, F)), "Unsupported type"),
    "an array of NumPy set": (lambda cp, x: x.__setitem__(..., np.ones(3, F)), "non-scalar numpy.ndarray"),
    "joined with NumPy": (lambda cp, x: cp.concatenate([x, np.ones((2, 3), F)]), "expected cupy.ndarray"),
    "implicit conversion": (lambda cp, x: np.asarray(x), "Implicit conversion to a NumPy array"),
    "an end of a slice": (lambda cp, x: x[: cp.sum(x)], "slice indices must be integers"),
    "a length": (lambda cp, x: range(cp.sum(x)), "cannot be interpreted as an integer"),
    "logic of floats": (lambda cp, x: x & x, "Wrong type .* of arguments for cupy_bitwise_and"),
    "halves in three axes": (
        lambda cp, x: x.astype(BF16) @ cp.broadcast_to(x.T.astype(BF16), (2, 3, 2)),
        "data type 'E' not understood",
    ),
    "memory of the CPU": (lambda cp, x: cp.from_dlpack(np.ones(3)), "CPU arrays cannot be directly imported"),
    "memory of the device": (lambda cp, x: np.from_dlpack(x), "cannot read memory of a device"),
    "another argument": (lambda cp, x: cp.sum(x, initial=0), "initial"),
    "an argument by name": (lambda cp, x: cp.where(condition=x > 0, input=x, other=x), "input"),
    "a name of NumPy's": (lambda cp, x: cp.trapezoid_rule(x), "has no attribute 'trapezoid_rule'"),
    "another device": (
        lambda cp, x: _on_device1(cp, x) + 1,
        r"resides \(1\) is different from the current device",
    ),
    "a generator elsewhere": (lambda cp, x: _draw_on_device1(cp), "allocated in a different device"),
    "a device as a key": (lambda cp, x: {x.device: 1}, "unhashable"),
}


def _on_device1(cp: Any, x: Any) -> Any:
    with cp.cuda.Device(1):
        return x.copy()


def _draw_on_device1(cp: Any) -> Any:
    rng = cp.random.default_rng(0)
    with cp.cuda.Device(1):
        return rng.random(3)


@pytest.mark.parametrize("name", REFUSED)
def test_refused(cp: Any, name: str) -> None:
    function, words = REFUSED[name]
    x = cp.asarray(np.ones((2, 3), F))
    with pytest.raises((TypeError, ValueError, AttributeError, BufferError, RuntimeError), match=words):
        function(cp, x)


@pytest.mark.parametrize(
    ("dtypes", "number", "expected"),
    [
        ((F, F), None, F),
        ((F, np.float64), None, np.float64),
        ((F,), 0.5, F),
        ((np.float16,), 0.5, np.float16),
        ((np.float16,), np.float32(0.5), F),
        ((np.int32,), 2, np.int32),
        ((np.int32,), 0.5, np.float64),
        ((np.bool_,), 1, np.int64),
        ((BF16, BF16), None, BF16),
        ((BF16, F), None, F),
    ],
)
def test_dtypes_are_joined(cp: Any, dtypes: tuple[Any, ...], number: Any, expected: Any) -> None:
    operands = [cp.ones((3,), dtype) for dtype in dtypes]
    assert cp.multiply(*operands, *([] if number is None else [number])).dtype == expected


def test_no_array_is_read_only(cp: Any) -> None:
    x = cp.broadcast_to(cp.zeros((1, 2)), (3, 2))
    x[1, 0] = 1
    assert x.tolist() == [[1, 0]] * 3


def test_no_scalars(cp: Any) -> None:
    x = cp.ones((2, 3), F)
    for number in (cp.sum(x), x[0, 0], x.max(), cp.full((), 1.0)):
        assert type(number) is cp.ndarray
        assert number.shape == ()


def test_it_has_no_name_that_cupy_lacks(cp: Any) -> None:
    from cupy import _rules

    names = {*cp.__all__}
    assert names <= _rules.NAMES
    assert {name for name in dir(cp.ndarray) if name not in ("_number", "_read", "_values", "_view")} <= (
        _rules.ATTRIBUTES | {*dir(object), "__weakref__", "__module__", "__annotations__"}
    )
    assert "__index__" not in _rules.ATTRIBUTES


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "float64"])
def test_a_linear_map_is_one_product_of_two_axes(cp: Any, dtype: str) -> None:
    """Products of more axes are refused in bfloat16, and copy their operands in the other dtypes."""
    values = np.random.default_rng(0).standard_normal((4, 3))
    weight, x = cp.asarray(values.astype(dtype)), cp.asarray(np.ones((2, 5, 3), dtype))
    with counts.counted() as counted:
        y = Linear(weight)(x)
    assert counted.launches == {"matmul": 1}
    assert (y.dtype, y.shape) == (weight.dtype, (2, 5, 4))
    expected = values.astype(dtype).astype(F).sum(axis=1).astype(dtype).astype(F)
    np.testing.assert_allclose(cp.asnumpy(y).astype(F), np.broadcast_to(expected, y.shape), rtol=2**-7)


MASKS: dict[str, Callable[[Any], dict[str, Any]]] = {
    "none": lambda cp: {},
    "causal": lambda cp: {"is_causal": True},
    "window": lambda cp: {"attn_mask": masks.sliding_window(8, 0)},
    "padding": lambda cp: {"attn_mask": masks.padding([50, 64])},
    "padding by an array": lambda cp: {"attn_mask": masks.padding(cp.asarray([50, 64]))},
    "a boolean array": lambda cp: {"attn_mask": cp.asarray(np.tri(64, dtype=bool))},
    "documents": lambda cp: {"attn_mask": masks.document(cp.asarray(np.arange(64) // 20))},
    "ALiBi": lambda cp: {"bias": biases.alibi(4)},
    "relative positions": lambda cp: {"bias": biases.relative(cp.ones((32, 4), F))},
    "sinks": lambda cp: {"sinks": cp.ones((4,), F)},
    "dropout": lambda cp: {"dropout_p": 0.5, "rng": cp.random.default_rng(0)},
}


@pytest.mark.parametrize("name", MASKS)
def test_a_call_waits_once_at_most(cp: Any, name: str) -> None:
    x, options = cp.ones((2, 4, 64, 8), F), MASKS[name](cp)
    with counts.counted() as counted:
        scaled_dot_product_attention(x, x, x, **options)
    assert counted.waits.total() <= 1, counted.waits
    assert counted.copies.total() <= 1, counted.copies


def test_sequences_of_unlike_lengths_share_a_call(cp: Any) -> None:
    """Packed, and in a paged cache to which a token of each was appended before."""
    lengths, starts = [*range(9, 41)], [0, *itertools.accumulate(range(9, 41))]
    pool, token = cp.zeros((96, 2, 16, 8), F), cp.ones((32, 2, 1, 8), F)
    table = [[3 * n, 3 * n + 1, 3 * n + 2] for n in range(32)]
    x, query = cp.ones((sum(lengths), 2, 8), F), cp.ones((32, 4, 1, 8), F)
    cache = PagedKVCache(pool, pool.copy(), table, [length - 1 for length in lengths])
    work = {
        "append": (lambda: cache.append(token, token, in_place=True), 0, 4),
        "attend": (lambda: cache.append(token, token).attend(query), 1, 40),
        "packed": (lambda: varlen_attention(x, x, x, starts, starts, is_causal=True), 1, 50),
    }
    for name, (call, waits, launches) in work.items():
        with counts.counted() as counted:
            call()
        assert counted.waits.total() <= waits, (name, counted)
        assert counted.copies.total() <= 2, (name, counted)
        assert counted.launches.total() <= launches, (name, counted)


def test_nothing_takes_it_for_a_gpu(cp: Any) -> None:
    assert cp.__version__.endswith(", its rules")
    with pytest.raises(ValueError, match="must be installed and have a device here; got backend='cupy'"):
        find_backends(["cupy"])


def test_each_stream_has_its_copies_of_lists(cp: Any) -> None:
    """The copy of another stream may not be complete."""
    x = cp.ones((3, 1, 4, 8), "f4")

    def copies() -> int:
        with counts.counted() as counted:
            scaled_dot_product_attention(x, x, x, masks.padding([3, 1, 2]))
        return counted.copies.total()

    copies()
    assert copies() == 0
    with cp.cuda.Stream():
        assert copies() == 1
        assert copies() == 0
    assert copies() == 0
