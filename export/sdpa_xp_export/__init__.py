"""ONNX graphs that compute what sdpa_xp computes, and the proof of it."""

from sdpa_xp_export.export import export_attention
from sdpa_xp_export.files import save
from sdpa_xp_export.spec import TensorSpec
from sdpa_xp_export.verify import Report, verify

__all__ = ["Report", "TensorSpec", "export_attention", "save", "verify"]
