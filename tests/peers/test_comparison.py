"""What the README and the guide to porting say about other libraries, run on the installed releases."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from internals import first_right, known_defects

from sdpa_xp import scaled_dot_product_attention

Attend = Callable[..., Any]
README = (Path(__file__).parents[2] / "README.md").read_text("utf-8")
SHAPE = (1, 2, 4, 8)  # (B, H, L, E)
ALLOWED = np.ones((4, 4), bool)
ALLOWED[1] = False  # query 1 may attend to no key
ALLOWED[:, 3] = False  # and no query to key 3


def by_torch(*arrays: Any, **keywords: Any) -> Any:
    import torch

    function = torch.nn.functional.scaled_dot_product_attention
    return function(*map(torch.tensor, arrays), **keywords).numpy()


def by_jax(query: Any, key: Any, value: Any, allowed: Any) -> Any:
    import jax

    rows = (np.swapaxes(x, 1, 2) for x in (query, key, value))  # (B, L, H, E)
    return np.swapaxes(jax.nn.dot_product_attention(*rows, mask=allowed[None, None]), 1, 2)


def by_onnxruntime(*arrays: Any) -> Any:
    import onnxruntime
    from onnx import TensorProto, helper

    feeds = dict(zip("QKVM", arrays, strict=True))
    kinds = dict.fromkeys("QKV", TensorProto.FLOAT) | {"M": TensorProto.BOOL}
    inputs = [helper.make_tensor_value_info(name, kinds[name], feeds[name].shape) for name in feeds]
    output = helper.make_tensor_value_info("Y", TensorProto.FLOAT, arrays[0].shape)
    graph = helper.make_graph([helper.make_node("Attention", [*feeds], ["Y"])], "attention", inputs, [output])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 23)], ir_version=11)
    session = onnxruntime.InferenceSession(model.SerializeToString())
    return session.run(None, feeds)[0]


PEERS = [
    pytest.param(by_torch, marks=pytest.mark.needs("torch"), id="torch"),
    pytest.param(by_jax, marks=pytest.mark.needs("jax"), id="jax"),
    pytest.param(by_onnxruntime, marks=pytest.mark.needs("onnx", "onnxruntime"), id="onnxruntime"),
]


@pytest.fixture
def arrays() -> Any:
    return np.random.default_rng(0).standard_normal((3, *SHAPE), np.float32)


@pytest.mark.parametrize("special", [np.nan, np.inf])
@pytest.mark.parametrize("place", ["key", "value"])
@pytest.mark.parametrize("peer", PEERS)
def test_a_masked_nan_or_inf_shows_elsewhere(peer: Attend, arrays: Any, place: str, special: float) -> None:
    """`jax.nn` replaces the scores of masked keys, and multiplies masked values by 0."""
    query, key, value = arrays
    before = scaled_dot_product_attention(query, key, value, ALLOWED)
    {"key": key, "value": value}[place][..., 3, :] = special
    shows = np.isnan(peer(query, key, value, ALLOWED)[:, :, [0, 2, 3]]).any(axis=-1)
    assert shows.any() != (peer is by_jax and place == "key")
    after = scaled_dot_product_attention(query, key, value, ALLOWED)
    np.testing.assert_allclose(after, before, atol=1e-6)


@pytest.mark.needs("onnx")
def test_the_readme_names_the_releases_with_known_defects() -> None:
    first, release = (
        first_right("attention", (1, 23)),
        re.search(r"1\.(\d+) to 1\.(\d+) compute some `Attention`", README),
    )
    assert release is not None
    assert (first, (1, int(release[1]))) == ((1, int(release[2]) + 1), (1, 23))
    assert known_defects()["masked NaN"].until > (2, 0)  # "later ones return NaN"


@pytest.mark.needs("jax")
def test_a_query_without_a_key_is_a_mean_in_jax(arrays: Any) -> None:
    mean = arrays[2].mean(axis=-2)
    np.testing.assert_allclose(by_jax(*arrays, ALLOWED)[:, :, 1], mean, atol=1e-6)
    assert not scaled_dot_product_attention(*arrays, ALLOWED)[:, :, 1].any()


@pytest.mark.parametrize("peer", [PEERS[0], PEERS[2]])
def test_a_query_without_a_key_is_0_in_torch_and_onnxruntime(peer: Attend, arrays: Any) -> None:
    assert not peer(*arrays, ALLOWED)[:, :, 1].any()


@pytest.mark.parametrize("peer", PEERS)
def test_grouped_heads(peer: Attend) -> None:
    """torch takes them with `enable_gqa=True` alone, the others as they are."""
    query = np.random.default_rng(0).standard_normal((1, 4, 5, 8), np.float32)
    key, value = np.random.default_rng(1).standard_normal((2, 1, 2, 5, 8), np.float32)
    allowed = np.tril(np.ones((5, 5), bool))
    if peer is by_torch:
        with pytest.raises(RuntimeError, match="must match the size"):
            peer(query, key, value, allowed)
    expected = peer(query, key, value, allowed, **({"enable_gqa": True} if peer is by_torch else {}))
    output = scaled_dot_product_attention(query, key, value, allowed)
    np.testing.assert_allclose(output, expected, atol=1e-6)


@pytest.mark.needs("jax")
def test_jax_takes_numpy_arrays_and_returns_its_own(arrays: Any) -> None:
    import jax

    rows = [np.swapaxes(x, 1, 2) for x in arrays]
    gradient = jax.grad(lambda query: jax.nn.dot_product_attention(query, *rows[1:]).sum())(rows[0])
    assert isinstance(jax.nn.dot_product_attention(*rows), jax.Array)
    assert isinstance(gradient, jax.Array)
    assert isinstance(scaled_dot_product_attention(*arrays), np.ndarray)


@pytest.mark.needs("torch")
def test_torch_takes_tensors_alone(arrays: Any) -> None:
    import torch

    with pytest.raises(TypeError, match=r"must be Tensor, not numpy\.ndarray"):
        torch.nn.functional.scaled_dot_product_attention(*arrays)
