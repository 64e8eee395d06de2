"""`implementation="native"` on torch tensors: its kernel computes the contract, or the call is refused."""

from __future__ import annotations

import math
from typing import Any

import array_api_compat.torch
import hypothesis.strategies as st
import numpy as np
import pytest
import torch
from hypothesis import given
from internals import judge, prepare, reference, textbook
from standins.torch_cuda import cuda_tensors, get, put

from sdpa_xp import (
    KVCache,
    attention_state,
    attention_weights,
    biases,
    dot_product_attention,
    explain,
    masks,
    scaled_dot_product_attention,
)
from sdpa_xp import scaled_dot_product_attention_vjp as vjp

NATIVE = {"implementation": "native"}


def tensors(seed: int, *shapes: tuple[int, ...], dtype: Any = torch.float32) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=generator).to(dtype) for shape in shapes]


@st.composite
def calls(draw: st.DrawFn) -> tuple[list[torch.Tensor], dict[str, Any]]:
    """Query, key and value of random shapes, and rules that the kernel takes."""
    batch = draw(st.sampled_from([(), (2,), (1,), (2, 3)]))
    heads, group = draw(st.sampled_from([1, 2])), draw(st.sampled_from([1, 3]))
    queries, keys, width, value_width = (draw(st.integers(1, 9)) for _ in range(4))
    shapes = [
        (*batch, heads * group, queries, width),
        (*batch[-draw(st.sampled_from([0, 1])) :], heads, keys, width),
        (*batch, heads, keys, value_width),
    ]
    seed, dtype = draw(st.integers(0, 2**16)), draw(st.sampled_from([torch.float32, torch.float64]))
    shape = (
        (queries, keys)
        if not batch
        else draw(
            st.sampled_from([(queries, keys), (keys,), (heads * group, 1, keys), (*batch, 1, queries, keys)])
        )
    )
    noise, added = tensors(seed + 1, shape, shape, dtype=dtype)
    allowed = noise < draw(st.sampled_from([-9.0, 0.0, 0.8]))
    rules: dict[str, Any] = {
        "is_causal": draw(st.booleans()),
        "scale": draw(st.sampled_from([None, 0.4, 0.0, -0.7])),
    }
    kind = draw(st.sampled_from(["none", "boolean", "floating", "both"]))
    if kind in ("boolean", "both"):
        rules["attn_mask"] = allowed
    if kind == "floating":
        rules["attn_mask"] = torch.where(allowed, added, -math.inf)
    if kind == "both":
        rules["bias"] = added
    return tensors(seed, *shapes, dtype=dtype), rules


@given(calls())
def test_same_as_the_reference_and_the_portable_implementation(
    call: tuple[list[torch.Tensor], dict[str, Any]],
) -> None:
    arrays, rules = call
    numbers = {name: x.numpy() if isinstance(x, torch.Tensor) else x for name, x in rules.items()}
    plain = [x.numpy() for x in arrays]
    expected = reference.attention(*plain, **numbers)[0]
    bound = textbook(np, *plain, **numbers)
    for implementation in ("native", "xp"):
        output = scaled_dot_product_attention(*arrays, **rules, implementation=implementation)
        assert output.dtype == arrays[0].dtype
        assert judge(output.numpy(), expected, bound, plain[0].dtype.name).agrees, implementation


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_is_rounded_once(dtype: Any) -> None:
    arrays = tensors(3, (2, 4, 5, 8), (2, 2, 7, 8), (2, 2, 7, 6), dtype=dtype)
    output = scaled_dot_product_attention(*arrays, **NATIVE)
    wide = scaled_dot_product_attention(*(x.float() for x in arrays), **NATIVE)
    assert torch.equal(output, wide.to(dtype))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize(
    "rules",
    [
        {},
        {"bias": 1000 + torch.arange(64 * 64.0).reshape(64, 64) % 7},
        {"bias": torch.full((64, 64), torch.finfo(torch.float32).min)},
        {"scale": -1000.0},
        {"scale": torch.full((), 1000.0)},
    ],
    ids=["plain", "bias", "lowest", "negative", "array"],
)
def test_halves_are_computed_in_float32(dtype: Any, rules: dict[str, Any]) -> None:
    """Of widths that torch's flash kernel takes: it would round weights, the bias and the scaled query."""
    query, key, value = tensors(3, *[(2, 4, 64, 16)] * 3, dtype=dtype)
    arrays = (query * 30, key * 1e-2, value)
    output = scaled_dot_product_attention(*arrays, **rules, **NATIVE)
    wide = scaled_dot_product_attention(*(x.float() for x in arrays), **rules, implementation="xp")
    assert (output.float() - wide).abs().max() <= wide.abs().max() * torch.finfo(dtype).eps


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("special", [math.nan, math.inf, -math.inf])
def test_a_special_number_shows_in_the_rows_of_the_portable_one(dtype: Any, special: float) -> None:
    query, key, value = tensors(4, *[(1, 2, 64, 16)] * 3, dtype=dtype)
    key[0, 0, 5, 0] = special
    output, expected = (
        scaled_dot_product_attention(query, key, value, implementation=name) for name in ("native", "xp")
    )
    assert torch.equal(output.isnan(), expected.isnan())
    assert output.isnan().any()


def test_memory_stays_linear() -> None:
    """What the kernel would make all scores for goes to the portable one, or is laid out anew."""
    long = torch.zeros(1, 1, 2048, 8)
    mask = torch.ones(2048, dtype=torch.bool)
    for rules in ({"attn_mask": mask[:, None] & mask}, {"attn_mask": mask, "is_causal": True}):
        assert "an L x S array of the mask" in explain(long, long, long, **rules).reason
    strided = torch.zeros(1, 1, 8, 2048).mT
    steps: list[int] = []

    class Watched(torch.overrides.TorchFunctionMode):
        def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            del types
            if function is torch.nn.functional.scaled_dot_product_attention:
                steps.extend(x.stride(-1) for x in args)
            return function(*args, **(kwargs or {}))

    with Watched():
        scaled_dot_product_attention(long, long, long)
        scaled_dot_product_attention(strided, strided, strided)
        scaled_dot_product_attention(strided, strided, strided, is_causal=True)
    assert steps == [1] * 9


@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")  # torch's own, on the first use
@pytest.mark.parametrize("implementation", [None, "xp"])
def test_forward_mode(implementation: str | None) -> None:
    """Also right after an alike call without it."""
    arrays = tensors(8, *[(1, 2, 5, 4)] * 3, dtype=torch.float64)
    direction = torch.ones_like(arrays[0])

    def attend(query: torch.Tensor) -> torch.Tensor:
        return scaled_dot_product_attention(query, *arrays[1:], implementation=implementation)

    plain = attend(arrays[0])
    with torch.autograd.forward_ad.dual_level():
        dual = torch.autograd.forward_ad.make_dual(arrays[0], direction)
        output, tangent = torch.autograd.forward_ad.unpack_dual(attend(dual))
    torch.testing.assert_close(output, plain)
    step = 1e-6
    ends = [attend(arrays[0] + sign * step * direction) for sign in (1, -1)]
    torch.testing.assert_close(tangent, (ends[0] - ends[1]) / (2 * step), rtol=0, atol=1e-8)


@pytest.mark.filterwarnings("ignore")  # of what torch.jit.trace does not see, and of itself
def test_a_traced_call_is_not_remembered() -> None:
    """Its lengths are tensors."""
    x = tensors(1, (1, 2, 5, 4))[0]
    traced = torch.jit.trace(lambda x: scaled_dot_product_attention(x, x, x), (x,), check_trace=False)
    assert prepare._CACHE == {}
    torch.testing.assert_close(traced(x), scaled_dot_product_attention(x, x, x))


@pytest.mark.parametrize(
    "rules", [{"is_causal": True}, {"attn_mask": torch.arange(7) < 5}], ids=["causal", "mask"]
)
def test_nan_in_keys_that_no_query_attends(rules: dict[str, Any]) -> None:
    query, key, value = tensors(5, (2, 4, 5, 8), (2, 2, 7, 8), (2, 2, 7, 6))
    expected = scaled_dot_product_attention(
        query, key[..., :5, :], value[..., :5, :], is_causal="is_causal" in rules
    )
    key[..., 5:, :] = value[..., 5:, :] = math.nan
    output = scaled_dot_product_attention(query, key, value, **rules, **NATIVE)
    torch.testing.assert_close(output, expected, rtol=0, atol=2e-6)


PADDED: dict[str, Any] = {
    "one length": masks.padding(5),
    "of each": masks.padding([7, 5, 3]),
    "of each, an array": masks.padding(torch.tensor([1, 7, 2])),
    "one empty": masks.padding([4, 0, 7]),
    "all empty": masks.padding(0),
    "all": masks.padding([7, 7, 7]),
    "causal": masks.causal() & masks.padding([7, 5, 3]),
}


@pytest.mark.parametrize("name", PADDED)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("layout", ["...HLE", "...LHE"])
def test_padding_cuts_keys(name: str, dtype: Any, layout: str) -> None:
    """What lies behind the real keys is not read, and has gradient 0."""
    shapes = [(3, 4, 6, 8), (3, 2, 7, 8), (3, 2, 7, 6)]
    query, key, value = (
        x if layout == "...HLE" else x.swapaxes(1, 2).contiguous() for x in tensors(8, *shapes, dtype=dtype)
    )
    length = -2 if layout == "...HLE" else -3
    mask = masks.to_array(PADDED[name], (3, 1, 6, 7), like=query)
    hidden = ~mask.any(dim=-2)[:, 0]  # (B, S)
    for x in (key, value):
        x.masked_fill_(hidden[:, None, :, None] if length == -2 else hidden[:, :, None, None], math.nan)
    expected, pull_back = vjp(query, key, value, PADDED[name], layout=layout)
    gradients = pull_back(2 * expected)
    arrays = [x.requires_grad_() for x in (query, key, value)]
    assert explain(*arrays, PADDED[name], layout=layout).implementation == "native"
    output = scaled_dot_product_attention(*arrays, PADDED[name], layout=layout)
    derived = torch.autograd.grad(output.square().sum(), arrays)
    for result, right in zip((output.detach(), *derived), (expected, *gradients.values()), strict=True):
        tolerance = 8e-6 if dtype == torch.float32 else 2.0**-6
        torch.testing.assert_close(result, right, rtol=tolerance, atol=tolerance)


def test_what_is_learned_is_connected_to_a_constant_output() -> None:
    """Its gradient is 0, as if there were keys."""
    query, key = torch.zeros(1, 1, 3, 4), torch.zeros(1, 1, 0, 4)
    learned: dict[str, Any] = {
        "sinks": torch.ones(1, requires_grad=True),
        "scale": torch.tensor(2.0, requires_grad=True),
        "bias": torch.ones(3, 1, requires_grad=True),
    }
    for name, array in learned.items():
        output = scaled_dot_product_attention(query, key, key, **{name: array})
        state = attention_state(query, key, key, **{name: array}).output
        for total in (output.sum(), state.sum()):
            (gradient,) = torch.autograd.grad(total, [array])
            assert gradient.shape == array.shape
            assert not gradient.any()


def test_padding_that_cuts_no_keys() -> None:
    """Many short sequences are one computation; padding of queries, and another mask, need all keys."""
    arrays = tensors(8, *[(9, 1, 6, 8)] * 3)
    lengths = masks.padding([1, 2, 3, 4, 5, 6, 1, 2, 3])
    for mask in (lengths, masks.padding(3, 2), masks.padding(3) & masks.sliding_window(1, 0)):
        assert explain(*arrays, mask).implementation == "xp"
    assert explain(*arrays, masks.padding([4] * 9)).implementation == "native"


def test_gradients() -> None:
    """Those of a row without a key are 0."""
    arrays = [x.requires_grad_() for x in tensors(7, (2, 4, 5, 8), (2, 2, 7, 8), (2, 2, 7, 6))]
    mask = torch.ones(5, 7, dtype=torch.bool)
    mask[1], mask[:, 3] = False, False

    def gradients(implementation: str) -> tuple[torch.Tensor, ...]:
        output = scaled_dot_product_attention(*arrays, mask, implementation=implementation)
        return torch.autograd.grad(output.square().sum(), arrays)

    for gradient, expected in zip(gradients("native"), gradients("xp"), strict=True):
        torch.testing.assert_close(gradient, expected, rtol=0, atol=8e-6)
    assert not gradients("native")[0][:, :, 1].any()


@pytest.mark.parametrize(
    ("rules", "reason"),
    [
        ({"softcap": 2.0}, "torch's kernel takes no `softcap`"),
        ({"sinks": torch.zeros(4)}, "torch's kernel takes no `sinks`"),
        ({"dropout_p": 0.5, "rng": torch.Generator()}, "torch's kernel takes no `rng`"),
        ({"attn_mask": masks.sliding_window(2, 0)}, "supports only `masks.causal"),
        ({"attn_mask": masks.causal("lower_right")}, "supports only `masks.causal"),
        ({"attn_mask": masks.causal() | masks.prefix(2)}, "supports only `masks.causal"),
        ({"bias": biases.alibi(4)}, "supports only one floating array as bias"),
        ({"bias": torch.zeros(7), "attn_mask": torch.zeros(5, 7)}, "supports only one floating array as bias"),
    ],
)
def test_what_the_kernel_does_not_compute(rules: dict[str, Any], reason: str) -> None:
    arrays = tensors(9, (2, 4, 5, 8), (2, 2, 7, 8), (2, 2, 7, 6))
    words = rf"`implementation` must be None or 'xp', because .*{reason}.*; got implementation='native'"
    with pytest.raises(ValueError, match=f"^scaled_dot_product_attention: {words}"):
        scaled_dot_product_attention(*arrays, **rules, **NATIVE)


@pytest.mark.parametrize(
    "shapes", [((0, 8), (7, 8), (7, 6)), ((5, 8), (0, 8), (0, 6)), ((5, 8), (7, 8), (7, 0))]
)
def test_empty_axes(shapes: Any) -> None:
    with pytest.raises(ValueError, match="because an axis is empty"):
        scaled_dot_product_attention(*tensors(1, *shapes), **NATIVE)


def test_arrays_that_do_not_fit_are_refused_by_name() -> None:
    arrays = tensors(9, (2, 4, 5, 8), (2, 2, 7, 8), (2, 2, 7, 6))
    for name, array in {
        "attn_mask": torch.ones(3, 7) > 0,
        "bias": torch.zeros(5, 6),
        "scale": torch.ones(5, 7),
    }.items():
        with pytest.raises(ValueError, match=f"^scaled_dot_product_attention: `{name}` must broadcast"):
            scaled_dot_product_attention(*arrays, **{name: array}, **NATIVE)


def test_functions_without_a_kernel() -> None:
    query, key = tensors(9, (1, 4, 8), (1, 4, 8))
    words = "`implementation` must be None or 'xp', because no vendor has a kernel for this function"
    with pytest.raises(ValueError, match=f"^attention_state: {words}"):
        attention_state(query, key, key, **NATIVE)
    with pytest.raises(ValueError, match=f"^attention_weights: {words}"):
        attention_weights(query, key, **NATIVE)
    with pytest.raises(ValueError, match=f"^KVCache.attend: {words}"):
        KVCache(key, key).attend(query, **NATIVE)


def test_library_without_a_kernel() -> None:
    x = np.ones((2, 3), np.float32)
    with pytest.raises(ValueError, match=r"must be None or 'xp', because there is no kernel for .*numpy; got"):
        scaled_dot_product_attention(x, x, x, **NATIVE)


def test_names_of_jax() -> None:
    x, y = tensors(2, (2, 5, 4, 8), (2, 7, 2, 8))
    output = dot_product_attention(x, y, y, is_causal=True, **NATIVE)
    torch.testing.assert_close(output, dot_product_attention(x, y, y, is_causal=True), rtol=0, atol=2e-6)


def kernels(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, ...]]:
    """The shapes of the queries that torch's kernel gets from now on."""
    shapes: list[tuple[int, ...]] = []
    kernel = torch.nn.functional.scaled_dot_product_attention

    def recorded(query: torch.Tensor, *rest: Any, **rules: Any) -> torch.Tensor:
        shapes.append(tuple(query.shape))
        return kernel(query, *rest, **rules)

    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", recorded)
    return shapes


@pytest.mark.parametrize(
    ("rules", "is_default"),
    [
        ({}, True),
        ({"is_causal": True}, True),
        ({"scale": -0.3}, True),
        ({"attn_mask": torch.tensor([True, False, True])}, True),
        ({"bias": torch.zeros(3, 3)}, True),
        ({"implementation": "xp"}, False),
        ({"softcap": 2.0}, False),
        ({"sinks": torch.zeros(2)}, False),
        ({"attn_mask": masks.sliding_window(1, 0)}, False),
    ],
    ids=str,
)
def test_the_kernel_is_the_default_where_it_computes_the_call(
    rules: dict[str, Any], is_default: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    q, k, v = tensors(1, (1, 2, 3, 4), (1, 2, 3, 4), (1, 2, 3, 4))
    expected = scaled_dot_product_attention(q, k, v, **(rules | {"implementation": "xp"}))
    kernel_shapes = kernels(monkeypatch)
    for _ in range(2):  # the second time the choice is known
        torch.testing.assert_close(scaled_dot_product_attention(q, k, v, **rules), expected)
    assert kernel_shapes == [(1, 2, 3, 4)] * 2 * is_default


def test_many_scores_at_once_are_not_the_default(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch makes them all where the widths differ."""
    q, k = tensors(2, (1, 1, 1100, 4), (1, 1, 1100, 4))
    kernel_shapes = kernels(monkeypatch)
    scaled_dot_product_attention(q, k, k[..., :3])
    assert not kernel_shapes
    scaled_dot_product_attention(q, k, k)
    scaled_dot_product_attention(q[..., :9, :], k, k[..., :3])
    assert len(kernel_shapes) == 2


def test_a_masked_nan_is_kept_out_by_default(monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel lets it through, so the portable implementation computes the call."""
    q, k, v = tensors(3, (1, 2, 5, 4), (1, 2, 5, 4), (1, 2, 5, 4))
    expected = scaled_dot_product_attention(q, k, v, is_causal=True)
    v[..., 4, :] = math.nan
    kernel_shapes = kernels(monkeypatch)
    output = scaled_dot_product_attention(q, k, v, is_causal=True)
    assert kernel_shapes
    torch.testing.assert_close(output[..., :4, :], expected[..., :4, :])
    assert bool(torch.all(torch.isnan(output[..., 4, :])))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_halves_go_to_the_kernel_as_they_are(dtype: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    q, k, v = tensors(4, (1, 2, 70, 16), (1, 2, 70, 16), (1, 2, 70, 16), dtype=dtype)
    kernel_shapes = kernels(monkeypatch)
    output = scaled_dot_product_attention(q, k, v, is_causal=True)
    assert kernel_shapes
    arrays = [x.double().numpy() for x in (q, k, v)]
    expected = reference.attention(*arrays, is_causal=True)[0]
    plain = textbook(array_api_compat.torch, q, k, v, is_causal=True).double().numpy()
    name = str(dtype).rpartition(".")[2]
    assert judge(output.double().numpy(), expected, plain, name).agrees


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize(
    ("rules", "stays_half"),
    [
        ({}, True),
        ({"is_causal": True, "scale": 0.3}, True),
        ({"attn_mask": torch.arange(70) % 3 > torch.zeros(70, 1)}, True),
        ({"attn_mask": torch.zeros(70, 70, dtype=torch.bool)}, True),
        ({"bias": torch.linspace(900, 1000, 70)}, False),
        ({"scale": -0.3}, False),
        ({"softmax_dtype": torch.float64}, False),
    ],
    ids=["plain", "causal", "boolean", "no key", "bias", "negative", "float64"],
)
def test_halves_stay_halves_on_cuda_if_the_kernel_is_asked_for(
    dtype: Any, rules: dict[str, Any], stays_half: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So that torch can take its flash kernel. What would be rounded before the softmax is computed wider."""
    arrays = tensors(4, *[(1, 2, 70, 16)] * 3, dtype=dtype)
    dtypes, kernel = [], torch.nn.functional.scaled_dot_product_attention

    def recorded(*inputs: torch.Tensor, **others: Any) -> torch.Tensor:
        dtypes.append(inputs[0].dtype)
        return kernel(*inputs, **others)

    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", recorded)
    with cuda_tensors():
        on_device = {name: put(x) if isinstance(x, torch.Tensor) else x for name, x in rules.items()}
        assert explain(*map(put, arrays), **on_device).implementation == "xp"
        output = get(scaled_dot_product_attention(*map(put, arrays), **on_device, **NATIVE))
    assert (dtypes == [dtype]) is stays_half
    assert output.dtype == dtype
    rules = {name: x for name, x in rules.items() if name != "softmax_dtype"}
    wide = [x.float() for x in arrays]
    expected = scaled_dot_product_attention(*wide, **rules, implementation="xp").numpy()
    plain = textbook(array_api_compat.torch, *arrays, **rules).float().numpy()
    assert judge(output.float().numpy(), expected, plain, str(dtype).rpartition(".")[2]).agrees


def test_tensors_without_values() -> None:
    """Inside FakeTensorMode, and in make_fx, no number can be looked at; a short call is the kernel alone."""
    from torch._subclasses import FakeTensorMode
    from torch.fx.experimental.proxy_tensor import make_fx

    (x,) = tensors(0, (1, 2, 3, 4))
    with FakeTensorMode():
        fake = torch.randn(1, 2, 3, 4)
        assert scaled_dot_product_attention(fake, fake, fake).shape == (1, 2, 3, 4)
    for mode in ("real", "fake", "symbolic"):
        graph = make_fx(lambda q: scaled_dot_product_attention(q, q, q), tracing_mode=mode)(x)
        torch.testing.assert_close(graph(x), scaled_dot_product_attention(x, x, x))
