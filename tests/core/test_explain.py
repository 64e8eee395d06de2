"""`explain` says what the call then does: which implementation, which tiles, which threads."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from internals import VARIABLE, products, reproducible_program, softmax, torch_kernels
from minimal_library import Array, replaced
from threadpoolctl import threadpool_limits

import sdpa_xp
from sdpa_xp import explain, masks, scaled_dot_product_attention, scaled_dot_product_attention_jvp

CALLS = [
    {},
    {"is_causal": True},
    {"attn_mask": masks.sliding_window(5, 2) & masks.padding(17)},
    {"attn_mask": np.arange(23) < 9, "softcap": 2.0},
    {"scale": np.ones((2, 1, 1), np.float32)},
]


@pytest.fixture
def call(rng: np.random.Generator) -> tuple[np.ndarray, ...]:
    return tuple(rng.standard_normal((2, 23, 4)).astype(np.float32) for _ in range(3))


def test_it_takes_the_same_call() -> None:
    one, other = inspect.signature(explain), inspect.signature(scaled_dot_product_attention)
    parameters = [
        [(p.name, p.default, p.kind) for p in signature.parameters.values()] for signature in (one, other)
    ]
    assert parameters[0] == parameters[1]


@pytest.mark.parametrize("rules", CALLS, ids=str)
@pytest.mark.usefixtures("small_tiles")
def test_tiles_are_those_that_are_computed(
    call: tuple[np.ndarray, ...], rules: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    weighed: list[int] = []
    product = products.matmul_grouped
    for module in (products, softmax):
        monkeypatch.setattr(module, "matmul_grouped", lambda *rest: weighed.append(1) or product(*rest))
    explained = explain(*call, **rules)
    assert weighed == []
    assert (explained.implementation, explained.tile) == ("xp", (4, 6))
    scaled_dot_product_attention(*call, **rules)
    assert explained.tiles == len(weighed)
    assert explained.total_tiles % (6 * 4) == 0  # ranges of queries and of keys
    assert (explained.tiles < explained.total_tiles) == ("is_causal" in rules or "attn_mask" in rules)


@pytest.mark.parametrize("mask", [masks.sliding_window(20, 0), masks.sliding_window(300, 0), masks.dilated(3)])
def test_tiles_of_a_reproducible_call_are_those_that_are_computed(
    mask: masks.Mask, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A window cuts its queries in another way; the keys of a tile begin where those of its queries do."""
    x, weighed = np.zeros((2, 600, 4), np.float32), [0]
    rules: dict[str, Any] = {"attn_mask": mask, "reproducible": True}
    add = reproducible_program.add_weighted

    def counted(*rest: Any) -> None:
        weighed[0] += 1
        add(*rest)

    monkeypatch.setattr(reproducible_program, "add_weighted", counted)
    explained = explain(x, x, x, **rules)
    assert weighed == [0]
    scaled_dot_product_attention(x, x, x, **rules)
    assert weighed == [explained.tiles]
    assert explained.tiles <= explained.total_tiles
    assert len(explained.tile_map) == -(-600 // explained.tile[0])


@pytest.mark.needs("torch")
@pytest.mark.parametrize("rules", [{}, {"attn_mask": masks.causal() & masks.sliding_window(200, 0)}], ids=str)
def test_multiplications_are_those_of_the_products(rules: dict[str, Any]) -> None:
    """As torch counts them; without a mask, derivatives take the times that `print` names."""
    import torch
    from torch.utils.flop_counter import FlopCounterMode

    x = torch.randn(4, 600, 64, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    _, pullback = sdpa_xp.scaled_dot_product_attention_vjp(x, x, x, **rules)
    tangents = dict.fromkeys(("query", "key", "value"), x)
    leaf = x.clone().requires_grad_()
    recorded = scaled_dot_product_attention(leaf, leaf, leaf, implementation="xp", **rules).sum()
    calls: list[tuple[float, Callable[[], object]]] = [
        (1, lambda: scaled_dot_product_attention(x, x, x, implementation="xp", **rules)),
        (2.5, lambda: pullback(x)),
        (2.5, recorded.backward),
        (3, lambda: scaled_dot_product_attention_jvp(x, x, x, tangents, **rules)),
        (10.5, lambda: pullback.jvp(x, tangents)),
    ]
    expected = explain(x, x, x, implementation="xp", **rules).multiplications
    for times, call in calls[:1] if rules else calls:
        with FlopCounterMode(display=False) as counter:
            call()
        # It counts an addition for each multiplication. Sums over rows are products too.
        assert counter.get_total_flops() / 2 / expected == pytest.approx(times, rel=0.03)


def test_a_tile_is_no_larger_than_the_call(call: tuple[np.ndarray, ...]) -> None:
    query, key, value = call
    assert explain(query[:, :2], key, value).tile == (2, 23)


@pytest.mark.parametrize(
    ("rules", "reason"),
    [
        ({}, "as documented"),
        ({"implementation": "native"}, "as documented"),
        ({"implementation": "xp"}, "asks for it"),
        ({"softcap": 2.0}, "no `softcap`"),
        ({"attn_mask": masks.prefix(2)}, "supports only `masks.causal()`"),
    ],
    ids=str,
)
@pytest.mark.needs("torch")
def test_the_implementation_is_the_one_that_computes(
    call: tuple[np.ndarray, ...], rules: dict[str, Any], reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    import torch

    kernel, kernel_calls = torch_kernels, []
    monkeypatch.setattr(
        kernel, "attend", lambda call, attend=kernel.attend: kernel_calls.append(1) or attend(call)
    )
    tensors = [torch.from_numpy(x) for x in call]
    explained = explain(*tensors, **rules)
    assert kernel_calls == []
    scaled_dot_product_attention(*tensors, **rules)
    assert (explained.implementation == "native") == (kernel_calls == [1])
    assert reason in explained.reason
    assert reason in str(explained)


@pytest.mark.needs("torch")
def test_inside_a_transform_the_kernel_is_not_the_default(call: tuple[np.ndarray, ...]) -> None:
    import torch

    explained: list[Any] = []
    torch.func.vmap(lambda x: explained.append(explain(x, x, x)) or x)(torch.from_numpy(call[0])[None])
    assert (explained[0].implementation, explained[0].total_tiles) == ("xp", 1)
    assert "torch.func" in explained[0].reason


def test_threads_are_for_large_calls_on_numpy(
    rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(VARIABLE, raising=False)
    small, large = (rng.standard_normal((4, n, 64)).astype(np.float32) for n in (8, 1024))
    with threadpool_limits(3, "blas"):
        assert explain(small, small, small).threads == 1
        assert explain(large, large, large).threads == 3
    monkeypatch.setenv(VARIABLE, "5")
    assert explain(large, large, large).threads == 5
    assert "in 5 threads" in str(explain(large, large, large))


@pytest.mark.needs("torch")
def test_threads_are_not_for_other_libraries(monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    monkeypatch.delenv(VARIABLE, raising=False)
    large = torch.ones(4, 1024, 64)
    with threadpool_limits(3, "blas"):
        assert explain(large, large, large, implementation="xp").threads == 1


def test_nothing_is_drawn() -> None:
    x, rng = np.ones((2, 2)), np.random.default_rng(0)
    explain(x, x, x, dropout_p=0.5, rng=rng)
    assert rng.integers(1000) == np.random.default_rng(0).integers(1000)


def test_dropout_reads_ranges_of_keys_and_no_patches() -> None:
    x, rng = np.ones((1, 1, 4096, 8), np.float32), np.random.default_rng(0)
    mask = masks.neighbourhood((64, 64), 7)
    in_patches, in_ranges = explain(x, x, x, mask), explain(x, x, x, mask, dropout_p=0.1, rng=rng)
    assert in_patches.tile != in_ranges.tile == explain(x, x, x, mask, softcap=9.0).tile


def test_why_arrays_count_as_lazy() -> None:
    """A mistake in `__bool__` makes them lazy."""
    x, reason = Array(np.ones((2, 5, 4), np.float32)), "minimal has no attention kernel to call"
    assert explain(x, x, x).reason == reason

    def mistaken(_: Any) -> bool:
        raise LookupError("a mistake")

    with replaced(Array, __bool__=mistaken):
        lazy = "; the arrays count as lazy: bool() raises LookupError: a mistake"
        assert explain(x, x, x).reason == reason + lazy
