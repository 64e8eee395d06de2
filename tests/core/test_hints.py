"""Functions of a caller in masks and biases, and what mends a mistake, on each library."""

from __future__ import annotations

import functools
import sys
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from calls import ones
from libraries import Library

from sdpa_xp import attention_scores, attention_weights, biases, masks, scaled_dot_product_attention

F = np.float32


Q, K = ones(2, 4, 5, 8), ones(2, 4, 7, 8)


@pytest.mark.leaves_out("cupy-rules-device1")
def test_the_code_of_a_hint_runs(library: Library) -> None:
    """It is written for the library of the arrays; `xp` is a namespace of the standard."""
    wrong, right = library.put(np.ones((3, 4), np.int32)), library.put(np.ones((3, 4), F))
    with library.guard(), pytest.raises(TypeError, match="Convert it first") as error:
        scaled_dot_product_attention(wrong, right, right)
    code = str(error.value).partition("Convert it first: ")[2].removesuffix(".")
    names = {"query": wrong, "xp": library.xp, **sys.modules}
    with library.guard():
        assert scaled_dot_product_attention(eval(code, names), right, right).dtype == right.dtype


@pytest.mark.parametrize("mask_mod", [lambda b, h, i, j: i >= j and j > 0, lambda b, h, i, j: 0 < j < i])
def test_a_condition_of_python_in_a_mask_function(library: Library, mask_mod: Any) -> None:
    if library.lazy:
        pytest.skip("Dask's own error says what it is about, and a mask is computed to find it")
    query, wrong = np.ones((1, 5, 2), F), masks.from_function(mask_mod)
    with pytest.raises((TypeError, ValueError, RuntimeError), match=r"`attn_mask` .* combine with"):
        library.call(attention_scores, query, query, attn_mask=wrong)


def test_an_error_of_a_class_of_numpys_own_names_the_argument() -> None:
    wrong = biases.from_function(lambda s, b, h, i, j: s + "1")
    with pytest.raises(TypeError, match="raised by the function of `bias`"):
        scaled_dot_product_attention(Q, K, K, bias=wrong)


CHAINED: dict[str, Callable[[Any, Any, Any, Any, Any], Any]] = {
    "a row, then a column": lambda table, b, h, i, j: table[b][i],
    "three times": lambda table, b, h, i, j: table[b][h][i],
    "at last": lambda table, b, h, i, j: table[b, h][i],
    "too many": lambda table, b, h, i, j: table[b, h, i, j],
}


@pytest.mark.parametrize("index", CHAINED)
@pytest.mark.parametrize("name", ["bias", "attn_mask"])
def test_a_table_that_is_indexed_twice(library: Library, index: str, name: str) -> None:
    """As in FlexAttention, whose functions get numbers."""
    read, shape = CHAINED[index], (2, 9) if index == "a row, then a column" else (2, 4, 9)
    x = np.ones((2, 4, 5, 8), F)
    with library.guard():
        table = library.put(np.ones(shape, F))
        rules: dict[str, Any] = {
            "bias": biases.from_function(lambda s, b, h, i, j: s + read(table, b, h, i, j))
        }
        if name == "attn_mask":
            rules = {"attn_mask": masks.from_function(lambda b, h, i, j: read(table, b, h, i, j) > 0)}
    of_dask = (AssertionError,) if library.name == "dask" else ()  # Dask asserts what its blocks have
    with pytest.raises((IndexError, ValueError, *of_dask)) as error:
        library.call(scaled_dot_product_attention, x, x, x, **rules)
    if not isinstance(error.value, AssertionError):
        assert name in str(error.value)
    if library.name == "torch":  # JAX clips indices, and so finds other shapes
        assert "index a table once" in str(error.value)


def test_arguments_may_be_left_open_or_have_defaults() -> None:
    masks.from_function(lambda *indices: indices[2] >= indices[3])
    masks.from_function(lambda b, h, i, j, window=3: i - j < window)


class OwnError(ValueError):
    """What a caller's function raises, and the caller expects."""


@pytest.mark.parametrize("error", [LookupError, OwnError, NotImplementedError, KeyboardInterrupt])
def test_an_error_of_the_callers_own_comes_out_as_it_is(error: type[BaseException]) -> None:
    def mask_mod(*_: Any) -> Any:
        raise error("no such table")

    with pytest.raises(error, match="no such table") as raised:
        scaled_dot_product_attention(Q, K, K, masks.from_function(mask_mod))
    assert type(raised.value) is error


def test_a_decorated_function_counts_by_its_own_arguments() -> None:
    def with_width(function: Any) -> Any:
        @functools.wraps(function)
        def inner(b: Any, h: Any, i: Any, j: Any) -> Any:
            return function(b, h, i, j, 3)

        return inner

    @with_width
    def window(b: Any, h: Any, i: Any, j: Any, width: int) -> Any:
        del b, h
        return i - j < width

    assert scaled_dot_product_attention(Q, K, K, masks.from_function(window)).shape == (2, 4, 5, 8)


@pytest.mark.parametrize(
    "mask", [np.tri(5, dtype=F), np.ones((5, 1), F) * (np.arange(5) < 3)], ids=["causal", "keys"]
)
def test_a_floating_mask_of_zeros_and_ones_is_warned_of(library: Library, mask: np.ndarray) -> None:
    """It is added to the scores. The warning shows the line of the caller."""
    if library.lazy or library.name.startswith(("cupy", "torch-cuda")):
        pytest.skip("no values yet, or none without waiting for a device")
    x, passed = library.put(np.ones((5, 4), F)), library.put(mask.astype(F))
    with pytest.warns(UserWarning, match="must be boolean") as record:
        scaled_dot_product_attention(x, x, x, passed)
    assert record[0].filename == __file__
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        attention_weights(x, x, bias=passed)
        attention_weights(x, x, attn_mask=passed != 0)
        for other in (passed * 2, passed * 0, passed * 0 + 1, (passed - 1) * 1e9):
            attention_weights(x, x, attn_mask=other)


def warnings_of(call: Any) -> list[str]:
    with warnings.catch_warnings(record=True) as record:
        warnings.simplefilter("always")
        call()
    return [str(warning.message) for warning in record if "must be boolean to mask" in str(warning.message)]


@pytest.mark.needs("torch")
def test_zeros_and_ones_while_torch_differentiates() -> None:
    import torch

    x, mask = torch.ones((5, 4), requires_grad=True), torch.ones((5, 5)).tril()

    def attend(query: Any, mask: Any = mask) -> Any:
        return scaled_dot_product_attention(query, x, x, mask).sum()

    assert warnings_of(lambda: attend(x))
    assert warnings_of(lambda: attend(x, mask.requires_grad_()))
    assert warnings_of(lambda: torch.func.grad(attend)(x.detach()))
    assert not warnings_of(lambda: torch.func.vmap(attend, (0, 0))(x.detach()[None], mask[None]))


@pytest.mark.needs("jax")
def test_zeros_and_ones_while_jax_traces() -> None:
    """Inside of `jit` and `grad` a mask that is no argument has values."""
    import jax

    x, mask = jax.numpy.ones((5, 4)), jax.numpy.tril(jax.numpy.ones((5, 5)))

    def attend(query: Any, mask: Any = mask) -> Any:
        return scaled_dot_product_attention(query, query, query, mask).sum()

    assert warnings_of(lambda: jax.eval_shape(jax.grad(attend), x))  # traced alike, and nothing is compiled
    assert warnings_of(lambda: jax.eval_shape(jax.jit(attend), x))
    assert not warnings_of(lambda: jax.eval_shape(jax.jit(attend), x, mask))
