"""Meshes of devices that run one program, and rings of devices. Only JAX has them."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypeVar, cast

from .protocols import Array, Part

T = TypeVar("T")


class Meshes:
    """Meshes of devices that run one program."""

    def missing(self) -> str:
        """Return what this JAX lacks for a ring of devices, or ""."""
        jax = sys.modules["jax"]
        has_all = hasattr(jax, "shard_map") and hasattr(jax.sharding, "auto_axes")
        return "" if has_all else f"JAX 0.7 or later; got jax.__version__={jax.__version__}"

    def axes(self, mesh: object) -> Mapping[str, int] | None:
        """Return the lengths of the axes of a mesh by name, or None if `mesh` is not a mesh."""
        sharding = sys.modules["jax"].sharding
        if not isinstance(mesh, sharding.Mesh | sharding.AbstractMesh):
            return None
        return cast(Mapping[str, int], dict(cast(Any, mesh).shape))


class DeviceRing:
    """The devices along the axis `name` of `mesh`. Along other axes of the mesh, arrays stay as they lie."""

    def __init__(self, mesh: Any, name: str) -> None:
        self.mesh, self.name = mesh, name
        self.size: int = mesh.shape[name]

    def run(
        self, body: Callable[..., Any], arrays: Sequence[Array], axes: Sequence[int | None], ndim: int
    ) -> Any:
        """Return `body(*arrays)`, computed by all devices.

        Each gets its part of an array along one of its axes, counted from the last, -1, or all of it for None.
        The result has `ndim` axes, and each device has a part of axis -2.
        """
        jax = sys.modules["jax"]
        types = zip(self.mesh.axis_names, self.mesh.axis_types, strict=True)
        explicit = tuple(name for name, kind in types if kind == jax.sharding.AxisType.Explicit)
        mesh = self.mesh
        is_concrete = isinstance(mesh, jax.sharding.Mesh)
        if explicit and is_concrete and not _is_of_a_mesh(arrays):
            # Nothing says how arrays lie. With automatic axes, the compiler moves them to their devices.
            explicit, auto = (), (jax.sharding.AxisType.Auto,) * len(mesh.axis_names)
            mesh = jax.sharding.Mesh(mesh.devices, mesh.axis_names, axis_types=auto)

        def mapped(*arrays: Array) -> Any:
            return jax.shard_map(
                body,
                mesh=jax.sharding.get_abstract_mesh() if explicit else mesh,
                in_specs=tuple(self._spec(array.ndim, axis) for array, axis in zip(arrays, axes, strict=True)),
                out_specs=self._spec(ndim, -2),
                axis_names={self.name},
                # The check refuses loops whose state begins as zeros, equal on all devices, and then varies.
                check_vma=False,
            )(*arrays)

        if explicit:
            # The types of arrays say how they lie. `shard_map` takes no explicit axes besides its own, so the
            # compiler finds out again how arrays lie, and is told only of the result.
            mapped = jax.sharding.auto_axes(mapped, axes=explicit, out_sharding=self._like(arrays[0], ndim))
        return jax.jit(mapped)(*arrays)

    def _spec(self, ndim: int, axis: int | None) -> Any:
        names = [self.name if number == axis else None for number in range(-ndim, 0)]
        return sys.modules["jax"].sharding.PartitionSpec(*names)

    def _like(self, query: Array, ndim: int) -> Any:
        """Return how the result lies: as the query on other axes of the mesh, and along the ring on axis -2."""
        jax = sys.modules["jax"]
        lies = [*jax.typeof(query).sharding.spec]
        names = [*[None] * (ndim - len(lies)), *(None if name == self.name else name for name in lies)]
        names[-2:] = self.name, None
        return jax.sharding.NamedSharding(self.mesh, jax.sharding.PartitionSpec(*names))

    def number(self) -> Array:
        """Return the number of the device that computes this."""
        return cast(Array, sys.modules["jax"].lax.axis_index(self.name))

    def sent(self, arrays: T, by: int) -> T:
        """Return the arrays of the device that is `by` places before this one."""
        return self.permuted(arrays, [(device + by) % self.size for device in range(self.size)])

    def permuted(self, arrays: T, destinations: Sequence[int]) -> T:
        """Return the arrays of the device whose destination this one is."""
        pairs = list(enumerate(destinations))
        return cast(T, sys.modules["jax"].lax.ppermute(arrays, self.name, pairs))

    def repeated(self, body: Callable[[T, Array], T], state: T, numbers: Iterable[int]) -> T:
        """Return `state` after `state = body(state, number)` for each number, in a compiled loop."""
        jax = sys.modules["jax"]
        steps = jax.numpy.asarray(list(numbers), jax.numpy.int32)
        if steps.shape[0] < 2:  # no loop: the compiler sees through it
            return body(state, steps[0]) if steps.shape[0] else state
        return cast(T, jax.lax.scan(lambda state, step: (body(state, step), None), state, steps)[0])

    def only_if(self, condition: Array, change: Callable[[T], T], state: T) -> T:
        """Return `change(state)`, or `state` on devices where the condition is False, which compute nothing."""
        return cast(T, sys.modules["jax"].lax.cond(condition, change, lambda state: state, state))

    def differentiable(
        self,
        compute: Callable[..., T],
        gradients: Callable[[tuple[Array, ...], T, T], tuple[Array | None, ...]],
    ) -> Callable[..., T]:
        """Return `compute`, differentiated by `gradients(arrays, results, cotangents of the results)`."""
        function: Any = sys.modules["jax"].custom_vjp(compute)

        def forward(*arrays: Array) -> tuple[T, tuple[tuple[Array, ...], T]]:
            results = compute(*arrays)
            return results, (arrays, results)

        def backward(residuals: tuple[tuple[Array, ...], T], cotangents: T) -> tuple[Array | None, ...]:
            arrays, results = residuals
            return gradients(arrays, results, cotangents)

        function.defvjp(forward, backward)
        return cast(Callable[..., T], function)

    def pullback(self, compute: Callable[..., T], *arrays: Array) -> tuple[T, Callable[[T], tuple[Array, ...]]]:
        """Return `compute(*arrays)`, and the function from its cotangents to the gradients of the arrays."""
        return cast(tuple[T, Callable[[T], tuple[Array, ...]]], sys.modules["jax"].vjp(compute, *arrays))

    def part(self, array: Array, parts: Sequence[Part]) -> Array:
        lengths = list(array.shape)
        for axis, _, length in parts:
            lengths[axis] = length
        return cast(Array, sys.modules["jax"].lax.dynamic_slice(array, _starts(array, parts), lengths))

    def with_part(self, array: Array, part: Array, parts: Sequence[Part]) -> Array:
        return cast(Array, sys.modules["jax"].lax.dynamic_update_slice(array, part, _starts(array, parts)))


def _is_of_a_mesh(arrays: Sequence[Array]) -> bool:
    """Return whether the types of arrays, or the context, are of a mesh with explicit axes."""
    jax = sys.modules["jax"]
    meshes = [jax.sharding.get_abstract_mesh(), *(jax.typeof(array).sharding.mesh for array in arrays)]
    return any(not mesh.empty for mesh in meshes)


def _starts(array: Array, parts: Sequence[Part]) -> list[Any]:
    """Return where parts begin, all of one dtype."""
    starts: list[Any] = [sys.modules["jax"].numpy.int32(0)] * array.ndim
    for axis, start, _ in parts:
        starts[axis] = start
    return starts
