"""Vendors' fused kernels, one file each.

To add a kernel, add a file with the functions of `Kernel`, and a line to `KERNELS`.
"""

from __future__ import annotations

from typing import Protocol

from sdpa_xp._call.prepared_call import PreparedCall
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
