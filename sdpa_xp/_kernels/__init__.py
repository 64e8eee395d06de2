"""Vendors' fused kernels, one file each.

To add a kernel, add a file with the functions of `NativeKernel`, and a line to `KERNELS` of `_attention.py`. A
kernel that takes arrays of another library has the functions of `Kernel`, and a line in `BY_NAME`. A file is
loaded by the first call that asks for its kernel.
"""

from __future__ import annotations

from typing import Protocol

from .._call import PreparedCall
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
