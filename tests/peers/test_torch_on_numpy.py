"""`implementation="torch"` on NumPy arrays: torch's kernel computes the contract in their memory, or refuses.

The tests of tests/core run with it as well: `--backends=numpy-torch`.
"""

from __future__ import annotations

import math
import subprocess
import sys
from typing import Any

import numpy as np
import pytest
import torch
from calls import attend as attend_with
from calls import draw
from internals import judge, reference, textbook
from libraries import LIBRARIES
from peers.judged import record_kernel
from torch._subclasses.fake_tensor import FakeTensorMode
from without import run_without

from sdpa_xp import dot_product_attention, explain, masks, scaled_dot_product_attention

F = np.float32
GROUPED = ((2, 4, 5, 8), (2, 2, 70, 8), (2, 2, 70, 8))
DTYPES = ("float16", "bfloat16", "float32", "float64")
RULES: dict[str, dict[str, Any]] = {
    "plain": {},
    "causal": {"is_causal": True},
    "keys": {"attn_mask": np.arange(70) % 3 > 0},
    "empty row": {"attn_mask": np.arange(5)[:, None] != 2},
    "causal and mask": {"attn_mask": masks.causal() & (np.arange(70) > 1)},
    "padding": {"attn_mask": masks.padding([3, 68])},
    "padding by an array": {"attn_mask": masks.padding(np.asarray([0, 40], np.uint16)), "is_causal": True},
    "negative scale": {"scale": -0.3},
    "scale of each row": {"scale": np.linspace(-1, 1, 5)[:, None]},
    "bias": {"bias": np.linspace(-9, 9, 70), "attn_mask": np.arange(70) > 9},
    "-inf": {"attn_mask": np.where(np.arange(70) > 9, 0.5, -math.inf)},
}


def attend(*arrays: np.ndarray, **rules: Any) -> Any:
    return scaled_dot_product_attention(*arrays, **rules, implementation="torch")


def floating(rules: dict[str, Any], dtype: str) -> dict[str, Any]:
    """Return the rules with floating arrays in a dtype."""
    return {
        k: x.astype(dtype) if isinstance(x, np.ndarray) and x.dtype.kind == "f" else x for k, x in rules.items()
    }


def numbers(seed: int, *shapes: tuple[int, ...], dtype: Any = F) -> list[np.ndarray]:
    return draw(np.random.default_rng(seed), *shapes, dtype=dtype)


@pytest.fixture
def kernel_calls(monkeypatch: pytest.MonkeyPatch) -> list[tuple[torch.Tensor, ...]]:
    """The tensors that torch's kernel gets from now on, and its output."""
    return record_kernel("torch", monkeypatch)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", RULES)
def test_same_as_the_reference(name: str, dtype: str, kernel_calls: list[Any]) -> None:
    rules, arrays = floating(RULES[name], dtype), numbers(1, *GROUPED, dtype=dtype)
    output = attend(*arrays, **rules)
    assert kernel_calls  # and not the portable implementation
    assert type(output) is np.ndarray
    assert (output.dtype, output.flags.writeable) == (arrays[0].dtype, True)
    if isinstance(mask := rules.get("attn_mask"), masks.Mask):
        rules = rules | {"attn_mask": masks.to_array(mask, (2, 4, 5, 70))}
    wide = dtype if dtype != "bfloat16" else "float32"  # NumPy's mean of bfloat16 is float32
    plain = textbook(np, *(x.astype(wide) for x in arrays), **floating(rules, wide)).astype(dtype)
    expected = reference.attention(*arrays, **rules)[0]
    assert judge(output, expected, plain, dtype).agrees


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("layout", ["...HLE", "...LHE"])
def test_nothing_is_copied(dtype: str, layout: str, kernel_calls: list[Any]) -> None:
    """The kernel reads the caller's memory, with the heads of the keys, and the caller gets the kernel's."""
    arrays = numbers(1, *GROUPED, dtype=dtype)
    if layout == "...LHE":
        arrays = [np.swapaxes(np.swapaxes(x, 1, 2).copy(), 1, 2) for x in arrays]
    arrays[1].flags.writeable = False
    output = attend(*(x if layout == "...HLE" else np.swapaxes(x, 1, 2) for x in arrays), layout=layout)
    (tensors,) = kernel_calls
    for tensor, array in zip(tensors, [*arrays, output], strict=True):
        assert tensor.data_ptr() == array.__array_interface__["data"][0]
        assert str(tensor.dtype) == f"torch.{dtype}"
    assert (*(tuple(tensor.shape) for tensor in tensors[:3]),) == GROUPED


UNUSUAL: dict[str, Any] = {
    "read-only": lambda x: np.frombuffer(x.tobytes(), x.dtype).reshape(x.shape),
    "negative strides": lambda x: np.flip(np.flip(x).copy()),
    "every other number": lambda x: np.repeat(x, 2, axis=-1)[..., ::2],
    "columns": np.asfortranarray,
    "not aligned": lambda x: np.frombuffer(b"-" + x.tobytes(), x.dtype, offset=1).reshape(x.shape),
    "of a record": lambda x: np.rec.fromarrays([x, x.astype("int8")])["f0"],
    "other byte order": lambda x: x.astype(x.dtype.newbyteorder()),
    "zero strides": lambda x: np.broadcast_to(x[:1, :, :1], x.shape),
}


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", UNUSUAL)
def test_any_array_of_numpy_is_read_as_it_is(name: str, dtype: str, kernel_calls: list[Any]) -> None:
    if (name, dtype) == ("other byte order", "bfloat16"):
        pytest.skip("ml_dtypes has one byte order")
    arrays = [UNUSUAL[name](x) for x in numbers(2, *GROUPED, dtype=dtype)]
    mask = UNUSUAL[name](np.arange(350).reshape(5, 70) % 3 > 0) if name != "zero strides" else None
    before = [x.tobytes() for x in arrays]
    output, expected = attend(*arrays, mask), scaled_dot_product_attention(*arrays, mask)
    assert kernel_calls
    assert output.dtype == arrays[0].dtype
    bound = 2e-6 if "32" in dtype or "64" in dtype else 2e-2
    np.testing.assert_allclose(output.astype("float64"), expected.astype("float64"), atol=bound)
    assert [x.tobytes() for x in arrays] == before
    assert all(tensor.data_ptr() % tensor.element_size() == 0 for tensors in kernel_calls for tensor in tensors)


def test_odd_strides_of_axes_of_one_element(kernel_calls: list[Any]) -> None:
    """NumPy counts them as aligned, and torch refuses them."""
    one = np.lib.stride_tricks.as_strided(np.ones(1, F), (1, 1, 1, 1), (9, 9, 9, 9))
    assert one.flags.aligned
    assert attend(one, one, one) == 1
    assert kernel_calls


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("special", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("keys", [16, 64, 100])
@pytest.mark.parametrize("place", ["query", "key", "value"])
def test_a_special_number_shows_in_the_rows_of_the_portable_one(
    place: str, keys: int, special: float, dtype: str
) -> None:
    """The kernel of halves takes a row with an inf for a row without keys. Arrays of NumPy and tensors."""
    arrays = dict(zip(("query", "key", "value"), numbers(4, *[(1, 2, keys, 16)] * 3, dtype=dtype), strict=True))
    arrays[place][0, 0, 5, 0] = special
    for rules in ({}, {"is_causal": True}, {"attn_mask": np.arange(keys) != 3}):
        expected = scaled_dot_product_attention(*arrays.values(), **rules, implementation="xp")
        for name, kernel in (("numpy", "torch"), ("torch", "native")):
            output = attend_with(LIBRARIES[name][1](), *arrays.values(), **rules, implementation=kernel)
            np.testing.assert_array_equal(np.isnan(output), np.isnan(expected))
            np.testing.assert_array_equal(np.isinf(output), np.isinf(expected))
            assert not np.isfinite(output).all()


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_a_bias_is_not_rounded_to_a_half(dtype: str, kernel_calls: list[Any]) -> None:
    arrays = numbers(5, *[(1, 2, 70, 16)] * 3, dtype=dtype)
    bias = 1000 + np.arange(70, dtype=F) % 7 / 7
    output = attend(*arrays, bias=bias).astype(F)
    assert {str(tensor.dtype) for tensors in kernel_calls for tensor in tensors} == {f"torch.{dtype}"}
    wide = scaled_dot_product_attention(*(x.astype(F) for x in arrays), bias=bias)
    assert abs(output - wide).max() <= abs(wide).max() * (2.0**-10 if dtype == "float16" else 2.0**-7)


def test_a_weight_that_float16_rounds_to_0_keeps_an_infinite_value() -> None:
    query, key = np.full((1, 1, 1, 1), 18, np.float16), np.zeros((1, 1, 100, 1), np.float16)
    value = np.ones((1, 1, 100, 1), np.float16)
    key[..., 1:, :], value[..., 1, :] = -1, math.inf  # exp(-18) is 2^-26
    assert attend(query, key, value) == math.inf


def test_explain_says_what_computes_a_call() -> None:
    x = np.ones((2, 3, 4), F)
    assert explain(x, x, x).implementation == "xp"
    explained = explain(x, x, x, implementation="torch")
    assert explained.implementation == "torch"
    assert str(explained).strip() == "torch: torch's kernel computes the call as documented"


def test_names_of_jax(kernel_calls: list[Any]) -> None:
    x, y = numbers(2, (2, 5, 4, 8), (2, 7, 2, 8))
    output = dot_product_attention(x, y, y, is_causal=True, implementation="torch")
    assert kernel_calls
    np.testing.assert_allclose(output, dot_product_attention(x, y, y, is_causal=True), rtol=0, atol=2e-6)


@pytest.mark.parametrize(
    "rules", [{}, {"is_causal": True, "attn_mask": np.arange(70) > 0}], ids=["plain", "mask"]
)
def test_modes_of_torch_change_nothing(rules: dict[str, Any]) -> None:
    """What the first call finds out is kept, whatever mode that is made in."""
    arrays = numbers(3, *GROUPED)
    expected = scaled_dot_product_attention(*arrays, **rules, implementation="xp")
    inside: list[Any] = []

    def in_vmap(x: torch.Tensor) -> torch.Tensor:
        inside.append(attend(*arrays, **rules))
        return x

    modes = FakeTensorMode(), torch.autocast("cpu"), torch.inference_mode(), torch.device("meta")
    for mode in (*modes, torch.no_grad()):
        with mode:
            inside.append(attend(*arrays, **rules))
    torch.func.vmap(in_vmap)(torch.ones(2))
    inside.append(attend(*arrays, **rules))
    for output in inside:
        assert output.dtype == F
        np.testing.assert_allclose(output, expected, rtol=0, atol=2e-6)


@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")
def test_torch_records_nothing_of_it() -> None:
    arrays = numbers(3, *GROUPED)
    traced = torch.jit.trace(lambda x: x + float(attend(*arrays).sum()), torch.ones(2), check_trace=False)
    assert "attention" not in str(traced.graph)


CALL = """
import sys
import numpy as np
from sdpa_xp import scaled_dot_product_attention
x = np.ones((2, 3), "float32")
scaled_dot_product_attention(x, x, x)
print("torch" in sys.modules)
scaled_dot_product_attention(x, x, x, implementation="torch")
print("torch" in sys.modules)
"""


def test_torch_is_imported_by_the_calls_that_ask_for_it() -> None:
    done = subprocess.run([sys.executable, "-c", CALL], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["False", "True"]
    missing = run_without(["torch"], CALL)
    words = "because torch is not installed (install it with `pip install torch`); got implementation='torch'."
    assert missing.stderr.strip().endswith(words)
    assert missing.stdout.split() == ["False"]
