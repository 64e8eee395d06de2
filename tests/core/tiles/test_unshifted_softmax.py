"""The softmax without a maximum: tried first, and never the result where it loses digits."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest
from internals import TileSize, judge, output_program, override, reference, textbook, threads

from sdpa_xp import attention_state, biases, masks, scaled_dot_product_attention

F = np.float32


@pytest.fixture
def ranges_computed(monkeypatch: pytest.MonkeyPatch) -> dict[str, int]:
    """How many ranges of queries, each in a task, were computed with and without a maximum."""
    override(monkeypatch, "LEAST_WORK_FOR_THREADS", 0)
    count = {"with": 0, "without": 0}
    functions = {"with": "attend_with_running_shift", "without": "attend_with_fixed_shift"}
    for name, function in functions.items():
        compute = getattr(output_program, function)

        def counted(*rest: Any, name: str = name, compute: Any = compute, **keywords: Any) -> Any:
            count[name] += 1
            return compute(*rest, **keywords)

        monkeypatch.setattr(output_program, function, counted)
    return count


def arrays(rng: np.random.Generator, size: float = 1.0) -> list[np.ndarray]:
    """Query, key and value whose rows have about the norm 8, times `size` in query and key."""
    q, k, v = (rng.standard_normal((2, 300, 64)).astype(F) for _ in range(3))
    return [q * F(size), k * F(size), v]


def right(call: list[np.ndarray], rules: dict[str, Any], atol: float = 4e-6) -> None:
    state = attention_state(*call, **rules)
    mask = rules.get("attn_mask")
    if isinstance(mask, masks.Mask):
        mask = masks.to_array(mask, (2, 300, 300))
    output, lse, _ = reference.attention(*call, **(rules | {"attn_mask": mask}))
    np.testing.assert_allclose(state.output, output, rtol=0, atol=atol)
    np.testing.assert_allclose(state.lse, lse, rtol=2e-6, atol=atol)


def of_norm(norm: float, rng: np.random.Generator) -> list[np.ndarray]:
    """Query, key and value whose queries and keys have this norm."""
    q, k, v = arrays(rng)
    return [*(F(norm) * x / np.linalg.norm(x, axis=-1, keepdims=True) for x in (q, k)), v]


def of_largest_score(score: float, rng: np.random.Generator) -> list[np.ndarray]:
    q, k, v = arrays(rng)
    return [q * F(score * 8 / np.max(abs(q @ np.swapaxes(k, -1, -2)))), k, v]


def of_far_last_keys(rng: np.random.Generator) -> list[np.ndarray]:
    q, k, v = arrays(rng)
    k[:, 200:] *= F(1e4)
    return [q, k, v]


def with_empty_rows() -> np.ndarray:
    allowed = np.random.default_rng(1).random((2, 300, 300)) < 0.5
    allowed[:, 100:180] = False
    return allowed


CALLS: dict[str, tuple[Callable[[np.random.Generator], list[np.ndarray]], dict[str, Any], float, bool]] = {
    "small": (arrays, {}, 4e-6, False),
    "small, causal": (arrays, {"is_causal": True}, 4e-6, False),
    "small, softcap": (arrays, {"softcap": 5.0}, 4e-6, False),
    "small, padding": (arrays, {"attn_mask": masks.padding(100)}, 4e-6, False),
    "small, padding of both": (arrays, {"attn_mask": masks.padding(300, 20)}, 4e-6, False),
    "small, one key a query": (arrays, {"attn_mask": np.eye(300, dtype=bool)}, 4e-6, False),
    "small, rows without keys": (arrays, {"attn_mask": with_empty_rows()}, 4e-6, False),
    # exp of 88 is the largest that float32 holds.
    "up to 80": (partial(of_largest_score, 80), {"is_causal": True}, 1e-4, False),
    # Scores are up to 7812 in size, and float32 holds such a one to 2^-11.
    "large": (partial(of_norm, 250), {}, 2e-3, True),
    "large, under a cap": (partial(arrays, size=20), {"softcap": 10.0}, 1e-4, False),
    "large biases": (
        arrays,
        {"bias": np.where(np.random.default_rng(2).random((300, 300)) < 0.5, F(1e4), F(-1e4))},
        2e-3,
        True,
    ),
    # 0 * inf is NaN: the mask multiplies what exp returns.
    "large, masked": (of_far_last_keys, {"attn_mask": np.arange(300) < 200}, 4e-6, True),
}
"""Inputs, options, the tolerance, and whether the largest score of a row is needed."""


@pytest.mark.parametrize("name", CALLS)
def test_which_scores_need_a_maximum(
    ranges_computed: dict[str, int], rng: np.random.Generator, name: str
) -> None:
    """It is tried without; once a range of queries needs one, no other is tried."""
    make, rules, tolerance, needs = CALLS[name]
    right(make(rng), rules, tolerance)
    assert bool(ranges_computed["with"]) == needs
    assert ranges_computed["without"] > 0
    assert not needs or ranges_computed["without"] <= 2 < ranges_computed["with"]  # two threads may try at once


@pytest.mark.parametrize("score", [-200.0, 200.0])
@pytest.mark.parametrize("rules", [{}, {"attn_mask": masks.padding(250, 130)}, {"is_causal": True}], ids=str)
def test_rows_beyond_what_exp_holds(
    ranges_computed: dict[str, int], rng: np.random.Generator, score: float, rules: dict[str, Any]
) -> None:
    """Their sum is 0, as that of a row without a key, or inf. Half of the rows have usual scores."""
    q, k, v = arrays(rng)
    k[..., 0] = 8.0
    q[:, ::2] = 0.1 * q[:, ::2]
    q[:, ::2, 0] = score
    right([q, k, v], rules, atol=2e-4)
    assert ranges_computed["with"]


def test_a_sum_beyond_float32_of_weights_that_are_not(ranges_computed: dict[str, int]) -> None:
    """300 times exp(88) is inf. Small values keep the output finite, which would be divided by inf."""
    q = np.full((1, 300, 64), F(math.sqrt(88 / 8)))
    v = np.full((1, 300, 64), F(1e-3))
    np.testing.assert_allclose(attention_state(q, q, v).output, v, rtol=1e-5)
    assert ranges_computed["with"]


def test_large_sinks_need_a_maximum(ranges_computed: dict[str, int], rng: np.random.Generator) -> None:
    attention_state(*arrays(rng), sinks=np.asarray([100, -100], F))
    assert ranges_computed["without"] <= 2


def test_small_biases_need_none(ranges_computed: dict[str, int], rng: np.random.Generator) -> None:
    call, bias = arrays(rng), rng.standard_normal((300, 300)).astype(F)
    bias[:, 7] = -math.inf
    right(call, {"bias": bias})
    distance = abs(np.arange(300)[:, None] - np.arange(300))
    expected, _, _ = reference.attention(*call, bias=-np.asarray([[[2**-4]], [[2**-8]]]) * distance)
    np.testing.assert_allclose(attention_state(*call, bias=biases.alibi(2)).output, expected, rtol=0, atol=4e-6)
    assert not ranges_computed["with"]


def test_a_function_may_keep_the_scores(rng: np.random.Generator) -> None:
    """What it was given, and what it returned, is not overwritten."""
    kept: list[np.ndarray] = []

    def score_mod(s: Any, _b: Any, _h: Any, _i: Any, _j: Any) -> Any:
        kept.append(s)
        return s

    q, k, v = arrays(rng)
    output = attention_state(q, k, v, bias=biases.from_function(score_mod)).output
    np.testing.assert_allclose(output, attention_state(q, k, v).output, rtol=0, atol=2e-6)
    every = np.concatenate([s.ravel() for s in kept])
    np.testing.assert_allclose(np.sort(every), np.sort((q @ np.swapaxes(k, -1, -2) / 8).ravel()), atol=1e-5)


@pytest.mark.needs("torch")
def test_a_function_may_bring_in_what_autograd_records(rng: np.random.Generator) -> None:
    """Nothing that the call is given requires a gradient, so that arrays are written to."""
    import torch

    tensors = [torch.from_numpy(x) for x in arrays(rng)]
    learned = torch.tensor(0.5, requires_grad=True)
    bias = biases.from_function(lambda s, _b, _h, i, j: s - learned * abs(i - j))
    scaled_dot_product_attention(*tensors, bias=bias).sum().backward()
    distance = abs(torch.arange(300)[:, None] - torch.arange(300))
    other = torch.tensor(0.5, requires_grad=True)
    torch.nn.functional.scaled_dot_product_attention(*tensors, attn_mask=-other * distance).sum().backward()
    np.testing.assert_allclose(learned.grad, other.grad, rtol=1e-4)


@pytest.mark.parametrize("what", ["opposite", "tiny values", "huge values"])
def test_what_bounded_scores_cannot_hold_is_done_again(
    ranges_computed: dict[str, int], rng: np.random.Generator, what: str
) -> None:
    """Rows whose scores are all about -35, and values near the ends of float32."""
    q, k, v = arrays(rng)
    if what == "opposite":
        u = rng.standard_normal(64)
        u *= math.sqrt(35 * 8) / np.linalg.norm(u)
        q, k = (-u + 0.01 * q).astype(F), (u + 0.01 * k).astype(F)
        v = v * F(1e-30)
    elif what == "huge values":
        q, k, v = q * F(1.5), k * F(1.5), v * F(1e37)
        k[:, :, :] = np.sign(q[:, :1]) * abs(k)
    else:
        v = v * F(1e-37)
    state = attention_state(q, k, v)
    output, _, _ = reference.attention(q, k, v)
    scale = np.max(abs(output))
    np.testing.assert_allclose(state.output / scale, output / scale, rtol=0, atol=3e-5)
    assert ranges_computed["without"]
    if what == "opposite":
        assert ranges_computed["with"]


@pytest.mark.sampled(5)
@pytest.mark.parametrize("score", [-21, -13, -5])
@pytest.mark.parametrize("size", [1e-36, 1e-33, 1e-24, 1.0])
@pytest.mark.parametrize("what", ["all", "one", "causal", "spread"])
def test_weights_that_are_small_keep_the_digits_of_small_values(
    rng: np.random.Generator, score: float, size: float, what: str
) -> None:
    """A sum of the row from 2^-30 on: weight * value underflows before it is divided by the sum."""
    q, k, v = arrays(rng, 0.1)
    q[..., 0], k[..., 0] = score, 8.0
    v *= F(size)
    if what == "one":
        v[:, 1:] = 0
    if what == "spread":  # a weight of e^-80, which is a normal number, but not times e^-13
        k[:, 7, 0], v[:, 7] = 8 - 8 * 80 / score, 1e25
        q, k = q.copy(), k.copy()
    rules = {"is_causal": True} if what == "causal" else {}
    expected, plain = reference.attention(q, k, v, **rules)[0], textbook(np, q, k, v, **rules)
    judged = judge(attention_state(q, k, v, **rules).output, expected, plain, "float32")
    assert judged.absolute <= judged.bound


@pytest.mark.parametrize("failing", [0, 150, 299])
def test_the_order_of_the_tasks_does_not_matter(
    ranges_computed: dict[str, int], rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch, failing: int
) -> None:
    """With threads, any of the tasks may be the first that needs a maximum."""
    q, k, v = (np.concatenate([x, x]) for x in arrays(rng))
    q[1, failing] *= 60
    override(monkeypatch, "ONE_CORE", TileSize(64, 64, 2**12))
    results = []
    for seed in range(6):

        def run(function: Any, tasks: list[Any], _threads: object, seed: int = seed) -> None:
            for number in np.random.default_rng(seed).permutation(len(tasks)):
                function(tasks[number])

        monkeypatch.setattr(threads, "run_tasks", run)
        state = attention_state(q, k, v)
        results.append(state.output.tobytes() + state.lse.tobytes())
    assert ranges_computed["without"]
    assert ranges_computed["with"]
    assert len(set(results)) == 1


def test_nan_and_inf_in_values_that_are_masked(
    ranges_computed: dict[str, int], rng: np.random.Generator
) -> None:
    q, k, v = arrays(rng)
    mask = np.tri(300, dtype=bool)
    mask[:, 17] = False
    clean = attention_state(q, k, v, mask).output
    v[:, 17], k[:, 17] = math.nan, math.inf
    np.testing.assert_allclose(attention_state(q, k, v, mask).output, clean, rtol=0, atol=2e-6)
    assert ranges_computed["with"]


def test_values_without_a_width() -> None:
    """Sums below 1 have the values looked at, and there are none."""
    query, key = np.full((1, 256, 64), -8, np.float32), np.full((1, 256, 64), 0.3, np.float32)
    assert scaled_dot_product_attention(query, key, key[..., :0]).shape == (1, 256, 0)
