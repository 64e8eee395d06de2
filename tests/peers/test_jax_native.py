"""`implementation="native"` on JAX arrays: jax.nn's function computes the contract, or the call is refused."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from internals import judge, override, reference, textbook

from sdpa_xp import attention_state, biases, dot_product_attention, masks, scaled_dot_product_attention

NATIVE = {"implementation": "native"}


@pytest.fixture(autouse=True, scope="module")
def whole_precision() -> Iterator[None]:
    """And little optimizing: compiling is most of the time here."""
    jax.config.update("jax_disable_most_optimizations", True)
    with jax.default_matmul_precision("float32"):
        yield


def draw(seed: int, *shapes: tuple[int, ...], dtype: Any = jnp.float32) -> list[Any]:
    rng = np.random.default_rng(seed)
    return [jnp.asarray(rng.standard_normal(shape), dtype) for shape in shapes]


def grouped(seed: int = 9, **rules: Any) -> list[Any]:
    return draw(seed, (2, 4, 5, 8), (2, 2, 7, 8), (2, 2, 7, 8), **rules)


@st.composite
def calls(draws: st.DrawFn) -> tuple[list[Any], dict[str, Any]]:
    """Query, key and value of random shapes, and rules that the kernel takes."""
    batch = draws(st.sampled_from([(), (2,), (1,), (2, 3)]))
    heads, group = draws(st.sampled_from([1, 2])), draws(st.sampled_from([1, 3]))
    queries, keys, width = (draws(st.integers(1, 5)) for _ in range(3))
    shapes = [
        (*batch, heads * group, queries, width),
        (*batch[-draws(st.sampled_from([0, 1])) :], heads, keys, width),
        (*batch, heads, keys, width),
    ]
    pairs = [(queries, keys), (keys,), (heads * group, 1, keys), (*batch, 1, queries, keys)]
    shape = draws(st.sampled_from(pairs if batch else pairs[:1]))
    noise, added = draw(draws(st.integers(0, 2**16)), shape, shape)
    allowed = noise < draws(st.sampled_from([-9.0, 0.0, 0.8]))
    scales = [None, 0.4, 0.0, -0.7, np.linspace(-1, 1, queries, dtype=np.float32)[:, None]]
    rules: dict[str, Any] = {"is_causal": draws(st.booleans()), "scale": draws(st.sampled_from(scales))}
    kind = draws(st.sampled_from(["none", "boolean", "floating", "both"]))
    if kind in ("boolean", "both"):
        rules["attn_mask"] = allowed
    if kind == "floating":
        rules["attn_mask"] = jnp.where(allowed, added, -math.inf)
    if kind == "both":
        rules["bias"] = added
    return draw(draws(st.integers(0, 2**16)), *shapes), rules


@settings(max_examples=12)
@given(calls())
def test_same_as_the_reference(call: tuple[list[Any], dict[str, Any]]) -> None:
    arrays, rules = call
    numbers = {name: np.asarray(x) if hasattr(x, "shape") else x for name, x in rules.items()}
    rules |= {"scale": jnp.asarray(rules["scale"])} if isinstance(rules["scale"], np.ndarray) else {}
    plain = [np.asarray(x) for x in arrays]
    output = scaled_dot_product_attention(*arrays, **rules, **NATIVE)
    assert output.dtype == arrays[0].dtype
    expected = reference.attention(*plain, **numbers)[0]
    assert judge(np.asarray(output), expected, textbook(np, *plain, **numbers), "float32").agrees


TABLE = np.linspace(-1, 1, 32, dtype=np.float32).reshape(8, 4)
MASKS: dict[str, Callable[[Callable[..., Any]], dict[str, Any]]] = {
    "lower right": lambda put: {"attn_mask": masks.causal("lower_right")},
    "a window": lambda put: {"attn_mask": masks.sliding_window(2, 1), "is_causal": True},
    "padding": lambda put: {"attn_mask": masks.padding([3, 7], [5, 2])},
    "documents or a prefix": lambda put: {
        "attn_mask": masks.document([0, 0, 1, 1, 2], [0] * 4 + [1] * 3) | masks.prefix(2)
    },
    "a function": lambda put: {"attn_mask": masks.from_function(lambda b, h, i, j: (i + j + h) % 2 == 0)},
    "ALiBi": lambda put: {"bias": biases.alibi(4), "attn_mask": masks.padding([3, 0])},
    "T5": lambda put: {"bias": biases.relative(put(TABLE), max_distance=6)},
}


@pytest.mark.sampled(3)
@pytest.mark.parametrize("traced", [False, True])
@pytest.mark.parametrize("rules", MASKS.values(), ids=MASKS)
def test_masks_and_biases(rules: Callable[..., dict[str, Any]], traced: bool) -> None:
    """What NumPy gives, in rows without a key too, which jax.nn gives the mean of the values."""
    of_jax = rules(jnp.asarray)
    call: Callable[..., Any] = lambda *x: scaled_dot_product_attention(*x, **of_jax, **NATIVE)  # noqa: E731
    output = (jax.jit(call) if traced else call)(*grouped())
    expected = scaled_dot_product_attention(*map(np.asarray, grouped()), **rules(np.asarray))
    np.testing.assert_allclose(output, expected, rtol=0, atol=2e-6)


@pytest.mark.parametrize("shape", [(7,), (5, 7), (4, 5, 1), (3, 1, 5, 7), (2, 1, 4, 1, 7)])
def test_a_batch_of_two_axes(shape: tuple[int, ...]) -> None:
    arrays = draw(4, (2, 3, 4, 5, 8), (3, 2, 7, 8), (2, 1, 2, 7, 8))
    rules = {"bias": jnp.where(draw(5, shape)[0] < 1, draw(6, shape)[0], -math.inf)}
    output = scaled_dot_product_attention(*arrays, **rules, **NATIVE)
    expected = scaled_dot_product_attention(*map(np.asarray, arrays), bias=np.asarray(rules["bias"]))
    np.testing.assert_allclose(output, expected, rtol=0, atol=2e-6)


@pytest.mark.parametrize("dtype", [jnp.float16, jnp.bfloat16])
def test_half_is_rounded_once(dtype: Any) -> None:
    arrays = grouped(3, dtype=dtype)
    output = scaled_dot_product_attention(*arrays, is_causal=True, **NATIVE)
    wide = scaled_dot_product_attention(*(x.astype(jnp.float32) for x in arrays), is_causal=True, **NATIVE)
    assert output.dtype == dtype
    np.testing.assert_array_equal(output, wide.astype(dtype))


def test_the_smallest_finite_number_does_not_mask() -> None:
    """Beside what is masked, for which jax.nn has a larger number."""
    q, k, v = grouped()
    bias = jnp.full(7, jnp.finfo(jnp.float32).min)
    output = scaled_dot_product_attention(q, k, v, jnp.arange(7) < 3, bias=bias, **NATIVE)
    mean = jnp.repeat(v[:, :, :3].mean(axis=2, keepdims=True), 2, axis=1)
    np.testing.assert_allclose(output, jnp.broadcast_to(mean, q.shape), rtol=0, atol=2e-6)


@pytest.mark.parametrize(
    "rules", [{"is_causal": True}, {"attn_mask": jnp.arange(7) < 5}], ids=["causal", "mask"]
)
def test_nan_in_keys_that_no_query_attends(rules: dict[str, Any]) -> None:
    q, k, v = grouped()
    expected = scaled_dot_product_attention(
        q, k[..., :5, :], v[..., :5, :], is_causal="is_causal" in rules, implementation="xp"
    )
    k, v = (x.at[..., 5:, :].set(math.nan) for x in (k, v))
    output = jax.jit(lambda *x: scaled_dot_product_attention(*x, **rules, **NATIVE))(q, k, v)
    np.testing.assert_allclose(output, expected, rtol=0, atol=2e-6)


def test_gradients() -> None:
    """Those of a row without a key are 0."""
    mask = jnp.ones((5, 7), bool).at[1].set(False).at[:, 3].set(False)

    def gradients(implementation: str) -> Any:
        def loss(*x: Any) -> Any:
            return (scaled_dot_product_attention(*x, mask, implementation=implementation) ** 2).sum()

        return jax.grad(loss, argnums=(0, 1, 2))(*grouped(7))

    for gradient, expected in zip(gradients("native"), gradients("xp"), strict=True):
        np.testing.assert_allclose(gradient, expected, rtol=0, atol=8e-6)
    assert not gradients("native")[0][:, :, 1].any()


@pytest.mark.parametrize(
    ("rules", "reason"),
    [
        ({"softcap": 2.0}, "JAX's kernel takes no `softcap`"),
        ({"sinks": np.zeros(4, np.float32)}, "JAX's kernel takes no `sinks`"),
        ({"dropout_p": 0.5, "rng": 0}, "JAX's kernel takes no `rng`"),
        ({"bias": biases.alibi(4) + biases.alibi(4)}, "supports only one bias, which must be added"),
        (
            {"bias": biases.from_function(lambda s, b, h, i, j: s * 2)},
            "supports only one bias, which must be added",
        ),
    ],
)
def test_what_the_kernel_does_not_compute(rules: dict[str, Any], reason: str) -> None:
    constructors = {"sinks": jnp.asarray, "rng": jax.random.key}
    rules = {name: constructors.get(name, lambda x: x)(x) for name, x in rules.items()}
    words = rf"`implementation` must be None or 'xp', because .*{reason}.*; got implementation='native'"
    with pytest.raises(ValueError, match=f"^scaled_dot_product_attention: {words}"):
        scaled_dot_product_attention(*grouped(), **rules, **NATIVE)


def test_widths_and_double_precision() -> None:
    q, k, v = grouped()
    with pytest.raises(ValueError, match="needs E = Ev"):
        scaled_dot_product_attention(q, k, v[..., :6], **NATIVE)
    with pytest.raises(ValueError, match="an axis is empty"):
        scaled_dot_product_attention(q, k[:, :, :0], v[:, :, :0], **NATIVE)
    with jax.enable_x64(True), pytest.raises(ValueError, match="computes a softmax in float32"):
        scaled_dot_product_attention(*grouped(dtype=jnp.float64), **NATIVE)


def test_arrays_that_do_not_fit_are_refused_by_name() -> None:
    for name, array in {
        "attn_mask": jnp.ones((3, 7), bool),
        "bias": jnp.zeros((5, 6)),
        "scale": jnp.ones((5, 7)),
    }.items():
        with pytest.raises(ValueError, match=f"^scaled_dot_product_attention: `{name}` must broadcast"):
            scaled_dot_product_attention(*grouped(), **{name: array}, **NATIVE)


def test_functions_without_a_kernel() -> None:
    words = "`implementation` must be None or 'xp', because no vendor has a kernel for this function"
    with pytest.raises(ValueError, match=f"^attention_state: {words}"):
        attention_state(*grouped(), **NATIVE)


def test_names_of_jax() -> None:
    x, y = draw(2, (2, 5, 4, 8), (2, 7, 2, 8))
    output = dot_product_attention(x, y, y, local_window_size=(2, 1), **NATIVE)
    np.testing.assert_allclose(
        output, jax.nn.dot_product_attention(x, y, y, local_window_size=(2, 1)), rtol=0, atol=2e-6
    )


@pytest.fixture
def kernels(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, ...]]:
    """The shapes of the queries of the calls that go to the kernel."""
    from internals import jax_kernels

    shapes: list[tuple[int, ...]] = []
    kernel = jax_kernels._compiled()

    def recorded(query: Any, *rest: Any, **rules: Any) -> Any:
        shapes.append(query.shape)
        return kernel(query, *rest, **rules)

    monkeypatch.setattr(jax_kernels, "_compiled", lambda: recorded)
    return shapes


@pytest.mark.parametrize(
    ("rules", "is_default"),
    [
        ({}, True),
        ({"is_causal": True}, True),
        ({"scale": -0.3}, True),
        ({"attn_mask": masks.sliding_window(1, 0)}, True),
        ({"implementation": "xp"}, False),
        ({"softcap": 2.0}, False),
        ({"bias": biases.from_function(lambda s, b, h, i, j: s * 2)}, False),
    ],
    ids=str,
)
def test_the_kernel_is_the_default_where_it_computes_the_call(
    rules: dict[str, Any], is_default: bool, kernels: list[tuple[int, ...]]
) -> None:
    expected = scaled_dot_product_attention(*grouped(), **(rules | {"implementation": "xp"}))
    output = scaled_dot_product_attention(*grouped(), **rules)
    np.testing.assert_allclose(output, expected, rtol=0, atol=2e-6)
    assert kernels == [(2, 4, 5, 8)] * is_default


def test_no_default_in_a_jit_nor_for_many_scores(
    kernels: list[tuple[int, ...]], monkeypatch: pytest.MonkeyPatch
) -> None:
    arrays = grouped()
    jax.jit(scaled_dot_product_attention)(*arrays)
    jax.jit(lambda mask: scaled_dot_product_attention(*arrays, mask))(jnp.arange(7) < 5)
    override(monkeypatch, "MOST_JAX_SCORES", 2 * 4 * 5 * 7 - 1)
    scaled_dot_product_attention(*arrays)
    assert not kernels


def test_a_masked_nan_is_kept_out_by_default(kernels: list[tuple[int, ...]]) -> None:
    """The kernel lets it through, so the portable implementation computes the call."""
    q, k, v = grouped()
    expected = scaled_dot_product_attention(q, k, v, is_causal=True)
    output = scaled_dot_product_attention(q, k, v.at[..., 4, :].set(math.nan), is_causal=True)
    assert len(kernels) == 2
    np.testing.assert_allclose(output[..., :4, :], expected[..., :4, :], rtol=0, atol=2e-6)
    assert bool(jnp.all(jnp.isnan(output[..., 4, :])))


def test_a_row_whose_scores_are_all_too_small_is_an_empty_one() -> None:
    """-inf by overflow, of which jax.nn makes a NaN."""
    q, k, v = grouped()
    output = scaled_dot_product_attention(jnp.full_like(q, 1e30), jnp.full_like(k, -1e30), v)
    np.testing.assert_array_equal(output, 0)
