"""What sdpa_xp asks of a library that it does not know: no more than docs/how-to/add-a-backend.md says.

The library here wraps NumPy, and refuses everything that the section "What an array must have" does not list.
"""

from __future__ import annotations

import inspect
import operator
import re
import types
from collections.abc import Callable
from typing import Any

import array_api_compat.numpy as np_compat
import numpy as np
import pytest
from internals import Namespace, cut_small

from sdpa_xp import (
    KVCache,
    PagedKVCache,
    attention_scores,
    attention_state,
    attention_weights,
    biases,
    dot_product_attention,
    masks,
    merge_states,
    positional,
    scaled_dot_product_attention,
    scaled_dot_product_attention_jvp,
    scaled_dot_product_attention_laplacian,
    scaled_dot_product_attention_vjp,
    varlen_attention,
    varlen_attention_state,
)

SCALARS = {"where": ("x", "y"), "clip": ("min", "max")}
"""The arguments of functions that may be Python scalars in the place of arrays, as the page lists them."""
NO_ONE_DTYPE = {"where": ("condition",), "take": ("indices",), "take_along_axis": ("indices",)}
"""The arguments whose dtype may be another than that of the other arrays."""
NUMBERS = (bool, int, float)


class Array:
    """An array of the library."""

    def __init__(self, data: np.ndarray) -> None:
        self.data = data

    shape = property(lambda self: self.data.shape)
    ndim = property(lambda self: self.data.ndim)
    dtype = property(lambda self: self.data.dtype)
    device = "cpu"

    def __array_namespace__(self, api_version: str | None = None) -> Any:
        del api_version
        return minimal

    def __getitem__(self, index: Any) -> Array:
        return Array(np.asarray(self.data[checked_index(index, self.ndim)]))

    def __setitem__(self, index: Any, value: Any) -> None:
        assert type(value) is Array
        assert value.dtype == self.dtype
        self.data[checked_index(index, self.ndim)] = value.data


def checked_index(index: Any, ndim: int) -> Any:
    parts = index if isinstance(index, tuple) else (index,)
    for part in parts:
        assert part is Ellipsis or type(part) in (int, slice), f"an index of {type(part)}"
        assert not isinstance(part, slice) or (part.step or 1) > 0
    assert Ellipsis in parts or len(parts) == ndim, "an index that leaves axes out without `...`"
    return index


def one_dtype(*values: Any) -> None:
    assert len({value.dtype for value in values if type(value) is Array}) < 2, "arrays of several dtypes"


def binary(function: Callable[..., Any], reflected: bool) -> Callable[..., Any]:
    def method(self: Array, other: Any) -> Any:
        assert type(other) in (Array, *NUMBERS), f"an operand of {type(other)}"
        one_dtype(self, other)
        values = self.data, other.data if type(other) is Array else other
        return Array(np.asarray(function(*reversed(values) if reflected else values)))

    return method


def unary(function: Callable[..., Any]) -> Callable[..., Any]:
    def method(self: Array) -> Any:
        result = function(self.data)
        return Array(np.asarray(result)) if isinstance(result, np.ndarray | np.generic) else result

    return method


def checked(name: str) -> Callable[..., Any]:
    """Return the function of NumPy, which refuses what the standard's function of 2023.12 refuses."""
    signature = inspect.signature(getattr(Namespace, name))

    def function(*arguments: Any, **keywords: Any) -> Array:
        bound = signature.bind(None, *arguments, **keywords).arguments
        arrays = []
        for argument, value in list(bound.items())[1:]:  # the first is `self` of the protocol
            annotation = str(signature.parameters[argument].annotation)
            may_be_an_array = ("Array" in annotation and "Sequence" not in annotation) or name == "clip"
            if may_be_an_array:
                is_scalar = argument in SCALARS.get(name, ()) and type(value) in NUMBERS
                assert is_scalar or type(value) is Array, f"{name}: `{argument}` is {type(value)}"
            if argument not in NO_ONE_DTYPE.get(name, ()):
                arrays += value if isinstance(value, list | tuple) else [value]
        one_dtype(*arrays)
        assert any(type(value) is Array for value in arrays) or not {"x", "y"} <= {*bound}, f"{name} of scalars"
        keywords = {key: opened(value) for key, value in keywords.items()}
        return Array(np.asarray(getattr(np_compat, name)(*map(opened, arguments), **keywords)))

    return function


def opened(value: Any) -> Any:
    if isinstance(value, list | tuple):
        return type(value)(map(opened, value))
    return value.data if type(value) is Array else value


OPERATORS = "add sub mul truediv floordiv mod matmul and_ or_ xor rshift le lt ge gt eq ne"
for name in OPERATORS.split():
    method = name.rstrip("_")
    setattr(Array, f"__{method}__", binary(getattr(operator, name), reflected=False))
    if method not in ("le", "lt", "ge", "gt", "eq", "ne"):
        setattr(Array, f"__r{method}__", binary(getattr(operator, name), reflected=True))
for name, converted in {"neg": operator.neg, "invert": operator.invert, "bool": bool, "int": int}.items():
    setattr(Array, f"__{name}__", unary(converted))
Array.__float__ = unary(float)  # type: ignore[attr-defined]

minimal = types.ModuleType("minimal")
FUNCTIONS = [name for name in vars(Namespace) if callable(vars(Namespace)[name]) and name[0] != "_"]
for name in FUNCTIONS:
    setattr(minimal, name, checked(name))
for name in ("bool", "int32", "int64", "float32", "float64"):
    setattr(minimal, name, np.dtype(name))
minimal.__array_namespace_info__ = np_compat.__array_namespace_info__  # type: ignore[attr-defined]


LENGTHS, IDS = np.asarray([5, 7]), np.asarray([[0, 0, 1, 1, 1, 2, 2], [0, 1, 1, 1, 1, 1, 3]])


LAST_IS_INF = np.where(np.arange(7)[:, None] < 6, 0, np.inf)


def beside(array: Any, values: np.ndarray) -> Any:
    return Array(values) if type(array) is Array else values


def relative(value: Any) -> biases.Bias:
    return biases.relative(value[0, 0, :, :4], bidirectional=False, max_distance=16)


def attended(q: Any, k: Any, v: Any, **rules: Any) -> Any:
    return scaled_dot_product_attention(q, k, v, **rules)


def merged(q: Any, k: Any, v: Any) -> Any:
    halves = (slice(0, 3), slice(3, 7))
    states = [attention_state(q, k[..., half, :], v[..., half, :], lse_base=2) for half in halves]
    return merge_states(states, lse_base=2).output


def derived(q: Any, k: Any, v: Any, **rules: Any) -> Any:
    output, pullback = scaled_dot_product_attention_vjp(q, k, v, **rules)
    return pullback(output)["key"]


def pushed(q: Any, k: Any, v: Any, **rules: Any) -> Any:
    return scaled_dot_product_attention_jvp(q, k, v, {"query": k, "key": v, "value": q}, **rules)[1]


def bent(q: Any, k: Any, v: Any) -> Any:
    pairs = {"query": [k, q], "key": [v, k], "value": [q, v]}
    tangents = {name: q.__array_namespace__().stack(pair, axis=0) for name, pair in pairs.items()}
    return scaled_dot_product_attention_laplacian(q, k, v, tangents, laplacians={"key": v}, is_causal=True)[2]


def cached(q: Any, k: Any, v: Any, **options: Any) -> Any:
    cache = KVCache(k, v, rotary=positional.Rotary(8), **options)
    return cache.append(k, v, in_place=bool(options)).attend(q, is_causal=True)


def paged(q: Any, k: Any, v: Any) -> Any:
    cache = PagedKVCache(k, v, [[0], [1]], [2, 4]).append(k[..., :1, :], v[..., :1, :])
    return cache.attend(q[..., :1, :])


def packed(q: Any, k: Any, v: Any) -> Any:
    return varlen_attention(q[0, ...], k[0, ...], v[0, ...], [0, 3, 7], [0, 5, 7], layout="...HLE")


def packed_state(q: Any, k: Any, v: Any) -> Any:
    starts = [0, 3, 7], [0, 5, 7]
    return varlen_attention_state(q[0, ...], k[0, ...], v[0, ...], *starts, layout="...HLE").lse


def ragged(q: Any, k: Any, v: Any) -> Any:
    cache = PagedKVCache(k, v, [[0], [1]], [2, 4])
    cache = cache.append(k[0, :, :3, :], v[0, :, :3, :], cu_seqlens_k=[0, 1, 3])
    return cache.attend_state(q[0, :, :3, :], cu_seqlens_q=[0, 1, 3]).lse


FEATURES: dict[str, Callable[..., Any]] = {
    "plain": attended,
    "scale, softcap": lambda q, k, v: attended(q, k, v, scale=0.3, softcap=5.0),
    "sinks": lambda q, k, v: attended(q, k, v, sinks=v[0, :, 0, 0]),
    "no keys": lambda q, k, v: attended(q, k[..., :0, :], v[..., :0, :]),
    "softmax_dtype": lambda q, k, v: attended(q, k, v, softmax_dtype=np.dtype("float64")),
    "causal": lambda q, k, v: attended(q, k, v, is_causal=True),
    "window": lambda q, k, v: attended(q, k, v, attn_mask=masks.sliding_window(2, 1)),
    "chunked, dilated": lambda q, k, v: attended(q, k, v, attn_mask=masks.chunked(3) | masks.dilated(2)),
    "padding": lambda q, k, v: attended(q, k, v, attn_mask=masks.causal() & masks.padding([0, 5])),
    "prefix": lambda q, k, v: attended(q, k, v, attn_mask=masks.causal() | masks.prefix([2, 3])),
    "documents": lambda q, k, v: attended(q, k, v, attn_mask=masks.document(IDS[0].tolist())),
    "documents in an array": lambda q, k, v: attended(q, k, v, attn_mask=masks.document(beside(q, IDS))),
    "lengths in an array": lambda q, k, v: attended(q, k, v, attn_mask=masks.padding(beside(q, LENGTHS))),
    "function as a mask": lambda q, k, v: attended(
        q, k, v, attn_mask=masks.from_function(lambda b, h, i, j: (i + j + b * h) % 3 != 0)
    ),
    "array as a mask": lambda q, k, v: attended(
        q, k, v, attn_mask=q @ k.__array_namespace__().matrix_transpose(k) > 0
    ),
    "array as a bias": lambda q, k, v: attended(q, k, v, bias=q[..., :7]),
    "alibi": lambda q, k, v: attended(q, k, v, bias=biases.alibi(4)),
    "relative": lambda q, k, v: attended(q, k, v, bias=relative(v)),
    "function as a bias": lambda q, k, v: attended(
        q, k, v, bias=biases.from_function(lambda s, b, h, i, j: s * 0.5)
    ),
    "dropout": lambda q, k, v: attended(q, k, v, dropout_p=0.3, rng=np.random.default_rng(0)),
    "state": lambda q, k, v: attention_state(q, k, v, is_causal=True).lse,
    "merged states": merged,
    "weights": lambda q, k, v: attention_weights(q, k, is_causal=True),
    "scores": lambda q, k, v: attention_scores(q, k, is_causal=True),
    "gradients": lambda q, k, v: derived(q, k, v, attn_mask=masks.causal() & masks.padding([0, 5])),
    "gradients of a bias": lambda q, k, v: derived(q, k, v, bias=relative(v)),
    "gradients, dropout": lambda q, k, v: derived(q, k, v, dropout_p=0.3, rng=np.random.default_rng(0)),
    "tangents": lambda q, k, v: pushed(q, k, v, attn_mask=masks.causal() & masks.padding([0, 5])),
    "tangents, dropout": lambda q, k, v: pushed(q, k, v, dropout_p=0.3, rng=np.random.default_rng(0)),
    "laplacian": bent,
    "dot_product_attention": lambda q, k, v: dot_product_attention(q, k, v, query_seq_lengths=[2, 3]),
    "varlen_attention": packed,
    "varlen_attention_state": packed_state,
    "KVCache": cached,
    "KVCache with room": lambda q, k, v: cached(q, k, v, capacity=16),
    "PagedKVCache": paged,
    "PagedKVCache, packed": ragged,
    "sinusoidal": lambda q, k, v: positional.sinusoidal(7, 8, like=q),
    "learned": lambda q, k, v: positional.learned(q[0, 0, ...], [0, 2, 1]),
    "mask as an array": lambda q, k, v: masks.to_array(masks.causal(), (7, 7), like=q),
    "bias as an array": lambda q, k, v: biases.to_array(biases.alibi(4), (4, 7, 7), like=q),
    "inf in masked keys": lambda q, k, v: attended(
        q, k, v + beside(v, LAST_IS_INF.astype(v.dtype)), attn_mask=masks.causal()
    ),
}


@pytest.fixture
def inputs() -> np.ndarray:
    return np.random.default_rng(3).standard_normal((3, 2, 4, 7, 8))


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "float64"])
@pytest.mark.parametrize("feature", FEATURES)
def test_no_more_is_needed(feature: str, dtype: str, inputs: np.ndarray, monkeypatch: Any) -> None:
    cut_small(monkeypatch)
    arrays = inputs.astype(dtype)
    expected = FEATURES[feature](*arrays)
    result = FEATURES[feature](*map(Array, arrays))
    assert type(result) is Array
    assert result.dtype == expected.dtype
    as_float64 = [np.asarray(x).astype(np.float64) for x in (result.data, expected)]
    tolerance = {"float16": 4e-3, "bfloat16": 3e-2}.get(dtype, 1e-5)
    np.testing.assert_allclose(*as_float64, rtol=tolerance, atol=tolerance)


def named(function: str, name: str) -> str:
    rule = f"{function}: the namespace of the arrays must have `{name}` for this call; got namespace=minimal."
    return f"^{re.escape(rule)} Define it there; the page "


@pytest.mark.parametrize(
    ("function", "name", "feature"),
    [
        ("scaled_dot_product_attention", "arange", FEATURES["causal"]),
        ("scaled_dot_product_attention", "int32", FEATURES["causal"]),
        ("scaled_dot_product_attention", "exp", attended),
        ("scaled_dot_product_attention", "any", attended),
        ("scaled_dot_product_attention", "arange", FEATURES["dropout"]),
        ("dot_product_attention", "permute_dims", FEATURES["dot_product_attention"]),
        ("attention_state", "log", FEATURES["state"]),
        ("merge_states", "maximum", merged),
        ("attention_weights", "exp", FEATURES["weights"]),
        ("attention_scores", "matrix_transpose", FEATURES["scores"]),
        ("scaled_dot_product_attention_vjp", "matrix_transpose", derived),
        ("varlen_attention", "concat", packed),
        ("KVCache.attend", "exp", cached),
        ("PagedKVCache.attend", "exp", paged),
    ],
)
def test_a_missing_name_is_named_with_the_function(
    function: str, name: str, feature: Callable[..., Any], inputs: np.ndarray, monkeypatch: Any
) -> None:
    monkeypatch.delattr(minimal, name)
    with pytest.raises(AttributeError, match=named(function, name)) as error:
        feature(*map(Array, inputs))
    assert error.value.name == name
    assert error.value.obj is minimal
    assert str(error.value.__cause__) == f"module 'minimal' has no attribute '{name}'"


def test_a_pullback_names_what_is_missing(inputs: np.ndarray, monkeypatch: Any) -> None:
    output, pullback = scaled_dot_product_attention_vjp(*map(Array, inputs))
    monkeypatch.delattr(minimal, "exp")
    with pytest.raises(AttributeError, match=named("scaled_dot_product_attention_vjp", "exp")):
        pullback(output)


def test_an_attribute_error_of_a_caller_stays(inputs: np.ndarray) -> None:
    mask = masks.from_function(lambda b, h, i, j: i.no_such_method())
    with pytest.raises(AttributeError, match=r"^'Array' object has no .* 'no_such_method'") as error:
        scaled_dot_product_attention(*map(Array, inputs), mask)
    assert error.value.__cause__ is None


def test_a_namespace_that_does_not_tell_its_dtypes_names_the_function(
    inputs: np.ndarray, monkeypatch: Any
) -> None:
    monkeypatch.delattr(minimal, "__array_namespace_info__")
    query, key, value = map(Array, inputs)
    rule = r"the namespace minimal must have __array_namespace_info__\(\), which"
    with pytest.raises(TypeError, match=f"^scaled_dot_product_attention: {rule}"):
        scaled_dot_product_attention(query, key, value, softmax_dtype=minimal.float64)
    with pytest.raises(TypeError, match=f"^to_array: {rule}"):
        masks.to_array(masks.causal(), (3, 3), like=query)
    with pytest.raises(TypeError, match=f"^sinusoidal: {rule}"):
        positional.sinusoidal(3, 4, like=query)


@pytest.mark.parametrize("returned", [None, object()], ids=["None", "an object"])
def test_a_method_that_returns_no_namespace(returned: object, inputs: np.ndarray, monkeypatch: Any) -> None:
    monkeypatch.setattr(Array, "__array_namespace__", lambda self, api_version=None: returned)
    rule = r"`query\.__array_namespace__\(\)` must return a namespace that has a `__name__`, such as a module"
    got = re.escape(f"; got query.__array_namespace__()={returned}.")
    with pytest.raises(TypeError, match=f"^scaled_dot_product_attention: {rule}{got}$"):
        scaled_dot_product_attention(*map(Array, inputs))


@pytest.mark.parametrize("name", ["", "Float"])
def test_a_dtype_without_a_name_that_can_be_read(name: str, inputs: np.ndarray, monkeypatch: Any) -> None:
    class Dtype:
        def __str__(self) -> str:
            return name or object.__repr__(self)

    monkeypatch.setattr(Array, "dtype", Dtype())
    hint = r"sdpa_xp reads no standard name in it: add the attribute `name`, such as 'float32'\.$"
    with pytest.raises(TypeError, match=hint) as error:
        scaled_dot_product_attention(*map(Array, inputs))
    assert "Convert" not in str(error.value)
    monkeypatch.undo()
    with pytest.raises(TypeError, match=r"Convert it first: xp\.astype\(query, xp\.float32\)\.$"):
        scaled_dot_product_attention(*(Array(array.astype(np.int32)) for array in inputs))
