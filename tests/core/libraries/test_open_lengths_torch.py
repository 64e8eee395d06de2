"""Lengths that torch's compilers know by their symbols: one program agrees with all eager calls."""

from __future__ import annotations

import io
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import pytest
from open_calls import BIASES, MASKS, OPTIONS, ROWS, TRACED, Row, call_of, functions

from sdpa_xp import attention_statistics, biases, masks
from sdpa_xp.errors import ArgumentValueError

torch: Any = pytest.importorskip("torch")
pytestmark = [
    pytest.mark.needs("torch"),
    pytest.mark.filterwarnings("ignore:Dynamo detected a call to a `functools.lru_cache`"),
]
TRACEABLE = [*MASKS, *BIASES, *OPTIONS]
"""The rows that torch.compile and the strict export trace: these trace no `~mask`."""


def with_gradients(call: Callable[..., Any]) -> Callable[..., Any]:
    def output_and_gradients(*arrays: Any) -> list[Any]:
        leaves = [x.detach().requires_grad_(x.is_floating_point()) for x in arrays]
        output = call(*leaves)
        return [
            output.detach(),
            *torch.autograd.grad(output.square().sum(), [x for x in leaves if x.requires_grad]),
        ]

    return output_and_gradients


class Module(torch.nn.Module):  # type: ignore[misc]
    """torch.export takes modules."""

    def __init__(self, call: Callable[..., Any]) -> None:
        super().__init__()
        self.call = call

    def forward(self, *arrays: Any) -> Any:
        return self.call(*arrays)


def exported(
    call: Callable[..., Any], axes: Sequence[str], arrays: Sequence[Any], open_: str, **options: Any
) -> Callable[..., Any]:
    """The program of a call with these axes, at first of these arrays, saved and loaded."""
    most: float = options.pop("most", np.inf)
    bounds = {} if most == np.inf else {"max": int(most)}
    dims = {letter: torch.export.Dim(letter, **(bounds if letter != "B" else {})) for letter in open_}
    if options.pop("self_attention", False):
        dims["S"] = dims["L"]
    dynamic = tuple({n: dims[letter] for n, letter in enumerate(names) if letter in dims} for names in axes)
    program = torch.export.export(Module(call), tuple(arrays), dynamic_shapes=(dynamic,), **options)
    file = io.BytesIO()
    torch.export.save(program, file)
    file.seek(0)
    loaded: Callable[..., Any] = torch.export.load(file).module()
    return loaded


def tensors(row: Row, lengths: Mapping[str, int]) -> list[Any]:
    return [torch.asarray(x) for x in row.draw(lengths)]


def assert_agrees(program: Callable[..., Any], call: Callable[..., Any], row: Row) -> None:
    for arrays, expected in row.runs(call, torch.asarray):
        torch.testing.assert_close(program(*arrays), expected, rtol=2e-5, atol=2e-5)


@pytest.mark.sampled(13)
@pytest.mark.parametrize("implementation", [None, "xp"])
@pytest.mark.parametrize("row", ROWS.values(), ids=ROWS)
def test_an_exported_program(row: Row, implementation: Any) -> None:
    call = call_of(row, implementation=implementation)
    program = exported(call, row.axes, tensors(row, TRACED), row.symbols, most=row.most)
    assert_agrees(program, call, row)


@pytest.mark.sampled(19)
@pytest.mark.parametrize("open_", ["L", "S"])
@pytest.mark.parametrize("row", [row for row in ROWS.values() if "L" in row.symbols])
def test_one_length_is_known(row: Row, open_: str) -> None:
    call, fixed = call_of(row), {letter: TRACED[letter] for letter in TRACED if letter != open_}
    program = exported(call, row.axes, tensors(row, TRACED), open_, most=row.most)
    for length in (3, 11, 17):
        arrays = tensors(row, fixed | {open_: length})
        torch.testing.assert_close(program(*arrays), call(*arrays), rtol=2e-5, atol=2e-5)


@pytest.mark.sampled(13)
@pytest.mark.parametrize("strict", [False, True])
@pytest.mark.parametrize("name", [name for name in TRACEABLE if "L" in ROWS[name].symbols])
def test_self_attention(name: str, strict: bool) -> None:
    """One symbol is the number of the queries and that of the keys."""
    row = ROWS[name]
    call, options = call_of(row), {"self_attention": True, "strict": strict, "most": row.most}
    program = exported(call, row.axes, tensors(row, TRACED | {"S": 5}), row.symbols, **options)
    for length in (3, 8, 12):
        arrays = tensors(row, TRACED | {"L": length, "S": length})
        torch.testing.assert_close(program(*arrays), call(*arrays), rtol=2e-5, atol=2e-5)


def test_strict_export_of_known_lengths() -> None:
    """A neighbourhood is computed in patches, as in the eager call."""
    x = torch.randn(1, 2, 64, 4)
    call = call_of(Row(lambda: {"attn_mask": masks.neighbourhood((8, 8), 1)}))
    program = torch.export.export(Module(call), (x, x, x), strict=True).module()
    torch.testing.assert_close(program(x, x, x), call(x, x, x))


@pytest.mark.sampled(13)
@pytest.mark.parametrize("name", TRACEABLE)
def test_one_compiled_graph(name: str) -> None:
    row, graphs = ROWS[name], []

    def backend(graph: Any, _: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    torch.compiler.reset()
    call = call_of(row)
    compiled = torch.compile(call, dynamic=True, fullgraph=True, backend=backend)
    # No two lengths of the traced call are equal: torch would take them for one symbol.
    for lengths in (TRACED | {"B": 3}, {"B": 2, "L": 6, "S": 9}, {"B": 5, "L": 11, "S": 8}):
        arrays = tensors(row, lengths | {letter: TRACED[letter] for letter in row.fixed})
        torch.testing.assert_close(compiled(*arrays), call(*arrays), rtol=2e-5, atol=2e-5)
    assert len(graphs) == 1


@pytest.mark.sampled(13)
@pytest.mark.parametrize("row", ROWS.values(), ids=ROWS)
def test_fake_tensors(row: Row) -> None:
    """They have shapes and dtypes, also in the backward pass, and none of their values is asked for."""
    from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

    call, mode = with_gradients(call_of(row)), FakeTensorMode()
    arrays = tensors(row, TRACED)
    fakes = [mode.from_tensor(x) for x in arrays]
    with mode:
        results = call(*fakes)
    for fake, real in zip(results, call(*arrays), strict=True):
        assert isinstance(fake, FakeTensor)
        assert (fake.shape, fake.dtype) == (real.shape, real.dtype)
    assert call_of(row)(*fakes).shape == results[0].shape  # also outside of their mode


@pytest.mark.sampled(19)
@pytest.mark.parametrize("mode", ["real", "fake", "symbolic", "real, before autograd"])
@pytest.mark.parametrize("row", ROWS.values(), ids=ROWS)
def test_make_fx(row: Row, mode: str) -> None:
    from torch.fx.experimental.proxy_tensor import make_fx

    kind, _, before = mode.partition(", ")
    call = with_gradients(call_of(row))
    arrays = tensors(row, TRACED)
    program = make_fx(call, tracing_mode=kind, pre_dispatch=bool(before))(*arrays)
    torch.testing.assert_close(program(*arrays), call(*arrays), rtol=2e-5, atol=2e-5)
    if kind == "symbolic" and not row.fixed:
        others = tensors(row, {"B": 3, "L": 6, "S": 9})
        torch.testing.assert_close(program(*others), call(*others), rtol=2e-5, atol=2e-5)


def test_nothing_is_kept_of_tensors_without_values() -> None:
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.fx.experimental.proxy_tensor import make_fx

    x = torch.randn(1, 2, 6, 3)
    call = call_of(Row(lambda: {"attn_mask": masks.causal([1]), "bias": biases.alibi([0.5, 0.1])}))
    make_fx(call)(x, x, x)
    with FakeTensorMode(allow_non_fake_inputs=True):
        call(x, x, x)
    assert type(call(x, x, x)) is torch.Tensor
    torch.testing.assert_close(call(x, x, x), call(x.clone(), x, x))


@pytest.mark.sampled(3)
@pytest.mark.parametrize("call", functions(torch.ones(1)).values())
def test_other_functions(call: Callable[..., Any]) -> None:
    row = ROWS["plain"]
    program = exported(call, row.axes, tensors(row, TRACED), row.symbols)
    for lengths in ({"B": 3, "L": 6, "S": 9}, {"B": 2, "L": 2, "S": 4}):
        arrays = tensors(row, lengths)
        torch.testing.assert_close(program(*arrays), call(*arrays), rtol=2e-5, atol=2e-5)


def test_sums_of_blocks_are_refused() -> None:
    def call(query: Any, key: Any, _: Any) -> Any:
        return attention_statistics(query, key, of="block_sums", block_size=2).block_sums

    row = ROWS["plain"]
    with pytest.raises(ArgumentValueError, match="'block_sums' if a compiler knows a length by its symbol"):
        exported(call, row.axes, tensors(row, TRACED), row.symbols)


@pytest.mark.parametrize(
    ("mask", "most"), [(masks.neighbourhood((3, 3), 1), "max=9"), (masks.blocks([[True]], 8), "max=8")]
)
def test_a_length_that_a_mask_bounds(mask: masks.Mask, most: str) -> None:
    """torch says which bound the call needs."""
    row = ROWS["plain"]
    with pytest.raises(torch._dynamo.exc.UserError, match=most):
        exported(call_of(Row(lambda: {"attn_mask": mask})), row.axes, tensors(row, TRACED), row.symbols)
