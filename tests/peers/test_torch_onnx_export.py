"""torch.onnx.export(dynamo=True) of a function that calls sdpa_xp: one Attention, and the numbers of NumPy."""

from __future__ import annotations

import importlib
import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from functools import cache
from typing import Any, NamedTuple

import numpy as np
import onnxruntime
import pytest
import torch
from calls import draw
from internals import judge, reference, textbook

from sdpa_xp import biases, dot_product_attention, masks, scaled_dot_product_attention

pytestmark = [
    pytest.mark.filterwarnings(r"ignore:`isinstance\(treespec, LeafSpec\)` is deprecated:FutureWarning"),
    pytest.mark.filterwarnings("ignore:# The axis name. . will not be used, since it shares:UserWarning"),
]


@pytest.fixture(autouse=True, scope="module")
def one_registry() -> Iterator[None]:
    """torch compiles its own 500 functions for each export, which is nearly half of it: here once an opset."""
    registry = importlib.import_module("torch.onnx._internal.exporter._registration").ONNXRegistry
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(registry, "from_torchlib", staticmethod(cache(registry.from_torchlib)))
        yield


Q, K, V = (2, 4, 5, 8), (2, 2, 7, 8), (2, 2, 7, 6)
ATTENTION = {"Attention": 1}


class Module(torch.nn.Module):
    """A function of arrays, as torch wants it."""

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self.function = function

    def forward(self, *arrays: Any) -> Any:
        return self.function(*arrays)


def exported(function: Callable[..., Any], arrays: list[np.ndarray], opset: int = 23, **how: Any) -> Any:
    """The ONNX model of `function` at torch tensors."""
    module = function if isinstance(function, torch.nn.Module) else Module(function)
    inputs = tuple(torch.asarray(x) for x in arrays)
    program = torch.onnx.export(module.eval(), inputs, dynamo=True, opset_version=opset, verbose=False, **how)
    return program.model_proto


def nodes(model: Any) -> Counter[str]:
    return Counter(node.op_type for node in model.graph.node)


def attribute(model: Any, name: str) -> Any:
    (node,) = [node for node in model.graph.node if node.op_type == "Attention"]
    return {x.name: x.f if x.type == x.FLOAT else x.i for x in node.attribute}.get(name)


def run(model: Any, arrays: list[np.ndarray]) -> np.ndarray:
    session = onnxruntime.InferenceSession(model.SerializeToString())
    names = [entry.name for entry in session.get_inputs()]
    return session.run(None, dict(zip(names, arrays, strict=True)))[0]


def boolean(rng: np.random.Generator, *shape: int) -> np.ndarray:
    """Of its rows that have a query each, one has no key."""
    mask = rng.random(shape) < 0.6
    mask[..., -1] = True
    if shape[-2] > 1:
        mask[..., 1, :] = False
    return mask


def assert_agree(output: np.ndarray, arrays: list[np.ndarray], **rules: Any) -> None:
    """`output` and NumPy's result are within the house's bound of the float64 reference."""
    expected = reference.attention(*arrays, **rules)[0]
    plain = textbook(np, *arrays, **rules)
    for result in (output, scaled_dot_product_attention(*arrays, **rules)):
        assert result.dtype == arrays[0].dtype
        agreement = judge(result, expected, plain, arrays[0].dtype.name)
        assert agreement.agrees, agreement


NOTHING: Mapping[str, Any] = {}


class Case(NamedTuple):
    shapes: Any = (Q, K, V)
    """Of query, key and value."""
    rules: Mapping[str, Any] = NOTHING
    more: Mapping[str, tuple[int, ...]] = NOTHING
    """Shapes of a boolean `attn_mask`, a `bias` and a `scale`."""
    beside: Mapping[str, int] | None = NOTHING
    """The nodes beside the one Attention; None if they do not matter."""
    opset: int = 23
    dtype: Any = np.float32


CAUSAL: dict[str, Any] = {"is_causal": True}


def masked(mask: tuple[int, ...], *shapes: tuple[int, ...]) -> Case:
    return Case(shapes, CAUSAL, {"attn_mask": mask}, beside=None)


CASES = {
    "plain": Case((Q, (2, 4, 7, 8), (2, 4, 7, 8))),
    "is_causal": Case(((2, 4, 7, 8),) * 3, CAUSAL, opset=24),
    "is_causal, L > S, grouped": Case(((2, 4, 9, 8), K, V), CAUSAL),
    "is_causal, L < S": Case(rules=CAUSAL, beside={"Where": 2}),
    "grouped, Ev < E": Case(opset=24),
    "scale": Case(rules={"scale": 0.3}),
    "one key head": Case(((2, 4, 5, 8), (2, 1, 5, 8), (2, 1, 5, 3)), {"scale": 2} | CAUSAL, opset=24),
    "causal as a value": Case(((2, 4, 7, 8),) * 3, {"attn_mask": masks.causal()}),
    "causal twice": Case(((2, 4, 7, 8),) * 3, {"attn_mask": masks.causal() & masks.causal()}),
    "two masks": Case(more={"attn_mask": (2, 1, 5, 7), "bias": (4, 5, 7)}, beside=None),
    "scale 0": Case(rules={"scale": 0.0}, beside={"Mul": 1}),
    "scale below 0": Case(rules={"scale": -0.7}, beside={"Mul": 1}),
    "learned scale": Case(more={"scale": (4, 1, 1)}, beside={"Mul": 1}),
    "half": Case(beside={"Cast": 4}, dtype=np.float16),  # which is computed in float32
    "2-D": masked((5, 7), (5, 8), (7, 8), (7, 6)),
    "3-D": masked((4, 1, 7), (4, 5, 8), (2, 7, 8), (2, 7, 6)),
    "5-D": masked((2, 1, 5, 7), (3, 2, 4, 5, 8), (3, 2, 2, 7, 8), (3, 2, 2, 7, 6)),
    "5-D, broadcast": masked((3, 1, 1, 1, 7), (3, 2, 4, 5, 8), (2, 2, 7, 8), (1, 2, 7, 6)),
    "4-D, broadcast": masked((1, 1, 5, 7), (2, 4, 5, 8), (1, 2, 7, 8), (1, 2, 7, 6)),
    "4-D, broadcast, without a mask": Case(((2, 4, 5, 8), (1, 2, 7, 8), (1, 2, 7, 6)), CAUSAL, beside=None),
}


@pytest.mark.sampled(3)
@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_one_attention(rng: np.random.Generator, case: Case) -> None:
    """With the nodes that are needed beside it; keys that no query attends may be NaN."""
    arrays = draw(rng, *case.shapes, dtype=case.dtype)
    arrays += [boolean(rng, *n) if x == "attn_mask" else draw(rng, n)[0] for x, n in case.more.items()]
    model = exported(
        lambda q, k, v, *more: scaled_dot_product_attention(
            q, k, v, **dict(zip(case.more, more, strict=True)), **case.rules
        ),
        arrays,
        case.opset,
    )
    assert nodes(model)["Attention"] == 1
    is_causal = case.rules.keys() == {"attn_mask"} or case.rules.get("is_causal", False)
    if case.beside is not None:
        assert nodes(model) == ATTENTION | dict(case.beside)
    if case.beside == {}:
        assert bool(attribute(model, "is_causal")) is is_causal
        scale = case.rules.get("scale")
        assert attribute(model, "scale") == (None if scale is None else np.float32(scale))
    rules = {"is_causal": is_causal, "scale": case.rules.get("scale")}
    rules |= dict(zip(case.more, arrays[3:], strict=True))
    assert_agree(run(model, arrays), arrays[:3], **rules)
    queries = arrays[0].shape[-2]
    if is_causal and queries < arrays[1].shape[-2]:
        poisoned = [arrays[0], *(x.copy() for x in arrays[1:3]), *arrays[3:]]
        poisoned[1][..., queries:, :] = poisoned[2][..., queries:, :] = math.nan
        np.testing.assert_array_equal(run(model, poisoned), run(model, arrays))


MASKED: dict[str, tuple[tuple[int, ...], dict[str, Any]]] = {
    "(L, S)": ((5, 7), {}),
    "(S,)": ((7,), {}),
    "(L, 1)": ((5, 1), {}),
    "(Hq, L, S)": ((4, 5, 7), {}),
    "(B, 1, 1, S)": ((2, 1, 1, 7), {}),
    "(B, Hq, L, S)": ((2, 4, 5, 7), {}),
    "beside is_causal": ((2, 1, 5, 7), {"is_causal": True}),
    "padding beside is_causal": ((2, 1, 1, 7), {"is_causal": True}),
    "negative scale": ((5, 7), {"scale": -0.4, "is_causal": True}),
}


@pytest.mark.sampled(7)
@pytest.mark.parametrize("kind", ["boolean", "floating"])
@pytest.mark.parametrize("name", MASKED)
def test_masks(rng: np.random.Generator, name: str, kind: str) -> None:
    """One Attention, with rows that have no key and padding that is NaN; before opset 23 the same numbers.

    Each mask is exported to one opset as a boolean one, and to the other as a floating one.
    """
    (shape, rules), turn = MASKED[name], [*MASKED].index(name) + len(kind)
    opset = (18, 23)[turn % 2]
    arrays = draw(rng, Q, K, V)
    allowed = boolean(rng, *shape) if len(shape) > 1 else np.arange(7) < 5
    if shape[-1] > 1:
        allowed[..., 3] = False
    floating = np.where(allowed, rng.standard_normal(shape), -math.inf).astype(np.float32)
    mask = allowed if kind == "boolean" else floating
    model = exported(lambda *x: scaled_dot_product_attention(*x, **rules), [*arrays, mask], opset)
    assert nodes(model)["Attention"] == (opset >= 23)
    assert_agree(run(model, [*arrays, mask]), [*arrays, mask], **rules)
    if shape[-1] > 1:
        poisoned = [arrays[0], *(x.copy() for x in arrays[1:]), mask]
        poisoned[1][..., 3, :] = poisoned[2][..., 3, :] = math.nan
        np.testing.assert_array_equal(run(model, poisoned), run(model, [*arrays, mask]))


def test_row_of_the_smallest_finite_number_is_not_empty(rng: np.random.Generator) -> None:
    bias = np.full((5, 7), np.finfo(np.float32).min)
    arrays = [*draw(rng, Q, K, V), bias]
    output = run(exported(scaled_dot_product_attention, arrays), arrays)
    mean = np.repeat(arrays[2].mean(axis=-2, keepdims=True), 2, axis=1)
    np.testing.assert_allclose(output, np.broadcast_to(mean, output.shape), atol=2e-6)


def test_keys_that_is_causal_leaves_out_at_lengths_that_are_known_later(rng: np.random.Generator) -> None:
    """In the example no key is left out; where the graph runs, some are."""
    queries, keys = (torch.export.Dim(name) for name in "LS")
    model = exported(
        lambda *x: scaled_dot_product_attention(*x, is_causal=True),
        draw(rng, (2, 4, 9, 8), K, V),
        dynamic_shapes=(({2: queries}, {2: keys}, {2: keys}),),
    )
    arrays = draw(rng, Q, K, V)
    poisoned = [x.copy() for x in arrays]
    poisoned[1][..., 5:, :] = poisoned[2][..., 5:, :] = math.nan
    assert_agree(run(model, poisoned), arrays, is_causal=True)


def test_heads_behind_the_length(rng: np.random.Generator) -> None:
    arrays = draw(rng, *[(2, 7, 4, 8)] * 3)
    model = exported(lambda *x: dot_product_attention(*x, is_causal=True), arrays)
    assert nodes(model) == ATTENTION | {"Transpose": 4}
    swapped = [x.swapaxes(-3, -2) for x in arrays]
    assert_agree(run(model, arrays).swapaxes(-3, -2), swapped, is_causal=True)


LENGTHS = [(3, 5, 7), (1, 1, 1), (2, 9, 3), (4, 6, 6), (1, 1, 40)]
DYNAMIC: dict[str, tuple[tuple[Any, ...] | None, dict[str, Any]]] = {
    "plain": (None, {}),
    "is_causal": (None, {"is_causal": True}),
    "padding": (("B", 1, 1, "S"), {}),
    "mask": (("B", 1, "L", "S"), {}),
    "mask of a row, is_causal": (("S",), {"is_causal": True}),
    "mask, is_causal": (("L", "S"), {"is_causal": True, "scale": -0.3}),
}


@pytest.mark.sampled(3)
@pytest.mark.parametrize(("mask", "rules"), DYNAMIC.values(), ids=DYNAMIC)
def test_lengths_that_are_known_later(rng: np.random.Generator, mask: Any, rules: dict[str, Any]) -> None:
    """Batch, L and S are symbols while torch exports; the graph runs at other lengths, 1 among them."""
    axes = {name: torch.export.Dim(name) for name in "BLS"}
    symbolic = [("B", 4, "L", 8), ("B", 2, "S", 8), ("B", 2, "S", 6)] + ([] if mask is None else [mask])

    def drawn(**lengths: int) -> list[np.ndarray]:
        shapes = [tuple(lengths.get(n, n) for n in shape) for shape in symbolic]
        return draw(rng, *shapes[:3]) + [rng.random(shape) < 0.6 for shape in shapes[3:]]

    dynamic = tuple({i: axes[n] for i, n in enumerate(shape) if n in axes} for shape in symbolic)
    model = exported(
        lambda *x: scaled_dot_product_attention(*x, **rules), drawn(B=2, L=5, S=7), dynamic_shapes=(dynamic,)
    )
    assert nodes(model)["Attention"] == 1
    assert mask or "is_causal" in rules or nodes(model) == ATTENTION
    for batch, queries, keys in LENGTHS:
        arrays = drawn(B=batch, L=queries, S=keys)
        assert_agree(run(model, arrays), arrays, **rules)


def test_lengths_of_self_attention(rng: np.random.Generator) -> None:
    """L is S whatever it is, so there is nothing beside the node."""
    length = torch.export.Dim("L")
    model = exported(
        lambda x: scaled_dot_product_attention(x, x, x, is_causal=True),
        draw(rng, (2, 4, 5, 8)),
        dynamic_shapes=(({2: length},),),
    )
    assert nodes(model) == ATTENTION
    (x,) = draw(rng, (2, 4, 11, 8))
    assert_agree(run(model, [x]), [x, x, x], is_causal=True)


class Block(torch.nn.Module):
    """Attention between its projections: 8 query heads share 2 key heads."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(7)
        self.query, self.key, self.value, self.output = (torch.nn.Linear(32, n) for n in (32, 8, 8, 32))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (
            projection(x).unflatten(-1, (-1, 4)).transpose(1, 2)
            for projection in (self.query, self.key, self.value)
        )
        y = scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.output(y.transpose(1, 2).flatten(-2))


def test_module(rng: np.random.Generator) -> None:
    block = Block()
    (x,) = draw(rng, (2, 6, 32))
    length = torch.export.Dim("L")
    model = exported(block, [x], dynamic_shapes={"x": {1: length}})
    assert nodes(model)["Attention"] == 1
    assert not nodes(model).keys() & {"Softmax", "Exp", "Where"}
    for x in draw(rng, (2, 6, 32), (2, 13, 32)):
        np.testing.assert_allclose(run(model, [x]), block(torch.asarray(x)).detach().numpy(), atol=2e-6)


PORTABLE: dict[str, dict[str, Any]] = {
    "softcap": {"softcap": 2.0, "is_causal": True},
    "window": {"attn_mask": masks.sliding_window(2, 1)},
    "lower right": {"attn_mask": masks.causal("lower_right")},
    "prefix": {"attn_mask": masks.causal() | masks.prefix(2)},
    "padding": {"attn_mask": masks.padding([7, 4])},
    "alibi": {"bias": biases.alibi(4)},
    "xp": {"implementation": "xp"},
}


@pytest.mark.sampled(3)
@pytest.mark.parametrize("rules", PORTABLE.values(), ids=PORTABLE)
def test_portable_implementation_is_exported_as_well(rng: np.random.Generator, rules: dict[str, Any]) -> None:
    """What the kernel does not compute; the graph runs at other lengths, too."""
    axes = {name: torch.export.Dim(name) for name in "LS"}
    dynamic = ({2: axes["L"]}, {2: axes["S"]}, {2: axes["S"]})
    # torch drops a tiny number that keeps the sum of a row without a key from 0, unless it is told not to.
    how = {"optimize": False} if rules == PORTABLE["lower right"] else {}
    model = exported(
        lambda *x: scaled_dot_product_attention(*x, **rules),
        draw(rng, Q, K, V),
        dynamic_shapes=(dynamic,),
        **how,
    )
    assert "Attention" not in nodes(model)
    for queries, keys in ((5, 7), (8, 9), (2, 40), *(((9, 8),) if how else ())):
        arrays = draw(rng, (2, 4, queries, 8), (2, 2, keys, 8), (2, 2, keys, 6))
        expected = scaled_dot_product_attention(*arrays, **rules)
        np.testing.assert_allclose(run(model, arrays), expected, rtol=0, atol=2e-6)


def test_double_precision_takes_no_attention(rng: np.random.Generator) -> None:
    """onnxruntime computes that node to float32 accuracy. A scale of a power of 2 survives torch's export."""
    arrays = draw(rng, Q, K, V, dtype=np.float64)
    model = exported(lambda *x: scaled_dot_product_attention(*x, scale=0.25), arrays)
    assert "Attention" not in nodes(model)
    assert_agree(run(model, arrays), arrays, scale=0.25)


def test_portable_arrays(rng: np.random.Generator) -> None:
    """Sinks, two biases, and lengths as an array."""
    arrays = [*draw(rng, Q, K, V, (4,), (5, 7), (4, 1, 7)), np.asarray([7, 4], np.int32)]

    def call(q: Any, k: Any, v: Any, sinks: Any, one: Any, other: Any, lengths: Any) -> Any:
        return scaled_dot_product_attention(
            q, k, v, masks.padding(lengths), bias=biases.from_array(one) + other, sinks=sinks
        )

    model = exported(call, arrays)
    assert "Attention" not in nodes(model)
    np.testing.assert_allclose(run(model, arrays), call(*arrays), rtol=0, atol=2e-6)


@pytest.mark.filterwarnings("ignore:Dynamo detected a call to a `functools.lru_cache`")
@pytest.mark.parametrize("strict", [False, True])
def test_torch_export(rng: np.random.Generator, strict: bool) -> None:
    """The exported program, run by torch; only there is the kernel what None means."""
    arrays = [*draw(rng, Q, K, V), boolean(rng, 2, 1, 5, 7)]
    inputs = tuple(torch.asarray(x) for x in arrays)
    module = Module(lambda *x: scaled_dot_product_attention(*x, is_causal=True))
    program = torch.export.export(module, inputs, strict=strict)
    assert "scaled_dot_product_attention" in str(program.graph)
    assert_agree(program.module()(*inputs).numpy(), arrays, is_causal=True)
