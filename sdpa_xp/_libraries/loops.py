"""Loops that a compiler keeps. Only JAX has them: other compilers write each pass into the graph."""

from __future__ import annotations

import operator
import sys
from collections.abc import Callable
from typing import Any, TypeAlias, TypeVar, cast

from .protocols import Array

T = TypeVar("T")
Sums: TypeAlias = dict[str, Array]

MOST_ORDERS = 3
"""The derivatives of a loop that keep no pass. Each reverse mode uses up one checkpoint. More of them cost
nothing: the compiled gradient multiplies as often with three as with one."""


class Loops:
    """Loops that the compiler keeps."""

    def register(self, kind: type, take: Callable[[Any], Any], put: Callable[[Any, Any], Any]) -> None:
        """Have the compiler take apart and put together arrays of a class."""
        sys.modules["jax"].tree_util.register_pytree_node(kind, take, put)

    def may_be_shared(self) -> bool:
        """Return whether a compiled program may run on several devices, which then share its loops."""
        return bool(sys.modules["jax"].device_count() > 1)

    def rolled(
        self, body: Callable[[Array], tuple[Sums, T]], numbers: Array, *, has_sums: bool
    ) -> tuple[Sums, T]:
        """Return `body` of each of `numbers`: the sums of its first arrays, and its others on a new axis 0.

        Gradients compute each pass again, so that no pass is kept: Chen et al., "Training Deep Nets with
        Sublinear Memory Cost", arXiv 1604.06174.
        """
        jax = sys.modules["jax"]
        for _ in range(MOST_ORDERS):
            # The compiler cannot merge the two computations of a pass across a loop: no need to prevent CSE.
            body = jax.checkpoint(body, prevent_cse=False)

        def add(sums: Sums, number: Array) -> tuple[Sums, T]:
            new, others = body(number)
            return jax.tree.map(operator.add, sums, new), others

        zeros: Any = {}
        if has_sums:
            like, _ = jax.eval_shape(body, numbers[0])
            zeros = jax.tree.map(jax.numpy.zeros_like, like)
        return cast(tuple[Sums, T], jax.lax.scan(add, zeros, numbers))

    def most_scores(self, of_a_device: int) -> int:
        """Return how many scores a pass computes, where a tile of a device has `of_a_device`."""
        # Inside a jit, arrays name no device. On a CPU, smaller passes took no longer, down to a fourth.
        is_cpu = sys.modules["jax"].default_backend() == "cpu"
        return of_a_device // 4 if is_cpu else of_a_device

    def rows_from(self, array: Array, start: Array, count: int, step: int) -> Array:
        """Return `count` rows of an array (..., L, width) from `start` on, which is known only in the loop.

        With a `step` above 1, they are every `step`-th row, and L is `count` times `step`.
        """
        lax = sys.modules["jax"].lax
        start = lax.convert_element_type(start, "uint32")  # a signed number would be looked at for its sign
        if step > 1:
            *leading, _, width = array.shape
            strided = sys.modules["jax"].numpy.reshape(array, (*leading, count, step, width))
            return cast(Array, lax.dynamic_index_in_dim(strided, start, axis=array.ndim - 1, keepdims=False))
        return cast(Array, lax.dynamic_slice_in_dim(array, start, count, axis=array.ndim - 2))
