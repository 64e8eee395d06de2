"""Which derivatives there are, and how each library computes them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, NamedTuple, TypeAlias

import autograd
import numpy as np
import transformations
from libraries import LIBRARIES, Library, generator

from quality.derivatives.features import Feature
from sdpa_xp import (
    scaled_dot_product_attention_jvp,
    scaled_dot_product_attention_laplacian,
    scaled_dot_product_attention_vjp,
)

Quantity: TypeAlias = Literal["gradients", "tangent", "second", "laplacian", "mapped", "hessian"]


@dataclass(frozen=True)
class Problem:
    """A feature in a library, as a function of its arrays, which come in the order of their names."""

    feature: Feature
    library: Library
    rules: Mapping[str, Any]
    """The keywords of the call without the arrays, in the library."""
    attend: Callable[..., Any] | None = None
    """Replaces `output`, if it is compiled."""
    rng: Any = None
    """What dropout draws from; None is a new generator for each call."""

    @staticmethod
    def placed(feature: Feature, library: Library) -> Problem:
        with library.guard():
            rules = {
                k: library.put(x) if isinstance(x, np.ndarray) else x for k, x in feature.call.rules.items()
            }
        return Problem(feature, library, rules)

    @property
    def names(self) -> list[str]:
        return list(self.feature.call.shapes)

    def named(self, arrays: Sequence[Any]) -> dict[str, Any]:
        return dict(zip(self.names, arrays, strict=True))

    def arguments(self, arrays: Sequence[Any]) -> tuple[list[Any], dict[str, Any]]:
        """Return query, key and value, and the keywords of the call."""
        named, call = self.named(arrays), self.feature.call._replace(rules=self.rules)
        rules = autograd.keywords(call, named)
        if self.feature.dropout_p:
            rules |= {"dropout_p": self.feature.dropout_p, "rng": self.rng or generator(self.library)}
        return [named[name] for name in autograd.INPUTS], rules

    def output(self, *arrays: Any) -> tuple[Any]:
        if self.attend is not None:
            return (self.attend(*arrays),)
        inputs, rules = self.arguments(arrays)
        return (self.feature.attend(*inputs, **rules),)


class Operands(NamedTuple):
    """The arrays of a call in their order, a direction for each, and a cotangent of the output."""

    arrays: Sequence[Any]
    tangents: Sequence[Any]
    cotangent: Any


Way: TypeAlias = Callable[[Problem, Operands], Sequence[Any]]
"""Returns the quantity, an array for each array of the call or for all."""


class Derivative(NamedTuple):
    """A derivative, and what it is compared with."""

    quantity: Quantity
    compute: Way


def _vjp(problem: Problem, x: Operands) -> Sequence[Any]:
    inputs, rules = problem.arguments(x.arrays)
    gradients = scaled_dot_product_attention_vjp(*inputs, **rules)[1](x.cotangent)
    return [gradients[name] for name in problem.names]


def _jvp(problem: Problem, x: Operands) -> Sequence[Any]:
    inputs, rules = problem.arguments(x.arrays)
    return [scaled_dot_product_attention_jvp(*inputs, problem.named(x.tangents), **rules)[1]]


def _product(problem: Problem, x: Operands) -> Sequence[Any]:
    inputs, rules = problem.arguments(x.arrays)
    _, pullback = scaled_dot_product_attention_vjp(*inputs, **rules)
    _, second = pullback.jvp(x.cotangent, problem.named(x.tangents))
    return [second[name] for name in problem.names]


def _laplacian(problem: Problem, x: Operands) -> Sequence[Any]:
    inputs, rules = problem.arguments(x.arrays)
    moved = {name: tangent[None, ...] for name, tangent in problem.named(x.tangents).items()}
    return scaled_dot_product_attention_laplacian(*inputs, moved, **rules)[1:]


OF_SDPA_XP: dict[str, Derivative] = {
    "scaled_dot_product_attention_vjp": Derivative("gradients", _vjp),
    "scaled_dot_product_attention_jvp": Derivative("tangent", _jvp),
    "pullback.jvp": Derivative("second", _product),
    "scaled_dot_product_attention_laplacian": Derivative("laplacian", _laplacian),
}
"""The functions of sdpa_xp that return derivatives, on arrays of any library."""


def of_library(library: str) -> dict[str, Derivative]:
    """Return what a library differentiates itself."""
    by = transformations.transformations(library)

    def all_gradients(problem: Problem, cotangent: Any) -> Callable[..., tuple[Any, ...]]:
        return lambda *arrays: tuple(by.vjp(problem.output, arrays, [cotangent]))

    def mapped(problem: Problem, x: Operands) -> Sequence[Any]:
        """Return the gradients for the arrays, and for the tangents in their place."""
        both = [by.stack(pair) for pair in zip(x.arrays, x.tangents, strict=True)]
        return by.vmap(all_gradients(problem, x.cotangent))(*both)

    def hessian(problem: Problem, x: Operands) -> Sequence[Any]:
        """Return the second derivatives for the queries."""
        query, *others = x.arrays
        return [by.hessian(lambda moved: (problem.output(moved, *others)[0] * x.cotangent).sum(), query)]

    ways: dict[str, tuple[Quantity, Way]] = {
        "gradients": ("gradients", lambda problem, x: by.vjp(problem.output, x.arrays, [x.cotangent])),
        "forward mode": ("tangent", lambda problem, x: by.jvp(problem.output, x.arrays, x.tangents)),
        "forward over reverse": (
            "second",
            lambda problem, x: by.jvp(all_gradients(problem, x.cotangent), x.arrays, x.tangents),
        ),
        "double backward": (
            "second",
            lambda problem, x: by.vjp(all_gradients(problem, x.cotangent), x.arrays, x.tangents),
        ),
        "vmap of gradients": ("mapped", mapped),
        "Hessian": ("hessian", hessian),
    }
    return {name: Derivative(*way) for name, way in ways.items()}


def _torch_gradients(problem: Problem, x: Operands) -> Sequence[Any]:
    import torch

    leaves = [array.detach().requires_grad_() for array in x.arrays]
    return torch.autograd.grad(problem.output(*leaves), leaves, x.cotangent)


def _torch_twice(problem: Problem, x: Operands) -> Sequence[Any]:
    import torch

    # A loss that is not linear in the output has a cotangent that depends on the arrays, too.
    *inputs, weight = leaves = [array.detach().requires_grad_() for array in (*x.arrays, x.cotangent)]
    first = torch.autograd.grad(problem.output(*inputs), inputs, weight, create_graph=True)
    return torch.autograd.grad(first, leaves, x.tangents)[:-1]


def _of_torch() -> dict[str, Derivative]:
    """Return what torch differentiates, the first two by what `backward` calls too."""
    return of_library("torch") | {
        "gradients": Derivative("gradients", _torch_gradients),
        "double backward": Derivative("second", _torch_twice),
    }


def _compiled(derivatives: Mapping[str, Derivative], library: str) -> dict[str, Derivative]:
    """Return the same derivatives inside of the library's compiler."""
    by = transformations.transformations(library)

    def inside(compute: Way) -> Way:
        def way(problem: Problem, x: Operands) -> Sequence[Any]:
            seeded = replace(problem, rng=generator(problem.library))
            results: Sequence[Any] = by.compiled(lambda *x: tuple(compute(seeded, Operands(*x))))(*x)
            return results

        return way

    def of_compiled(compute: Way) -> Way:
        def way(problem: Problem, x: Operands) -> Sequence[Any]:
            seeded = replace(problem, rng=generator(problem.library))
            attend = by.compiled(lambda *arrays: seeded.output(*arrays)[0])
            return compute(replace(problem, attend=attend), x)

        return way

    # torch compiles the forward and the backward pass of a function, and autograd calls both.
    outside = (_torch_gradients, _torch_twice)
    return {
        name: Derivative(quantity, (of_compiled if compute in outside else inside)(compute))
        for name, (quantity, compute) in derivatives.items()
    }


class Column(NamedTuple):
    """A library, by the name that the site has for it."""

    library: Library
    derivatives: dict[str, Derivative]


def columns() -> dict[str, Callable[[], Column]]:
    """Return the libraries; each is imported when its column is asked for."""

    def column(name: str, make: Callable[[], dict[str, Derivative]] = dict) -> Callable[[], Column]:
        return lambda: Column(LIBRARIES[name][1](), OF_SDPA_XP | make())

    def compiled(name: str, make: Callable[[], dict[str, Derivative]]) -> Callable[[], Column]:
        return lambda: Column(LIBRARIES[name][1](), _compiled(OF_SDPA_XP | make(), name))

    return {
        "NumPy": column("numpy"),
        "array-api-strict": column("strict-CPU_DEVICE"),
        "Dask": column("dask"),
        "torch": column("torch", _of_torch),
        "torch.compile": compiled("torch", _of_torch),
        "JAX": column("jax", lambda: of_library("jax")),
        "jax.jit": compiled("jax", lambda: of_library("jax")),
        "MLX": column("mlx", lambda: of_library("mlx")),
    }
