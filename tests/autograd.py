"""The gradients of attention by torch's autograd, of the formula in a textbook: whole arrays, no tiles."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, NamedTuple

import numpy as np
from calls import draw_named
from internals import EPS

INPUTS = ("query", "key", "value")
DRAWS = 8
"""How often the textbook is computed with other rounding errors, beside once without."""
Arrays, Factor = Mapping[str, np.ndarray], np.ndarray | None
Named = Mapping[Any, np.ndarray]
"""What is differentiated, or derivatives, by name or number."""


class Call(NamedTuple):
    """A call in plain terms, beside what the library is given for it."""

    shapes: Mapping[str, tuple[int, ...]]
    """Of the floating arrays whose gradients are asked for, by the names that these have."""
    rules: Mapping[str, Any] = {}
    """Keywords of the library."""
    holds: Callable[[Mapping[str, Any]], Mapping[str, Any]] = lambda _: {}
    """Keywords of the library that hold some of the arrays."""
    allowed: Callable[[Any, Any], Any] | None = None
    """Whether query i attends key j; the batch and the heads stand in front."""
    added: Callable[[Mapping[str, Any], Any, Any], Any] | None = None
    """What is added to the scores, beside `attn_mask` and `bias`, of the arrays and of i and j."""
    with_lse: bool = False
    """Whether the log-sum-exp of each row is added to its output, as a way to derive both."""


def arrays(call: Call, rng: np.random.Generator, dtype: Any) -> dict[str, np.ndarray]:
    return draw_named(rng, call.shapes, dtype)


def keywords(call: Call, placed: Mapping[str, Any]) -> dict[str, Any]:
    """The keywords of a call of the library, whose arrays are `placed` in one."""
    arrays = {name: x for name, x in placed.items() if name not in INPUTS and "." not in name}
    return {**arrays, **call.rules, **call.holds(placed)}


def textbook(exact: Named, compute: Callable[[Callable[[Any], Any]], Named]) -> Named:
    """What `compute` returns in the dtype of the result, for each element the worst of several draws.

    `compute` has a function that it applies to each array. It changes nothing in the first draw, and in the
    others each number by at most two rounding errors. Derivatives are often small differences of large ones.
    The error of the formula in it is random, and another on each CPU, which adds in an order of its own. The
    draws show what it can be, where one alone may be nearly exact by luck.
    """
    rng = np.random.default_rng(0)

    def moved(x: Any) -> Any:
        if isinstance(x, Mapping):
            return {name: moved(array) for name, array in x.items()}
        if isinstance(x, tuple):
            return tuple(map(moved, x))
        step = 2 * EPS[x.dtype.name] * rng.uniform(-1, 1, x.shape)
        return (x.astype(np.float64) * (1 + step)).astype(x.dtype)

    worst = dict(compute(lambda x: x))
    for _ in range(DRAWS):
        for name, other in compute(moved).items():
            further = np.abs(other - exact[name]) > np.abs(worst[name] - exact[name])
            worst[name] = np.where(further, other, worst[name])
    return worst


def _tensor(dtype: str, x: Factor) -> Any:
    import torch

    return None if x is None else torch.tensor(x.astype(np.float64), dtype=getattr(torch, dtype))


def gradients(
    call: Call, inputs: Arrays, cotangent: np.ndarray, dtype: str = "float64", dropped: Factor = None
) -> dict[str, np.ndarray]:
    """By name, beside the "output", computed in `dtype`; "weights" is that of what the values are weighed by.

    `dropped` is what dropout multiplies the weights by.
    """
    import torch

    tensor = partial(_tensor, dtype)
    leaves = {name: tensor(x).requires_grad_() for name, x in inputs.items()}
    output, weights = attention(call, leaves, tensor(dropped))
    targets = leaves | {"weights": weights}
    results = torch.autograd.grad(output, [*targets.values()], tensor(cotangent), materialize_grads=True)
    named = zip((*targets, "output"), (*results, output.detach()), strict=True)
    return {name: x.double().numpy() for name, x in named}


def jvp(
    call: Call, inputs: Arrays, tangents: Arrays, dtype: str = "float64", dropped: Factor = None
) -> np.ndarray:
    """The tangent of the output, by forward mode in `dtype`."""
    import torch

    still, factor = {name: _tensor(dtype, x) for name, x in inputs.items()}, _tensor(dtype, dropped)

    def output(*moved: Any) -> Any:
        return attention(call, {**still, **dict(zip(tangents, moved, strict=True))}, factor)[0]

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of torch.jit, which torch itself calls
        here, along = (tuple(_tensor(dtype, part[name]) for name in tangents) for part in (inputs, tangents))
        _, tangent = torch.func.jvp(output, here, along)
    result: np.ndarray = tangent.double().numpy()
    return result


def laplacian(
    call: Call,
    inputs: Arrays,
    tangents: Arrays,
    laplacians: Arrays,
    dtype: str = "float64",
    dropped: Factor = None,
) -> list[np.ndarray]:
    """The tangents of the output and its laplacian, by forward mode over forward mode in `dtype`."""
    import torch

    here, along, bends = (
        tuple(_tensor(dtype, part[name]) for name in inputs) for part in (inputs, tangents, laplacians)
    )
    factor = _tensor(dtype, dropped)

    def output(*leaves: Any) -> Any:
        return attention(call, dict(zip(inputs, leaves, strict=True)), factor)[0]

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of torch.jit, which torch itself calls
        _, total = torch.func.jvp(output, here, bends)
        firsts = []
        for direction in zip(*along, strict=True):

            def slope(*leaves: Any, direction: Any = direction) -> Any:
                return torch.func.jvp(output, leaves, direction)[1]

            first, second = torch.func.jvp(slope, here, direction)
            firsts.append(first)
            total = total + second
    return [torch.stack(firsts).double().numpy(), total.double().numpy()]


def second_order(
    call: Call,
    inputs: Arrays,
    tangents: Arrays,
    cotangents: tuple[np.ndarray, np.ndarray],
    dtype: str = "float64",
    dropped: Factor = None,
) -> dict[str, np.ndarray]:
    """How each gradient changes if the inputs move by tangents, and the first cotangent by the second."""
    import torch

    tensor = partial(_tensor, dtype)
    leaves = {name: tensor(x).requires_grad_() for name, x in inputs.items()}
    cotangent, moved = map(tensor, cotangents)
    output, _ = attention(call, leaves, tensor(dropped))
    by = {"materialize_grads": True, "retain_graph": True}
    first = torch.autograd.grad(output, [*leaves.values()], cotangent, create_graph=True, **by)
    slope = sum((x * tensor(tangents[name])).sum() for name, x in zip(leaves, first, strict=True))
    # The Hessian is symmetric: the gradient of the slope is the change of the gradients.
    second = torch.autograd.grad(slope, [*leaves.values()], **by)
    linear = torch.autograd.grad(output, [*leaves.values()], moved, **by)
    return {n: (x + y).double().numpy() for n, x, y in zip(leaves, second, linear, strict=True)}


def hessian(
    call: Call, inputs: Arrays, cotangent: np.ndarray, dtype: str = "float64", dropped: Factor = None
) -> np.ndarray:
    """The second derivatives of <cotangent, output> for the query, (*query.shape, *query.shape)."""
    import torch

    tensor = partial(_tensor, dtype)
    leaves = {name: tensor(x) for name, x in inputs.items()}
    factor, weight = tensor(dropped), tensor(cotangent)

    def loss(query: Any) -> Any:
        return (attention(call, leaves | {"query": query}, factor)[0] * weight).sum()

    result: np.ndarray = torch.func.jacrev(torch.func.jacrev(loss))(leaves["query"]).double().numpy()
    return result


def output_and_weights(call: Call, inputs: Arrays, dtype: str) -> list[np.ndarray]:
    """Computed in `dtype`."""
    leaves = {name: _tensor(dtype, x) for name, x in inputs.items()}
    return [x.double().numpy() for x in attention(call, leaves)]


def attention(call: Call, leaves: Mapping[str, Any], dropped: Any = None) -> tuple[Any, Any]:
    """Output, and the weights that it is a sum by."""
    import torch

    q, k, v = (leaves[name] for name in INPUTS)
    flat, heads_last = q.ndim == k.ndim == v.ndim == 2, call.rules.get("layout") == "...LHE"
    q, k, v = (x[None] if x.ndim == 2 else x.transpose(-3, -2) if heads_last else x for x in (q, k, v))
    k, v = (x.repeat_interleave(q.shape[-3] // x.shape[-3], dim=-3) for x in (k, v))
    scale = leaves["scale"] if "scale" in leaves else call.rules.get("scale", q.shape[-1] ** -0.5)
    s = q @ k.transpose(-1, -2) * scale
    if softcap := call.rules.get("softcap"):
        s = softcap * torch.tanh(s / softcap)
    i, j = torch.arange(s.shape[-2])[:, None], torch.arange(s.shape[-1])[None, :]
    for name in leaves.keys() & {"attn_mask", "bias"}:
        s = s + leaves[name]
    if call.added is not None:
        s = s + call.added(leaves, i, j)
    if call.allowed is not None:
        s = torch.where(call.allowed(i, j), s, -torch.inf)
    if "sinks" in leaves:
        s = torch.cat([s, leaves["sinks"][..., None, None].expand(*s.shape[:-1], 1)], dim=-1)
    empty = (s == -torch.inf).all(dim=-1, keepdim=True)
    w = torch.softmax(s.masked_fill(empty, 0), dim=-1).masked_fill(empty, 0)[..., : k.shape[-2]]
    w = w if dropped is None else w * dropped
    output = w @ v
    if call.with_lse:
        output = output + torch.logsumexp(s, dim=-1, keepdim=True)
    return (output[0] if flat else output.transpose(-3, -2) if heads_last else output), w
