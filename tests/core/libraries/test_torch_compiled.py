"""Gradients inside torch.compile: one operator in the graph, in linear memory, and no NaN of a masked pair."""

from __future__ import annotations

import math
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from internals import description
from public_masks import CALLS as MASKS

from sdpa_xp import KVCache, attention_state, biases, masks, scaled_dot_product_attention

torch: Any = pytest.importorskip("torch")
pytestmark = [
    pytest.mark.needs("torch"),
    pytest.mark.filterwarnings("ignore:Dynamo detected a call to a `functools.lru_cache`"),
]
PADDED = torch.arange(5) < 4


def draw(*shape: int) -> Any:
    return torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(sum(shape)))


QUERY, KEY, VALUE = draw(1, 2, 4, 3), draw(1, 1, 5, 3), draw(1, 1, 5, 2)
SLOPES = draw(2).abs()
NAN = KEY.clone()
NAN[..., 4, :] = math.nan
BAND = masks.sliding_window(2, 1, offset="lower_right") | ~masks.prefix([3])


class Graphs:
    """A backend that keeps the graphs of both passes."""

    def __init__(self) -> None:
        from torch._dynamo.backends.common import aot_autograd

        self.graphs: list[Any] = []
        self.backend = aot_autograd(fw_compiler=self._keep, bw_compiler=self._keep)

    def _keep(self, graph: Any, _inputs: Any) -> Any:
        self.graphs.append(graph.graph)
        from functorch.compile import make_boxed_func

        return make_boxed_func(graph.forward)

    def compiled(self, function: Callable[..., Any], **options: Any) -> Callable[..., Any]:
        torch.compiler.reset()
        compiled: Callable[..., Any] = torch.compile(function, fullgraph=True, backend=self.backend, **options)
        return compiled

    def operators(self) -> int:
        return sum("sdpa_xp" in str(node.target) for graph in self.graphs for node in graph.nodes)

    def largest(self) -> int:
        """The elements of the largest array."""
        results = [node.meta.get("val") for graph in self.graphs for node in graph.nodes]
        arrays = [x for r in results for x in (r if isinstance(r, list | tuple) else [r])]
        return max(int(x.numel()) for x in arrays if isinstance(x, torch.Tensor))


def gradients(function: Callable[..., Any], *arrays: Any) -> Any:
    leaves = [x.clone().requires_grad_() for x in arrays]
    return torch.autograd.grad(function(*leaves).square().sum(), leaves)


def of_all(query: Any, key: Any, value: Any, slopes: Any, scale: Any) -> Any:
    more = {"bias": biases.alibi(slopes), "softcap": 2.0, "scale": scale, "sinks": slopes}
    return scaled_dot_product_attention(query, key, value, BAND, is_causal=True, **more)


def textbook_of_all(query: Any, key: Any, value: Any, slopes: Any, scale: Any) -> Any:
    i, j = torch.arange(4)[:, None], torch.arange(5)
    scores = 2 * torch.tanh(query @ key.mT * scale / 2) - slopes[:, None, None] * (i - j).abs()
    allowed = (((i + 1 - 2 <= j) & (j <= i + 1 + 1)) | (j >= 3)) & (j <= i)
    sinks = slopes[:, None, None].expand(1, 2, 4, 1)
    weights = torch.cat([scores.masked_fill(~allowed, -math.inf), sinks], -1).softmax(-1)
    return weights[..., :5] @ value


def test_gradients_are_those_of_the_textbook() -> None:
    graphs, inputs = Graphs(), (QUERY, KEY, VALUE, SLOPES, draw(2, 1, 1))
    computed = gradients(graphs.compiled(of_all), *inputs)
    torch.testing.assert_close(computed, gradients(textbook_of_all, *inputs), rtol=0, atol=1e-12)
    assert graphs.operators() == 2  # one for each pass


def test_a_masked_nan_adds_nothing() -> None:
    def both(query: Any, key: Any) -> Any:
        output, lse = attention_state(query, key, VALUE, PADDED)
        return output + lse[..., None]

    compiled = Graphs().compiled(both)
    expected = gradients(both, QUERY, torch.nan_to_num(NAN))
    torch.testing.assert_close(gradients(compiled, QUERY, NAN), expected, rtol=0, atol=1e-12)


def test_memory_is_linear() -> None:
    x, graphs = torch.randn(1, 1, 512, 4), Graphs()
    gradients(graphs.compiled(lambda x: scaled_dot_product_attention(x, x, x)), x)
    assert graphs.largest() <= x.numel()


def test_a_cache() -> None:
    def call(query: Any, key: Any, value: Any) -> Any:
        return KVCache(key, value).attend(query)

    expected = gradients(
        lambda *x: scaled_dot_product_attention(*x, masks.causal("lower_right")), QUERY, KEY, VALUE
    )
    computed = gradients(Graphs().compiled(call), QUERY, KEY, VALUE)
    torch.testing.assert_close(computed, expected, rtol=0, atol=1e-12)


def test_slopes_of_tokens_with_positions() -> None:
    """Their gradients are those of torch's own operations, also outside of a compiler."""
    places = torch.asarray([0, 2, 3, 7, 8])

    def call(slopes: Any) -> Any:
        return KVCache(KEY, VALUE, positions=places).attend(QUERY, bias=biases.alibi(slopes))

    def textbook(slopes: Any) -> Any:
        distance = (places[1:, None] - places).abs()
        scores = QUERY @ KEY.mT / math.sqrt(3) - slopes[:, None, None] * distance
        return scores.masked_fill(places > places[1:, None], -math.inf).softmax(-1) @ VALUE

    torch.testing.assert_close(gradients(call, SLOPES), gradients(textbook, SLOPES), rtol=0, atol=1e-12)


def test_one_graph_for_all_lengths() -> None:
    graphs = Graphs()
    compiled = graphs.compiled(
        lambda x: scaled_dot_product_attention(x, KEY, VALUE, is_causal=True), dynamic=True
    )
    for queries in (4, 6, 7):  # all unlike the other lengths, or torch takes two for one
        x = draw(1, 2, queries, 3)
        expected = gradients(lambda x: scaled_dot_product_attention(x, KEY, VALUE, is_causal=True), x)
        torch.testing.assert_close(gradients(compiled, x), expected, rtol=0, atol=1e-12)
    assert len(graphs.graphs) == 2


def test_second_derivatives_where_the_backend_has_them() -> None:
    """Backends of torch that derive the graph have first derivatives only; this one computes it as it is."""

    def derivative(function: Callable[..., Any], orders: int) -> Any:
        x = QUERY.clone().requires_grad_()
        result = function(x)
        for _ in range(orders):
            (result,) = torch.autograd.grad(result.square().sum(), x, create_graph=True)
        return result.detach()

    def call(query: Any) -> Any:
        return scaled_dot_product_attention(query, NAN, VALUE, PADDED)

    torch.compiler.reset()
    compiled = torch.compile(call, fullgraph=True, backend="eager")
    torch.testing.assert_close(derivative(compiled, 2), derivative(call, 2), rtol=0, atol=1e-11)
    with pytest.raises(NotImplementedError, match="first and second derivatives only"):
        derivative(compiled, 3)


FIRST_CALL = """
import sdpa_xp, torch
from sdpa_xp import biases, masks
def call(x):
    return sdpa_xp.scaled_dot_product_attention(x, x, x, masks.padding([5]), bias=biases.alibi(2))
x = torch.rand(1, 2, 8, 4)
compiled = torch.compile(call, fullgraph=True, backend="eager")(x)
torch.testing.assert_close(compiled, call(x))
"""


def test_the_first_call_of_a_process_is_compiled() -> None:
    """It loads the files of torch, of its kernel, of a mask and of a bias."""
    subprocess.run([sys.executable, "-c", FIRST_CALL], check=True)


def test_an_exported_program_needs_no_sdpa_xp() -> None:
    layer = torch.nn.Linear(3, 3, dtype=torch.float64)

    class Model(torch.nn.Module):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.layer = layer

        def forward(self, x: Any) -> Any:
            return scaled_dot_product_attention(self.layer(x), KEY, VALUE, PADDED)

    program = torch.export.export(Model(), (QUERY,), strict=True)
    assert "sdpa_xp" not in str(program.graph)


@pytest.mark.parametrize("name", [make.__name__ for make in MASKS if make is not masks.from_function])
def test_options_are_restored_from_their_description(name: str) -> None:
    (call,) = (call for make, call in MASKS.items() if make.__name__ == name)
    keywords = {key: torch.asarray(x) if isinstance(x, np.ndarray) else x for key, x in call.items()}
    mask = ~(getattr(masks, name)(**keywords) & masks.causal([1, 2]))
    options = description.CallOptions(
        mask, biases.alibi(SLOPES) + draw(4, 5), True, -0.5, softmax_dtype=torch.float64
    )
    text, arrays = description.describe(options)
    assert description.options_of(text, arrays, torch) == options
    assert description.count_arrays(text) == len(arrays)


@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated:DeprecationWarning")
def test_forward_mode_inside_of_a_compiled_function() -> None:
    query = draw(2, 5, 8)

    def tangent(x: Any) -> Any:
        return torch.func.jvp(lambda y: scaled_dot_product_attention(y, query, query), (x,), (x,))[1]

    compiled = torch.compile(tangent, backend="eager", fullgraph=True)
    torch.testing.assert_close(compiled(query), tangent(query))
