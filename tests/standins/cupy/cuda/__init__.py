"""Two devices. A kernel reads arrays of the current device alone, as on GPUs without peer access."""

from __future__ import annotations

from cupy.cuda import runtime
from cupy.cuda.device import Device
from cupy.cuda.stream import Stream, get_current_stream

__all__ = ["Device", "Stream", "get_current_stream", "runtime"]
