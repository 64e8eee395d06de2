"""`implementation="native"` on torch tensors: its kernel computes the contract, or the call is refused."""

from __future__ import annotations

import math
from typing import Any

import array_api_compat.torch
import pytest
import torch
from internals import judge, prepare, reference, textbook
from peers.judged import record_kernel
from standins.torch_cuda import cuda_tensors, get, put

from sdpa_xp import attention_state, explain, masks, scaled_dot_product_attention
from sdpa_xp import scaled_dot_product_attention_vjp as vjp

NATIVE = {"implementation": "native"}


def tensors(seed: int, *shapes: tuple[int, ...], dtype: Any = torch.float32) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=generator).to(dtype) for shape in shapes]


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
@pytest.mark.parametrize("options", [{}, {"implementation": "xp", "attn_mask": masks.sliding_window(2, 1)}])
def test_a_traced_call_is_not_remembered(options: dict[str, Any]) -> None:
    """Its lengths are tensors."""
    x = tensors(1, (1, 2, 5, 4))[0]

    def attend(x: Any) -> Any:
        return scaled_dot_product_attention(x, x[:, :1], x[:, :1], **options)

    traced = torch.jit.trace(attend, (x,), check_trace=False)
    assert prepare._CACHE == {}
    torch.testing.assert_close(traced(x), attend(x))


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


def test_many_scores_at_once_are_not_the_default(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch makes them all where the widths differ."""
    q, k = tensors(2, (1, 1, 1100, 4), (1, 1, 1100, 4))
    kernel_calls = record_kernel("torch", monkeypatch)
    scaled_dot_product_attention(q, k, k[..., :3])
    assert not kernel_calls
    scaled_dot_product_attention(q, k, k)
    scaled_dot_product_attention(q[..., :9, :], k, k[..., :3])
    assert len(kernel_calls) == 2


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_halves_go_to_the_kernel_as_they_are(dtype: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    q, k, v = tensors(4, (1, 2, 70, 16), (1, 2, 70, 16), (1, 2, 70, 16), dtype=dtype)
    kernel_calls = record_kernel("torch", monkeypatch)
    output = scaled_dot_product_attention(q, k, v, is_causal=True)
    assert kernel_calls
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
    kernel_calls = record_kernel("torch", monkeypatch)
    with cuda_tensors():
        on_device = {name: put(x) if isinstance(x, torch.Tensor) else x for name, x in rules.items()}
        assert explain(*map(put, arrays), **on_device).implementation == "xp"
        output = get(scaled_dot_product_attention(*map(put, arrays), **on_device, **NATIVE))
    assert ({query.dtype for query, *_ in kernel_calls} == {dtype}) is stays_half
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
