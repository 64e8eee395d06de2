"""ONNX graphs that compute what sdpa_xp computes, and the proof of it."""

from importlib import import_module

from ._interrupts import end_at_once

end_at_once()  # the imports below take a second

try:
    import_module("onnx")
except ImportError as error:
    _reason = error

    def __getattr__(name: str) -> object:
        """Say what to install. The import itself passes: so the command line can say it in one line, too."""
        if name not in __all__:  # a module of the package is found, and may need no onnx
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        from sdpa_xp._checks import install_hint

        text = f"sdpa_xp_export needs onnx and onnxruntime. {install_hint('export')}"
        raise ModuleNotFoundError(text, name="onnx") from _reason

else:
    from ._files.model import LargeModel
    from .export import export_attention
    from .jit import JittedLayer, jit
    from .judge import Verdict, judge, judge_cases
    from .report import LayerReport, Report
    from .save import save
    from .spec import TensorSpec
    from .to_onnx import to_onnx
    from .verify import verify, verify_layer

__all__ = [
    "JittedLayer",
    "LargeModel",
    "LayerReport",
    "Report",
    "TensorSpec",
    "Verdict",
    "export_attention",
    "jit",
    "judge",
    "judge_cases",
    "save",
    "to_onnx",
    "verify",
    "verify_layer",
]


def __dir__() -> list[str]:
    """Complete public names, not the files that define them."""
    return __all__
