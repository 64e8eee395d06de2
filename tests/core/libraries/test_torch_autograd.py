"""torch differentiates a call by the library's own derivatives, in each of its modes and as often as asked."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest

from sdpa_xp import attention_state, biases, masks, scaled_dot_product_attention

torch: Any = pytest.importorskip("torch")
func = torch.func
pytestmark = [pytest.mark.needs("torch"), pytest.mark.filterwarnings("ignore::DeprecationWarning")]
HOLES = torch.arange(5) <= 2 * torch.arange(4)[:, None] - 1
"""The first query attends to no key."""


def draw(*shape: int) -> Any:
    return torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(sum(shape)))


QUERY, KEY, VALUE = draw(1, 2, 4, 3), draw(1, 1, 5, 3), draw(1, 1, 5, 2)
MORE = {"scale": draw(2, 1, 1), "sinks": draw(2), "attn_mask": draw(4, 5), "slopes": draw(2).abs()}


def attend(query: Any, key: Any, value: Any, slopes: Any = None, **rules: Any) -> Any:
    bias = {} if slopes is None else {"bias": biases.alibi(slopes)}
    return scaled_dot_product_attention(query, key, value, **bias, **rules)


def of_all(query: Any, key: Any, value: Any, *more: Any) -> Any:
    return attend(query, key, value, **dict(zip(MORE, more, strict=True)), softcap=2.0, is_causal=True)


def with_dropout(*inputs: Any) -> Any:
    return attend(*inputs, dropout_p=0.4, rng=torch.Generator().manual_seed(1))


CALLS: dict[str, tuple[Callable[..., Any], tuple[Any, ...]]] = {
    "torch's kernel": (attend, ()),
    "portable": (lambda *x: attend(*x, implementation="xp", is_causal=True), ()),
    "empty row": (lambda *x: attend(*x, attn_mask=HOLES), ()),
    "2-D": (lambda *x: attend(*(part[0, 0] for part in x), attn_mask=masks.sliding_window(2, 1)), ()),
    "heads last": (lambda *x: attend(*(part.transpose(1, 2) for part in x), layout="...LHE"), ()),
    "dropout": (with_dropout, ()),
    "all": (of_all, tuple(MORE.values())),
}


def state(*inputs: Any, **rules: Any) -> tuple[Any, Any]:
    """Both results of `attention_state`, without the log-sum-exp of rows that have no key."""
    output, lse = attention_state(*inputs, **rules)
    return output, lse.masked_fill(lse == -math.inf, 0.0)


CALLS |= {
    "state, empty row": (lambda *x: state(*x, attn_mask=HOLES), ()),
    "state, 2-D": (lambda *x: state(*(part[0, 0] for part in x), is_causal=True), ()),
    "state, no keys": (lambda q, k, v: state(q, k[..., :0, :], v[..., :0, :], is_causal=True), ()),
    "state, sinks": (lambda *x: state(*x[:3], HOLES, sinks=x[3], lse_base=2), (MORE["sinks"],)),
    "state, dropout": (lambda *x: state(*x, HOLES, dropout_p=0.4, rng=torch.Generator().manual_seed(1)), ()),
    "state, slopes": (
        lambda *x: state(*x[:3], bias=biases.alibi(x[3]), attn_mask=x[4]),
        (MORE["slopes"], draw(4, 5)),
    ),
}


@pytest.mark.parametrize("name", CALLS)
def test_finite_differences_of_both_orders(name: str) -> None:
    call, more = CALLS[name]
    inputs = [x.clone().requires_grad_() for x in (QUERY, KEY, VALUE, *more)]
    with torch.no_grad():
        plain = call(*inputs)
    torch.testing.assert_close(call(*inputs), plain, rtol=1e-14, atol=1e-14)
    # Along random directions: an entry at a time takes ten times as long.
    is_batched = "dropout" not in name and "state" not in name
    by = {"check_batched_grad": is_batched, "check_batched_forward_grad": is_batched}
    assert torch.autograd.gradcheck(call, inputs, check_forward_ad=True, fast_mode=True, **by)
    assert torch.autograd.gradgradcheck(call, inputs, check_fwd_over_rev=True, fast_mode=True)


def loss(query: Any) -> Any:
    return scaled_dot_product_attention(query, KEY, VALUE, HOLES).square().sum()


def textbook(query: Any) -> Any:
    scores = (query @ KEY.mT / math.sqrt(3))[..., 1:, :].masked_fill(~HOLES[1:], -math.inf)
    return (scores.softmax(-1) @ VALUE).square().sum()


def times(f: Callable[[Any], Any], count: int) -> Callable[[Any], Any]:
    """A derivative along a direction, `count` times by forward mode."""
    for _ in range(count):
        f = partial(lambda f, x: func.jvp(f, (x,), (QUERY + 1,))[1], f)
    return f


FORWARD = {"vectorize": True, "strategy": "forward-mode"}
TRANSFORMS: dict[str, Callable[[Any], Any]] = {
    "grad": lambda f: func.grad(f)(QUERY),
    "jvp": lambda f: func.jvp(f, (QUERY,), (QUERY,))[1],
    "vmap of grad": lambda f: func.vmap(func.grad(f))(torch.stack([QUERY, 2 * QUERY])),
    "grad of vmap": lambda f: func.grad(lambda x: func.vmap(f)(x).sum())(torch.stack([QUERY, 2 * QUERY])),
    "hessian": lambda f: func.hessian(f)(QUERY),
    "jacrev of jacrev": lambda f: func.jacrev(func.jacrev(f))(QUERY),
    "jacrev of jacfwd": lambda f: func.jacrev(func.jacfwd(f))(QUERY),
    "jacfwd of jacfwd": lambda f: func.jacfwd(func.jacfwd(f))(QUERY),
    "functional.hessian": lambda f: torch.autograd.functional.hessian(f, QUERY, vectorize=True),
    "functional.jacobian by forward mode": lambda f: torch.autograd.functional.jacobian(f, QUERY, **FORWARD),
    "functional.hessian by forward mode": lambda f: torch.autograd.functional.hessian(
        f, QUERY, vectorize=True, outer_jacobian_strategy="forward-mode"
    ),
    "forward mode twice": lambda f: times(f, 2)(QUERY),
    "forward mode thrice": lambda f: times(f, 3)(QUERY),
    "third": lambda f: func.jvp(lambda x: func.jvp(func.grad(f), (x,), (QUERY,))[1], (QUERY,), (QUERY,))[1],
}


@pytest.mark.parametrize("at_once", [True, False], ids=["at once", "one by one"])
@pytest.mark.parametrize("transform", TRANSFORMS.values(), ids=TRANSFORMS)
def test_transforms(transform: Callable[[Any], Any], at_once: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if not at_once:
        from internals import torch_function

        monkeypatch.setattr(torch_function, "MOST_SCORES_AT_ONCE", 0)
    torch.testing.assert_close(transform(loss), transform(textbook), rtol=0, atol=1e-10)


@pytest.mark.parametrize("rules", [{"is_causal": True}, {"bias": HOLES.double()}, {"attn_mask": HOLES}])
def test_reverse_over_forward_mode_in_an_open_level(rules: dict[str, Any]) -> None:
    """torch computes how the gradient moves, too."""

    def call(query: Any) -> Any:
        return scaled_dot_product_attention(query, KEY, VALUE, **rules).square().sum()

    forward_ad, x = torch.autograd.forward_ad, QUERY.clone().requires_grad_()
    with forward_ad.dual_level():
        tangent = forward_ad.unpack_dual(call(forward_ad.make_dual(x, QUERY + 1))).tangent
        (gradient,) = torch.autograd.grad(tangent, x)
    expected = func.jvp(func.grad(call), (QUERY,), (QUERY + 1,))[1]
    torch.testing.assert_close(gradient, expected, rtol=0, atol=1e-11)


def test_third_derivatives_of_autograd() -> None:
    def third(f: Callable[[Any], Any]) -> Any:
        x = QUERY.clone().requires_grad_()
        result = f(x)
        for _ in range(3):
            (result,) = torch.autograd.grad(result.square().sum(), x, create_graph=True)
        return result.detach()

    torch.testing.assert_close(third(loss), third(textbook), rtol=1e-10, atol=1e-10)


def test_checkpoint() -> None:
    def second(wrapped: bool) -> Any:
        x = QUERY.clone().requires_grad_()
        y = torch.utils.checkpoint.checkpoint(loss, x, use_reentrant=False) if wrapped else loss(x)
        (gradient,) = torch.autograd.grad(y, x, create_graph=True)
        return torch.autograd.grad(gradient.square().sum(), x)[0]

    torch.testing.assert_close(second(True), second(False), rtol=0, atol=0)


@pytest.mark.parametrize("name", ["key", "value"])
@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_masked_nan_adds_nothing(name: str, bad: float) -> None:
    """The last query attends to the last key, so that its gradients alone may be NaN."""

    def gradients(change: float | None) -> list[Any]:
        inputs = {"query": QUERY.clone(), "key": KEY.clone(), "value": VALUE.clone()}
        if change is not None:
            inputs[name][..., 4, 0] = change
        leaves = [x.requires_grad_() for x in inputs.values()]
        output = scaled_dot_product_attention(*leaves, torch.arange(5) < 4)
        loss = sum(x.square().sum() for x in (output, *attention_state(*leaves, torch.arange(5) < 4)))
        return list(torch.autograd.grad(loss, leaves))

    for gradient, clean in zip(gradients(bad), gradients(None), strict=True):
        torch.testing.assert_close(gradient, clean, rtol=0, atol=1e-12)


def batched(f: Callable[[Any], Any], *, again: bool = False) -> Any:
    """The gradients of all elements of f(x) or, if `again`, those of all elements of a gradient."""
    x = QUERY.clone().requires_grad_()
    y = torch.autograd.grad(f(x).square().sum(), x, create_graph=True)[0] if again else f(x)
    cotangents = torch.eye(y.numel(), dtype=y.dtype).reshape(-1, *y.shape)
    return torch.autograd.grad(y, x, cotangents, is_grads_batched=True)[0]


def squared(f: Callable[[Any], Any]) -> Callable[[Any], Any]:
    return lambda x: f(x).square().sum()


MANY_AT_ONCE: dict[str, Callable[[Any], Any]] = {
    "is_grads_batched": batched,
    "is_grads_batched of a gradient": partial(batched, again=True),
    "jacobian": lambda f: torch.autograd.functional.jacobian(f, QUERY, vectorize=True),
    "jacobian by forward mode": lambda f: torch.autograd.functional.jacobian(f, QUERY, **FORWARD),
    "hessian": lambda f: torch.autograd.functional.hessian(squared(f), QUERY, vectorize=True),
    "hessian by forward mode": lambda f: torch.autograd.functional.hessian(
        squared(f), QUERY, vectorize=True, outer_jacobian_strategy="forward-mode"
    ),
    "jacrev of jacrev": lambda f: func.jacrev(func.jacrev(squared(f)))(QUERY),
    "grad of vmap": lambda f: func.grad(squared(func.vmap(f)))(torch.stack([QUERY, 2 * QUERY])),
    "grad of vmap of grad": lambda f: func.grad(squared(func.vmap(func.grad(squared(f)), -1)))(
        torch.stack([QUERY, 2 * QUERY], -1)
    ),
}
PADDED = torch.arange(5) < 4
PADDINGS: dict[str, dict[str, Any]] = {
    "boolean": {"attn_mask": PADDED},
    "float": {"attn_mask": torch.zeros(4, 5, dtype=torch.float64).masked_fill(~PADDED, -math.inf)},
    "bias": {"bias": torch.zeros(4, 5, dtype=torch.float64).masked_fill(~PADDED, -math.inf), "softcap": 2.0},
    "mask": {"attn_mask": masks.from_array(PADDED.expand(4, 5)), "implementation": "xp"},
}


@pytest.mark.parametrize("at_once", [True, False], ids=["at once", "one by one"])
@pytest.mark.parametrize("transform", MANY_AT_ONCE.values(), ids=MANY_AT_ONCE)
def test_masked_nan_adds_nothing_to_many_derivatives(
    transform: Callable[[Any], Any], at_once: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not at_once:
        from internals import torch_function

        monkeypatch.setattr(torch_function, "MOST_SCORES_AT_ONCE", 0)

    def derivatives(bad: float, rules: dict[str, Any]) -> Any:
        key, value = KEY.clone(), VALUE.clone()
        key[..., 4, :] = value[..., 4, :] = bad

        def both(query: Any) -> Any:
            output, lse = attention_state(query, key, value, **rules)
            return scaled_dot_product_attention(query, key, value, **rules) + output + lse[..., None]

        return transform(both)

    for rules in [*PADDINGS.values()] if at_once else [PADDINGS["boolean"]]:
        torch.testing.assert_close(derivatives(math.nan, rules), derivatives(0, rules), rtol=0, atol=1e-11)


@pytest.mark.parametrize("implementation", [None, "xp"])
def test_a_nan_cotangent_reaches_no_key_that_its_row_does_not_attend_to(implementation: Any) -> None:
    leaves = [x.clone().requires_grad_() for x in (QUERY, KEY, VALUE)]
    output = scaled_dot_product_attention(*leaves, is_causal=True, implementation=implementation)
    cotangent = torch.ones_like(output)
    cotangent[..., 1, :] = math.nan
    query, key, value = torch.autograd.grad(output, leaves, cotangent)
    assert query.isnan().any(-1).nonzero()[:, -1].tolist() == [1, 1]
    for gradient in (key, value):
        assert gradient[..., 2:, :].isfinite().all()
        assert gradient[..., :2, :].isnan().any()


class Products(torch.utils._python_dispatch.TorchDispatchMode):  # type: ignore[misc]
    """Counts the products of matrices."""

    count = 0

    def __torch_dispatch__(self, func: Any, _types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += func.overloadpacket.__name__ in ("bmm", "mm", "matmul")
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("order", [1, 2])
@pytest.mark.parametrize("name", ["query", "key", "value", "scale", "sinks", "attn_mask", "slopes"])
def test_only_gradients_that_are_needed_are_computed(name: str, order: int) -> None:
    """It is the gradient that a call with all of them has, from fewer products of matrices."""
    arrays = {"query": QUERY, "key": KEY, "value": VALUE, **MORE}

    def gradient(names: set[str]) -> tuple[Any, int]:
        leaves = {n: x.clone().requires_grad_(n in names) for n, x in arrays.items()}
        output = attend(**leaves, softcap=2.0).square().sum()
        with Products() as products:
            for _ in range(order):
                (result,) = torch.autograd.grad(output, leaves[name], create_graph=order > 1)
                output = result.square().sum()
        return result.detach(), products.count

    one, products_of_one = gradient({name})
    every, products_of_all = gradient({*arrays})
    torch.testing.assert_close(one, every, rtol=1e-12, atol=1e-12)
    assert products_of_one < products_of_all


def test_the_gradient_of_mapped_calls_reads_their_outputs() -> None:
    """Two products are those of the output, five those of the gradients, and three look for a NaN."""

    def attend(x: Any) -> Any:
        return scaled_dot_product_attention(x, x, x, is_causal=True)

    with Products() as products:
        func.grad(squared(func.vmap(attend)))(torch.stack([QUERY, QUERY]))
    assert products.count <= 10


def test_large_scores_keep_the_derivative_of_their_log_sum_exp() -> None:
    """In float32, the sum of 1e8 and a logarithm is 1e8. The derivative is the mean of the keys."""
    query, key = torch.full((1, 1), 1e4).requires_grad_(), torch.full((2**16, 1), 1e4)
    lse = attention_state(query, key, key, torch.ones(1, 2**16, dtype=torch.bool), scale=1).lse
    (gradient,) = torch.autograd.grad(lse, query)
    torch.testing.assert_close(gradient, torch.full((1, 1), 1e4), rtol=1e-5, atol=0)


def test_memory_of_a_backward_pass_is_linear() -> None:
    """No tensor that is saved has as many elements as there are scores in a few tiles."""
    saved: list[int] = []
    x = torch.randn(1, 1, 1024, 8).requires_grad_()
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t.numel()) or t, lambda t: t):
        output = scaled_dot_product_attention(x, x, x, is_causal=True, implementation="xp")
    (gradient,) = torch.autograd.grad(output.sum(), x)
    assert gradient.shape == x.shape
    assert sum(saved) <= 6 * x.numel()


@pytest.mark.parametrize("rules", [{}, {"implementation": "xp"}, {"attn_mask": HOLES}])
def test_calls_without_gradients_do_no_more(rules: Any) -> None:
    """No function of the files that record a call is called if inputs have no gradient, or none is kept."""
    called: set[str] = set()

    def profile(frame: Any, event: str, _argument: Any) -> None:
        if event == "call":
            called.add(frame.f_code.co_filename.rpartition("sdpa_xp")[2][1:])

    def files(*inputs: Any) -> set[str]:
        scaled_dot_product_attention(*inputs, **rules)
        called.clear()
        sys.setprofile(profile)
        try:
            scaled_dot_product_attention(*inputs, **rules)
        finally:
            sys.setprofile(None)
        return called & {"_torch/recorded.py", "_libraries/torch/function.py"}

    leaf = QUERY.clone().requires_grad_()
    assert not files(QUERY, KEY, VALUE)
    with torch.no_grad():
        assert not files(leaf, KEY, VALUE)
    assert bool(files(leaf, KEY, VALUE)) == (rules != {"implementation": "xp"})


def test_functionalize() -> None:
    gradient = func.functionalize(func.grad(loss))(QUERY)
    torch.testing.assert_close(gradient, func.grad(textbook)(QUERY), rtol=0, atol=1e-10)
