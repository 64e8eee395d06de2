"""What differs on CuPy: its arrays are on devices, which neither NumPy nor a library on the CPU reads."""

from __future__ import annotations

import importlib
from typing import Any

import numpy as np
import pytest
from libraries import LIBRARIES, NAMESPACES, each_other

from sdpa_xp import masks, scaled_dot_product_attention
from sdpa_xp.layers import Linear, MultiHeadAttention

pytestmark = pytest.mark.needs("cupy")

F = np.float32


@pytest.fixture
def cp() -> Any:
    import cupy

    return cupy


@each_other
@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "float64"])
def test_moves_from_another_library_and_back(cp: Any, other: str, dtype: str) -> None:
    """By the module and by an array. A dtype stays if both libraries have it; bfloat16 also in CuPy."""
    library = LIBRARIES[other][1]()
    library.needs(dtype)
    values = (np.arange(6).reshape(3, 2) / 4).astype(dtype)
    layer = Linear(library.put(values))
    for like in (cp, cp.zeros((1,), F)):
        there = layer.to(like)
        assert type(there.weight) is cp.ndarray
        assert there.weight.dtype == dtype
        np.testing.assert_array_equal(cp.asnumpy(there.weight), values)
        for back in (importlib.import_module(NAMESPACES[other]), library.put(np.zeros((1, 1), F))):
            weight = there.to(back).weight
            kept = dtype if dtype != "bfloat16" or other in ("torch", "jax", "mlx") else "float32"
            if dtype == "float64" and other == "mlx":
                kept = "float32"
            assert str(weight.dtype).rpartition(".")[2] == kept
            np.testing.assert_array_equal(np.asarray(library.get(weight), F), values.astype(F))


def test_chunks_of_dask_may_be_on_a_device(cp: Any) -> None:
    dask = pytest.importorskip("dask.array")
    lazy = dask.from_array(np.ones((4, 3), F), chunks=2).map_blocks(cp.asarray)
    np.testing.assert_array_equal(Linear(lazy).to(np).weight, np.ones((4, 3), F))


def test_weights_are_drawn_for_cupy_from_any_generator(cp: Any) -> None:
    for dtype in ("float16", "bfloat16", "float32"):
        like = cp.zeros((1,), dtype)
        layers = [
            MultiHeadAttention.init(rng(0), 8, num_heads=2, like=like)
            for rng in (np.random.default_rng, cp.random.default_rng)
        ]
        for layer in layers:
            assert {type(x) for x in layer.parameters.values()} == {cp.ndarray}
            assert {x.dtype for x in layer.parameters.values()} == {like.dtype}


def test_a_failing_call_leaves_the_attributes_of_its_generator(cp: Any) -> None:
    """`state` is a method, and its result an address: nothing that could be restored."""

    def refuse(*_: Any) -> Any:
        raise LookupError("refused")

    rng, x = cp.random.default_rng(0), cp.ones((1, 4, 8), F)
    for options in ({"attn_mask": masks.from_function(refuse)}, {"attn_mask": cp.ones((3, 3), np.bool_)}):
        with pytest.raises((LookupError, ValueError)):
            scaled_dot_product_attention(x, x, x, dropout_p=0.5, rng=rng, **options)
    assert "state" not in vars(rng.bit_generator)
    assert isinstance(rng.bit_generator.state(), int)


@pytest.fixture
def device1(cp: Any) -> Any:
    """A device that is not the current one."""
    if cp.cuda.runtime.getDeviceCount() < 2:
        pytest.skip("there is one device")
    return cp.cuda.Device(1)


def test_layers_are_on_the_device_that_is_asked_for(cp: Any, device1: Any) -> None:
    layer, device0 = Linear(np.ones((3, 8), F), np.ones(3, F)), cp.cuda.Device(0)
    with device1:
        x = cp.ones((2, 8), F)
    there = [
        layer.to(x),
        layer.to(cp, device1),
        layer.to(cp).to(x),
        Linear.init(np.random.default_rng(0), 8, 3, like=x),
        Linear.init(cp.random.default_rng(0), 8, 3, like=x),
    ]
    for moved in there:
        assert moved.weight.device == moved.bias.device == moved(x).device == device1
        assert moved.to(cp, device0).weight.device == device0
        np.testing.assert_array_equal(moved.to(np).weight, cp.asnumpy(moved.weight))


def test_a_generator_may_be_on_another_device(cp: Any, device1: Any) -> None:
    """Its numbers are moved, as torch's are."""
    outputs = []
    with device1:
        x, rng_there = cp.ones((1, 4, 8), F), cp.random.default_rng(0)
    for rng in (rng_there, cp.random.default_rng(0)):
        outputs.append(scaled_dot_product_attention(x, x, x, dropout_p=0.5, rng=rng))
        assert outputs[-1].device == device1
    np.testing.assert_array_equal(*map(cp.asnumpy, outputs))
    with device1:
        drawn = Linear.init(cp.random.default_rng(0), 8, 3)
    assert drawn.weight.device == device1


def test_two_devices_are_refused(cp: Any, device1: Any) -> None:
    x = cp.ones((2, 4, 8), F)
    with device1:
        there = cp.ones((2, 4, 8), F)
    with pytest.raises(ValueError, match=r"`query` and `key` must be on one device; got .*Device 1.*Device 0"):
        scaled_dot_product_attention(there, x, x)
