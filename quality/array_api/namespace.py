"""The namespace that data-apis' array-api-tests judges: `to_onnx` and onnxruntime behind each function."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnxruntime
from internals import Dtype, graph_namespace, numpy_dtype

from quality.array_api.eager import function_of

__array_api_version__ = "2025.12"
__version__ = f"onnxruntime {onnxruntime.__version__}"

for _name in graph_namespace.__all__:
    _attribute = getattr(graph_namespace, _name)
    if isinstance(_attribute, Dtype):
        _attribute = numpy_dtype(_attribute.name)
    elif callable(_attribute) and _name[0] != "_":
        _attribute = function_of(_name)
    globals()[_name] = _attribute

# No graph holds them. The tests need the names; `without_complex` removes their examples.
complex64, complex128 = np.dtype("complex64"), np.dtype("complex128")


class _Info(type(graph_namespace.__array_namespace_info__())):  # type: ignore[misc]
    def default_dtypes(self, *, device: object = None) -> Any:
        return {name: numpy_dtype(x.name) for name, x in super().default_dtypes(device=device).items()}

    def dtypes(self, *, device: object = None, kind: Any = None) -> Any:
        return {name: numpy_dtype(x.name) for name, x in super().dtypes(device=device, kind=kind).items()}


def __array_namespace_info__() -> _Info:  # noqa: N807, the standard's name
    return _Info()
