"""Bad input is refused before any work, by a message that names the argument, the rule and what came."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from calls import ones
from internals import override
from libraries import LIBRARIES, Library

from sdpa_xp import KVCache, attention_state, attention_weights, masks, scaled_dot_product_attention

F = np.float32
Q, K, V = (np.ones(shape, F) for shape in ((2, 4, 3, 8), (2, 2, 5, 8), (2, 2, 5, 6)))


@pytest.mark.parametrize(
    ("change", "error", "words"),
    [
        ({"query": ones(8)}, ValueError, r"`query` must have at least 2 axes.*query.shape=\(8,\)"),
        ({"key": ones()}, ValueError, r"`key` must have at least 2 axes.*key.shape=\(\)"),
        ({"key": ones(2, 2, 5, 7)}, ValueError, r"`query` and `key` must agree on axis -1 \(E\).*8\).*7\)"),
        ({"value": ones(2, 2, 4, 6)}, ValueError, r"`key` and `value` must agree on axis -2 \(S\).*5, 8\).*4, 6\)"),
        ({"value": ones(2, 1, 5, 6)}, ValueError, r"`key` and `value` must agree on axis -3 \(H\)"),
        ({"query": ones(2, 4, 3, 0), "key": ones(2, 2, 5, 0)}, ValueError, r"width \(axis -1, E\) of at least 1"),
        ({"query": ones(2, 3, 3, 8)}, ValueError, r"heads of `query` \(axis -3, Hq\) must be a multiple.*\(H\)"),
        ({"query": ones(2, 1, 3, 8)}, ValueError, "multiple.* broadcast `query` to the heads of `key`"),
        ({"key": ones(2, 0, 5, 8), "value": ones(2, 0, 5, 6)}, ValueError, "must be a multiple"),
        ({"query": ones(3, 4, 3, 8)}, ValueError, "leading axes of `query`, `key`, `value` must broadcast"),
        ({"query": ones(2, 4, 3, 8, dtype=np.int32)}, TypeError, "`query` must be one of float16.*int32.*astype"),
        ({"value": ones(2, 2, 5, 6, dtype=np.complex64)}, TypeError, "`value` must be one of.*complex64"),
        ({"key": ones(2, 2, 5, 8, dtype=bool)}, TypeError, "`key` must be one of.*bool"),
        ({"key": ones(2, 2, 5, 8, dtype=np.float16)}, TypeError, "`query` and `key` must have one dtype.*float32.*float16"),
        ({"attn_mask": ones(3, 5, dtype=np.int64)}, TypeError, "`attn_mask` must be boolean.*int64.*attn_mask != 0"),
        ({"attn_mask": ones(3, 5, dtype=np.float64)}, TypeError, "`attn_mask` must have the dtype of `query`.*float64"),
        ({"attn_mask": ones(3, 5, dtype=np.complex64)}, TypeError, "`attn_mask` must be one of.*complex64"),
        ({"attn_mask": ones(3, 4)}, ValueError, r"`attn_mask` must broadcast to \(..., Hq, L, S\).*\(3, 4\).*\(2, 4, 3, 5\)"),
        ({"attn_mask": ones(2, 5)}, ValueError, r"must broadcast.*attn_mask\[:, None, None, :\]"),
        ({"bias": ones(3, 5, dtype=bool)}, TypeError, "`bias` must be one of float16.*bool"),
        ({"bias": ones(3, 5, dtype=np.float64)}, TypeError, "`bias` must have the dtype of `query` or of the scores .float32.; got.*float64"),
        ({"bias": ones(3, 3, 5)}, ValueError, "`bias` must broadcast"),
        ({"is_causal": 1}, TypeError, "`is_causal` must be True or False; got is_causal=1"),
        ({"scale": "1"}, TypeError, "`scale` must be a real number; got scale='1'"),
        ({"scale": True}, TypeError, "`scale` must be a real number"),
        ({"scale": np.True_}, TypeError, "`scale` must be a real number"),
        ({"scale": np.dtype("bfloat16").type(1)}, TypeError, "`scale` must be a real number"),
        ({"scale": float("nan")}, ValueError, "`scale` must be finite; got scale=nan"),
        ({"scale": float("inf")}, ValueError, "`scale` must be finite"),
        ({"scale": ones(4, 1, 1, dtype=np.int64)}, TypeError, "`scale` must be one of float16"),
        ({"scale": ones(1, 1, 3, 5)}, ValueError, r"`scale` must broadcast to \(..., Hq, L, 1\)"),
        ({"softcap": -1.0}, ValueError, "`softcap` must be positive, or None or 0 for off; got softcap=-1.0"),
        ({"softcap": float("inf")}, ValueError, "`softcap` must be finite"),
        ({"softcap": ones(1)}, TypeError, "`softcap` must be a real number"),
        ({"implementation": "native"}, ValueError, "`implementation` must be None or 'xp'.*'native'"),
        ({"implementation": 3}, ValueError, "`implementation` must be None(, 'xp', 'native' or 'torch'| or 'xp'); got implementation=3"),
        ({"sinks": ones(3)}, ValueError, r"`sinks` must broadcast to \(..., Hq\); got sinks.shape=\(3,\)"),
        ({"sinks": ones(4, 1)}, ValueError, r"`sinks` must broadcast to \(..., Hq\)"),
        ({"sinks": ones(4, dtype=int)}, TypeError, "`sinks` must be one of float16.*int64"),
        ({"sinks": ones(4, dtype=float)}, TypeError, "`sinks` must have the dtype of `query`.*float64"),
        ({"sinks": 0.0}, TypeError, "`sinks` must be a plain array.*got sinks=0.0"),
        ({"dropout_p": -0.1}, ValueError, "`dropout_p` must be between 0 and 1; got dropout_p=-0.1"),
        ({"dropout_p": 1.1}, ValueError, "`dropout_p` must be between 0 and 1"),
        ({"dropout_p": float("nan")}, ValueError, "`dropout_p` must be finite"),
        ({"dropout_p": True}, TypeError, "`dropout_p` must be a real number"),
        ({"softmax_dtype": "float16"}, ValueError, "`softmax_dtype` must be None, or .* no narrower.*softmax_dtype=float16"),
        ({"query": Q.astype(float), "key": K.astype(float), "value": V.astype(float), "softmax_dtype": "float32"}, ValueError, "no narrower than the scores; got softmax_dtype=float32, scores=float64"),
        ({"softmax_dtype": "int32"}, ValueError, "`softmax_dtype` must be"),
    ],
)  # fmt: skip
def test_refused(change: dict[str, Any], error: type[Exception], words: str) -> None:
    arguments = {"query": Q, "key": K, "value": V} | change
    for function in (scaled_dot_product_attention, attention_state):
        with pytest.raises(error, match=f"^{function.__name__}: .*{words}"):
            function(**arguments)
    if "value" not in words and "value" not in change:
        del arguments["value"]
        with pytest.raises(error, match=f"^attention_weights: .*{words.replace(', `value`', '')}"):
            attention_weights(**arguments)


@pytest.mark.filterwarnings("ignore:the matrix subclass:PendingDeprecationWarning")
@pytest.mark.parametrize("name", ["query", "key", "value", "attn_mask", "bias"])
@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda x: np.ma.MaskedArray(x), "numpy.ma.*MaskedArray.*Its own mask would be ignored"),
        (lambda x: np.matrix(x), "numpy.*matrix.*matrix product"),
        (lambda x: x.tolist(), r"a list of length.*Convert the list: numpy.asarray\(\w+\)"),
        (lambda _: "text", "'text'"),
        (lambda x: x[0, 0].item(), r"got \w+=-?\d"),
    ],
)
def test_no_plain_array(name: str, make: Any, words: str) -> None:
    arguments = {"query": ones(3, 8), "key": ones(5, 8), "value": ones(5, 6)}
    arguments[name] = make(ones(3, 5) if name in ("attn_mask", "bias") else arguments[name])
    with pytest.raises(
        TypeError,
        match=f"scaled_dot_product_attention: `{name}` must be (a mask or |a bias or )?a plain array.*{words}",
    ):
        scaled_dot_product_attention(**arguments)


def test_a_mask_is_shown_as_it_is_written() -> None:
    """Unless it is long."""
    x = ones(3, 8)
    with pytest.raises(TypeError, match=r"got mask=causal\(2\) & padding\(3\)\. Write attn_mask=\.\.\."):
        scaled_dot_product_attention(x, x, x, mask=masks.causal(2) & masks.padding(3))
    long = masks.causal()
    for number in range(20):
        long = long & masks.causal(number)
    with pytest.raises(TypeError, match=r"got mask=sdpa_xp\.masks\.\w+\.\w+\. Write"):
        scaled_dot_product_attention(x, x, x, mask=long)


@pytest.mark.filterwarnings("ignore:The PyTorch API of MaskedTensors:UserWarning")
@pytest.mark.needs("torch")
@pytest.mark.parametrize("name", ["query", "key", "value", "attn_mask", "bias"])
def test_no_masked_tensor(name: str) -> None:
    import torch
    from torch.masked import masked_tensor

    arguments = dict.fromkeys(("query", "key", "value"), torch.ones(3, 3))
    arguments[name] = masked_tensor(torch.ones(3, 3), torch.eye(3, dtype=torch.bool))
    with pytest.raises(TypeError, match=rf"`{name}` must be .*plain array.*get_data\(\).*get_mask\(\)"):
        scaled_dot_product_attention(**arguments)
    with pytest.raises(TypeError, match=r"^KVCache: `key` must be a plain array.*get_mask\(\)"):
        KVCache(arguments[name], torch.ones(3, 3))


@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support")
@pytest.mark.parametrize("how", ["to_sparse", "to_sparse_csr"])
@pytest.mark.needs("torch")
def test_sparse_tensors(how: str) -> None:
    import torch

    x = torch.ones((3, 8))
    for arguments in ({"query": getattr(x, how)()}, {"bias": getattr(torch.ones((3, 3)), how)()}):
        with pytest.raises(TypeError, match=r"must be a (bias or a )?plain array.*to_dense"):
            scaled_dot_product_attention(**({"query": x, "key": x, "value": x} | arguments))


@pytest.mark.parametrize("dtype", [object, "U1"])
def test_no_numbers(dtype: Any) -> None:
    x = np.zeros((3, 8), dtype)
    with pytest.raises(TypeError, match="`query` must be one of float16, bfloat16, float32, float64"):
        scaled_dot_product_attention(x, x, x)


@pytest.mark.parametrize("name", ["key", "value", "attn_mask", "bias", "scale"])
@pytest.mark.needs("torch")
def test_mixed_libraries(name: str) -> None:
    torch = LIBRARIES["torch"][1]()
    arguments = {"query": ones(3, 8), "key": ones(5, 8), "value": ones(5, 6)}
    arguments[name] = torch.put(arguments.get(name, ones(1, 1)))
    words = f"`query` and `{name}` must be arrays of one library; got query=numpy.ndarray, {name}=torch.Tensor"
    with pytest.raises(TypeError, match=words):
        scaled_dot_product_attention(**arguments)


@pytest.mark.parametrize("name", ["key", "value", "attn_mask", "bias", "scale"])
@pytest.mark.needs("array_api_strict")
def test_mixed_devices(name: str) -> None:
    first, other = (LIBRARIES[f"strict-{device}"][1]() for device in ("CPU_DEVICE", "device1"))
    arrays = {"query": ones(3, 8), "key": ones(5, 8), "value": ones(5, 6)}
    arrays.setdefault(name, ones(1, 1))
    placed = {key: (other if key == name else first).put(x) for key, x in arrays.items()}
    with pytest.raises(ValueError, match=f"`query` and `{name}` must be on one device.*CPU_DEVICE.*device1"):
        scaled_dot_product_attention(**placed)


def test_a_length_of_none() -> None:
    """The standard lets a lazy library say it for a length that it does not know."""

    class Lazy:
        shape, ndim, dtype, device = (None, 8), 2, np.dtype("float32"), "cpu"

        def __array_namespace__(self, api_version: str | None = None) -> Any:
            return np

    x: Any = Lazy()
    with pytest.raises(
        ValueError, match=r"the lengths of `query` must be known; got query.shape=\(None, 8\)\.$"
    ):
        scaled_dot_product_attention(x, x, x)


def test_refused_on_every_library(library: Library) -> None:
    """One message of each kind, where dtypes and shapes are the library's own."""
    x = ones(3, 8)
    for arrays, error, words in [
        ((x, ones(5, 7), ones(5, 7)), ValueError, r"agree on axis -1 \(E\)"),
        ((x.astype(np.int32), x, x), TypeError, "`query` must be one of float16"),
    ]:
        with pytest.raises(error, match=words):
            library.call(scaled_dot_product_attention, *arrays)
    with pytest.raises(TypeError, match="integer mask is ambiguous"):
        library.call(scaled_dot_product_attention, x, x, x, attn_mask=np.ones((3, 3), np.int32))


def test_nothing_is_computed_before_the_checks(monkeypatch: pytest.MonkeyPatch) -> None:
    def work(*_: Any, **__: Any) -> None:
        raise AssertionError("work began")

    override(monkeypatch, "attend_portably", work)
    with pytest.raises(ValueError, match="softcap"):
        scaled_dot_product_attention(Q, K, V, softcap=-1)
    with pytest.raises(AssertionError, match="work began"):
        scaled_dot_product_attention(Q, K, V)
