"""A layer in another dtype: `layer.to(dtype=...)`."""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
from libraries import LIBRARIES, NAMESPACES, Library, each_other

from sdpa_xp.layers import Layer, Linear, MultiHeadAttention, SingleHeadAttention

F = np.float32
RNG = np.random.default_rng(0)
HEADS = MultiHeadAttention.init(RNG, 8, num_heads=2)
LAYERS = {
    "heads": HEADS,
    "one head": SingleHeadAttention.init(RNG, 8, 8),
    "map": Linear.init(RNG, 8, 4),
    "learned": MultiHeadAttention(
        HEADS.query, HEADS.key, HEADS.value, num_heads=2, scale=np.ones(2, F), sinks=np.ones(2, F)
    ),
}
DTYPES = ("float16", "bfloat16", "float32", "float64")
LACKED = {
    "numpy": "bfloat16",
    "dask": "float16 bfloat16",
    "strict-CPU_DEVICE": "float16 bfloat16",
    "jax": "float64",
}


@pytest.mark.parametrize("dtype", DTYPES)
@each_other
def test_each_dtype_in_each_library(other: str, dtype: str) -> None:
    """Each number is rounded once; what a library has not is refused before any array is copied."""
    module = importlib.import_module(NAMESPACES[other])
    if dtype in LACKED.get(other, "").split():
        with pytest.raises(TypeError, match="`dtype` must"):
            HEADS.to(module, dtype=dtype)
        return
    get = LIBRARIES[other][1]().get
    for name, x in HEADS.to(module, dtype=dtype).parameters.items():
        assert str(x.dtype).rpartition(".")[2] == dtype
        kept = HEADS.parameters[name].astype(np.float64)
        step = {"float16": 2.0**-11, "bfloat16": 2.0**-8}.get(dtype, 0.0)
        assert np.all(
            np.abs(np.asarray(get(x), np.float64) - kept) <= step * np.abs(kept) + 2.0**-25 * (step > 0)
        )


@pytest.mark.parametrize("name", LAYERS)
def test_each_layer_in_half_precision(library: Library, name: str) -> None:
    """All arrays have the dtype, and a call takes inputs of it, and no others."""
    library.needs("float16")
    with library.guard():
        put = {key: library.put(np.asarray(x)) for key, x in LAYERS[name].parameters.items()}
        layer = LAYERS[name].with_parameters(put)
        try:
            half = layer.to(dtype="float16")
        except TypeError:
            assert library.name.startswith("dask")  # its namespace has no such name
            return
    assert {str(x.dtype).rpartition(".")[2] for x in half.parameters.values()} == {"float16"}
    x = RNG.standard_normal((2, 3, 8)).astype(F)
    computed = library.call(half, x.astype(np.float16))
    assert str(computed.dtype).rpartition(".")[2] == "float16"
    np.testing.assert_allclose(np.asarray(library.get(computed), F), LAYERS[name](x), rtol=0, atol=2e-2)
    with pytest.raises(TypeError, match="one dtype"):
        library.call(half, x)


@dataclass(frozen=True, repr=False)
class Embedding(Layer):
    table: Any
    places: Any


def test_integers_stay() -> None:
    layer = Embedding(np.ones((3, 2), F), np.arange(3)).to(dtype="float16")
    assert [x.dtype.name for x in layer.parameters.values()] == ["float16", "int64"]


def test_names_and_dtypes_of_libraries_mean_the_same() -> None:
    for dtype in ("float16", np.float16, np.dtype("float16")):
        assert HEADS.to(dtype=dtype).query.weight.dtype == np.float16
    there = HEADS.to(np, dtype="float64")
    assert (there.query.weight.dtype, HEADS.query.weight.dtype) == (np.float64, F)
    assert HEADS.to(device="cpu").query.weight is not HEADS.query.weight


@pytest.mark.needs("torch")
def test_dtypes_of_torch() -> None:
    torch = importlib.import_module("torch")
    there = HEADS.to(torch, dtype=torch.bfloat16)
    assert there.query.weight.dtype is torch.bfloat16
    assert there.to(np, dtype=torch.float16).query.weight.dtype == np.float16
    assert there.to(np).query.weight.dtype == F  # as without a dtype, where the library has it not
    large = Linear(torch.full((2, 2), 1e30)).to(dtype="float16")  # as torch and NumPy convert it
    assert bool(torch.isinf(large.weight).all())


@each_other
def test_a_dtype_is_no_device(other: str) -> None:
    """Also where a library ignores devices."""
    module = importlib.import_module(NAMESPACES[other])
    with pytest.raises(ValueError, match="`device` must"):
        LAYERS["map"].to(module, "float16")
