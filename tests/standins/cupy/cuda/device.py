"""A device, which is current inside of its context."""

from __future__ import annotations

from typing import Any

from standins import counts

from cupy.cuda import runtime


class Device:
    """A device by its number; the current one without a number."""

    __hash__ = None  # type: ignore[assignment]

    def __init__(self, device: Any = None) -> None:
        self.id = runtime.getDevice() if device is None else int(device)
        self._previous: list[int] = []

    def __int__(self) -> int:
        return self.id

    def __enter__(self) -> Device:
        self._previous.append(runtime.getDevice())
        runtime.setDevice(self.id)
        return self

    def __exit__(self, *error: object) -> None:
        runtime.setDevice(self._previous.pop())

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Device) and self.id == other.id

    def __repr__(self) -> str:
        return f"<CUDA Device {self.id}>"

    def synchronize(self) -> None:
        """Wait for everything that the device was told to compute."""
        counts.wait("synchronize")
