"""Jets: the derivatives of functions of this library that get them, and the rules that compute these."""

from __future__ import annotations

import math
import operator
from collections import OrderedDict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
from differentiable_calls import FEW, MANY
from internals import Jet, cut_small, kind_of_jets
from libraries import LIBRARIES, Library

import sdpa_xp
from sdpa_xp import AttentionState, KVCache, biases, jvp, layers, masks, positional
from sdpa_xp import scaled_dot_product_attention as attention
from sdpa_xp import scaled_dot_product_attention_jvp as attention_jvp
from sdpa_xp import scaled_dot_product_attention_laplacian as laplacian
from sdpa_xp import scaled_dot_product_attention_vjp as vjp
from sdpa_xp.errors import ArgumentTypeError

SHAPES = ((2, 4, FEW, 8), (2, 2, MANY, 8), (2, 2, MANY, 8))
RNG = np.random.default_rng(7)
GAPS = masks.from_function(lambda _b, _h, i, j: (i != 1) & ((i + j) % 3 != 0))
"""The second query attends to no key."""
WEIGHTS = RNG.standard_normal((8, 8))
PRIMALS, TANGENTS = (tuple(RNG.standard_normal(shape) for shape in SHAPES) for _ in range(2))


def decode(q: Any, k: Any, v: Any) -> Any:
    cache = KVCache(k[..., :3, :], v[..., :3, :], rotary=positional.Rotary(8))
    cache = cache.append(k[..., 3:7, :], v[..., 3:7, :])
    return cache.attend(q[..., :2, :]), cache.attend_state(q[..., :1, :]), cache.key


def project(q: Any, k: Any, v: Any) -> Any:
    layer = layers.MultiHeadAttention.init(np.random.default_rng(0), 8, num_heads=2, like=WEIGHTS)
    return layer(q[:, 0, ...], k[:, 0, ...], v[:, 1, ...])


def merge(q: Any, k: Any, v: Any) -> Any:
    halves = (slice(None, 4), slice(4, None))
    return sdpa_xp.merge_states([sdpa_xp.attention_state(q, k[..., n, :], v[..., n, :]) for n in halves])


def pull(q: Any, k: Any, v: Any) -> Any:
    output, pullback = vjp(q, k, v, GAPS, softcap=1.5)
    return pullback(output)


def pack(q: Any, k: Any, v: Any) -> Any:
    starts = [0, 2, FEW], [0, 4, MANY]
    parts = (space(x).permute_dims(x[0, ...], (1, 0, 2)) for x in (q, k, v))
    return sdpa_xp.varlen_attention(*parts, *starts)


def learn(q: Any, k: Any, v: Any) -> Any:
    slopes, table, sinks = v[0, 0, :4, 0], v[0, 0, :4, :4], k[0, 0, 0, :4]
    bias = biases.alibi(slopes) + biases.relative(table)
    return attention(q, k, v, masks.sliding_window(3, 2), bias=bias, sinks=sinks, scale=k[0, 0, :1, :1])


def count(q: Any, k: Any, _v: Any) -> Any:
    return sdpa_xp.attention_statistics(q, k, of=("row_max", "entropy", "key_sums"), is_causal=True)


def page(q: Any, k: Any, v: Any) -> Any:
    """The pool has no derivatives, the new tokens have some."""
    pool = [library_array(k, np.ones((6, 2, 4, 8))) for _ in "kv"]
    cache = sdpa_xp.PagedKVCache(*pool, [[0, 1, 2], [3, 4, 5]], [0, 0])
    return cache.append(k[..., :7, :], v[..., :7, :]).attend(q)


def library_array(like: Any, numbers: np.ndarray) -> Any:
    """The numbers without derivatives, in the library of `like`."""
    like = getattr(like, "value", like)
    return numbers if isinstance(like, np.ndarray) else like.__array_namespace__().asarray(numbers)


def compose(x: Any, y: Any, z: Any) -> Any:
    """Functions of the array API, and operators in all forms."""
    xp = space(x)
    x = x * y
    x = x + xp.tanh(z) ** 2
    x = x - xp.max(x, axis=(0, 1), keepdims=True)
    rows = [xp.sum(row * row) for row in x]
    total = xp.stack(rows) + len(x) + xp.asarray(xp.where(xp.isfinite(z[:, 0]), z[:, 0], 0.0), dtype=z.dtype)
    total = total + xp.full_like(x[:, 0], 2.0) * xp.linspace(0.0, 1.0, 5)
    powers = xp.pow(xp.abs(y) + 1.0, xp.abs(z)), 2.0 ** xp.sin(x), (x * x) ** 0, y**1
    return total, powers, xp.min(x.mT @ y, axis=1), x // 1.0


CALLS: dict[str, Callable[..., Any]] = {
    "attention": lambda q, k, v: attention(q, k, v, is_causal=True, softcap=2.0),
    "state": lambda q, k, v: sdpa_xp.attention_state(q, k, v, GAPS),
    "weights": lambda q, k, _v: {"weights": sdpa_xp.attention_weights(q, k, attn_mask=GAPS)},
    "scores": lambda q, k, _v: [sdpa_xp.attention_scores(q, k, softcap=3.0)],
    "statistics": count,
    "packed": pack,
    "cache": decode,
    "paged": page,
    "largest weights": lambda q, k, _v: sdpa_xp.attention_statistics(q, k, of="top_keys", top_k=3).top_keys[0],
    "second order": lambda q, k, v: vjp(q, k, v, is_causal=True)[1].jvp(q, {"query": q, "key": k}),
    "layer": project,
    "merged": merge,
    "gradients": pull,
    "learned": learn,
    "functions": lambda q, k, v: compose(2.0 * q[0, 0, :5], k[0, 0, :5], v[1, 1, :5]),
    "operators": lambda q, k, v: (k + 2 * v, -k / (v * v + 1), (k[0, 0] @ v[0, 0].T) ** 2, q[0, 1:, ::2]),
}
each_call = pytest.mark.parametrize("name", CALLS)


def arrays_in(value: Any) -> Iterator[np.ndarray]:
    parts = value.values() if isinstance(value, dict) else value if isinstance(value, tuple | list) else None
    if parts is None and value is not None:
        yield np.asarray(value)
    for part in parts or ():
        yield from arrays_in(part)


def differences(function: Callable[..., Any], step: float = 1e-5) -> list[np.ndarray]:
    """Central differences."""
    there, back = (
        arrays_in(function(*(x + sign * t for x, t in zip(PRIMALS, TANGENTS, strict=True))))
        for sign in (step, -step)
    )
    with np.errstate(invalid="ignore"):
        return [(x - y) / (2 * step) for x, y in zip(there, back, strict=True)]


def assert_near(computed: Any, expected: list[np.ndarray], atol: float) -> None:
    computed = [*arrays_in(computed)]
    assert [x.shape for x in computed] == [x.shape for x in expected]
    for x, y in zip(computed, expected, strict=True):
        finite = np.isfinite(y)
        np.testing.assert_allclose(x[finite], y[finite], rtol=0, atol=atol * max(1.0, np.abs(y[finite]).max()))


@each_call
@pytest.mark.parametrize("cut", [False, True], ids=["one tile", "small tiles"])
def test_central_differences(monkeypatch: pytest.MonkeyPatch, name: str, cut: bool) -> None:
    function, expected = CALLS[name], differences(CALLS[name])
    if cut:
        cut_small(monkeypatch)
    output, tangent = jvp(function, PRIMALS, TANGENTS)
    plain = function(*PRIMALS)
    assert type(output) is type(tangent) is type(plain)
    assert_near(output, [*arrays_in(plain)], 1e-14)
    assert_near(tangent, expected, 1e-8)


@pytest.mark.parametrize("name", [name for name in CALLS if name != "layer"])  # its weights are NumPy's
@pytest.mark.needs("jax")
def test_as_jax(name: str) -> None:
    """On arrays of JAX and inside its jit, where JAX has the derivative as well."""
    library = LIBRARIES["jax-x64"][1]()
    import jax

    with library.guard():
        primals, tangents = (tuple(map(library.put, part)) for part in (PRIMALS, TANGENTS))
        expected = [library.get(x) for x in jax.tree.leaves(jax.jvp(CALLS[name], primals, tangents))]
        for push in (jvp, jax.jit(jvp, static_argnums=0)):
            computed = [library.get(x) for x in jax.tree.leaves(push(CALLS[name], primals, tangents))]
            for x, y in zip(computed, expected, strict=True):
                size = max(1.0, np.abs(y[np.isfinite(y)]).max())
                np.testing.assert_allclose(x, y, rtol=0, atol=1e-12 * size)


def test_each_library(library: Library) -> None:
    if library.lazy:
        pytest.skip("refused: test_refusals")
    expected = differences(CALLS["state"])
    with library.guard():
        primals, tangents = (tuple(library.put(x.astype("f4")) for x in part) for part in (PRIMALS, TANGENTS))
        state, tangent = jvp(CALLS["state"], primals, tangents)
        assert isinstance(state, AttentionState)
        assert isinstance(tangent, AttentionState)
        assert_near([library.get(x) for x in tangent], expected, 2e-5)


def test_jvp_of_jvp(monkeypatch: pytest.MonkeyPatch) -> None:
    """The second derivative, with tiles and without; and the third of a number."""

    def slope(*primals: Any) -> Any:
        return jvp(CALLS["attention"], primals, TANGENTS)[1]

    expected = differences(slope)
    cut_small(monkeypatch)
    assert_near(jvp(slope, PRIMALS, TANGENTS)[1], expected, 1e-7)
    assert_near(
        jvp(lambda *x: jvp(CALLS["state"], x, TANGENTS)[0], PRIMALS, TANGENTS)[1],
        jvp(CALLS["state"], PRIMALS, TANGENTS)[1],
        1e-12,
    )

    one = np.ones(1)

    def derivative(function: Callable[[Any], Any]) -> Callable[[Any], Any]:
        return lambda x: jvp(function, (x,), (one,))[1]

    third = derivative(derivative(derivative(lambda x: x * x * x * x)))
    np.testing.assert_allclose(third(np.asarray([2.0])), [48.0])


def test_directions_are_not_confused() -> None:
    """An array of the outer function inside of the inner one belongs to another direction."""
    one = np.ones(1)

    def outer(x: Any) -> Any:
        return jvp(lambda y: x * y, (one,), (one,))[1]

    np.testing.assert_array_equal(jvp(outer, (one,), (one,)), [[1.0], [1.0]])
    for function in (
        lambda x: jvp(lambda y: space(x).exp(x * y) + x, (one,), (one,))[1],  # x e^x
        lambda x: jvp(lambda y: space(y).where(x + y < 0, x, y + space(y).exp(y * x)) - y, (one,), (one,))[1],
        lambda x: jvp(lambda y: space(y).exp(space(x).vecdot(y, x) + 0 * x), (one,), (one,))[1],
    ):
        np.testing.assert_allclose(jvp(function, (3 * one,), (one,))[1], [4 * np.exp(3.0)])
    _, tangent = jvp(lambda x: x * jvp(lambda y: y * y, (x,), (one,))[1], (3 * one,), (one,))
    np.testing.assert_allclose(tangent, [12.0])  # of x * 2 x


def test_quantised() -> None:
    """Between two steps codes are constant, and scales have derivatives."""

    def quantise(q: Any, k: Any, v: Any) -> Any:
        return KVCache(k, v).quantised("int8").append(v, k).attend(q)

    assert_near(jvp(quantise, PRIMALS, TANGENTS)[1], differences(quantise, 1e-9), 1e-5)


def test_results_that_are_no_floating_numbers_have_no_derivatives() -> None:
    def flags(x: Any) -> Any:
        xp = space(x)
        flags = xp.isfinite(x)
        return flags, x < 1.0, x == x, xp.astype(x, xp.int64), xp.logical_not(flags), xp.argmax(x)

    for part in jvp(flags, (np.asarray([0.0, 1.0, 2.0]),), (np.ones(3),)):
        assert all(part.dtype.kind in "bi" for part in part)


def test_powers() -> None:
    """A derivative of 0 is 0, where the formula has 0 log 0 or 0 / 0."""
    x, one = np.zeros(3), np.ones(3)
    _, tangents = jvp(
        lambda x: (x**0, x**1, x**2, space(x).pow(x, np.asarray([0.0, 1.0, 2.0])), x ** (x + 1), 0 ** (x + 1)),
        (x,),
        (one,),
    )
    expected = [[0, 0, 0], [1, 1, 1], [0, 0, 0], [0, 1, 0], [1, 1, 1], [0, 0, 0]]
    np.testing.assert_array_equal(tangents, expected)


def test_mixed_dtypes() -> None:
    """The tangent has the dtype and the shape of the output."""
    x, wide = np.ones(3, np.float32), np.arange(6.0).reshape(2, 3)
    output, tangent = jvp(
        lambda x: (x * wide, x + wide, wide - x, space(x).where(wide > 2, x, wide), x / wide[1], 2 * x),
        (x,),
        (x,),
    )
    assert [(a.dtype, a.shape) for a in output] == [(a.dtype, a.shape) for a in tangent]
    assert [a.dtype.itemsize for a in output] == [8] * 5 + [4]


def test_arrays_without_axes() -> None:
    """NumPy makes scalars of them, which are no arrays."""
    x = np.asarray([0.5, 2.0])

    def function(x: Any) -> Any:
        xp = space(x)
        scale = xp.sum(x)
        return attention(*PRIMALS, scale=scale), jvp(lambda y: y * y * x[0], (scale,), (xp.ones(()),))

    step = 1e-6
    output, (tangent, (value, slope)) = jvp(function, (x,), (x,))
    there, back = (attention(*PRIMALS, scale=2.5 * (1 + sign * step)) for sign in (1, -1))
    np.testing.assert_allclose(tangent, (there - back) / (2 * step), atol=1e-8)
    np.testing.assert_allclose([value, slope], [3 * 3.125, 2 * 2.5])  # of (x_0 + x_1)^2 x_0 and its derivative
    assert output[0].dtype == np.float64
    np.testing.assert_array_equal(jvp(lambda x: x * x, (np.float64(2),), (np.float64(1),)), [4.0, 4.0])


@dataclass(frozen=True)
class Pair:
    left: Any
    right: Any


def test_outputs() -> None:
    """What holds arrays is kept, and what does not move has zeros; no result is in the memory of an input."""
    x, moved = np.asarray([1.0, 2.0]), np.asarray([3.0, 4.0])

    def function(x: Any) -> Any:
        parts = Pair(x, None), AttentionState(x[1:], x), x.shape, [2, 2.5, "name", True], np.arange(2), x * 0
        return OrderedDict(zip("abcdef", parts, strict=True))

    output, tangent = jvp(function, (x,), (moved,))
    for result, expected in ((output, x), (tangent, moved)):
        assert type(result) is OrderedDict
        assert isinstance(result["b"], AttentionState)
        np.testing.assert_array_equal(result["a"].left, expected)
        np.testing.assert_array_equal(result["b"].output, expected[1:])
        assert (result["a"].right, result["c"]) == (None, (2,))
    assert (output["d"], tangent["d"]) == ([2, 2.5, "name", True], [2, 0.0, "name", True])
    np.testing.assert_array_equal([tangent["e"], tangent["f"]], np.zeros((2, 2)))
    for result in (output, tangent):
        result["a"].left[0] = result["b"].output[0] = 9.0
    np.testing.assert_array_equal([x, moved], [[1.0, 2.0], [3.0, 4.0]])
    cache, tangent = jvp(lambda k, v: KVCache(k, v), PRIMALS[1:], TANGENTS[1:])
    for part, expected in ((cache, PRIMALS), (tangent, TANGENTS)):
        assert isinstance(part, KVCache)
        np.testing.assert_array_equal(part.key, expected[1])
        np.testing.assert_array_equal(part.value, expected[2])


@pytest.mark.needs("jax")
def test_trees_of_jax() -> None:
    """JAX does not take jets apart, where its functions would change derivatives as if they were values."""
    import jax

    x = jax.numpy.ones(3)
    for refused in (jax.numpy.exp, jax.jit(lambda x: x * x)):
        with pytest.raises(TypeError):
            jvp(refused, (x,), (x,))
    _, tangent = jvp(lambda x: jax.tree.map(lambda x: x * x, {"x": 3.0 * x}), (x,), (x,))
    np.testing.assert_array_equal(tangent["x"], 18.0)
    assert [*jvp(lambda x: [*x], (x,), (x,))[1]] == [1.0, 1.0, 1.0]


def test_attention_jvp_in_jvp() -> None:
    """The tangents of attention may be jets: then the result has their derivatives."""
    moved = dict(zip(("query", "key", "value"), TANGENTS, strict=True))

    def function(q: Any, k: Any, v: Any) -> Any:
        return attention_jvp(q, k, v, {name: 2 * x for name, x in moved.items()})[1]

    _, tangent = jvp(function, PRIMALS, TANGENTS)
    assert_near(tangent, differences(function), 1e-7)


def test_a_function_of_the_scores() -> None:
    """It gets scores without derivatives, and may only add; a mask sees no scores."""
    types: list[type] = []

    def score_mod(score: Any, _b: Any, _h: Any, i: Any, j: Any) -> Any:
        types.append(type(score))
        return score + abs(i - j) / 2

    mask = masks.from_function(lambda _b, _h, i, j: (i + j) % 3 != 0)
    rules: dict[str, Any] = {"attn_mask": mask, "bias": biases.from_function(score_mod)}
    _, tangent = jvp(lambda *x: attention(*x, **rules), PRIMALS, TANGENTS)
    assert set(types) == {np.ndarray}
    assert_near(tangent, differences(lambda *x: attention(*x, **rules)), 1e-8)


def test_arrays_without_derivatives_beside_others() -> None:
    """They are computed as without derivatives, also of dtypes that have no negative."""
    x, small = np.asarray([1.0, 2.0]), np.asarray([0, 3], np.uint8)
    nan = np.asarray([np.nan, 1.0])
    value, tangent = jvp(
        lambda x: (
            x * space(x).minimum(small, small[::-1]),
            x + space(x).maximum(nan, nan[::-1]),
            space(x).concat(x[n : n + 1] for n in range(2)),
            math.inf,
        ),
        (x,),
        (x,),
    )
    np.testing.assert_array_equal(value[0], [0.0, 0.0])
    np.testing.assert_array_equal(value[1], [np.nan, np.nan])
    np.testing.assert_array_equal(tangent[2], x)
    assert tangent[3] == 0


def test_weights_of_a_layer_move_and_its_inputs_do_not(library: Library, rng: np.random.Generator) -> None:
    if library.lazy:
        pytest.skip("refused: test_refusals")
    layer = layers.MultiHeadAttention.init(rng, 8, num_heads=2, like=np.zeros(1))
    x = rng.standard_normal((2, 5, 8))
    with library.guard():
        placed = {name: library.put(np.asarray(w, np.float32)) for name, w in layer.parameters.items()}
        of_library = layers.MultiHeadAttention.from_mapping(placed, num_heads=2)
        put = library.put(x.astype(np.float32))
    for name, weight in layer.parameters.items():
        direction = rng.standard_normal(np.shape(weight))
        moved = (layer.with_parameters({name: weight + step * direction}) for step in (1e-6, -1e-6))
        first, second = (end(x, is_causal=True) for end in moved)

        def output(w: Any, name: str = name) -> Any:
            return of_library.with_parameters({name: w})(put, is_causal=True)

        with library.guard():
            _, tangent = jvp(output, (placed[name],), (library.put(direction.astype(np.float32)),))
        np.testing.assert_allclose(library.get(tangent), (first - second) / 2e-6, rtol=0, atol=2e-5)


@pytest.mark.needs("torch")
def test_writing_into_a_tensor() -> None:
    """Torch would make another tensor, and another name of the old one would not show the derivatives."""
    import torch

    x, total = torch.ones(3), torch.zeros(3)
    for name in ("iadd", "isub", "imul", "itruediv", "ipow", "imod", "ifloordiv"):
        with pytest.raises(ArgumentTypeError, match="of torch takes no Jet"):
            jvp(lambda x, name=name: getattr(operator, name)(total, x), (x,), (x,))
    for refused in (torch.exp, lambda x: torch.add(x, total), lambda x: total.copy_(x)):
        with pytest.raises(ArgumentTypeError, match="of torch takes no Jet"):
            jvp(refused, (x,), (x,))
    _, tangent = jvp(lambda x: (total + x) * (x % 0.7) + (x > total), (x,), (x,))
    assert torch.allclose(tangent, x * 0.3 + 1)
    flags = kind_of_jets(x, 1).isfinite(Jet(kind_of_jets(x, 1), (x, x)))
    for combine in (operator.and_, operator.or_, operator.xor):
        assert combine(x > 0, flags).dtype == torch.bool


COMPILED: dict[str, Callable[..., Any]] = {
    "attention": lambda q, k, v: attention(q, k, v, is_causal=True, softcap=2.0),
    "outputs": lambda q, k, v: {"a": [attention(q, k, v), 2.0], "b": sdpa_xp.attention_weights(q, k)},
    "jvp of jvp": lambda q, k, v: jvp(lambda x: attention(x * q, k, v), (k[..., :FEW, :],), (v[..., :FEW, :],)),
}


@pytest.mark.needs("torch")
@pytest.mark.parametrize("name", COMPILED)
@pytest.mark.filterwarnings("ignore")
def test_inside_torch_compile(name: str) -> None:
    import torch

    k, v = map(torch.asarray, PRIMALS[1:])
    constant = torch.ones(8, dtype=k.dtype)

    def push(k: Any, v: Any) -> Any:
        function = COMPILED[name]
        return jvp(lambda k, v: function(constant * k[..., :FEW, :], constant + k, v), (k, v), (v, k))

    torch.compiler.reset()
    computed = torch.compile(push, fullgraph=True, backend="eager")(k, v)
    assert_near(computed, [*arrays_in(push(k, v))], 1e-12)


def test_memory_of_programs() -> None:
    """Derivatives written into memory without any would not be seen by other views of it."""
    kind = kind_of_jets(np.ones(3), 1)
    jet, memory = Jet(kind, (np.ones(3), np.ones(3))), kind.full((2, 3), 0.0)
    with pytest.raises(TypeError, match="must be made by `zeros`"):
        memory[0, ...] = jet
    squares = kind.zeros((3,)) + jet
    squares = kind.astype(squares, np.float64, copy=True)
    squares *= squares
    np.testing.assert_array_equal(kind.part(squares, 1), 2.0)


def space(x: Any) -> Any:
    return x.__array_namespace__()


ONE = "abs cos exp expm1 floor isnan log log1p mean negative sin sinh cosh tan atan"
TWO = "add divide matmul maximum minimum multiply subtract vecdot"
FUNCTIONS: dict[str, Callable[..., Any]] = {
    **{name: lambda xp, x, _y, name=name: getattr(xp, name)(x) for name in ONE.split()},
    **{name: lambda xp, x, y, name=name: getattr(xp, name)(x, y) for name in TWO.split()},
    "others": lambda xp, x, _y: xp.sqrt(x) + xp.square(x) + xp.tanh(x) + xp.sum(x, axis=0),
    "pow": lambda xp, x, _y: xp.pow(x, 3),
    "max": lambda xp, x, _y: (xp.max(x), xp.max(x, axis=-1), xp.max(x, axis=0, keepdims=True)),
    "min": lambda xp, x, _y: (xp.min(x, axis=-1), xp.min(x, keepdims=True), xp.max(x, axis=(1, 0))),
    "powers": lambda xp, x, y: (x**0, x**1, x**-1.5, xp.pow(x, xp.asarray([0.0, 1.0, 2.0]))),
    "arrays": lambda xp, x, y: (*xp.unstack(x * y, axis=1), *xp.broadcast_arrays(x, y[0])),
    "where": lambda xp, x, y: xp.where(x < y, x * x, y) + xp.where(x < y, 0.0, x),
    "concat": lambda xp, x, y: xp.concat([x, xp.ones_like(x), x * y], axis=-1),
    "stack": lambda xp, x, y: xp.stack([xp.zeros_like(x), y * y], axis=1),
    "clip": lambda xp, x, _y: xp.clip(x * x, 0.5, 2.0),
    "moves": lambda xp, x, _y: xp.flip(xp.permute_dims(xp.reshape(x * x, (3, 1, 3)), (2, 0, 1)), axis=0),
    "takes": lambda xp, x, _y: xp.take(x * x, xp.asarray([2, 0]), axis=1) + xp.cumulative_sum(x, axis=1)[:, :2],
    "inverses": lambda xp, x, _y: (
        *(xp.asin(x / 2), xp.acos(x / 2), xp.asinh(x), xp.acosh(x + 1), xp.atanh(x / 2)),
    ),
    "logarithms": lambda xp, x, y: (xp.log2(x), xp.log10(x), xp.logaddexp(x, y), xp.logaddexp(x, 0 * y + 2)),
    "angles": lambda xp, x, y: (xp.atan2(x, y), xp.atan2(x, -y), xp.atan2(-x, 0 * y), xp.hypot(x, y)),
    "remainders": lambda xp, x, y: (9 * x % y, 5.0 % y, xp.remainder(-x, y), x % 0.3, xp.reciprocal(y)),
    "products": lambda xp, x, y: (xp.prod(x), xp.prod(x * y, axis=1), xp.prod(x, axis=(0, 1), keepdims=True)),
    "spreads": lambda xp, x, _y: (xp.var(x), xp.var(x, axis=0, keepdims=True), xp.std(x, axis=1, correction=1)),
    "order": lambda xp, x, y: (xp.sort(x * y, axis=0), xp.argsort(x), xp.isin(x, x)),
    "truths": lambda xp, x, y: xp.logical_xor(x > 1, y > 1),
    "operators": lambda _xp, x, y: 2.0 / x + x / 2.0 - (1.0 - y) * x + x / y @ y,
}


def in_place(xp: Any, x: Any, y: Any) -> Any:
    total = xp.zeros(x.shape, dtype=x.dtype)
    total += x
    total *= x
    total -= x * y
    total *= 3.0
    return total


FUNCTIONS["in place"] = in_place


@pytest.mark.parametrize("name", FUNCTIONS)
def test_rules(name: str, rng: np.random.Generator) -> None:
    """Along two directions, with the sum of second derivatives: of each function of the namespace."""
    x, y, *parts = (rng.random((3, 3)) + 0.5 for _ in range(8))
    kind, step = kind_of_jets(x, 2, has_bend=True), 1e-4
    jets = (Jet(kind, (a, *moved)) for a, moved in ((x, parts[:3]), (y, parts[3:])))
    result = FUNCTIONS[name](kind, *jets)

    def moved_by(n: int, t: float) -> list[np.ndarray]:
        points = x + t * parts[n], y + t * parts[3 + n]
        return [z.astype("f8") for z in arrays_in(FUNCTIONS[name](kind.of_values, *points))]

    results, here = result if isinstance(result, tuple) else (result,), moved_by(0, 0.0)
    bends = [np.zeros_like(z) for z in here]
    for n in range(3):  # the last one is how the bends of the arguments move the result
        there, back = moved_by(n, step), moved_by(n, -step)
        slopes = [(a - b) / (2 * step) for a, b in zip(there, back, strict=True)]
        second = [(a - 2 * b + c) / step**2 for a, b, c in zip(there, here, back, strict=True)]
        bends = [z + a for z, a in zip(bends, slopes if n == 2 else second, strict=True)]
        if n < 2:
            assert_near([kind.part(z, 1 + n) for z in results], slopes, 1e-6)
    assert_near([kind.part(z, 0) for z in results], here, 1e-14)
    assert_near([kind.part(z, 3) for z in results], bends, 1e-5)


def test_a_nan_is_a_maximum() -> None:
    pairs = np.asarray([[np.nan, 0.0], [0.0, np.nan]])
    output, _ = jvp(lambda x: space(x).maximum(x[0, ...], x[1, ...]), (pairs,), (pairs,))
    assert np.isnan(output).all()


def test_arrays_that_refuse_jets() -> None:
    """An array of array-api-strict does not ask what stands on its right; on its left, jets answer."""
    array = pytest.importorskip("array_api_strict").ones((2, 2))
    _, tangent = jvp(lambda x: x * array + space(x).multiply(array, x), (array,), (array,))
    np.testing.assert_array_equal(np.asarray(tangent), 2 * np.ones((2, 2)))


def tables_of(c: Any, like: Any) -> Any:
    """Rotations, in which the cosines or both tables have derivatives."""
    xp = space(like)
    both = positional.RotaryTables(c, 1 + c * c)
    cosines = positional.RotaryTables(c, xp.ones(c.shape), interleaved=True)
    positions = xp.asarray([3, 1, 0, 2])
    cache = KVCache(like, like, rotary=both)
    return (
        both.apply(like, 0),
        both.inverse(like, positions),
        cosines.apply(like, [3, 1, 0, 2]),
        cache.attend(like),
    )


def adding(number: Any) -> biases.Bias:
    """A bias whose function closes over a number, which may have derivatives."""
    return biases.from_function(lambda score, _b, _h, i, j: score + number * abs(i - j))


PLAIN = RNG.standard_normal((2, 4, 4, 8))
SEED = 5
INNER: dict[str, Callable[..., Any]] = {
    "tables": lambda x: tables_of(x[0, 0, :, :4], PLAIN),
    "cotangent": lambda x: vjp(PLAIN, PLAIN, PLAIN, softcap=2.0, bias=PLAIN[..., :4])[1](x),
    "dropout": lambda x: vjp(PLAIN, PLAIN, PLAIN, dropout_p=0.4, rng=np.random.default_rng(SEED))[1](x),
    "second order": lambda x: vjp(PLAIN, PLAIN, PLAIN)[1].jvp(x, {"key": x}, x * x),
    "one tangent": lambda x: attention_jvp(PLAIN, PLAIN, PLAIN, {"query": PLAIN, "value": x}, GAPS),
    "function": lambda x: attention(PLAIN, PLAIN, PLAIN, bias=adding(x[0, 0, 0, 0])),
    "function of packed": lambda x: sdpa_xp.varlen_attention(
        *[PLAIN[0]] * 3, [0, 1, 4], [0, 2, 4], bias=adding(space(x).sum(x))
    ),
    "function as an array": lambda x: biases.to_array(adding(x[0, 0, 0, 0]), (2, 3)),
    "laplacian": lambda x: laplacian(PLAIN, PLAIN, PLAIN, {"key": PLAIN[None]}, laplacians={"query": x}),
}


@pytest.mark.parametrize("name", INNER)
@pytest.mark.parametrize("order", [1, 2])
def test_one_argument_has_derivatives(name: str, order: int) -> None:
    """What a call gets last may carry derivatives where its inputs carry none, also in another jvp."""
    x, moved = np.random.default_rng(SEED).standard_normal((2, *PLAIN.shape))
    function = INNER[name]
    if order == 2:
        function = lambda x: jvp(lambda y: INNER[name](x * y), (moved,), (PLAIN,))[1]  # noqa: E731
    there, back = (arrays_in(function(x + step * moved)) for step in (1e-5, -1e-5))
    _, tangent = jvp(function, (x,), (moved,))
    assert_near(tangent, [(a - b) / 2e-5 for a, b in zip(there, back, strict=True)], 1e-6)


def test_dtypes() -> None:
    """A conversion keeps the derivatives, unless it leaves the floating numbers."""

    def function(x: Any) -> Any:
        xp = space(x)
        return xp.astype(xp.astype(x * x, xp.float32), xp.float64) * xp.astype(x > 1.0, xp.float64)

    _, tangent = jvp(function, (np.asarray([0.5, 2.0]),), (np.ones(2),))
    np.testing.assert_array_equal(tangent, [0.0, 4.0])


@pytest.mark.filterwarnings("ignore:Degrees of freedom", "ignore:invalid value", "ignore:Mean of empty slice")
def test_spreads_and_products_of_few_numbers() -> None:
    def spread(x: Any) -> Any:
        return x.__array_namespace__().var(x, axis=0, correction=1)

    for rows, expected in ((0, np.nan), (1, np.nan), (2, 4.5)):
        x = np.arange(3.0 * rows).reshape(rows, 3)
        for part in jvp(spread, (x,), (x,)) if rows < 2 else jvp(spread, (x,), (x,))[:1]:
            np.testing.assert_array_equal(part, np.full(3, expected))
    output, tangent = jvp(
        lambda x: x.__array_namespace__().prod(x, axis=0), (np.ones((0, 3)),), (np.ones((0, 3)),)
    )
    np.testing.assert_array_equal([output, tangent], [[1.0] * 3, [0.0] * 3])


def test_equal_numbers_are_sorted_in_their_order() -> None:
    x, moved = np.repeat([0.0, 1.0, 0.0], [6, 6, 8]), np.arange(20.0)
    _, tangent = jvp(lambda x: x.__array_namespace__().sort(x), (x,), (moved,))
    np.testing.assert_array_equal(tangent, moved[np.argsort(x, stable=True)])


@pytest.mark.needs("torch")
def test_spreads_of_torch() -> None:
    import torch

    x = torch.arange(12.0).reshape(3, 4) ** 2
    value, tangent = jvp(lambda x: x.__array_namespace__().var(x, axis=1), (x,), (x,))
    torch.testing.assert_close(
        [value, tangent], [torch.var(x, 1, correction=0), 2 * torch.var(x, 1, correction=0)]
    )
