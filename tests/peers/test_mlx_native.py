"""`implementation="native"` on MLX arrays: its kernel computes the contract, or the call is refused."""

from __future__ import annotations

import math
from typing import Any

import hypothesis.strategies as st
import numpy as np
import pytest
from calls import draw
from hypothesis import given
from internals import judge, reference, textbook

from sdpa_xp import biases, masks, scaled_dot_product_attention

mx = pytest.importorskip("mlx.core")

F = np.float32
NATIVE = {"implementation": "native"}
GROUPED = ((2, 4, 5, 8), (2, 2, 7, 8), (2, 2, 7, 6))
NAMES = ("query", "key", "value")


def numbers(seed: int, *shapes: tuple[int, ...]) -> list[np.ndarray]:
    rng = np.random.default_rng(seed)
    return draw(rng, *shapes)


def put(x: Any) -> Any:
    return mx.array(x) if isinstance(x, np.ndarray) else x


def attend(*arrays: np.ndarray, **rules: Any) -> np.ndarray:
    placed = {name: put(x) for name, x in rules.items()}
    return np.asarray(scaled_dot_product_attention(*map(put, arrays), **placed))


@st.composite
def calls(draw: st.DrawFn) -> tuple[list[np.ndarray], dict[str, Any]]:
    """Query, key and value of random shapes, and rules that the kernel takes."""
    batch = draw(st.sampled_from([(), (2,), (1,), (2, 3)]))
    heads, group = draw(st.sampled_from([1, 2])), draw(st.sampled_from([1, 3]))
    queries, keys, width, value_width = (draw(st.integers(1, 9)) for _ in range(4))
    shapes = [
        (*batch, heads * group, queries, width),
        (*batch[-draw(st.sampled_from([0, 1])) :], heads, keys, width),
        (*batch, heads, keys, value_width),
    ]
    added = [(queries, keys), (keys,), (queries, 1), (heads * group, 1, keys)]
    shape = draw(st.sampled_from([*added, (*batch, 1, queries, keys)] if batch else added))
    seed = draw(st.integers(0, 2**16))
    noise, bias, scales, sinks = numbers(seed + 1, shape, shape, (queries, 1), (heads * group,))
    allowed = noise < draw(st.sampled_from([-9.0, 0.0, 0.8]))
    rules: dict[str, Any] = {
        "is_causal": draw(st.booleans()),
        "scale": draw(st.sampled_from([None, 0.4, 0.0, -0.7, scales])),
        "sinks": draw(st.sampled_from([None, sinks])),
    }
    kind = draw(st.sampled_from(["none", "boolean", "floating", "both"]))
    if kind in ("boolean", "both"):
        rules["attn_mask"] = allowed
    if kind == "floating":
        rules["attn_mask"] = np.where(allowed, bias, -math.inf).astype(F)
    if kind == "both":
        rules["bias"] = bias
    return numbers(seed, *shapes), rules


@given(calls())
def test_same_as_the_reference_and_the_portable_implementation(
    call: tuple[list[np.ndarray], dict[str, Any]],
) -> None:
    arrays, rules = call
    expected = reference.attention(*arrays, **rules)[0]
    bound = textbook(np, *arrays, **rules)
    for implementation in ("native", "xp"):
        output = attend(*arrays, **rules, implementation=implementation)
        assert judge(output, expected, bound, "float32").agrees, implementation


@pytest.mark.parametrize("name", ["float16", "bfloat16"])
def test_half_is_rounded_once(name: str) -> None:
    dtype = getattr(mx, name)
    arrays = [mx.array(x).astype(dtype) for x in numbers(3, *GROUPED)]
    output = scaled_dot_product_attention(*arrays, **NATIVE)
    wide = scaled_dot_product_attention(*(x.astype(mx.float32) for x in arrays), **NATIVE)
    assert output.dtype == dtype
    assert bool(mx.all(output == wide.astype(dtype)))


@pytest.mark.parametrize(
    "rules", [{"is_causal": True}, {"attn_mask": np.arange(7) < 5}], ids=["causal", "mask"]
)
@pytest.mark.parametrize("transform", [lambda f: f, mx.vmap], ids=["eager", "vmap"])
def test_nan_in_keys_that_no_query_attends(rules: dict[str, Any], transform: Any) -> None:
    query, key, value = numbers(5, *GROUPED)
    expected = attend(query, key[..., :5, :], value[..., :5, :], is_causal="is_causal" in rules)
    key[..., 5:, :] = value[..., 5:, :] = math.nan
    placed = {name: put(x) for name, x in rules.items()}
    output = transform(lambda *x: scaled_dot_product_attention(*x, **placed, **NATIVE))(
        *map(put, (query, key, value))
    )
    np.testing.assert_allclose(np.asarray(output), expected, rtol=0, atol=2e-6)


def test_a_masked_nan_is_kept_out_of_the_rows_that_do_not_attend_it() -> None:
    query, key, value = numbers(6, *GROUPED)
    expected = attend(query, key, value, is_causal=True)
    value[..., 4, :] = math.nan
    output = attend(query, key, value, is_causal=True, **NATIVE)
    np.testing.assert_allclose(output[..., :4, :], expected[..., :4, :], rtol=0, atol=2e-6)
    assert np.all(np.isnan(output[..., 4, :]))


@pytest.mark.parametrize(
    "mask", [{"is_causal": True}, {"attn_mask": np.eye(2, dtype=bool)}], ids=["causal", "mask"]
)
def test_a_masked_score_is_less_than_all_others(mask: dict[str, Any]) -> None:
    """Also where those are -inf: MLX masks with the most negative finite number."""
    query, key, value = np.ones((2, 1), F), np.asarray([[-math.inf], [1.0]], F), np.asarray([[0.0], [7.0]], F)
    assert not np.any(attend(query, key, value, **mask, **NATIVE)[0] == 7)


def test_gradients() -> None:
    """Those of a row without a key are 0."""
    arrays = [mx.array(x) for x in numbers(7, *GROUPED)]
    mask = np.ones((5, 7), bool)
    mask[1], mask[:, 3] = False, False

    def gradients(implementation: str) -> Any:
        def loss(*x: Any) -> Any:
            output = scaled_dot_product_attention(*x, mx.array(mask), implementation=implementation)
            return mx.sum(output * output)

        return [np.asarray(x) for x in mx.grad(loss, argnums=(0, 1, 2))(*arrays)]

    native, portable = gradients("native"), gradients("xp")
    for gradient, expected in zip(native, portable, strict=True):
        np.testing.assert_allclose(gradient, expected, rtol=0, atol=8e-6)
    assert not native[0][:, :, 1].any()


@pytest.mark.parametrize(
    ("rules", "reason"),
    [
        ({"softcap": 2.0}, "MLX's kernel takes no `softcap`"),
        ({"sinks": np.zeros((2, 4), F)}, r"MLX's kernel takes `sinks` of shape \(Hq,\) alone"),
        ({"dropout_p": 0.5, "rng": mx.random.key(0)}, "MLX's kernel takes no `rng`"),
        ({"softmax_dtype": "float64"}, "MLX's kernel computes float64 to float32 accuracy"),
        ({"attn_mask": masks.sliding_window(2, 0)}, "supports only `masks.causal"),
        ({"attn_mask": masks.causal("lower_right")}, "supports only `masks.causal"),
        ({"bias": biases.alibi(4)}, "supports only one floating array as bias"),
        (
            {"bias": np.zeros(7, F), "attn_mask": np.zeros((5, 7), F)},
            "supports only one floating array as bias",
        ),
    ],
)
def test_what_the_kernel_does_not_compute(rules: dict[str, Any], reason: str) -> None:
    words = rf"`implementation` must be None or 'xp', because .*{reason}.*; got implementation='native'"
    with pytest.raises(ValueError, match=f"^scaled_dot_product_attention: {words}"):
        attend(*numbers(9, *GROUPED), **rules, **NATIVE)


@pytest.mark.parametrize(
    "shapes", [((0, 8), (7, 8), (7, 6)), ((5, 8), (0, 8), (0, 6)), ((5, 8), (7, 8), (7, 0))]
)
def test_empty_axes(shapes: Any) -> None:
    with pytest.raises(ValueError, match="because an axis is empty"):
        attend(*numbers(1, *shapes), **NATIVE)


def test_arrays_that_do_not_fit_are_refused_by_name() -> None:
    added = {"attn_mask": np.ones((3, 7), bool), "bias": np.zeros((5, 6), F), "scale": np.ones((5, 7), F)}
    for name, array in added.items():
        with pytest.raises(ValueError, match=f"^scaled_dot_product_attention: `{name}` must broadcast"):
            attend(*numbers(9, *GROUPED), **{name: array}, **NATIVE)


@pytest.fixture
def kernel_shapes(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, ...]]:
    """The shapes of the queries that MLX's kernel gets from now on."""
    shapes: list[tuple[int, ...]] = []
    kernel = mx.fast.scaled_dot_product_attention

    def recorded(query: Any, *rest: Any, **rules: Any) -> Any:
        shapes.append(query.shape)
        return kernel(query, *rest, **rules)

    monkeypatch.setattr(mx.fast, "scaled_dot_product_attention", recorded)
    return shapes


@pytest.mark.parametrize(
    ("rules", "is_default"),
    [
        ({}, True),
        ({"scale": -0.3}, True),
        ({"sinks": np.zeros(2, F)}, True),
        ({"is_causal": True}, False),
        ({"attn_mask": np.asarray([True, False, True])}, False),
        ({"bias": np.zeros((3, 3), F)}, False),
        ({"implementation": "xp"}, False),
        ({"softcap": 2.0}, False),
    ],
    ids=str,
)
def test_the_kernel_is_the_default_where_nothing_masks(
    rules: dict[str, Any], is_default: bool, kernel_shapes: list[tuple[int, ...]]
) -> None:
    arrays = numbers(1, *[(1, 2, 3, 4)] * 3)
    expected = attend(*arrays, **(rules | {"implementation": "xp"}))
    assert not kernel_shapes
    for _ in range(2):  # the second time the choice is known
        np.testing.assert_allclose(attend(*arrays, **rules), expected, rtol=0, atol=1e-6)
    assert kernel_shapes == [(1, 2, 3, 4)] * 2 * is_default


def test_many_scores_at_once_are_refused(kernel_shapes: list[tuple[int, ...]]) -> None:
    """MLX makes them all on the CPU."""
    q, k = numbers(2, (1, 1, 1100, 4), (1, 1, 1100, 4))
    attend(q, k, k)
    assert not kernel_shapes
    with pytest.raises(ValueError, match="MLX's kernel makes all scores"):
        attend(q, k, k, **NATIVE)
    attend(q[..., :9, :], k, k)
    assert len(kernel_shapes) == 1


def test_the_default_inside_a_transform(kernel_shapes: list[tuple[int, ...]]) -> None:
    """The portable implementation, also where a call of the same shapes had the kernel outside."""
    q, k, v = (mx.array(x) for x in numbers(4, (2, 3, 4), (2, 3, 4), (2, 3, 4)))
    expected = mx.stack([scaled_dot_product_attention(*x) for x in zip(q, k, v, strict=True)])
    assert len(kernel_shapes) == 2
    output = mx.vmap(scaled_dot_product_attention)(q, k, v)
    assert len(kernel_shapes) == 2
    np.testing.assert_allclose(np.asarray(output), np.asarray(expected), rtol=0, atol=1e-6)
