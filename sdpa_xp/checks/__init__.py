"""Every message a user can see. A check runs before any work, and names the argument that is wrong."""

from sdpa_xp.checks.arrays import added_dtype, floating, mask_dtype, one_device, one_dtype, one_library
from sdpa_xp.checks.keywords import flag, implementation, number, softcap
from sdpa_xp.checks.messages import message
from sdpa_xp.checks.shapes import Sizes, broadcast, broadcasts, shapes
from sdpa_xp.checks.states import states

__all__ = [
    "Sizes",
    "added_dtype",
    "broadcast",
    "broadcasts",
    "flag",
    "floating",
    "implementation",
    "mask_dtype",
    "message",
    "number",
    "one_device",
    "one_dtype",
    "one_library",
    "shapes",
    "softcap",
    "states",
]
