"""Vendors' fused kernels, one file each.

To add a kernel, add a file with the functions of `NativeKernel`, and a line to `KERNELS`. A kernel that
takes arrays of another library has the functions of `Kernel`, and a line in `BY_NAME`. A file is loaded by the
first call that asks for its kernel.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple, Protocol

from .._call.prepared_call import PreparedCall
from .._checks.keywords import refuse_missing_kernel
from .._libraries.protocols import Array


class Kernel(Protocol):
    """The functions of a kernel's file."""

    def unsupported_reason(self, call: PreparedCall, /) -> str | None:
        """Return why the kernel does not compute the call as the library documents it, or None if it does."""

    def attend(self, call: PreparedCall, /) -> Array | None:
        """Return the output (..., Hq, L, Ev) of a supported call.

        None means that the inputs need the portable implementation, as a NaN may.
        """


class NativeKernel(Kernel, Protocol):
    """The functions of the file of a kernel that may be the default for arrays of its library."""

    def not_default_reason(self, call: PreparedCall, /) -> str | None:
        """Return why the kernel is only used if the call asks for it, or None if it is a default."""


def _torch() -> NativeKernel:
    from . import torch

    return torch


def _jax() -> NativeKernel:
    from . import jax

    return jax


def _mlx() -> NativeKernel:
    from . import mlx

    return mlx


def _torch_on_numpy() -> Kernel:
    from . import torch_on_numpy

    return torch_on_numpy


KERNELS: dict[str, Callable[[], NativeKernel]] = {"jax": _jax, "mlx": _mlx, "torch": _torch}
"""By the name of the library whose arrays they take."""
BY_NAME: dict[str, Callable[[], Kernel]] = {"torch": _torch_on_numpy}
"""By the value of `implementation` that asks for them. They are no defaults: no result may depend on whether
another library is installed."""


class KernelChoice(NamedTuple):
    """What a call is computed with, and why."""

    kernel: Kernel | None
    """None is the portable implementation."""
    reason: str


def choose_kernel(call: PreparedCall) -> KernelChoice:
    """Choose the kernel of a call, or the portable implementation.

    Raises:
        ValueError: The call asks for a kernel, and none computes it.
    """
    if call.implementation == "xp":
        return KernelChoice(None, "the call asks for it")
    name, library = call.implementation, call.grid.library.name
    native = KERNELS[library]() if library in KERNELS else None
    kernel: Kernel | None = native
    if name in BY_NAME:
        library, kernel = name, BY_NAME[name]()
    reason = native.not_default_reason(call) if name is None and native is not None else None
    if kernel is None:
        reason = f"{call.grid.xp.__name__.removeprefix('array_api_compat.')} has no attention kernel to call"
    elif reason is None:
        reason = kernel.unsupported_reason(call)
    if reason is None:
        return KernelChoice(kernel, f"{library}'s kernel computes the call as documented")
    if name is not None:
        refuse_missing_kernel(call.grid.function, name, reason)
    return KernelChoice(None, reason)
