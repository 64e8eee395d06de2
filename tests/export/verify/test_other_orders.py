"""The bounds of a right result do not depend on the order in which the CPU of the day adds.

Each kind of CPU has kernels of its own, which cut long sums into blocks of other lengths. So results here are
those of the textbook formula with its sums in blocks of some length, of tokens that are permuted: an engine on
another CPU. All must agree, far from the bound; four times as far off as the bound allows must not.
"""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import array_api_compat.numpy as numpy_namespace
import internals
import numpy as np
import pytest
from numpy.typing import NDArray

from sdpa_xp import scaled_dot_product_attention
from sdpa_xp_export import TensorSpec, to_onnx, verify_layer

F = np.float32
FAR = 0.75
"""The most of its bound that any right result here may need."""
BLOCKS = (1, 16, 128, 2**40)
"""The lengths of the blocks that are added one after the other; 1 is the order of a plain loop."""


def summed(x: NDArray[Any], axis: int, block: int) -> NDArray[Any]:
    """A sum in its dtype, in blocks."""
    x = np.moveaxis(x, axis, -1)
    if block == 1:  # `sum` of one term a time, in one call
        return np.add.accumulate(x, axis=-1)[..., -1]
    parts = [x[..., n : n + block].sum(-1) for n in range(0, x.shape[-1], block)]
    return np.add.accumulate(np.stack(parts), axis=0)[-1]


def product(first: NDArray[Any], second: NDArray[Any], block: int) -> NDArray[Any]:
    blocks = [slice(n, n + block) for n in range(0, first.shape[-1], block)]
    parts = (first[..., part] @ second[..., part, :] for part in blocks)
    total: NDArray[Any] = next(parts)
    for part in parts:
        total = total + part
    return total


def in_blocks(monkeypatch: pytest.MonkeyPatch, block: int) -> Any:
    """The namespace of the textbook formula whose sums are in blocks."""
    internals.override(monkeypatch, "product", lambda _xp, first, second: product(first, second, block))

    def sum_(x: NDArray[Any], axis: int, keepdims: bool = False) -> NDArray[Any]:
        total = summed(x, axis, block)
        return np.expand_dims(total, axis) if keepdims else total

    return SimpleNamespace(**vars(numpy_namespace) | {"sum": sum_})


def permuted(arguments: dict[str, Any], rng: np.random.Generator) -> dict[str, Any]:
    """The same call of keys, and of widths of queries and keys, in another order."""
    keys, width = (rng.permutation(n) for n in arguments["key"].shape[-2:])
    moved = {"query": arguments["query"][..., width], "key": arguments["key"][..., width][..., keys, :]}
    return arguments | moved | {"value": arguments["value"][..., keys, :]}


CALLS = {
    "float32": ("float32", ("output", "lse")),
    "float64": ("float64", ("output", "lse")),
    "float16": ("float16", ("output",)),
    "statistics": ("float32", ("entropy", "row_max")),
}
SETTINGS = [
    *(
        internals.Case({"L": queries, "S": keys})
        for queries, keys in ((1, 1), (1, 5), (1, 2053), (5, 300), (64, 1024))
    ),
    *(internals.Case({"L": 9, "S": 130}, size) for size in (100.0, 1000.0)),
    *(internals.Case({"L": 9, "S": 600}, extreme=extreme) for extreme in ("one high score", "low scores")),
]


def shares(
    monkeypatch: pytest.MonkeyPatch, call: internals.ExportCall, seed: int, times: float = 1.0
) -> Iterator[float]:
    """How much of its bound each right result needs, or one that is off by so many times the bound."""
    dtype = call.accumulation_dtype
    rng = np.random.default_rng(seed)
    drawn = []
    for setting in SETTINGS:
        arrays = internals.random_inputs(call, setting.lengths, rng, setting.size)
        arrays = internals.with_extremes(call, arrays, setting.extreme, rng) if setting.extreme else arrays
        arguments = internals.reference_inputs(call, arrays)
        drawn.append((setting, arguments, internals.expected_rows(call.outputs, arguments, dtype)))
    for block in BLOCKS:
        with monkeypatch.context() as patch:
            xp = in_blocks(patch, block)
            results = []
            for setting, arguments, expected in drawn:
                tokens = {name: arguments[name].astype(dtype) for name in ("query", "key", "value")}
                with np.errstate(all="ignore"):
                    stages = internals.reference.stages(xp, **permuted(arguments | tokens, rng))
                results.append((setting, stages, expected))
        for name in call.outputs:
            kind = dtype if name != "output" else call.query.dtype
            runs = [
                internals.Compared(stages[name].astype(kind), expected[name], setting.size, setting.extreme)
                for setting, stages, expected in results
            ]
            agreements = internals.judge_rows(runs, kind, dtype)
            if times != 1:
                for run, agreement in zip(runs, agreements, strict=True):
                    run.result[agreement.index] += times * agreement.bound
                agreements = internals.judge_rows(runs, kind, dtype)
            yield from (agreement.share for agreement in agreements)


@pytest.mark.parametrize("name", CALLS)
def test_another_order_agrees_and_a_fault_does_not(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    dtype, outputs = CALLS[name]
    query, key = TensorSpec(dtype, (2, "L", 16)), TensorSpec(dtype, (2, "S", 16))
    call = internals.checked_call("test", query, key, key, outputs=outputs)
    for seed in range(4):
        assert max(shares(monkeypatch, call, seed)) < FAR
    assert min(shares(monkeypatch, call, 0, 4.0)) > 1


@pytest.mark.parametrize("keys", [5, 300, 3000])
def test_one_row_of_many_keys(monkeypatch: pytest.MonkeyPatch, keys: int) -> None:
    """By the sizes of what is added: the sum may be much smaller, and is of few numbers."""
    rng, worst = np.random.default_rng(0), 0.0
    for seed in range(100):
        q, k, v = (rng.standard_normal(shape).astype(F) for shape in ((1, 16), (keys, 16), (keys, 2)))
        expected, _, weights = internals.reference.attention(q, k, v)
        plain, terms = internals.reference.textbook(np, q, k, v), float(np.max(weights @ np.abs(v)))
        call = permuted({"query": q, "key": k, "value": v}, rng)
        with monkeypatch.context() as patch:
            result = internals.reference.textbook(in_blocks(patch, BLOCKS[seed % 4]), **call)
        worst = max(worst, internals.judge(result, expected, plain, "float32", terms).share)
        result[0, 0] += 4 * internals.judge(result, expected, plain, "float32", terms).bound
        assert not internals.judge(result, expected, plain, "float32", terms).agrees
    assert worst < FAR


@pytest.mark.parametrize("count", [64, 389, 2053, 8192])
def test_equal_terms_drift(count: int) -> None:
    """All roundings of their sum may have one sign, and another CPU may be nearly exact."""
    worst = 0.0
    for number in np.random.default_rng(0).uniform(0.5, 2, 300).astype(F) / F(count):
        exact = np.asarray([float(number) * count])
        lucky = exact.astype(F)
        for block in BLOCKS:
            result = summed(np.full((1, count), number), -1, block)
            (agreement,) = internals.judge_together([(result, exact, lucky)], "float32", sums=[count])
            worst = max(worst, agreement.share)
            result += F(4 * agreement.bound)
            assert not internals.judge_together([(result, exact, lucky)], "float32", sums=[count])[0].agrees
    assert 0.5 < worst < 1


def test_the_number_of_terms_concerns_its_run_alone() -> None:
    exact = np.ones(1)
    off = exact + 10 * 2.0**-23
    short, long = internals.judge_together([(off, exact, exact)] * 2, "float32", sums=[1, 100])
    assert (short.agrees, long.agrees) == (False, True)
    (half,) = internals.judge_together([(exact + 0.01, exact, exact)], "float16", sums=[1000])
    assert half.bound < 0.005  # half dtypes are summed in float32


@pytest.mark.usefixtures("short_verify")
@pytest.mark.parametrize("specs", [("bool", ("B", "L")), ("bool", (1, 300))], ids=["open", "fixed"])
def test_layers_of_two_kinds_of_tokens(specs: Any) -> None:
    """Far from the bound on a CPU that adds in another order than this one."""
    factor, shift = np.random.default_rng(0).standard_normal((2, 16), F) / 4

    def layer(mask: Any) -> Any:
        xp = mask.__array_namespace__()
        x = xp.astype(mask, xp.float32)[..., None] * factor + shift
        return scaled_dot_product_attention(x, x, x, is_causal=True)

    model = to_onnx(layer, TensorSpec(*specs))
    for seed in range(4):
        report = verify_layer(model, layer, seed=seed)
        assert max(one_run.agreement.share for one_run in report.runs) < FAR, str(report)
    wrong = to_onnx(lambda mask: layer(mask) * 1.0001, TensorSpec(*specs))
    assert not verify_layer(wrong, layer).agrees
