"""ONNX graphs that compute what sdpa_xp computes, and the proof of it."""

from importlib.util import find_spec

if find_spec("onnx") is None:
    raise ModuleNotFoundError(
        "sdpa_xp_export needs onnx and onnxruntime: pip install 'sdpa_xp[export]'", name="onnx"
    )

from sdpa_xp_export.export import export_attention
from sdpa_xp_export.files import save
from sdpa_xp_export.report import LayerReport, Report
from sdpa_xp_export.spec import TensorSpec
from sdpa_xp_export.traced import to_onnx
from sdpa_xp_export.verify import verify
from sdpa_xp_export.verify_layer import verify_layer

__all__ = [
    "LayerReport",
    "Report",
    "TensorSpec",
    "export_attention",
    "save",
    "to_onnx",
    "verify",
    "verify_layer",
]
