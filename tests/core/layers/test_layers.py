"""Layers on every library: the float64 reference with the maps around it, and what moves their arrays."""

from __future__ import annotations

import contextlib
import dataclasses
import importlib
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import pytest
from calls import gradients
from internals import judge, namespace, override, product, reference, stages
from libraries import LIBRARIES, NAMESPACES, Library, each_other, generator, read_only

from sdpa_xp import KVCache, PagedKVCache, masks
from sdpa_xp.layers import Layer as Parameters
from sdpa_xp.layers import Linear, MultiHeadAttention, SingleHeadAttention

F = np.float32
Layer = MultiHeadAttention | SingleHeadAttention


def multi(*widths: int, num_heads: int = 4, **rules: Any) -> Callable[[], Layer]:
    """A layer of NumPy arrays, whose biases are not 0."""

    def make() -> Layer:
        rng = np.random.default_rng(1)
        layer = MultiHeadAttention.init(rng, *widths, num_heads=num_heads, **rules)
        return layer.with_parameters(
            {
                name: rng.standard_normal(x.shape, dtype=F)
                for name, x in layer.parameters.items()
                if name.endswith("bias")
            }
        )

    return make


def single(*widths: int, **rules: Any) -> Callable[[], Layer]:
    return lambda: SingleHeadAttention.init(np.random.default_rng(1), *widths, **rules)


def but(make: Callable[[], Layer], **fields: Any) -> Callable[[], Layer]:
    return lambda: dataclasses.replace(make(), **fields)


class Case(NamedTuple):
    """A layer, the shapes of what goes in, and the keywords of the call."""

    make: Callable[[], Layer]
    inputs: tuple[tuple[int, ...], ...]
    rules: dict[str, Any] = {}  # noqa: RUF012


SLOPES = np.asarray([0.2, -0.5, 1.5, 0.0], F)
ALLOWED = np.arange(24).reshape(2, 1, 2, 6) % 5 > 0
CASES = {
    "self": Case(multi(8), ((2, 5, 8),)),
    "self, causal": Case(multi(8, bias=False), ((2, 5, 8),), {"is_causal": True}),
    "no batch": Case(multi(8), ((5, 8),), {"is_causal": True}),
    "two axes of batch": Case(multi(8), ((3, 2, 5, 8),)),
    "cross": Case(multi(8, 6, 10), ((2, 2, 8), (2, 6, 6), (2, 6, 10))),
    "cross, value is key": Case(multi(8, 6), ((2, 2, 8), (2, 6, 6))),
    "mask": Case(multi(8), ((2, 2, 8), (2, 6, 8)), {"attn_mask": ALLOWED}),
    "bias and cap": Case(multi(8), ((2, 2, 8), (2, 6, 8)), {"bias": SLOPES.reshape(4, 1, 1), "softcap": 2.0}),
    "grouped": Case(multi(8, num_kv_heads=2), ((2, 5, 8),)),
    "widths of its own": Case(multi(8, head_dim=3, out_dim=7, num_kv_heads=1), ((2, 5, 8),)),
    "no map at the end": Case(but(multi(8), out=None), ((2, 5, 8),)),
    "scale": Case(but(multi(8), scale=-0.3), ((2, 5, 8),)),
    "scale of each head": Case(but(multi(8), scale=SLOPES), ((2, 5, 8),)),
    "temperature": Case(but(multi(8), temperature=3.0), ((2, 5, 8),)),
    "temperature of each head": Case(but(multi(8), temperature=SLOPES + 1, scale=0.7), ((2, 5, 8),)),
    "sinks": Case(but(multi(8), sinks=SLOPES), ((2, 5, 8),)),
    "sinks and scale of the call": Case(
        but(multi(8), sinks=SLOPES + 1, scale=SLOPES), ((2, 5, 8),), {"sinks": SLOPES, "scale": 0.5}
    ),
    "single": Case(single(8, 6), ((2, 5, 8),), {"is_causal": True}),
    "single, no batch": Case(single(8, 6, bias=True), ((5, 8),)),
    "single, cross": Case(single(8, 6, key_dim=3, value_dim=4), ((2, 2, 8), (2, 6, 3), (2, 6, 4))),
    "single, scale": Case(but(single(8, 6), scale=SLOPES[2:3]), ((2, 5, 8),)),
}


def placed_on(library: Library, layer: Layer) -> Layer:
    """The layer with its arrays in the library."""
    with library.guard():
        return layer.with_parameters({name: library.put(np.asarray(x)) for name, x in layer.parameters.items()})


def draw(rng: np.random.Generator, case: Case, dtype: Any = F) -> list[np.ndarray]:
    return [rng.standard_normal(shape).astype(dtype) for shape in case.inputs]


def plainly(attend: Callable[..., Any], xp: Any, layer: Layer, inputs: list[Any], rules: dict[str, Any]) -> Any:
    """Output of the layer, spelled out around `attend`; and its weights."""
    inputs = [*inputs, *[inputs[-1]] * (3 - len(inputs))]
    heads = getattr(layer, "num_heads", 1)
    counts = (heads, *[getattr(layer, "num_kv_heads", 1)] * 2)
    apart = []
    for x, role, count in zip(inputs, (layer.query, layer.key, layer.value), counts, strict=True):
        flat = linear(xp, role, x)
        split = xp.reshape(flat, (*flat.shape[:-1], count, flat.shape[-1] // count))
        apart.append(xp.moveaxis(split, -2, -3))
    scale = 1 / math.sqrt(apart[0].shape[-1]) if layer.scale is None else layer.scale
    layer_rules = {"scale": of_heads(xp, scale) / of_heads(xp, layer.temperature)}
    sinks = getattr(layer, "sinks", None)
    layer_rules |= {} if sinks is None else {"sinks": sinks}
    output, weights = attend(*apart, **(layer_rules | rules))
    output = xp.moveaxis(output, -3, -2)
    joined = xp.reshape(output, (*output.shape[:-2], heads * output.shape[-1]))
    out = getattr(layer, "out", None)
    return (joined if out is None else linear(xp, out, joined)), weights


def linear(xp: Any, layer: Linear, x: Any) -> Any:
    y = product(xp, x, xp.matrix_transpose(layer.weight))
    return xp.astype(y if layer.bias is None else y + layer.bias[(*[None] * (y.ndim - 1), ...)], x.dtype)


def of_heads(xp: Any, number: Any) -> Any:
    return xp.reshape(number, (-1, 1, 1)) if getattr(number, "ndim", 0) else number


def expect(layer: Layer, inputs: list[np.ndarray], rules: dict[str, Any]) -> tuple[np.ndarray, np.ndarray]:
    """Output and weights in float64."""
    wide = layer.with_parameters({name: np.asarray(x, np.float64) for name, x in layer.parameters.items()})
    inputs = [np.asarray(x, np.float64) for x in inputs]
    return plainly(lambda *x, **rules: reference.attention(*x, **rules)[::2], np, wide, inputs, rules)


def assert_agrees(
    library: Library, result: Any, layer: Layer, inputs: list[np.ndarray], rules: dict[str, Any], which: int = 0
) -> None:
    """`result` is the output, or by `which` the weights, as near to float64 as the textbook's formula is."""

    def attend(*x: Any, **rules: Any) -> Any:
        every = stages(library.xp, *x, **rules)
        return every["output"], every["weights"]

    with library.without_settings.guard(), np.errstate(all="ignore"):
        placed = [library.put(x) for x in inputs]
        placed_rules = {name: library.put(x) if isinstance(x, np.ndarray) else x for name, x in rules.items()}
        plain = plainly(attend, library.xp, placed_on(library, layer), placed, placed_rules)[which]
    expected = expect(layer, inputs, rules)[which]
    if which and isinstance(layer, SingleHeadAttention):
        expected, plain = expected[..., 0, :, :], plain[..., 0, :, :]
    assert namespace(result) is library.xp
    assert result.dtype == placed[0].dtype
    assert result.shape == expected.shape
    agreement = judge(library.get(result), expected, library.get(plain), inputs[0].dtype.name)
    assert agreement.agrees, agreement


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_call_weights_and_state(library: Library, rng: np.random.Generator, case: Case) -> None:
    layer, inputs = case.make(), draw(rng, case)
    placed = placed_on(library, layer)
    assert_agrees(library, library.call(placed, *inputs, **case.rules), layer, inputs, case.rules)
    weights = library.call(placed.weights, *inputs[:2], **case.rules)
    assert_agrees(library, weights, layer, inputs, case.rules, which=1)
    state = library.call(placed.state, *inputs, **case.rules)
    with library.guard():
        output = placed.combine(state.output)
    assert_agrees(library, output, layer, inputs, case.rules)


@pytest.mark.sampled(0, on="EAGER_JAX")
@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float64"])
@pytest.mark.parametrize("name", ["self", "cross", "grouped"])
def test_dtypes(library: Library, rng: np.random.Generator, dtype: str, name: str) -> None:
    library.needs(dtype)
    case = CASES[name]
    layer, inputs = case.make(), draw(rng, case, dtype)
    layer = layer.with_parameters({n: np.asarray(x).astype(dtype) for n, x in layer.parameters.items()})
    assert_agrees(library, library.call(placed_on(library, layer), *inputs), layer, inputs, {})


def test_calls_that_are_alike_are_checked_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """By shape, dtype, library and device, of inputs and of weights."""
    layer, x = multi(8, 6)(), np.ones((3, 5, 8), F)
    other = np.ones((3, 2, 6), F)
    changed = layer.with_parameters({n: w.astype(np.float64) for n, w in layer.parameters.items()})
    layer(x, other)
    checked: list[str] = []
    override(monkeypatch, "check_kind_of_inputs", lambda function, values: checked.append(function))
    layer(x + 1, other * 2)
    assert checked == []
    for odd in (other.astype(np.float64), other[:, :1], np.ma.asarray(other)):
        with contextlib.suppress(TypeError, ValueError):
            layer(x, odd)
        assert checked[0] == "MultiHeadAttention"
        checked.clear()
    with contextlib.suppress(TypeError):
        changed(x, other)
    assert checked[0] == "MultiHeadAttention"


@pytest.mark.sampled(0, on="EAGER_JAX")
@pytest.mark.leaves_out("cupy-rules-device1")
def test_attending_to_a_cache(library: Library, rng: np.random.Generator) -> None:
    """What a layer attends to is projected once; scales and sinks are the layer's. By hand it is the same."""
    layer = but(multi(8, num_kv_heads=2), scale=SLOPES, sinks=SLOPES)()
    tokens = rng.standard_normal((2, 5, 8), dtype=F)
    placed, outputs, by_hand = placed_on(library, layer), [], []
    with library.guard():
        cache = KVCache(*placed.project_key_value(library.put(tokens[:, :2].copy())))
        for start, stop in ((2, 4), (4, 5)):
            x = library.put(tokens[:, start:stop].copy())
            query, key, value = placed.project(x)
            cache = cache.append(key, value)
            outputs.append(placed.attend(x, cache))
            by_hand.append(placed.combine(cache.attend(query, **placed.attention_options)))
        results = [library.get(library.xp.concat(parts, axis=1)) for parts in (outputs, by_hand)]
        near = library.get(placed.attend(x, cache, masks.sliding_window(1, 0), scale=0.5))
    expected = expect(layer, [tokens], {"is_causal": True})[0][:, 2:]
    for result in results:
        np.testing.assert_allclose(result, expected, rtol=0, atol=4e-6)
    distance = np.arange(5)[:, None] - np.arange(5)
    expected = expect(layer, [tokens], {"attn_mask": (distance >= 0) & (distance < 2), "scale": 0.5})[0][:, -1:]
    np.testing.assert_allclose(near, expected, rtol=0, atol=4e-6)


@pytest.mark.parametrize("name", ["cross", "cross, value is key"])
def test_cross_attention_to_a_cache(library: Library, rng: np.random.Generator, name: str) -> None:
    case = CASES[name]
    layer, (query, *memory) = case.make(), draw(rng, case)
    placed = placed_on(library, layer)
    cache = KVCache(*library.call(placed.project_key_value, *memory))
    output = library.call(lambda x: placed.attend(x, cache, is_causal=False), query)
    assert_agrees(library, output, layer, [query, *memory], {})


def test_attending_to_pages(rng: np.random.Generator) -> None:
    layer = multi(8)()
    tokens = rng.standard_normal((2, 5, 8), dtype=F)
    pools = [np.zeros((4, 4, 3, 2), F) for _ in range(2)]
    cache = PagedKVCache(*pools, block_table=[[0, 1], [2, 3]], lengths=[0, 0])
    output = layer.attend(tokens, cache.append(*layer.project_key_value(tokens)))
    np.testing.assert_allclose(output, layer(tokens, is_causal=True), rtol=0, atol=4e-6)


@dataclasses.dataclass(frozen=True, repr=False)
class Block(Parameters):
    """A layer of a user: of a layer, an array, and what is neither."""

    attention: MultiHeadAttention
    gain: Any
    name: str = "block"

    def __call__(self, x: Any) -> Any:
        return x + self.attention(x) * self.gain[(*[None] * (x.ndim - 1), ...)]


@pytest.mark.leaves_out("cupy-rules-device1", "torch-cuda-rules")
def test_a_layer_of_ones_own(library: Library, rng: np.random.Generator) -> None:
    """Made of others, it has their parameters, is moved and gets other ones as they do."""
    attention, x = multi(8)(), rng.standard_normal((2, 5, 8), dtype=F)
    block = Block(attention, np.full(8, 0.5, F))
    names = [*(f"attention.{name}" for name in attention.parameters), "gain"]
    assert [*block.parameters] == names
    with library.guard():
        placed = block.with_parameters({n: library.put(np.asarray(v)) for n, v in block.parameters.items()})
        result = library.get(placed(library.put(x)))
    exact = x + 0.5 * expect(attention, [x], {})[0]
    np.testing.assert_allclose(result, exact, rtol=0, atol=4e-6)
    assert placed.name == "block"
    assert repr(block).startswith("Block(attention=MultiHeadAttention(8 -> 8, num_heads=")
    back = placed.to(np) if library.lazy else library.call(placed.to, np.zeros(1, F))
    assert [*back.parameters] == names


def test_in_a_trace(library: Library, rng: np.random.Generator) -> None:
    """Parameters are what is traced; nothing of the layer is read."""
    library.needs_jit()
    layer = CASES["temperature of each head"].make()
    inputs = [rng.standard_normal((2, 5, 8), dtype=F)]
    call = library.jit(lambda arrays, x: layer.with_parameters(arrays)(x, is_causal=True))
    with library.guard():
        result = call(placed_on(library, layer).parameters, library.put(inputs[0]))
    np.testing.assert_allclose(library.get(result), expect(layer, inputs, {"is_causal": True})[0], atol=4e-6)


@pytest.mark.leaves_out("torch-inference")
@pytest.mark.sampled(0, on="EAGER_JAX")
def test_gradients_of_parameters(library: Library, rng: np.random.Generator) -> None:
    """torch's, JAX's and MLX's, against finite differences of the reference."""
    layer = but(multi(8, 6, num_kv_heads=2), scale=SLOPES, temperature=SLOPES + 1, sinks=SLOPES)()
    inputs = [rng.standard_normal(shape, dtype=F) for shape in ((2, 3, 8), (2, 5, 6))]
    weight = rng.standard_normal((2, 3, 8), dtype=F)
    names = [*layer.parameters]

    def loss(*arrays: Any) -> Any:
        placed = [library.put(x) for x in inputs]
        learned = layer.with_parameters(dict(zip(names, arrays, strict=True)))
        return (learned(*placed, is_causal=True) * library.put(weight)).sum()

    results = gradients(library, loss, *map(np.asarray, layer.parameters.values()))
    wide = {name: np.asarray(x, np.float64) for name, x in layer.parameters.items()}
    for name, gradient in zip(names, results, strict=True):
        for index in {(0,) * gradient.ndim, tuple(n // 2 for n in gradient.shape)}:
            ends = []
            for step in (1e-5, -1e-5):
                moved = wide[name].copy()
                moved[index] += step
                moved_layer = layer.with_parameters(wide | {name: moved})
                ends.append((expect(moved_layer, inputs, {"is_causal": True})[0] * weight).sum())
            assert gradient[index] == pytest.approx((ends[0] - ends[1]) / 2e-5, abs=2e-5), (name, index)


# What makes a layer.


@pytest.mark.leaves_out("torch-cuda-rules")
def test_weights_follow_from_the_generator(library: Library) -> None:
    """Xavier's bound is reached and kept, biases are 0, and the same seed gives the same weights."""
    has_generator = library.name.split("-")[0] in ("numpy", "torch", "jax", "mlx")
    like = None if has_generator else library.put(np.zeros(1, F))
    rules: dict[str, Any] = {"num_heads": 4, "num_kv_heads": 2, "like": like}
    with library.guard():
        first, again, other = (
            MultiHeadAttention.init(generator(library, seed), 64, 32, **rules) for seed in (0, 0, 1)
        )
    shapes = {name: x.shape for name, x in first.parameters.items() if name.endswith("weight")}
    assert [*shapes.values()] == [(64, 64), (32, 32), (32, 32), (64, 64)]
    for name, shape in shapes.items():
        weight = library.get(first.parameters[name])
        bound = math.sqrt(6 / sum(shape))
        assert np.max(np.abs(weight)) <= bound
        assert np.max(np.abs(weight)) > 0.98 * bound
        assert abs(weight.mean()) < 4 * bound / math.sqrt(3 * weight.size)
        assert weight.std() == pytest.approx(bound / math.sqrt(3), rel=0.06)
        np.testing.assert_array_equal(weight, library.get(again.parameters[name]))
        assert not np.any(weight == library.get(other.parameters[name]).max())
        assert not np.any(library.get(first.parameters[name.replace("weight", "bias")]))
    flat = np.concatenate([library.get(first.parameters[name]).ravel() for name in shapes])
    assert len(np.unique(flat)) > 0.99 * flat.size


@pytest.mark.parametrize("dtype", ["float32", "float64", "bfloat16"])
def test_weights_like_an_array(library: Library, dtype: str) -> None:
    """NumPy's generator gives the same weights in every library."""
    library.needs(dtype)
    array = library.put(np.zeros(1, dtype))
    with library.guard():
        layer = SingleHeadAttention.init(np.random.default_rng(3), 8, 4, bias=True, like=array)
    expected = SingleHeadAttention.init(np.random.default_rng(3), 8, 4, bias=True)
    for name, x in layer.parameters.items():
        assert namespace(x) is library.xp
        assert x.dtype == array.dtype
        result, rounding = np.asarray(library.get(x), float), 2**-8 if dtype == "bfloat16" else 2**-23
        np.testing.assert_allclose(result, expected.parameters[name], rtol=0, atol=rounding)


def test_parameters_are_by_name(library: Library) -> None:
    """Those that are not named stay, and the layer stays as it is."""
    layer = placed_on(library, but(multi(8), sinks=SLOPES)())
    names = [f"{role}.{kind}" for role in ("query", "key", "value", "out") for kind in ("weight", "bias")]
    assert sorted(layer.parameters) == sorted([*names, "sinks"])
    zeros = library.put(np.zeros(8, F))
    changed = layer.with_parameters({"query.bias": zeros})
    assert changed.query.bias is zeros
    assert changed.key is not None
    for name, array in changed.parameters.items():
        assert (array is layer.parameters[name]) == (name != "query.bias")
    with pytest.raises(dataclasses.FrozenInstanceError):
        layer.num_heads = 2
    assert (changed.num_heads, changed.num_kv_heads) == (4, 4)


@pytest.mark.parametrize(
    "make", [but(multi(8, num_kv_heads=2), sinks=SLOPES), but(single(8, 6), scale=SLOPES[:1])]
)
def test_from_mapping(library: Library, make: Callable[[], Layer]) -> None:
    """What `parameters` gave is read again, behind a prefix and by other names."""
    layer = placed_on(library, make())
    counts = {name: getattr(layer, name) for name in ("num_heads", "num_kv_heads") if hasattr(layer, name)}
    names = {"query": "q_proj"} | ({"out": "o_proj"} if counts else {})
    file = {"other.query.weight": library.put(np.zeros((2, 2), F))}
    for name, array in layer.parameters.items():
        role, _, rest = name.partition(".")
        file["block.attention." + ".".join([names.get(role, role), *([rest] if rest else [])])] = array
    result = type(layer).from_mapping(file, "block.attention.", names=names, **counts)
    assert result.parameters.keys() == layer.parameters.keys()
    assert all(result.parameters[name] is array for name, array in layer.parameters.items())
    assert all(getattr(result, name) == count for name, count in counts.items())


# Between libraries.


def test_to_numpy_and_back(library: Library) -> None:
    """By the module and by an array; what comes back is what went, and its memory is its own."""
    layer = but(multi(8, num_kv_heads=2), scale=SLOPES)()
    there = placed_on(library, layer)
    with contextlib.nullcontext() if library.lazy else library.guard():
        host = there.to(np)
    before = {name: x.copy() for name, x in host.parameters.items()}
    assert all(type(x) is np.ndarray and x.flags.writeable for x in before.values())
    with library.guard():
        back = host.to(library.put(np.zeros(1, F)))
    for x in host.parameters.values():
        x[...] = 7
    for name, x in back.parameters.items():
        assert namespace(x) is library.xp
        assert x.dtype == there.parameters[name].dtype
        np.testing.assert_array_equal(before[name], library.get(there.parameters[name]))
        np.testing.assert_array_equal(library.get(x), before[name])
    assert (back.num_heads, back.num_kv_heads) == (4, 2)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float64"])
@each_other
@pytest.mark.leaves_out("torch-cuda-rules")
def test_to_each_library(library: Library, other: str, dtype: str) -> None:
    """A dtype stays where the library has it and is float32 where not, of the same value but for float64."""
    library.needs(dtype)
    module = importlib.import_module(NAMESPACES[other])
    layer = multi(8)()
    layer = placed_on(library, layer.with_parameters({n: x.astype(dtype) for n, x in layer.parameters.items()}))
    with contextlib.nullcontext() if library.lazy else library.guard():
        moved = layer.to(module)
    put = LIBRARIES[other][1]()
    for name, x in moved.parameters.items():
        assert namespace(x) is put.xp
        lacks = {"bfloat16": ("numpy", "dask", "strict-CPU_DEVICE"), "float64": ("jax", "mlx")}
        is_wide = other == "jax" and library.name.startswith("jax")  # with 64 bits meanwhile
        kept = dtype if is_wide or other not in lacks.get(dtype, ()) else "float32"
        assert str(x.dtype).rpartition(".")[2] == kept
        expected = library.get(layer.parameters[name]).astype(kept)
        np.testing.assert_array_equal(np.asarray(put.get(x)).astype(kept), expected)


@pytest.mark.needs("torch")
def test_to_copies() -> None:
    """DLPack shares memory, and a layer does not change: what is written to one is not seen in the other."""
    import torch

    arrays = {"weight": np.ones((2, 3), F), "bias": np.ones(2, F)}
    there = Linear(**arrays).to(torch)
    again = there.to(torch)
    arrays["weight"][:] = 2
    there.bias[:] = 3
    assert there.weight.max() == again.bias.max() == 1


def aligned(shape: tuple[int, ...], offset: int) -> np.ndarray:
    """Return an array that begins `offset` bytes behind a multiple of 64."""
    size = 4 * math.prod(shape)
    memory = np.zeros(size + 128, np.uint8)
    begin = -memory.ctypes.data % 64 + offset
    return memory[begin : begin + size].view(F).reshape(shape)


@each_other
@pytest.mark.needs("torch")
def test_traps_of_moving(other: str) -> None:
    """Read-only, transposed and sliced arrays, and tensors that require a gradient.

    They begin at a multiple of 64 bytes or not: JAX copies only the latter as they are passed.
    """
    torch, module = importlib.import_module("torch"), importlib.import_module(NAMESPACES[other])
    put = LIBRARIES[other][1]()
    numbers = np.arange(6, dtype=F).reshape(2, 3)
    learned = torch.asarray(numbers).clone().requires_grad_()
    traps = (read_only(numbers), read_only(numbers.T.copy()).T, np.broadcast_to(numbers, (2, 3)), learned)
    apart = [aligned((6, 4), offset)[::2, 1:3].T for offset in (0, 16)]
    across = [aligned((3, 2), offset).T for offset in (0, 16)]
    for weight in (*apart, *across):
        weight[...] = numbers
    for weight in (*traps, *apart, *across, *map(torch.asarray, (*apart, *across))):
        np.testing.assert_array_equal(np.asarray(put.get(Linear(weight).to(module).weight)), numbers)
