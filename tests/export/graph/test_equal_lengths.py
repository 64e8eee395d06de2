"""Equal lengths have one name, however a layer comes to them, and each is the number that NumPy has."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import onnxruntime
import pytest
from graphs import run

from sdpa_xp import attention_statistics
from sdpa_xp_export import TensorSpec, to_onnx

Layer = Callable[..., Any]
OF_ONE: dict[str, Layer] = {
    "a mask, twice": lambda xp, x: (lambda m: x[m] + 2 * x[m])(x > 0),
    "equal masks": lambda xp, x: x[x > 0] + 2 * x[x > 0],
    "mirrored masks": lambda xp, x: x[x > 0] + x[0 < x],  # noqa: SIM300
    "masks that commute": lambda xp, x: x[(x > 0) & (x < 2)] + x[(x < 2) & (x > 0)],
    "a mask and its indices": lambda xp, x: x[x > 0] + xp.take(x, xp.nonzero(x > 0)[0]),
    "nonzero, twice": lambda xp, x: xp.nonzero(x > 0)[0] + xp.nonzero(x > 0)[0],
    "nonzero of numbers": lambda xp, x: xp.nonzero(x)[0] + xp.nonzero(x != 0)[0],
    "a flat mask": lambda xp, x: x[x > 0] + xp.reshape(x, (-1,))[xp.reshape(x > 0, (-1,))],
    "a mask that was taken": lambda xp, x: (lambda m: x[m] + x[m])(xp.take(x > 0, xp.arange(x.shape[0]))),
    "as many zeros": lambda xp, x: xp.zeros(x[x > 0].shape[0], dtype=x.dtype) + x[x > 0],
    "unique values": lambda xp, x: xp.unique_values(x) + xp.unique_counts(x).values,
    "repeats": lambda xp, x: (lambda n: xp.repeat(x, n) + xp.repeat(x, n))(xp.astype(x > 0, xp.int64)),
    "N + 1": lambda xp, x: xp.zeros(x.shape[0] + 1) + xp.zeros(1 + x.shape[0]),
    "2 N": lambda xp, x: (
        xp.zeros(2 * x.shape[0]) + xp.zeros(x.shape[0] + x.shape[0]) + xp.zeros(x.shape[0] * 2)
    ),
    "3 N - N": lambda xp, x: xp.zeros(3 * x.shape[0] - x.shape[0]) + xp.concat([x, x]),
    "N - 1 + 1": lambda xp, x: xp.zeros(x.shape[0] - 1 + 1) + xp.zeros(x.shape[0] + 3 - 3) + x,
    "a square": lambda xp, x: xp.zeros((x.shape[0] + 1) ** 2) + xp.zeros(x.shape[0] ** 2 + 1 + x.shape[0] * 2),
    "2 N // 2": lambda xp, x: xp.zeros(2 * x.shape[0] // 2) + x,
    "rounded up": lambda xp, x: (
        xp.zeros((x.shape[0] + 1) // 2) + x[::2] + xp.arange(0, x.shape[0], 2, dtype=x.dtype)
    ),
    "halves of equal sums": lambda xp, x: xp.zeros((x.shape[0] + 3) // 2) + xp.zeros((3 + x.shape[0]) // 2),
    "twice a joined array, and one": lambda xp, x: (
        lambda b: xp.concat([b, b[:1]]) + xp.concat([b[:1], xp.zeros(b.shape[0])])
    )(xp.repeat(xp.concat([x, xp.zeros(1)]), 2)),
    "joined and tiled": lambda xp, x: (lambda b: xp.concat([b, b]) + xp.tile(b, (2,)))(
        (lambda c: xp.reshape(xp.stack([c, c]), (-1,)))(xp.concat([x, xp.zeros(1)]))
    ),
    "N // 2 // 3": lambda xp, x: xp.zeros(x.shape[0] // 2 // 3) + xp.zeros(x.shape[0] // 6),
    "2 N // 4": lambda xp, x: xp.zeros(2 * x.shape[0] // 4) + xp.zeros(x.shape[0] // 2),
    "quotient and rest": lambda xp, x: xp.zeros(x.shape[0] // 4 * 4 + x.shape[0] % 4) + x,
    "neighbours": lambda xp, x: x[1:] - x[:-1] + x[: x.shape[0] - 1] + x[1 : x.shape[0]] + xp.diff(x),
    "third neighbours": lambda xp, x: x[3:] + x[:-3],
    "rolled by hand": lambda xp, x: xp.concat([x[1:], x[:1]]) + x + xp.roll(x, -1),
    "rolled by three": lambda xp, x: xp.concat([x[3:], x[:3]]) + x + xp.concat([x[-2:], x[:-2]]),
    "rolled by three, and joined": lambda xp, x: xp.concat([x, x[:3], x[3:]]) + xp.concat([x, x]),
    "rolled by three, of a sum": lambda xp, x: (
        lambda y: xp.concat([y[3:], y[:3]]) + xp.concat([y[-4:], y[:-4]]) + y
    )(xp.concat([x, xp.ones(1, dtype=x.dtype), x, x[x > 0]])),
    "shifted": lambda xp, x: xp.concat([xp.zeros(1, dtype=x.dtype), x])[:-1] + x,
    "halves": lambda xp, x: (lambda n: xp.concat([x[n:], x[:n]]) + x)(x.shape[0] // 2),
    "four parts": lambda xp, x: (lambda n: xp.concat([x[:n], x[n:]]) + x)(x.shape[0] // 4 * 4),
    "tiles and repeats": lambda xp, x: xp.tile(x, (2,)) + xp.repeat(x, 2) + xp.reshape(xp.stack([x, x]), (-1,)),
    "the size": lambda xp, x: xp.zeros(xp.stack([x, x, x]).size) + xp.reshape(xp.stack([x, x, x]), (-1,)),
    "flat and back": lambda xp, x: (
        xp.reshape(xp.reshape(xp.stack([x, x], axis=-1), (-1,)), (-1, 2)) + x[:, None]
    ),
    "sums up to each": lambda xp, x: xp.cumulative_sum(x, include_initial=True)[1:] + x,
    "products of rolled rows": lambda xp, x: xp.vecdot(xp.concat([x[1:], x[:1]]), x),
    "a product of rolled rows": lambda xp, x: xp.concat([x[1:], x[:1]]) @ x,
    "a sum of rolled rows": lambda xp, x: xp.tensordot(xp.concat([x[1:], x[:1]]), x, axes=1),
    "a rolled mask": lambda xp, x: x[xp.concat([x[1:] > 0, x[:1] > 0])],
}


def expected(layer: Layer, *arrays: np.ndarray) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return layer(np, *arrays)


@pytest.mark.parametrize("name", OF_ONE)
def test_equal_lengths(name: str) -> None:
    layer = OF_ONE[name]
    model = to_onnx(lambda x: layer(x.__array_namespace__(), x), TensorSpec("float32", ("N",)))
    for length in (0, 1, 2, 3, 5, 8, 13):
        x = np.random.default_rng(length).integers(-3, 4, length).astype(np.float32)
        output = run(model, {"x": x})["output"]
        np.testing.assert_array_equal(output, expected(layer, x), f"N={length}", strict=False)


def parts_of_others(xp: Any, x: Any, y: Any) -> Any:
    """x[:3] and y[:3] may be shorter, each on its own; a sum of both is as long as the run makes it."""
    cut = xp.concat([x[1:], y[1:]]) + xp.concat([y, x])[2:]
    head = xp.concat([x[2:], x[:2]]) + xp.ones(1, dtype=x.dtype)
    return cut, xp.asarray(cut.shape[0]), head, xp.asarray(head.shape[0])


def cut_off(xp: Any, x: Any) -> Any:
    """x[1:] of no elements has none, so its length and 1 are 1, where N - 1 + 1 is 0."""
    rest, n = x[1:], x.shape[0]
    return rest, xp.asarray(n - 1), xp.zeros(rest.shape[0] + 1), xp.zeros(n - 1 + 1), x[:0]


def beyond_the_axis(xp: Any, x: Any, y: Any) -> Any:
    """A length that a slice claims is not read from it: y[:N] may have fewer rows."""
    n = x.shape[0]
    ends = y[n - 2 :], y[1:n]
    return y[: n // 2], xp.zeros(n // 2), *ends, *(xp.zeros(end.shape[0]) for end in ends)


def both_short(xp: Any, x: Any, y: Any, z: Any) -> Any:
    parts = y[1 : x.shape[0] + 1] + z[1 : x.shape[0] + 1]
    return parts, xp.asarray(parts.shape[0])


def of_any_name(xp: Any, x: Any, y: Any, z: Any) -> Any:
    """A name that the graph would give stays another length."""
    return xp.zeros(x.shape[0] * 2), z, xp.asarray(x.shape[0] - 1), y


JOINED: dict[str, Layer] = {
    "a sum": lambda xp, x, y: x + y,
    "a sum, turned": lambda xp, x, y: y + x,
    "where": lambda xp, x, y: xp.where(y > 0, x, x),
    "rows": lambda xp, x, y: (xp.zeros((4, 1), dtype=x.dtype) * (y + x))[0],
    "products": lambda xp, x, y: (y[:, None, None] @ x[:, None, None])[:, 0, 0],
    "broadcast_arrays": lambda xp, x, y: xp.broadcast_arrays(x, y)[0],
    "twice": lambda xp, x, y: (x + y) + x,
}


def broadcast(name: str, cut: int) -> Layer:
    """Where N - 2 is cut off at 0, 2 more are 2 elements, with which an array of 1 element broadcasts."""

    def layer(xp: Any, x: Any) -> Any:
        y = xp.concat([xp.arange(x.shape[0] - cut, dtype=x.dtype), xp.ones(cut, dtype=x.dtype)])
        joint = JOINED[name](xp, x, y)
        return joint, xp.asarray(joint.shape[0])

    return layer


DIVIDED: list[Layer] = [
    lambda xp, x: xp.reshape(xp.reshape(x, (-1, 4)), (-1,)) + x,
    lambda xp, x: xp.reshape(xp.reshape(x, (2, -1)), (-1,)) + x,
    lambda xp, x: xp.reshape(x, (-1, 4))[:, 0] + xp.zeros(x.shape[0] // 4),
]
"""What a Reshape divides is divisible, so that the quotient times the divisor is the length again."""
OF_SEVERAL: dict[str, tuple[Layer, tuple[Any, ...], list[tuple[int, ...]]]] = {
    "parts of others": (
        parts_of_others, ("N", "M"), [(3, 4), (1, 1), (0, 2), (2, 0), (1, 0), (0, 3), (0, 0)],
    ),
    "cut off": (cut_off, ("N",), [(0,), (1,), (4,)]),
    "beyond the axis": (beyond_the_axis, ("N", 3), [(0, 3), (2, 3), (4, 3), (9, 3)]),
    "both short": (both_short, ("N", "M", "K"), [(5, 4, 4), (2, 3, 4), (4, 2, 3), (1, 1, 2)]),
    "any name": (of_any_name, ("N", "N_minus_1", "N_times_2"), [(4, 7, 2)]),
    **{f"divided {n}": (layer, ("N",), [(0,), (4,), (12,)]) for n, layer in enumerate(DIVIDED)},
    **{
        f"{name} of {cut}": (broadcast(name, cut), ("N",), [(1,), (3,), (6,)])
        for name in JOINED
        for cut in (2, 3)
    },
}  # fmt: skip
"""A layer, the lengths of its arrays, and their lengths in runs."""


@pytest.mark.parametrize("name", OF_SEVERAL)
def test_lengths_of_a_run(name: str) -> None:
    """They are NumPy's, of arrays and as numbers, wherever NumPy computes."""
    layer, names, runs = OF_SEVERAL[name]
    inputs = "xyz"[: len(names)]
    model = to_onnx(
        eval(f"lambda {', '.join(inputs)}: f(x.__array_namespace__(), {', '.join(inputs)})", {"f": layer}),
        *(TensorSpec("float32", (length,)) for length in names),
    )
    for lengths in runs:
        arrays = [np.ones(length, np.float32) for length in lengths]
        try:
            results = expected(layer, *arrays)
        except ValueError:
            continue
        outputs = [*run(model, dict(zip(inputs, arrays, strict=True))).values()]
        results = results if isinstance(results, tuple) else (results,)
        for output, result in zip(outputs, results, strict=True):
            np.testing.assert_array_equal(output, result, f"{lengths}")
            assert output.shape == np.shape(result)


NUMBERS: dict[str, Layer] = {
    "differences": lambda n: (n - 1, 3 - n, n - 1 + 1, 0 - n, 2 * n - 7, -1 * n + 4),
    "quotients": lambda n: (n // 2, (n - 3) // 2, n % 3, (n - 5) % 4, (3 * n + 5) // 2, n // 2 // 3, 2 * n % 2),
    "products": lambda n: (n * n, (n + 1) * (n - 1), n**3, 4 * n + n, (n - 2) * (n - 2)),
}


@pytest.mark.parametrize("name", NUMBERS)
def test_integers_of_lengths(name: str) -> None:
    """As Python computes them, also below 0."""

    def layer(x: Any) -> Any:
        xp = x.__array_namespace__()
        numbers = [*NUMBERS[name](x.shape[0])]
        return xp.stack(
            [
                xp.asarray(number)
                if not isinstance(number, int)
                else number + 0 * xp.astype(xp.sum(x), xp.int64)
                for number in numbers
            ]
        )

    model = to_onnx(layer, TensorSpec("float32", ("N",)))
    for length in (0, 1, 2, 5, 9):
        output = run(model, {"x": np.zeros(length, np.float32)})["output"]
        assert output.tolist() == [*NUMBERS[name](length)]


def test_a_bound_counts_as_the_length() -> None:
    """So that x[:1] broadcasts, and table[:N] meets N rows. The slice itself may have fewer elements."""

    def layer(x: Any) -> Any:
        first, last = x[:1], x[-1:]
        assert (first.shape, last.shape) == ((1,), (1,))
        assert x[: first.size + x.shape[0]].shape[0] == x.shape[0] + 1
        return first + x + last

    model = to_onnx(layer, TensorSpec("float32", ("N",)))
    for length in (0, 1, 4):
        x = np.arange(length, dtype=np.float32)
        np.testing.assert_array_equal(run(model, {"x": x})["output"], x[:1] + x + x[-1:])


@pytest.mark.parametrize(
    "layer",
    [
        lambda xp, x, past, table: xp.concat([x[1:], x[:1]]) + x,
        lambda xp, x, past, table: xp.concat([x[3:], x[:3]]) + 1,
        lambda xp, x, past, table: table[: x.shape[0]] + x,
        lambda xp, x, past, table: table[past.shape[0] : past.shape[0] + x.shape[0]] + x,
    ],
)
def test_a_length_that_a_caller_named_keeps_its_name(layer: Layer) -> None:
    specs = [TensorSpec("float32", shape) for shape in (("N",), ("P",), (9,))]
    model = to_onnx(lambda x, past, table: layer(x.__array_namespace__(), x, past, table), *specs)
    assert model.graph.output[0].type == model.graph.input[0].type


def test_names_of_two_inputs() -> None:
    def layer(x: Any, y: Any) -> Any:
        xp = x.__array_namespace__()
        return xp.concat([x, y]) + xp.concat([y, x]), xp.zeros(y.shape[0] + x.shape[0]) + xp.concat([x, y])

    model = to_onnx(layer, TensorSpec("float32", ("N",)), TensorSpec("float32", ("M",)))
    assert model.graph.output[0].type == model.graph.output[1].type
    x, y = np.arange(2, dtype=np.float32), np.ones(3, np.float32)
    np.testing.assert_array_equal(run(model, {"x": x, "y": y})["output_0"], [1, 2, 2, 1, 2])


def test_sums_in_specs() -> None:
    """The names of a sum may stand in any order, and one of them may follow from the others."""
    specs = [TensorSpec("float32", shape) for shape in (("P+L",), ("L+P",), ("P",))]

    def layer(x: Any, y: Any, p: Any) -> Any:
        xp = x.__array_namespace__()
        return x + y, xp.zeros(x.shape[0] - p.shape[0]), xp.concat([p, x[p.shape[0] :]]) + y

    model = to_onnx(layer, *specs)
    assert [value.type.tensor_type.shape.dim[0].dim_param for value in model.graph.input] == ["P+L", "L+P", "P"]
    feeds = {"x": np.ones(5, np.float32), "y": np.ones(5, np.float32), "p": np.ones(2, np.float32)}
    assert [y.shape for y in run(model, feeds).values()] == [(5,), (3,), (5,)]


COMPUTED: dict[str, tuple[str, Callable[[Any], Any], int]] = {
    "a quotient": ("N_over_2", lambda x: x.shape[0] // 2, 4),
    "an axis": ("N_less_1", lambda x: x[1:].shape[0], 8),
    "a range": ("N_and_1_over_2", lambda x: x.__array_namespace__().arange(0, x.shape[0], 2).shape[0], 5),
}
"""A name, a length that would get it, and what that is for N = 9."""


@pytest.mark.parametrize("is_first", [True, False])
@pytest.mark.parametrize("name", COMPUTED)
def test_a_computed_length_has_no_name_of_the_caller(name: str, is_first: bool) -> None:
    """In whichever order the inputs come."""
    other, length_of, right = COMPUTED[name]

    def layer(first: Any, second: Any) -> Any:
        x, y = (first, second) if is_first else (second, first)
        xp, length = x.__array_namespace__(), length_of(x)
        return xp.asarray(length), xp.asarray(y.shape[0]), xp.ones(length), xp.sum(y) / y.shape[0]

    lengths = {"N": 9, other: 6} if is_first else {other: 6, "N": 9}
    model = to_onnx(layer, *(TensorSpec("float32", (length,)) for length in lengths))
    feeds = {x: np.ones(n, np.float32) for x, n in zip(("first", "second"), lengths.values(), strict=True)}
    count, others, ones, mean = run(model, feeds).values()
    assert (count, others, ones.shape, mean) == (right, 6, (right,), 1.0)


def test_blocks_of_two_calls_have_their_own_lengths() -> None:
    def layer(q: Any, k: Any) -> Any:
        sums = [
            attention_statistics(*arrays, of="block_sums", block_size=size).block_sums
            for arrays, size in (((q, k), (3, 4)), ((k, q), (2, 5)))
        ]
        xp = q.__array_namespace__()
        return [xp.asarray(length) for x in sums for length in (x.shape[-2], x.shape[-1])]

    model = to_onnx(layer, *(TensorSpec("float32", (1, 2, length, 8)) for length in "LS"))
    feeds = {name: np.ones((1, 2, n, 8), np.float32) for name, n in (("q", 7), ("k", 11))}
    assert [int(n) for n in run(model, feeds).values()] == [3, 3, 6, 2]


def test_lengths_that_differ_in_a_run_do_not_agree_by_luck() -> None:
    """Where a difference is cut off, axes that fit otherwise do not: the run fails, as NumPy does."""
    model = to_onnx(
        lambda x: (lambda xp: xp.concat([x[3:], xp.ones(3, dtype=x.dtype)]) + x)(x.__array_namespace__()),
        TensorSpec("float32", ("N",)),
    )
    assert run(model, {"x": np.ones(4, np.float32)})["output"].shape == (4,)
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4
    session = onnxruntime.InferenceSession(model.SerializeToString(), options)
    with pytest.raises(Exception, match="broadcast"):
        session.run(None, {"x": np.ones(2, np.float32)})
