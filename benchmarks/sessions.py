"""Sessions of onnxruntime, for graphs that take turns."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import onnxruntime

RUNTIME = "onnxruntime>=1.31;cpu"


def session(model: Path | bytes) -> Any:
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3
    # Threads that spin between runs would take the cores from the others of the table.
    options.add_session_config_entry("session.intra_op.allow_spinning", "0")
    source = str(model) if isinstance(model, Path) else model
    return onnxruntime.InferenceSession(source, options, providers=["CPUExecutionProvider"])
