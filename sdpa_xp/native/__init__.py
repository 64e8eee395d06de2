"""Vendors' fused kernels, one file each, and which of them is for a call.

Each file has the functions of `Kernel`. The portable implementation stands by for whatever a kernel refuses.
"""

from __future__ import annotations

from typing import NamedTuple, Protocol

from sdpa_xp import checks
from sdpa_xp._libraries import library_of
from sdpa_xp._libraries.protocols import Array
from sdpa_xp.arguments import Call
from sdpa_xp.native import jax, mlx, torch


class Kernel(Protocol):
    """What a file here is."""

    def is_by_name(self, call: Call, /) -> str | None:
        """Why only a call that asks for the kernel gets it now; None where others do as well."""

    def refusal(self, call: Call, /) -> str | None:
        """Why the kernel does not compute the call as the library's contract says; None where it does."""

    def attend(self, call: Call, /) -> Array | None:
        """The output, (..., Hq, L, Ev), of a call that is not refused; None where its numbers turn out to need
        the portable implementation."""


KERNELS: dict[str, Kernel] = {"jax": jax, "mlx": mlx, "torch": torch}
"""By the name of the library whose arrays they take."""


class Choice(NamedTuple):
    """What a call is computed with, and why."""

    kernel: Kernel | None
    """None is the portable implementation."""
    reason: str


def choose(call: Call) -> Choice:
    """The kernel for a call, where there is one; refuses a call that asks for one where there is none."""
    if call.implementation == "xp":
        return Choice(None, "the call asks for it")
    asked = call.implementation == "native"
    library = library_of(call.arrays["query"]).name
    kernel = KERNELS.get(library)
    if kernel is None:
        name = call.pairs.xp.__name__.removeprefix("array_api_compat.")
        reason: str | None = f"there is no kernel for {name}"
    else:
        reason = (None if asked else kernel.is_by_name(call)) or kernel.refusal(call)
    if reason is None:
        return Choice(kernel, f"{library}'s kernel computes the call as documented")
    if asked:
        checks.no_kernel(call.pairs.function, reason)
    return Choice(None, reason)
