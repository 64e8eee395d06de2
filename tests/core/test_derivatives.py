"""Gradients, tangents, Laplacians and Hessian-vector products, against torch's autograd of the textbook.

The outputs of the same calls are held against that textbook too.
"""

from __future__ import annotations

import math
import pickle
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import autograd
import numpy as np
import pytest
from autograd import Call
from calls import gradients as gradients_of_library
from calls import tracer_of
from differentiable_calls import BAD, CALLS, FEW, HOLES, MANY, MORE_QUERIES, placed_in, shapes
from internals import cut_small, device, judge_together, namespace, override
from libraries import LIBRARIES, Library, generator

import sdpa_xp
from sdpa_xp import attention_weights, biases, scaled_dot_product_attention, scaled_dot_product_attention_jvp
from sdpa_xp import scaled_dot_product_attention_vjp as vjp

F = np.float32
NUMPY = LIBRARIES["numpy"][1]()
X = np.random.default_rng(0).standard_normal((2, 4, 8)).astype(F)
ALLOWED = HOLES & np.tri(FEW, MANY, dtype=bool)
"""The pairs of the call "all"."""
Parts = Mapping[str, Mapping[str, Any]]


class Drawn:
    """A call with all that its derivatives take: `along` is three directions, `bends` are Laplacians."""

    def __init__(self, call: Call, rng: np.random.Generator, dtype: Any = F) -> None:
        self.call = call
        arrays, tangents, bends = (autograd.arrays(call, rng, dtype) for _ in range(3))
        along = {name: rng.standard_normal((3, *x.shape)).astype(dtype) for name, x in arrays.items()}
        keywords = autograd.keywords(call, arrays)
        output = scaled_dot_product_attention(*(arrays[n] for n in autograd.INPUTS), **keywords)
        cotangents = {n: rng.standard_normal(output.shape).astype(dtype) for n in ("first", "second")}
        self.parts: dict[str, dict[str, Any]] = {
            "arrays": arrays,
            "tangents": tangents,
            "along": along,
            "bends": bends,
            "cotangents": cotangents,
        }


def gradients(inputs: Any, parts: Parts, **rules: Any) -> dict[str, Any]:
    output, pullback = vjp(*inputs, **rules)
    return {"output": output, **pullback(parts["cotangents"]["first"])}


def tangent(inputs: Any, parts: Parts, **rules: Any) -> dict[str, Any]:
    output, tangent = scaled_dot_product_attention_jvp(*inputs, parts["tangents"], **rules)
    return {"output": output, "tangent": tangent}


def products(inputs: Any, parts: Parts, **rules: Any) -> dict[str, Any]:
    """The derivatives of the gradients, beside these."""
    output, pullback = vjp(*inputs, **rules)
    first, moved = pullback.jvp(parts["cotangents"]["first"], parts["tangents"], parts["cotangents"]["second"])
    return {"output": output, **first, **{f"moved {name}": x for name, x in moved.items()}}


def laplacian(inputs: Any, parts: Parts, **rules: Any) -> dict[str, Any]:
    compute, bends = sdpa_xp.scaled_dot_product_attention_laplacian, parts["bends"]
    return dict(zip(LAPLACIAN, compute(*inputs, parts["along"], laplacians=bends, **rules), strict=True))


Kind = Callable[..., dict[str, Any]]
LAPLACIAN = ("output", "tangents", "laplacian")
KINDS: tuple[Kind, ...] = (gradients, tangent, products, laplacian)
MOVING = {gradients: ["arrays"], tangent: ["arrays", "tangents"], products: ["arrays", "tangents"]} | {
    laplacian: ["arrays", "along", "bends"]
}
each_kind = pytest.mark.parametrize("kind", KINDS)
KEPT: dict[tuple[Any, ...], Any] = {}
FEW_CALLS = ("batches broadcast", "relative", "scale of each query", "all")


def run(library: Library, kind: Kind, drawn: Drawn, **more: Any) -> dict[str, np.ndarray]:
    """Each result is of the library and on the device of the call."""
    if library.lazy and (kind is not gradients or "function" in repr(drawn.call.rules.get("bias"))):
        pytest.skip("a lazy graph has gradients alone, and cannot try a function: tests/refusals/chunks.txt")
    with library.guard():
        inputs, rules = placed_in(library, drawn.call, drawn.parts["arrays"])
        placed = {part: {n: library.put(x) for n, x in xs.items()} for part, xs in drawn.parts.items()}
        results = kind(inputs, placed, **rules, **more)
    for name, x in results.items():
        like = placed["arrays"].get(name.removeprefix("moved "), results["output"])
        assert namespace(x) is library.xp
        shape = (3, *like.shape) if name == "tangents" else like.shape
        assert (x.dtype, device(x), x.shape) == (like.dtype, device(like), shape)
    return {name: library.get(x) for name, x in results.items()}


def exact(kind: Kind, call: Call, parts: Parts, *rest: Any) -> dict[str, np.ndarray]:
    """The results by autograd, in float64 or a dtype; "weights" is the gradient of the weights."""
    arrays, (first, second) = parts["arrays"], parts["cotangents"].values()
    results = autograd.gradients(call, arrays, first, *rest)
    if kind is tangent:
        results = {"tangent": autograd.jvp(call, arrays, parts["tangents"], *rest), "output": results["output"]}
    elif kind is laplacian:
        derivatives = autograd.laplacian(call, arrays, parts["along"], parts["bends"], *rest)
        results = dict(zip(LAPLACIAN, (results["output"], *derivatives), strict=True))
    elif kind is products:
        moved = autograd.second_order(call, arrays, parts["tangents"], (first, second), *rest)
        results |= {f"moved {name}": x for name, x in moved.items()}
    return results


def kept(compute: Callable[[], Any], drawn: Drawn, *what: Any) -> Any:
    """What autograd computes of a call, once for all libraries and numbers of threads that get its numbers."""
    if (key := (what, id(drawn.call), pickle.dumps(drawn.parts))) not in KEPT:
        KEPT[key] = drawn.call, compute()  # no other call has its id while it is held
    return KEPT[key][1]


def sizes(kind: Kind, expected: Mapping[str, np.ndarray]) -> dict[tuple[str, ...], float]:
    """Which results have one bound, and the size of what they are differences of."""
    if kind in (gradients, products):
        size = max(1.0, np.abs(expected["weights"]).max())
        groups = {(name,): size for name in expected if not name.startswith(("moved", "weights", "output"))}
    else:
        groups = {}
    if together := tuple(name for name in expected if name.startswith(("moved", "tangent", "laplacian"))):
        groups[together] = max(1.0, *(np.abs(expected[name]).max() for name in together))
    return groups | {("output",): 1.0}


def assert_agree(library: Library, kind: Kind, drawn: Drawn, dtype: str = "float32") -> None:
    """Each result is as near to autograd's as the house's rule asks.

    Those of the scores are differences of those of the weights, and have roundings of their size.
    """
    call, parts = drawn.call, drawn.parts
    computed, expected = run(library, kind, drawn), kept(lambda: exact(kind, call, parts), drawn, kind)
    assert computed.keys() == expected.keys() - {"weights"}
    draws = partial(autograd.textbook, expected, lambda moved: exact(kind, call, moved(parts), dtype))
    textbook = kept(draws, drawn, kind, dtype)
    for names, size in sizes(kind, expected).items():
        runs = [(computed[name], expected[name], textbook[name]) for name in names]
        for name, agreement in zip(names, judge_together(runs, dtype, size), strict=True):
            assert agreement.agrees, (name, agreement)


@pytest.fixture
def several_tiles(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tiles of 4 x 6; on JAX, which compiles each shape anew, one of all pairs."""
    if "jax" not in request.node.callspec.params.get("library", ""):
        cut_small(monkeypatch)


THIN, HALF = pytest.mark.sampled(0, on="THIN"), pytest.mark.sampled(2)
EACH = [
    *(
        (kind, name, call, HALF if kind is products else ())
        for kind in KINDS[:3]
        for name, call in CALLS.items()
    ),
    *((laplacian, name, CALLS[name], ()) for name in FEW_CALLS),
    *((kind, f"{name}, swapped", call, THIN) for kind in KINDS[:2] for name, call in MORE_QUERIES.items()),
]
"""Each call; in those that are swapped, there are more queries than keys."""


@pytest.mark.usefixtures("several_tiles")
@pytest.mark.parametrize(
    ("kind", "call"),
    [pytest.param(kind, call, id=f"{kind.__name__}-{name}", marks=marks) for kind, name, call, marks in EACH],
)
@pytest.mark.needs("torch")
def test_float32(library: Library, rng: np.random.Generator, kind: Kind, call: Call) -> None:
    assert_agree(library, kind, Drawn(call, rng))


@pytest.mark.sampled(0, on="EAGER_JAX")
@pytest.mark.usefixtures("several_tiles")
@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float64"])
@pytest.mark.parametrize(
    ("kind", "name"),
    [
        *(
            (kind, name)
            for kind in (gradients, tangent)
            for name in ("grouped heads", "mask and bias", "relative")
        ),
        *((kind, "all") for kind in KINDS),
    ],
)
@pytest.mark.needs("torch")
def test_dtypes(library: Library, rng: np.random.Generator, kind: Kind, name: str, dtype: str) -> None:
    library.needs(dtype)
    assert_agree(library, kind, Drawn(CALLS[name], rng, np.dtype(dtype)), dtype)


def assert_exact(kind: Kind, drawn: Drawn, digits: float) -> None:
    """To the last digits of float64."""
    computed = run(NUMPY, kind, drawn)
    expected = kept(lambda: exact(kind, drawn.call, drawn.parts), drawn, kind)
    for name, x in computed.items():
        wanted = expected[name]
        np.testing.assert_allclose(x, wanted, rtol=0, atol=digits * max(1, np.abs(wanted).max()), err_msg=name)


@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
@pytest.mark.parametrize("has_threads", [False, True], ids=["one thread", "threads"])
@pytest.mark.parametrize("kind", [products, laplacian])
@pytest.mark.needs("torch")
def test_float64(
    rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch, kind: Kind, has_threads: bool, call: Call
) -> None:
    """With the queries divided between threads or not."""
    cut_small(monkeypatch)
    if has_threads:
        override(monkeypatch, "LEAST_WORK_FOR_THREADS", 0)
        override(monkeypatch, "SMALLEST_SIDE", 2)
        monkeypatch.setattr("os.cpu_count", lambda: 64)
    assert_exact(kind, Drawn(call, rng, np.float64), 1e-13 if kind is laplacian else 1e-12)


@pytest.mark.parametrize("scale", [1.0, 40.0], ids=["without a maximum", "too large for that"])
@each_kind
@pytest.mark.needs("torch")
def test_many_tiles(rng: np.random.Generator, kind: Kind, scale: float) -> None:
    """In threads, and with the softmax without a maximum: see `_Shortcut`."""
    rules = {"scale": scale, "is_causal": True}
    call = Call(shapes((4, 300, 8), (2, 600, 8)), rules, allowed=lambda i, j: j <= i)
    assert_exact(kind, Drawn(call, rng, np.float64), 1e-13 if kind is tangent else 1e-12)


@pytest.mark.sampled(0, on="EAGER_JAX")
@pytest.mark.usefixtures("several_tiles")
@pytest.mark.parametrize("p", [0.4, 1.0])
@each_kind
@pytest.mark.needs("torch")
def test_dropout_is_that_of_the_output(
    library: Library, rng: np.random.Generator, kind: Kind, p: float
) -> None:
    """All results drop the same weights, those that `attention_weights` shows."""
    drawn = Drawn(CALLS["causal"], rng)
    computed = run(library, kind, drawn, dropout_p=p, rng=generator(library))
    with library.guard():
        zeros = [library.put(np.zeros_like(drawn.parts["arrays"][name])) for name in ("query", "key")]
        kept = attention_weights(*zeros, dropout_p=p, rng=generator(library))
    expected = exact(kind, drawn.call, drawn.parts, "float64", library.get(kept).astype(np.float64) * MANY)
    for name, x in computed.items():
        size = np.abs(expected[name]).max()
        np.testing.assert_allclose(x, expected[name], rtol=0, atol=4e-6 * max(1.0, size), err_msg=name)


def test_a_pullback_draws_nothing(rng: np.random.Generator) -> None:
    output, pullback = vjp(X, X, X, dropout_p=0.4, rng=rng)
    for first, again in zip(pullback(output).values(), pullback(output).values(), strict=True):
        np.testing.assert_array_equal(first, again)


@pytest.mark.sampled(0, on="EAGER_JAX")
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_half_is_float32_rounded_once(library: Library, rng: np.random.Generator, dtype: str) -> None:
    """The output among what is kept: in float32, or D would have the roundings of the half dtype."""
    library.needs(dtype)
    drawn = Drawn(CALLS["all"], rng, np.dtype(dtype))
    computed = run(library, gradients, drawn)
    drawn.parts = {part: {n: x.astype(F) for n, x in xs.items()} for part, xs in drawn.parts.items()}
    for name, x in run(library, gradients, drawn).items():
        np.testing.assert_array_equal(computed[name], x.astype(dtype))


@pytest.mark.needs("torch")
def test_softmax_dtype(library: Library, rng: np.random.Generator) -> None:
    """Computed in float64, the gradients are those of float64, rounded to the dtype of the arrays."""
    library.needs("float64")
    drawn = Drawn(CALLS["all"], rng)
    computed = run(library, gradients, drawn, softmax_dtype="float64")
    expected = exact(gradients, drawn.call, drawn.parts)
    for name, x in computed.items():
        np.testing.assert_allclose(x, expected[name].astype(F), rtol=2**-22, atol=1e-12)


@pytest.mark.parametrize(
    ("query", "key", "width"),
    [
        ((2, 0, 8), (2, 5, 8), 3),
        ((2, 4, 8), (2, 0, 8), 3),
        ((2, 4, 8), (2, 5, 8), 0),
        ((0, 2, 4, 8), (2, 5, 8), 3),
    ],
    ids=["L", "S", "Ev", "batch"],
)
@each_kind
def test_empty_axes(
    library: Library, rng: np.random.Generator, kind: Kind, query: Any, key: Any, width: int
) -> None:
    """No element of a result depends on a key."""
    library.needs_empty_arrays()
    drawn = Drawn(Call(shapes(query, key, width, sinks=(2,), scale=(2, 1, 1)), {"is_causal": True}), rng)
    drawn.parts["arrays"]["key"][...] = math.nan
    for name, x in run(library, kind, drawn).items():
        np.testing.assert_array_equal(x, 0, err_msg=name)


@pytest.mark.sampled(0, on="EAGER_JAX")
@pytest.mark.usefixtures("several_tiles")
def test_a_row_without_a_key_has_no_gradient(library: Library, rng: np.random.Generator) -> None:
    """Of its query, scale and bias. Keys that no query attends, and sinks of -inf, have none either."""
    more = {"scale": (4, FEW, 1), "bias": (FEW, MANY), "sinks": (4,)}
    drawn = Drawn(CALLS["boolean array with an empty row"]._replace(shapes=shapes(**more)), rng)
    arrays = drawn.parts["arrays"]
    arrays["sinks"][[1, 3]], arrays["scale"][:, 1] = -math.inf, math.nan
    computed = run(library, gradients, drawn)
    for nothing in (
        computed["output"][:, :, 1],
        computed["query"][:, :, 1],
        computed["scale"][:, 1],
        computed["bias"][~HOLES],
        computed["sinks"][[1, 3]],
    ):
        np.testing.assert_array_equal(nothing, 0)
    for name in ("key", "value"):
        assert np.all(np.any(computed[name] != 0, axis=-1) == HOLES.any(axis=0))


def spoilt(name: str) -> tuple[Any, dict[str, Any]]:
    """Where the call "all" gets a bad number, and which parts of results it reaches.

    Query 1 attends to no key, so that nothing of it shows.
    """
    heads, rows = ([1], np.arange(FEW) == 5) if name in ("query", "first") else ([0, 1], ALLOWED[:, 3])
    keys = np.ix_([0], [0], ALLOWED[rows].any(axis=0))
    of_rows = np.ix_([0], heads, rows)
    where = np.s_[0, 1, [1, 5]] if name in ("query", "first") else np.s_[0, 0, 3]
    return where, {"query": of_rows, "key": keys, "value": keys, "tangent": of_rows}


@pytest.mark.sampled(0, on="EAGER_JAX")
@pytest.mark.usefixtures("several_tiles")
@pytest.mark.parametrize(
    ("kind", "part", "name"),
    [
        *((gradients, "arrays", name) for name in autograd.INPUTS),
        (gradients, "cotangents", "first"),
        *((tangent, part, name) for part in ("arrays", "tangents") for name in autograd.INPUTS),
    ],
)
def test_a_bad_number_shows_where_it_is_attended(
    library: Library, rng: np.random.Generator, kind: Kind, part: str, name: str
) -> None:
    """NaN and inf in one row of an input show in what attends it or is attended by it, and nowhere else."""
    if library.lazy:
        pytest.skip("a lazy graph holds this for padding: test_what_takes_part_in_nothing_may_be_anything")
    drawn = Drawn(CALLS["all"], rng)
    clean = run(library, kind, drawn)
    array, (where, reached) = drawn.parts[part][name], spoilt(name)
    original = array.copy()
    for bad in BAD:
        array[where] = bad
        computed = run(library, kind, drawn)
        for result in reached.keys() & computed.keys():
            is_reached = np.zeros(clean[result].shape, bool)
            is_reached[reached[result]] = True
            size = 4e-6 * np.abs(clean[result]).max() if kind is tangent else 0
            pair = computed[result][~is_reached], clean[result][~is_reached]
            np.testing.assert_allclose(*pair, rtol=0, atol=size, err_msg=f"{result}, {bad}")
            if (name, result) != ("value", "value"):  # whose own gradient does not know it
                assert result == "key" or not np.isfinite(computed[result][is_reached]).any()
        if kind is gradients:
            np.testing.assert_array_equal(computed["scale"][2:], clean["scale"][2:])
            assert np.isfinite(computed["bias"][:, ~ALLOWED]).all()
        array[...] = original


def test_a_bad_bias_of_masked_pairs_adds_nothing(library: Library, rng: np.random.Generator) -> None:
    drawn = Drawn(CALLS["all"], rng)
    clean = run(library, tangent, drawn)["tangent"]
    for part in ("arrays", "tangents"):
        drawn.parts[part]["bias"][:, ~ALLOWED] = math.nan
        computed = run(library, tangent, drawn)["tangent"]
        np.testing.assert_allclose(computed, clean, rtol=0, atol=4e-6 * np.abs(clean).max())


@pytest.mark.sampled(0, on="EAGER_JAX")
@pytest.mark.usefixtures("several_tiles")
@pytest.mark.parametrize(("kind", "part"), [(kind, part) for kind in KINDS for part in MOVING[kind]])
@pytest.mark.parametrize("name", ["all", "padding"])
def test_what_takes_part_in_nothing_may_be_anything(
    library: Library, rng: np.random.Generator, kind: Kind, part: str, name: str
) -> None:
    """NaN and inf in a query without keys, and in keys and values that no query attends to."""
    if library.lazy and name == "all":
        pytest.skip("a lazy graph promises this only for keys that no query attends")
    drawn = Drawn(CALLS[name], rng)
    clean = run(library, kind, drawn)
    for argument in autograd.INPUTS if name == "all" else ("key", "value"):
        array = drawn.parts[part][argument]
        original = array.copy()
        hidden = np.s_[..., 1, :, MANY // 2 :, :]
        if name == "all":
            hidden = np.s_[..., 1 if argument == "query" else ~ALLOWED.any(axis=0), :]
        for bad in BAD:
            array[hidden] = bad
            for result, x in run(library, kind, drawn).items():
                wanted = clean[result]
                atol = (1e-5 if kind in (products, laplacian) else 1e-6) * np.abs(wanted).max()
                np.testing.assert_allclose(x, wanted, rtol=0, atol=atol, err_msg=f"{argument}, {result}")
        array[...] = original


@pytest.mark.usefixtures("several_tiles")
@pytest.mark.parametrize("kind", [tangent, products, laplacian])
def test_scores_that_change_alike(library: Library, rng: np.random.Generator, kind: Kind) -> None:
    """Nothing changes, nor do large numbers of opposite signs leave their roundings."""
    drawn = Drawn(Call(shapes(bias=(4, FEW, MANY), sinks=(4,)), {"attn_mask": HOLES}), rng)
    for part, size in (("tangents", 2.0**16), ("along", 2.0**10), ("bends", 2.0**16)):
        for name, x in drawn.parts[part].items():
            x[...] = size if name in ("bias", "sinks") else 0
    drawn.parts["cotangents"]["second"][...] = 0
    for name, x in run(library, kind, drawn).items():
        if name.startswith(("moved", "tangent", "laplacian")):
            np.testing.assert_allclose(x, 0, atol=2.0**-5 if kind is tangent else 2.0**-4, err_msg=name)


@pytest.mark.filterwarnings("ignore:Dynamo detected a call to a `functools.lru_cache`")
@pytest.mark.parametrize("known", [(), ("arrays",)], ids=["nothing known", "arrays known"])
@each_kind
def test_inside_a_jit(library: Library, rng: np.random.Generator, kind: Kind, known: tuple[str, ...]) -> None:
    """What is known of the arrays is used; nothing is read of what is traced."""
    tracer = tracer_of(library) if not known and kind in (gradients, products) else library.jit
    if tracer is None:
        pytest.skip("the library has no jit")
    call = CALLS["softcap" if kind in (products, laplacian) else "all"]
    drawn = Drawn(call, rng)
    with library.guard():
        placed = {part: {n: library.put(x) for n, x in xs.items()} for part, xs in drawn.parts.items()}
        rules = {n: library.put(x) if isinstance(x, np.ndarray) else x for n, x in call.rules.items()}
        fixed = {part: placed.pop(part) for part in known}

        def compute(parts: Parts) -> Any:
            parts = {**fixed, **parts}
            inputs = [parts["arrays"][name] for name in autograd.INPUTS]
            return kind(inputs, parts, **rules | autograd.keywords(call._replace(rules={}), parts["arrays"]))

        traced = tracer(compute)(placed)
    for name, x in run(library, kind, drawn).items():
        atol = (4e-6 if kind is tangent else 1e-5) * max(1.0, np.abs(x).max())
        np.testing.assert_allclose(library.get(traced[name]), x, rtol=0, atol=atol, err_msg=name)


@pytest.mark.leaves_out("jax-debug", "torch-inference")
def test_against_the_library_that_differentiates(library: Library, rng: np.random.Generator) -> None:
    drawn = Drawn(CALLS["all"], rng)
    arrays, cotangent = drawn.parts["arrays"], drawn.parts["cotangents"]["first"]
    rules = {**drawn.call.rules, "implementation": "xp"}

    def loss(*leaves: Any) -> Any:
        placed = dict(zip(arrays, leaves, strict=True))
        inputs = [placed.pop(name) for name in autograd.INPUTS]
        output = scaled_dot_product_attention(*inputs, **placed, **rules | {"attn_mask": library.put(HOLES)})
        return (output * library.put(cotangent)).sum()

    derived = gradients_of_library(library, loss, *arrays.values())
    computed = run(library, gradients, drawn)
    for name, expected in zip(arrays, derived, strict=True):
        np.testing.assert_allclose(computed[name], expected, rtol=0, atol=2e-5)


@pytest.mark.leaves_out("torch-inference")
@pytest.mark.sampled(0, on="EAGER_JAX")
@pytest.mark.parametrize("score", [-1e9, float(np.finfo(F).min), 1e9])
@pytest.mark.parametrize("source", ["bias", "products"])
def test_rows_of_large_scores(library: Library, score: float, source: str) -> None:
    """All keys weigh alike, and so do their gradients, with the kernel that is a default too.

    1 / sqrt(16) is a power of two: no product is rounded, which a BLAS may do in another way for the last keys.
    """
    keys, size = 18, 2.0**18
    query = np.full((1, 2, 5, 16), math.copysign(size, score) if source == "products" else 1.0, F)
    key = np.full((1, 2, keys, 16), size if source == "products" else 1.0, F)
    value, bias = np.ones((1, 2, keys, 16), F), np.full((5, keys), score, F)

    rules = {"bias": bias} if source == "bias" else {}
    with library.guard():
        inputs, placed = (map(library.put, (query, key, value)), {n: library.put(x) for n, x in rules.items()})
        pulled = vjp(*inputs, **placed)[1](library.put(np.ones_like(query)))["value"]
    np.testing.assert_allclose(library.get(pulled), 5 / keys, rtol=1e-5)

    def loss(value: Any) -> Any:
        placed = {name: library.put(x) for name, x in rules.items()}
        return scaled_dot_product_attention(library.put(query), library.put(key), value, **placed).sum()

    (derived,) = gradients_of_library(library, loss, value)
    np.testing.assert_allclose(derived, 5 / keys, rtol=1e-5)


@pytest.mark.needs("torch")
@pytest.mark.parametrize(
    ("moved", "bent"), [("value", "query"), ("key", "sinks"), ("scale", "value"), ("sinks", "bias")]
)
def test_some_inputs_alone(rng: np.random.Generator, moved: str, bent: str) -> None:
    """One input moves, and another has a Laplacian."""
    drawn = Drawn(CALLS["all"], rng, np.float64)
    for part, one in (("tangents", moved), ("along", moved), ("bends", bent)):
        for name, x in drawn.parts[part].items():
            x[...] = x if name == one else 0
    expected = exact(tangent, drawn.call, drawn.parts) | exact(laplacian, drawn.call, drawn.parts)
    for part, one in (("tangents", moved), ("along", moved), ("bends", bent)):
        drawn.parts[part] = {one: drawn.parts[part][one]}
    for name, x in (run(NUMPY, tangent, drawn) | run(NUMPY, laplacian, drawn)).items():
        np.testing.assert_allclose(
            x, expected[name], rtol=0, atol=1e-13 * max(1, np.abs(x).max()), err_msg=name
        )


def test_no_tangent_is_none(library: Library, rng: np.random.Generator) -> None:
    drawn = Drawn(CALLS["all"], rng)
    drawn.parts["tangents"] = {}
    np.testing.assert_array_equal(run(library, tangent, drawn)["tangent"], 0)


def test_a_sink_of_minus_infinity(rng: np.random.Generator) -> None:
    """It is none, however it would change."""
    drawn = Drawn(CALLS["sinks"], rng)
    drawn.parts["arrays"]["sinks"][1] = -math.inf
    drawn.parts["along"]["sinks"][:, 1] = drawn.parts["bends"]["sinks"][1] = math.nan
    results = run(NUMPY, laplacian, drawn)
    for part in drawn.parts.values():
        part.pop("sinks", None)
    for name, x in run(NUMPY, laplacian, drawn).items():
        atol = 1e-5 * np.abs(x).max()
        np.testing.assert_allclose(results[name][..., 1, :, :], x[..., 1, :, :], rtol=0, atol=atol)


def test_a_change_of_the_bias_alone_is_not_written_to(rng: np.random.Generator) -> None:
    """Its tiles are slices of the caller's array, and not the memory of the products."""
    query, bias, moved = rng.standard_normal((2, 64, 8)), *rng.standard_normal((2, 2, 64, 4096))
    key, before = rng.standard_normal((2, 4096, 8)), moved.copy()
    scaled_dot_product_attention_jvp(query, key, key, {"bias": moved}, bias=bias)
    np.testing.assert_array_equal(moved, before)


def test_two_biases_of_one_kind(rng: np.random.Generator) -> None:
    x, t = rng.standard_normal((2, 2, 5, 5))
    slopes, moved = rng.standard_normal((2, 2))
    both = biases.alibi(slopes) + biases.from_array(x) + biases.alibi(2 * slopes)
    query = rng.standard_normal((2, 5, 4))
    tangents = {"bias.slopes (2)": moved, "bias.array": t}
    _, computed = scaled_dot_product_attention_jvp(query, query, query, tangents, bias=both)
    added = biases.to_array(biases.alibi(moved), (2, 5, 5)) + t
    whole = biases.to_array(biases.alibi(3 * slopes), (2, 5, 5)) + x
    _, expected = scaled_dot_product_attention_jvp(query, query, query, {"bias": added}, bias=whole)
    np.testing.assert_allclose(computed, expected, rtol=0, atol=1e-13)


def test_the_results_of_a_pullback_share_no_memory() -> None:
    output, pullback = vjp(X, X, X)
    results = [x for part in pullback.jvp(output, {"query": X}) for x in part.values()]
    assert not any(np.shares_memory(x, y) for n, x in enumerate(results) for y in [X, *results[:n]])


def test_the_textbook_of_several_draws() -> None:
    """A small sum of large numbers may be exact by luck; in another order it is not, and has to agree."""
    rng, shares = np.random.default_rng(0), []
    for _ in range(200):
        x = rng.standard_normal(30).astype(F)
        exact = {"": x.astype(np.float64).sum(keepdims=True)}
        textbook = autograd.textbook(exact, lambda moved, x=x: {"": moved(x).sum(keepdims=True)})
        result = np.add.accumulate(rng.permutation(x))[-1:]
        (agreement,) = judge_together([(result, exact[""], textbook[""])], "float32")
        shares.append(agreement.share)
        result += F(4 * agreement.bound)
        assert not judge_together([(result, exact[""], textbook[""])], "float32")[0].agrees
    assert max(shares) < 0.75
