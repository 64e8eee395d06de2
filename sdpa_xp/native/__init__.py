"""Vendors' fused kernels, one file each, and which of them is for a call.

Each file has the functions of `Kernel`. The portable implementation stands by for whatever a kernel refuses.
"""

from __future__ import annotations

from typing import Protocol

from sdpa_xp import checks, namespace
from sdpa_xp.arguments import Call
from sdpa_xp.native import torch
from sdpa_xp.protocols import Array


class Kernel(Protocol):
    """What a file here is."""

    def is_default(self, call: Call, /) -> bool:
        """Whether a call that leaves the choice to the library gets the kernel now."""

    def refusal(self, call: Call, /) -> str | None:
        """Why the kernel does not compute the call as the library's contract says; None where it does."""

    def attend(self, call: Call, /) -> Array | None:
        """The output, (..., Hq, L, Ev), of a call that is not refused; None where its numbers turn out to need
        the portable implementation."""


KERNELS: dict[str, Kernel] = {"torch": torch}
"""By the name of the library whose arrays they take."""


def kernel_for(call: Call) -> Kernel | None:
    """The kernel that the call is to be computed with; None is the portable implementation."""
    asked = call.implementation == "native"
    library = namespace.library_name(call.arrays["query"])
    kernel = KERNELS.get(library)
    if call.implementation == "xp" or not (asked or (kernel is not None and kernel.is_default(call))):
        return None
    reason = f"there is no kernel for {call.pairs.xp.__name__}" if kernel is None else kernel.refusal(call)
    if reason is None:
        return kernel
    if asked:
        checks.no_kernel(call.pairs.function, reason)
    return None
