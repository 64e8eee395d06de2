"""The number of the current device, which each thread has for itself."""

from __future__ import annotations

import threading

_THREAD = threading.local()


def getDeviceCount() -> int:  # noqa: N802
    """Return the number of devices."""
    return 2


def getDevice() -> int:  # noqa: N802
    """Return the number of the current device."""
    return getattr(_THREAD, "device", 0)


def setDevice(device: int) -> None:  # noqa: N802
    """Make a device current."""
    if not 0 <= device < getDeviceCount():
        raise RuntimeError("cudaErrorInvalidDevice: invalid device ordinal")
    _THREAD.device = device
