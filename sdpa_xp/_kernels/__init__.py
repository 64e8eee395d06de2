"""Vendors' fused kernels, one file each, and the choice between a kernel and the portable implementation.

To add a kernel, add a file with the functions of `Kernel`, and a line to `KERNELS`.
"""

from __future__ import annotations

from typing import NamedTuple, Protocol

from sdpa_xp._call.prepared_call import PreparedCall
from sdpa_xp._checks.keywords import refuse_missing_kernel
from sdpa_xp._kernels import jax, mlx, torch
from sdpa_xp._libraries.protocols import Array


class Kernel(Protocol):
    """The functions of a kernel's file."""

    def not_default_reason(self, call: PreparedCall, /) -> str | None:
        """Return why the kernel is only used if the call asks for it, or None if it is a default."""

    def unsupported_reason(self, call: PreparedCall, /) -> str | None:
        """Return why the kernel does not compute the call as the library documents it, or None if it does."""

    def attend(self, call: PreparedCall, /) -> Array | None:
        """Return the output (..., Hq, L, Ev) of a supported call.

        None means that the inputs need the portable implementation, as a NaN may.
        """


KERNELS: dict[str, Kernel] = {"jax": jax, "mlx": mlx, "torch": torch}
"""By the name of the library whose arrays they take."""


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
    is_asked_for = call.implementation == "native"
    library = call.grid.library.name
    kernel = KERNELS.get(library)
    reason: str | None
    if kernel is None:
        name = call.grid.xp.__name__.removeprefix("array_api_compat.")
        reason = f"there is no kernel for {name}"
    else:
        reason = (None if is_asked_for else kernel.not_default_reason(call)) or kernel.unsupported_reason(call)
    if reason is None:
        return KernelChoice(kernel, f"{library}'s kernel computes the call as documented")
    if is_asked_for:
        refuse_missing_kernel(call.grid.function, reason)
    return KernelChoice(None, reason)
