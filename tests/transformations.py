"""The derivatives that a library computes itself, of functions of several arrays that return several."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

Function = Callable[..., Any]


class Transformations(Protocol):
    """What a library differentiates functions with."""

    def vjp(self, function: Function, arrays: Sequence[Any], cotangents: Sequence[Any]) -> list[Any]: ...

    def jvp(self, function: Function, arrays: Sequence[Any], tangents: Sequence[Any]) -> list[Any]: ...

    def vmap(self, function: Function) -> Function: ...

    def stack(self, arrays: Sequence[Any]) -> Any: ...

    def compiled(self, function: Function) -> Function: ...

    def hessian(self, function: Function, array: Any) -> Any: ...


class OfJax:
    """Those of JAX."""

    def vjp(self, function: Function, arrays: Sequence[Any], cotangents: Sequence[Any]) -> list[Any]:
        import jax

        return list(jax.vjp(function, *arrays)[1](tuple(cotangents)))

    def jvp(self, function: Function, arrays: Sequence[Any], tangents: Sequence[Any]) -> list[Any]:
        import jax

        return list(jax.jvp(function, tuple(arrays), tuple(tangents))[1])

    def vmap(self, function: Function) -> Function:
        import jax

        return jax.vmap(function)

    def stack(self, arrays: Sequence[Any]) -> Any:
        import jax

        return jax.numpy.stack(arrays)

    def compiled(self, function: Function) -> Function:
        import jax

        return jax.jit(function)

    def hessian(self, function: Function, array: Any) -> Any:
        import jax

        return jax.hessian(function)(array)


class OfMlx:
    """Those of MLX."""

    def vjp(self, function: Function, arrays: Sequence[Any], cotangents: Sequence[Any]) -> list[Any]:
        import mlx.core as mx

        return list(mx.vjp(function, list(arrays), list(cotangents))[1])

    def jvp(self, function: Function, arrays: Sequence[Any], tangents: Sequence[Any]) -> list[Any]:
        import mlx.core as mx

        return list(mx.jvp(function, list(arrays), list(tangents))[1])

    def vmap(self, function: Function) -> Function:
        import mlx.core as mx

        mapped: Function = mx.vmap(function)
        return mapped

    def stack(self, arrays: Sequence[Any]) -> Any:
        import mlx.core as mx

        return mx.stack(list(arrays))

    def compiled(self, function: Function) -> Function:
        import mlx.core as mx

        compiled: Function = mx.compile(function)
        return compiled

    def hessian(self, function: Function, array: Any) -> Any:
        raise NotImplementedError("MLX has no function for Hessians")


class OfTorch:
    """Those of `torch.func`."""

    def vjp(self, function: Function, arrays: Sequence[Any], cotangents: Sequence[Any]) -> list[Any]:
        import torch

        return list(torch.func.vjp(function, *arrays)[1](tuple(cotangents)))

    def jvp(self, function: Function, arrays: Sequence[Any], tangents: Sequence[Any]) -> list[Any]:
        import torch

        return list(torch.func.jvp(function, tuple(arrays), tuple(tangents))[1])

    def vmap(self, function: Function) -> Function:
        import torch

        return torch.func.vmap(function)

    def stack(self, arrays: Sequence[Any]) -> Any:
        import torch

        return torch.stack(list(arrays))

    def compiled(self, function: Function) -> Function:
        import torch

        torch.compiler.reset()  # so that no limit of recompiling is met
        return torch.compile(function, fullgraph=True, backend="aot_eager")

    def hessian(self, function: Function, array: Any) -> Any:
        import torch

        return torch.func.hessian(function)(array)


def transformations(library: str) -> Transformations:
    """Return those of the library of that name, or of a variant of it."""
    return {"jax": OfJax, "mlx": OfMlx, "torch": OfTorch}[library.partition("-")[0]]()
