"""JAX: eager arrays, and tracers inside a jit. The compiler keeps loops."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from functools import cache
from typing import Any, cast

import array_api_compat as compat

from .base import ASTYPE, MASKED, Compute, Generators, Library, Tangent
from .jax_trees import register_all, register_waiting
from .loops import Loops
from .meshes import Meshes
from .protocols import Access, AnyArray, Array, Device, Namespace

UNCHANGED = nullcontext()


class JaxKeys(Generators):
    """Keys of JAX, which are arrays."""

    name = "JAX key"

    def owns(self, rng: object) -> bool:
        if not compat.is_jax_array(rng):
            return False
        jax, key = sys.modules["jax"], cast(Any, rng)
        typed = jax.numpy.issubdtype(key.dtype, jax.dtypes.prng_key)
        return bool(key.ndim == 0 if typed else key.ndim == 1 and str(key.dtype) == "uint32")

    def random_words(self, rng: Any, count: int, _xp: Any, _device: Device) -> Array:
        return cast(Array, sys.modules["jax"].random.bits(rng, (count,), "uint32").view("int32"))

    def uniform(self, rng: Any, count: int, xp: Any) -> Array:
        return cast(Array, sys.modules["jax"].random.uniform(rng, (count,), xp.float32))


class JaxTangentRules:
    """The derivatives of `jax.custom_jvp`, which JAX transposes."""

    def may_record(self, access: Access) -> bool:
        return access.is_traced

    def constant(self, array: Array) -> Array:
        return cast(Array, sys.modules["jax"].lax.stop_gradient(array))

    def define(self, compute: Compute, tangent: Tangent, *arrays: Array, of_pairs: bool = False) -> Array:
        del of_pairs
        jax = sys.modules["jax"]
        function: Any = jax.custom_jvp(compute)
        symbolic_zero = jax.custom_derivatives.SymbolicZero

        def rule(primals: Sequence[Array], tangents: Sequence[Array]) -> tuple[Array, Array]:
            output = function(*primals)  # not `compute`, so that the next derivative has this rule too
            moved = [None if isinstance(t, symbolic_zero) else t for t in tangents]
            return output, tangent(primals, output, moved)

        function.defjvp(rule, symbolic_zeros=True)
        return cast(Array, function(*arrays))


class Jax(Library):
    name = "jax"
    generators = JaxKeys()
    module = "jax.numpy"
    conversion = "jax.numpy.asarray"
    cast_code = ASTYPE
    multiplies_halves = compiles_shapes = True
    loops, meshes, tangent_rules = Loops(), Meshes(), JaxTangentRules()
    needs_context = has_settings = True

    def owns(self, array: object) -> bool:
        is_owned = bool(compat.is_jax_array(array))
        if is_owned:  # asked once for a type: the first array of JAX shows that JAX is in use
            register_all()
        return is_owned

    def register_trees(self) -> None:
        register_waiting()

    def namespace(self, array: AnyArray) -> Namespace:
        with _without_debugging():  # array-api-compat makes an array to ask for it
            return super().namespace(array)

    def device(self, array: Any) -> Device:
        """Return the device. Inside a jit, and for a sharded array, JAX names no single device."""
        if self.is_traced(array):  # for the error of a missing attribute, JAX reads all equations so far
            return None
        device = compat.device(array)
        return device if isinstance(device, sys.modules["jax"].Device) else None

    def is_accelerator(self, device: Device) -> bool:
        return getattr(device, "platform", "cpu") != "cpu"

    def takes_cuda(self) -> bool:
        return any(device.platform != "cpu" for device in sys.modules["jax"].devices())

    def from_numpy(self, array: Any, _xp: Any, device: Device) -> Any:
        return sys.modules["jax"].device_put(array, device)  # a transfer guard refuses `asarray`

    def to_cpu(self, array: Any) -> Any:
        return sys.modules["numpy"].asarray(array)

    def is_traced(self, array: Any) -> bool:
        return isinstance(array, sys.modules["jax"].core.Tracer)

    def refuses_unlike_axes(self) -> bool:
        return bool(sys.modules["jax"].config.jax_numpy_rank_promotion != "allow")

    def compiled(self, function: Callable[..., Any]) -> Callable[..., Any]:
        return _compiled(function)

    def find_nonfinite(self, function: str, name: str, array: Any) -> None:
        config, xp = sys.modules["jax"].config, sys.modules["jax.numpy"]
        for kind, is_kind in (("nan", xp.isnan), ("inf", xp.isposinf if name in MASKED else xp.isinf)):
            setting = f"jax_debug_{kind}s"
            if getattr(config, setting) and not self.is_traced(array):
                with _without_debugging():
                    has_kind = bool(xp.any(is_kind(array)))
                if has_kind:
                    rule = f"`{name}` must have no {kind}, since {setting} is set"
                    raise FloatingPointError(f"{function}: {rule}")

    def context_maker(self, _array: Array) -> Callable[[], AbstractContextManager[object]]:
        return _without_debugging

    def values_at_hand(self, array: Any) -> Any:
        device = None if self.is_traced(array) else self.device(array)
        return sys.modules["numpy"].asarray(array) if getattr(device, "platform", "") == "cpu" else None

    def known_values(self, array: Any) -> Any:
        is_here = not self.is_traced(array) and array.is_fully_addressable
        return sys.modules["numpy"].asarray(array) if is_here else array


@cache
def _compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    return cast(Callable[..., Any], sys.modules["jax"].jit(function, static_argnames=("xp", "size")))


def _without_debugging() -> AbstractContextManager[object]:
    """Return a context in which JAX neither refuses our constants nor looks for NaN and inf in our steps.

    A masked score is -inf, and a number such as the scale is moved to the device: neither is a fault of the
    caller, who finds a NaN in the result (see `find_nonfinite`).
    """
    jax = sys.modules["jax"]
    config = jax.config
    is_guarded = config.jax_transfer_guard_host_to_device or config.jax_transfer_guard_device_to_host
    if not (config.jax_debug_nans or config.jax_debug_infs or is_guarded):
        return UNCHANGED
    stack = ExitStack()
    for context in (jax.debug_nans(False), jax.debug_infs(False), jax.transfer_guard("allow")):
        stack.enter_context(context)
    return stack


JAX = Jax()
