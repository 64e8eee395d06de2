"""Attention for NumPy, torch, JAX, MLX and Dask: one function, the same numbers up to rounding, export to ONNX.

If you come from torch, jax.nn, Keras, flash-attention, FlashInfer, xformers, MLX or ONNX, read the page "Port
from another library": its tables have their arguments on the left, and ours on the right. A call with one of
their names, such as `softmax_scale`, raises an error that says what to write instead.
"""

import importlib
import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from . import biases, masks, positional
    from . import errors as errors
    from . import layers as layers
    from . import plot as plot
    from . import typing as typing
    from ._attention import attention_state, scaled_dot_product_attention
    from ._dot_product import dot_product_attention
    from ._explanation import Explanation, explain
    from ._forward_mode import jvp, scaled_dot_product_attention_jvp, scaled_dot_product_attention_laplacian
    from ._gradients import scaled_dot_product_attention_vjp
    from ._linear.attention import LinearAttentionState, linear_attention, linear_attention_vjp
    from ._linear.convolution import CausalConvState, causal_conv_with_state
    from ._ring import ring_attention
    from ._states import AttentionState, merge_states
    from ._statistics import AttentionStatistics, attention_statistics
    from ._top_keys import top_keys
    from ._varlen import varlen_attention, varlen_attention_state, varlen_attention_statistics
    from ._weights import attention_scores, attention_weights
    from .caches.kv import KVCache
    from .caches.paged import PagedKVCache

__version__ = "0.1.0"
"""Of the library and of the exporter, which are released together."""

__all__ = [
    "AttentionState",
    "AttentionStatistics",
    "CausalConvState",
    "Explanation",
    "KVCache",
    "LinearAttentionState",
    "PagedKVCache",
    "__version__",
    "attention_scores",
    "attention_state",
    "attention_statistics",
    "attention_weights",
    "biases",
    "causal_conv_with_state",
    "dot_product_attention",
    "explain",
    "jvp",
    "linear_attention",
    "linear_attention_vjp",
    "masks",
    "merge_states",
    "positional",
    "ring_attention",
    "scaled_dot_product_attention",
    "scaled_dot_product_attention_jvp",
    "scaled_dot_product_attention_laplacian",
    "scaled_dot_product_attention_vjp",
    "top_keys",
    "varlen_attention",
    "varlen_attention_state",
    "varlen_attention_statistics",
]

_NAMES = {
    "": "biases errors layers masks plot positional typing",
    "_attention": "attention_state scaled_dot_product_attention",
    "caches.kv": "KVCache",
    "caches.paged": "PagedKVCache",
    "_dot_product": "dot_product_attention",
    "_explanation": "Explanation explain",
    "_forward_mode": "jvp scaled_dot_product_attention_jvp scaled_dot_product_attention_laplacian",
    "_gradients": "scaled_dot_product_attention_vjp",
    "_linear.attention": "LinearAttentionState linear_attention linear_attention_vjp",
    "_linear.convolution": "CausalConvState causal_conv_with_state",
    "_ring": "ring_attention",
    "_states": "AttentionState merge_states",
    "_statistics": "AttentionStatistics attention_statistics",
    "_top_keys": "top_keys",
    "_varlen": "varlen_attention varlen_attention_state varlen_attention_statistics",
    "_weights": "attention_scores attention_weights",
}
_MODULES = {name: module or name for module, names in _NAMES.items() for name in names.split()}
"""The module of each public name, imported when the name is first used: a program loads only what it uses.

`errors`, `layers`, `plot` and `typing` are not in `__all__`: `import *` would load them, and matplotlib.
"""
_ELSEWHERE = {
    "it is in sdpa_xp_export": (
        "JittedLayer LargeModel LayerReport Report TensorSpec Verdict "
        "export_attention jit judge judge_cases save to_onnx verify verify_layer"
    ),
    "write scaled_dot_product_attention": (
        "attention attend flash_attention flash_attn_func memory_efficient_attention sdpa"
    ),
    "write varlen_attention": "flash_attn_varlen_func varlen",
    "write scaled_dot_product_attention_vjp": "gradients vjp grad",
    "write attention_weights": "weights",
    "write attention_statistics": "statistics",
    "write ring_attention": "ring",
    "write dot_product_attention": "dot_product",
}
"""Where names are that are not in the library, or what to write instead."""

if not TYPE_CHECKING:  # with this function, type checkers would accept every name

    def __getattr__(name: str) -> object:
        """Import a public name (PEP 562)."""
        if name not in _MODULES:
            hints = [hint for hint, names in _ELSEWHERE.items() if name in names.split()]
            for part in ("layers", "masks", "biases", "positional", "errors") if name[0] != "_" else ():
                module = importlib.import_module(f"{__name__}.{part}")
                origin = getattr(getattr(module, name, None), "__module__", "")
                hints += [f"it is in {module.__name__}"] * origin.startswith(module.__name__)
            hint = "".join(f"; {hint}" for hint in hints)
            # `from sdpa_xp import name` asks here, and has no words for an AttributeError but its own.
            if hint and sys._getframe(1).f_code.co_name == "_handle_fromlist":
                message = f"cannot import name {name!r} from {__name__!r}{hint}"
                raise ImportError(message, name=__name__, path=__file__)
            message = f"module {__name__!r} has no attribute {name!r}{hint}"
            raise AttributeError(message, name=name, obj=sys.modules[__name__])
        module = importlib.import_module(f"{__name__}.{_MODULES[name]}")
        globals()[name] = value = module if name == _MODULES[name] else getattr(module, name)
        return value

    def __dir__() -> list[str]:
        return __all__
