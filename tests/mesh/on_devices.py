"""Calls on eight devices, in a process of their own: `python on_devices.py results`.

test_mesh.py starts it. JAX makes several devices of one processor only if it is told before it starts.
"""

from __future__ import annotations

import os
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ["XLA_FLAGS"] = (  # compiling is most of the time here
    "--xla_force_host_platform_device_count=8 --xla_cpu_parallel_codegen_split_count=1"
    " --xla_llvm_disable_expensive_passes=true --xla_cpu_use_fusion_emitters=false"
)
# At this level, XLA's fused code of a soft cap with a bias has gradients of NaN. The same program is finite one
# operation after the other, and without the pass `fusion`.
if "results" not in sys.argv:
    os.environ["XLA_FLAGS"] += " --xla_backend_optimization_level=0"
os.environ["JAX_PLATFORMS"] = "cpu"
sys.path.insert(0, str(Path(__file__).parents[1]))

import jax
import jax.numpy as jnp
import numpy as np
from calls import F, draw
from internals import judge_together, reference, tuning
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from mesh.sent_bytes import received
from sdpa_xp import biases, masks, ring_attention, scaled_dot_product_attention
from sdpa_xp import scaled_dot_product_attention_vjp as vjp

DRAWN = np.random.default_rng(19)
Options = dict[str, Any]


def mesh_of(*lengths: int, kind: AxisType = AxisType.Auto) -> Any:
    names = ("keys",) if len(lengths) == 1 else ("batch", "keys")
    devices = jax.devices()[: int(np.prod(lengths))]
    return jax.make_mesh(lengths, names, axis_types=(kind,) * len(lengths), devices=devices)


def ring(mesh: Any, **options: Any) -> Callable[..., Any]:
    return lambda *arrays: ring_attention(*arrays, mesh=mesh, axis_name="keys", **options)


def check(
    name: str,
    devices: int,
    shapes: list[tuple[int, ...]],
    rules: Options,
    learned: Options,
    dtype: str = "float32",
) -> None:
    """Output and all gradients are those of one device; `learned` are options that have gradients.

    The bound is that of the house, with the results of one device in place of the textbook formula.
    """
    mesh, jax_dtype = mesh_of(devices), jnp.dtype(dtype)
    arrays = draw(np.random.default_rng(3), *shapes, dtype=jax_dtype)
    (cotangent,) = draw(np.random.default_rng(4), (*arrays[0].shape[:-1], shapes[2][-1]), dtype=jax_dtype)
    learned_arrays = {n: make(jax_dtype)[1] for n, make in learned.items()}

    def call(query: Any, key: Any, value: Any, values: Options) -> Any:
        options = {n: learned[n](x)[0] for n, x in values.items()}
        return ring(mesh, **rules, **options)(query, key, value)

    def pulled(cotangent: Any, *inputs: Any) -> tuple[Any, Any]:
        output, pull = jax.vjp(call, *inputs)
        return output, pull(cotangent)

    placed = jax.tree.map(jnp.asarray, (cotangent, *arrays, learned_arrays))
    output, gradients = jax.jit(pulled)(*placed)
    assert output.dtype == dtype
    assert output.sharding.spec == P(*[None] * (output.ndim - 2), "keys"), output.sharding
    results = {"output": output} | dict(zip(("query", "key", "value"), gradients, strict=False)) | gradients[3]

    def on_one(float_type: Any, put: Callable[[Any], Any]) -> Options:
        options = {n: make(float_type)[0] for n, make in learned.items()}
        output, pull_back = vjp(*(put(x) for x in arrays), **rules, **options)
        return {"output": output} | dict(zip([*results][1:], pull_back(put(cotangent)).values(), strict=True))

    expected = on_one(np.float64, lambda x: x.astype(np.float64))
    single = on_one(jax_dtype, jnp.asarray if dtype == "bfloat16" else np.asarray)
    runs = [(np.asarray(results[n]), np.asarray(expected[n]), np.asarray(single[n])) for n in results]
    for argument, agreement in zip(results, judge_together(runs, dtype), strict=True):
        assert agreement.agrees, (name, argument, agreement)


def learns(make: Callable[[Any], Any], array: np.ndarray) -> Callable[[Any], tuple[Any, Any]]:
    """Return a function of a dtype, or of an array of JAX: the option that has such an array, and the array."""

    def option(dtype_or_array: Any) -> tuple[Any, Any]:
        is_dtype = isinstance(dtype_or_array, type | np.dtype)
        x = array.astype(dtype_or_array) if is_dtype else dtype_or_array
        return make(x), x

    return option


def same(array: Any) -> Any:
    return array


GROUPED = [(2, 4, 16, 8), (2, 2, 16, 8), (2, 2, 16, 6)]
ROWS = learns(same, DRAWN.random((4, 16, 1)) + 0.5)
PAIRS = learns(same, DRAWN.standard_normal((4, 16, 16)))
SINKS = learns(same, DRAWN.standard_normal(4))
SMALLEST = learns(same, np.full((1, 18), np.finfo(F).min))
TABLE = learns(lambda table: biases.relative(table, max_distance=16), DRAWN.standard_normal((8, 2)))


def results() -> None:
    """Zig-zag and plain orders, rings of an odd number, keys that travel both ways and not at all."""
    zigzag = {"is_causal": True, "softcap": 3.0}
    check("zig-zag", 4, GROUPED, zigzag, {"bias": PAIRS, "scale": ROWS, "sinks": SINKS})
    window = masks.sliding_window(2, 1) & masks.padding([9, 15], [16, 11])
    check("window", 8, GROUPED, {"attn_mask": window}, {})
    nearer = biases.from_function(lambda s, b, h, i, j: s - abs(i - j) * 0.125 * (h + 1) + b)
    check("function", 3, [(2, 2, 12, 8), (1, 18, 8), (2, 1, 18, 5)], {"bias": nearer}, {})
    packed = masks.document([0] * 5 + [1] * 13) & (masks.causal() | masks.prefix(3)) & ~masks.dilated(7)
    check("smallest number", 3, [(1, 18, 4)] * 3, {}, {"bias": SMALLEST})
    check("documents and a table", 3, [(2, 18, 4)] * 3, {"attn_mask": packed}, {"bias": TABLE})


def dtypes() -> None:
    check("bfloat16", 4, GROUPED, {}, {}, "bfloat16")
    with jax.enable_x64(True):
        lower_right = [(1, 4, 8), (1, 12, 8), (1, 12, 4)]
        check("float64", 2, lower_right, {"attn_mask": masks.causal("lower_right")}, {}, "float64")


def others() -> None:
    """What a jit traces, what is dropped, NaN behind the end, layouts, and a mesh of two axes."""
    mesh, arrays = mesh_of(2), draw(np.random.default_rng(3), *GROUPED)
    query, key, value = map(jnp.asarray, arrays)
    allowed = jnp.asarray(DRAWN.random((2, 1, 16, 16)) < 0.5).at[:, :, 3].set(False)
    lengths, key_of_rng = jnp.asarray([7, 16]), jax.random.key(2)

    def rules(allowed: Any, lengths: Any, ids: Any) -> Options:
        mask = allowed & masks.causal() & masks.padding(lengths) & masks.document(ids)
        return {"attn_mask": mask, "dropout_p": 0.3, "rng": key_of_rng, "bias": biases.alibi(4)}

    def called(function: Callable[..., Any]) -> Any:
        return jax.jit(lambda *inputs: function(query, key, value, **rules(*inputs)))(
            allowed, lengths, jnp.arange(16) // 9
        )

    output = called(lambda *inputs, **options: ring(mesh, **options)(*inputs))
    np.testing.assert_allclose(output, called(scaled_dot_product_attention), atol=2e-6)

    hidden = [x.at[..., 11:, :].set(jnp.nan) for x in (key, value)]  # padding may hold anything
    expected = reference.attention(*arrays, np.arange(16) < 11)[0]
    for kind in (AxisType.Auto, AxisType.Explicit):  # JAX's two ways to say how arrays lie
        of_two = mesh_of(2, 2, kind=kind)
        sharding = NamedSharding(of_two, P("batch", None, "keys"))
        placed = [jax.device_put(x, sharding) for x in (query, *hidden)]
        padded = ring(of_two, attn_mask=masks.padding(11))
        for call in (padded, jax.jit(padded)):
            output = call(*placed)
            np.testing.assert_allclose(output, expected, atol=2e-6)
            assert output.sharding.is_equivalent_to(sharding, output.ndim), output.sharding
            assert jax.typeof(output).sharding == jax.typeof(placed[0]).sharding  # if explicit, it says how

    by_default = jax.make_mesh((2,), ("keys",), devices=jax.devices()[:2])  # its axes are explicit
    expected = reference.attention(*arrays, is_causal=True)[0]
    for call in (ring(by_default, is_causal=True), jax.jit(ring(by_default, is_causal=True))):
        output = call(query, key, value)  # arrays on one device are moved
        np.testing.assert_allclose(output, expected, atol=2e-6)
        assert output.sharding.spec == P(None, None, "keys"), output.sharding
    of_query = jax.grad(lambda x: ring(by_default, is_causal=True)(x, key, value).sum())(query)
    on_one = jax.grad(lambda x: scaled_dot_product_attention(x, key, value, is_causal=True).sum())
    np.testing.assert_allclose(of_query, jax.jit(on_one)(query), atol=2e-6)

    flat = [x[1, 0] for x in (query, key, value)]
    moved = [jnp.swapaxes(x, 1, 2) for x in (query, key, value)]
    causal = ring(mesh, is_causal=True)
    expected = reference.attention(*arrays, is_causal=True)[0]
    np.testing.assert_allclose(causal(*flat), expected[1, 0], atol=2e-6)
    output = ring(mesh, is_causal=True, layout="...LHE")(*moved)
    np.testing.assert_allclose(jnp.swapaxes(output, 1, 2), expected, atol=2e-6)


def plain() -> None:
    """The call itself, inside of jit, of arrays that lie on several devices: nothing moves."""
    arrays = draw(np.random.default_rng(3), (2, 4, 16, 8), (2, 4, 12, 8), (2, 4, 12, 6))
    expected = reference.attention(*arrays, is_causal=True)[0]
    ways = {
        "batch and heads": (P("batch", "keys"), P("batch", "keys")),
        "queries": (P("batch", None, "keys"), P("batch")),
    }
    for is_loop in (False, True):
        if is_loop:  # as for long sequences: blocks of queries in a loop
            tuning.DEVICE, tuning.SMALLEST_SIDE = tuning.TileSize(4, 6, 200), 4
        for kind in (AxisType.Auto, AxisType.Explicit):
            mesh = mesh_of(2, 4, kind=kind)
            for name, specs in ways.items():
                placed = [jax.device_put(x, NamedSharding(mesh, specs[n > 0])) for n, x in enumerate(arrays)]
                call = jax.jit(lambda *inputs: scaled_dot_product_attention(*inputs, is_causal=True))
                compiled = call.lower(*placed).compile()
                output = compiled(*placed)
                np.testing.assert_allclose(output, expected, atol=2e-6)
                assert output.sharding.is_equivalent_to(placed[0].sharding, 4), (name, output.sharding)
                text = compiled.as_text()
                assert (" while(" in text) == is_loop
                for moves in ("all-gather", "all-to-all", "collective-permute"):
                    assert moves not in text, (name, is_loop, kind, moves)


def sent() -> None:
    """Bytes that a device receives, in the compiled program: as many as it must, and not more."""
    n, length, width, value_width = 8, 64, 8, 6
    shapes = [(2, length, width), (1, length, width), (1, length, value_width)]
    arrays = [jax.ShapeDtypeStruct(shape, F) for shape in shapes]
    mesh = mesh_of(n)
    block = length // n * (width + value_width) * 4  # keys and values of a device
    half = length // n // 2 * 4
    exchanged = (
        half * (2 * width + width + value_width),
        half * 2 * value_width,
    )  # of zig-zag order: there and back
    for rules, hops, is_zigzag in (
        ({}, n - 1, False),
        ({"attn_mask": masks.sliding_window(length // n, 0)}, 1, False),
        ({"attn_mask": masks.sliding_window(8, 15)}, 3, False),
        ({"is_causal": True}, n - 1, True),
    ):
        call = ring(mesh, **rules)
        forward = jax.jit(call).lower(*arrays).compile().as_text()
        moved = received(forward, 3)
        most = hops * block + is_zigzag * 2 * sum(exchanged)
        assert hops * block <= moved <= most, (rules, moved, hops * block)
        assert is_zigzag or moved == hops * block
        if hops == 3:
            continue  # one of the windows is enough
        cotangent = jax.ShapeDtypeStruct((2, length, value_width), F)
        pulled = jax.jit(lambda g, *x: jax.vjp(call, *x)[1](g))  # noqa: B023
        moved = received(pulled.lower(cotangent, *arrays).compile().as_text(), 3)
        # Keys for the output, keys once more, and their gradients, which are as large. If both hops of the keys
        # are outside of loops, the compiler sends them once.
        ring_bytes = (2 if hops == 1 else 3) * hops * block
        assert 0 <= moved - ring_bytes <= is_zigzag * 4 * sum(exchanged), (rules, moved, ring_bytes)


def balance() -> None:
    """The blocks that devices compute, seen by a function of the caller, which runs in each of them."""
    n, length = 4, 16
    corners: Counter[tuple[int, int, int, int]] = Counter()

    def record(*corner: Any) -> None:
        corners[tuple(map(int, corner))] += 1

    def watched(s: Any, _b: Any, _h: Any, i: Any, j: Any) -> Any:
        jax.debug.callback(record, i[0, 0], i[-1, 0], j[0, 0], j[0, -1])
        return s

    x = jnp.ones((1, length, 4))
    call = ring(mesh_of(n), is_causal=True, bias=biases.from_function(watched))
    jax.block_until_ready(jax.jit(call)(x, x, x))
    jax.effects_barrier()
    piece = length // (2 * n)
    blocks = [(i, j) for i in range(2 * n) for j in range(i + 1)]
    expected = {(i * piece, (i + 1) * piece - 1, j * piece, (j + 1) * piece - 1) for i, j in blocks}
    assert corners.keys() == expected
    # Inside a jit each block calls the function twice, so that its own -inf reaches no gradient.
    assert set(corners.values()) == {2}
    of_device = Counter(min(i, 2 * n - 1 - i) for i, _ in blocks)
    assert set(of_device.values()) == {2 * n + 1}


def memory() -> None:
    """What a device needs for gradients does not grow with the number of devices, each of which adds keys."""
    needed = []
    for n in (2, 8):
        x = jax.ShapeDtypeStruct((1, 128 * n, 256), F)
        call = ring(mesh_of(n), is_causal=True)
        total = jax.jit(jax.grad(lambda *inputs: call(*inputs).sum(), argnums=(0, 1, 2)))  # noqa: B023
        needed.append(total.lower(x, x, x).compile().memory_analysis().temp_size_in_bytes)
    keys_and_values = 2 * 128 * 256 * 4
    assert needed[1] - needed[0] < keys_and_values, needed  # six more blocks of keys and values came by


if __name__ == "__main__":
    for test in sys.argv[1:]:
        {f.__name__: f for f in (results, dtypes, others, plain, sent, balance, memory)}[test]()
