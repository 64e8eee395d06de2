"""A program may put sdpa_xp in the place of torch's function: torch's kernel below it is still torch's."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from sdpa_xp import masks, scaled_dot_product_attention

torch: Any = pytest.importorskip("torch")
pytestmark = [
    pytest.mark.needs("torch"),
    pytest.mark.filterwarnings("ignore:Dynamo detected a call to a `functools.lru_cache`"),
]
TORCH = torch.nn.functional.scaled_dot_product_attention


def with_the_signature_of_torch(
    query: Any,
    key: Any,
    value: Any,
    attn_mask: Any = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Any:
    assert dropout_p == 0.0
    assert enable_gqa or query.shape[-3] == key.shape[-3]
    return scaled_dot_product_attention(query, key, value, attn_mask, is_causal=is_causal, scale=scale)


REPLACEMENTS = [scaled_dot_product_attention, with_the_signature_of_torch]


@pytest.fixture(params=REPLACEMENTS, ids=["ours", "an adapter"])
def swapped(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", request.param)
    replacement: Callable[..., Any] = request.param
    return replacement


def draw(*shape: int) -> Any:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)))


@pytest.mark.parametrize(
    "rules",
    [
        {},
        {"is_causal": True},
        {"attn_mask": (torch.arange(7) < 5).expand(5, 7)},
        {"scale": -0.3},
        {"attn_mask": draw(5, 7)},
    ],
    ids=["plain", "causal", "mask", "scale", "bias"],
)
@pytest.mark.parametrize("heads", [4, 2])
def test_calls(swapped: Callable[..., Any], rules: dict[str, Any], heads: int) -> None:
    leaves = [x.requires_grad_() for x in (draw(2, 4, 5, 8), draw(2, heads, 7, 8), draw(2, heads, 7, 8))]
    grouped = {"enable_gqa": True} if heads == 2 else {}
    expected = TORCH(*leaves, **rules, **grouped)
    if swapped is scaled_dot_product_attention:
        grouped = {}
    output = torch.nn.functional.scaled_dot_product_attention(*leaves, **rules, **grouped)
    torch.testing.assert_close(output, expected)
    results = (torch.autograd.grad(x.square().sum(), leaves) for x in (output, expected))
    torch.testing.assert_close(*results, rtol=1e-4, atol=1e-5)


@pytest.mark.usefixtures("swapped")
def test_the_kernel_by_name() -> None:
    x = draw(1, 2, 5, 8)
    native = scaled_dot_product_attention(x, x, x, is_causal=True, implementation="native")
    torch.testing.assert_close(native, TORCH(x, x, x, is_causal=True))
    y = x.numpy()
    torch.testing.assert_close(
        torch.asarray(scaled_dot_product_attention(y, y, y, is_causal=True, implementation="torch")), native
    )


@pytest.mark.usefixtures("swapped")
def test_compiled_and_exported() -> None:
    class Model(torch.nn.Module):  # type: ignore[misc]
        def forward(self, x: Any) -> Any:
            return torch.nn.functional.scaled_dot_product_attention(x, x, x, is_causal=True)

    x, model = draw(2, 4, 5, 8), Model()
    expected = TORCH(x, x, x, is_causal=True)
    program = torch.export.export(model, (x,)).module()
    assert "scaled_dot_product_attention" in str(program.graph)
    torch.testing.assert_close(program(x), expected)
    torch.compiler.reset()
    compiled = torch.compile(model, fullgraph=True, backend="eager")
    torch.testing.assert_close(compiled(x), expected)


def test_a_layer_of_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    layer, x = torch.nn.MultiheadAttention(16, 4, batch_first=True), draw(2, 6, 16)
    mask = ~masks.to_array(masks.causal(), (6, 6), like=x)
    expected = layer(x, x, x, attn_mask=mask, need_weights=False)[0]
    calls = []

    def counted(*arguments: Any, **keywords: Any) -> Any:
        calls.append(keywords)
        return with_the_signature_of_torch(*arguments, **keywords)

    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", counted)
    torch.testing.assert_close(layer(x, x, x, attn_mask=mask, need_weights=False)[0], expected)
    assert calls
