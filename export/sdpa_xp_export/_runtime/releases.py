"""Where a graph will run, and what is known of the releases: data, measured release by release."""

from __future__ import annotations

import re
from dataclasses import dataclass

from sdpa_xp.checks import message

PROVIDERS = {"cpu": "CPUExecutionProvider", "cuda": "CUDAExecutionProvider"}
"""The providers that `verify` runs models on. `web` stands for the two of onnxruntime-web: WebAssembly, which
computes with the kernels of the CPU, and WebGPU, which has kernels of its own."""

# The first release on which each form computes every call that it takes. ai.onnx Attention gives wrong
# numbers before 1.28: masked keys leak with a softcap (to 1.26), causal masks move (1.25 to 1.27).
FIRST_RELEASE = {
    "attention": (1, 28),
    "multi_head": (1, 23),
    "grouped_query": (1, 23),
    "tiled": (1, 23),
    "primitive": (1, 23),
}
# The opsets that each form may be asked for; 26 is the last that onnxruntime 1.31 loads. At 18 each operator
# that is written here has a kernel for CUDA, from 1.23 on; at later ones some have it since 1.27 only.
OPSETS = {"attention": range(23, 25)} | dict.fromkeys(
    ("multi_head", "grouped_query", "tiled", "primitive"), range(17, 25)
)
DEFAULT_OPSET = {"attention": 23, "multi_head": 18, "grouped_query": 18, "tiled": 18, "primitive": 18}
# The first release that loads an opset, where it is not the first of all.
FIRST_RELEASE_OF_OPSET = {24: (1, 24)}
# The first release on which an empty batch or length gives an empty result, and does not end the process.
EMPTY_INPUTS = {"multi_head": (1, 31)}
# From here on the window of GroupQueryAttention counts the query's own key; before, only the keys to its left
# (onnxruntime 25927). So no graph with a window is right on both sides of it.
WINDOW_COUNTS_ITSELF = (1, 24)
# Why a provider computes a form wrong. WebGPU: outputs are off by 0.1 to 1.5 in 1.30 and 1.31 where the adapter
# has subgroups and its FlashAttention uses them; tests/runtime/webgpu.py runs the other forms there.
WRONG_ON = {
    "web": {
        "multi_head": "the WebGPU provider computes MultiHeadAttention wrong from 32 tokens on",
        "grouped_query": "the WebGPU provider computes GroupQueryAttention wrong from 32 tokens on",
    }
}
# From here on Erf of NaN is NaN on the CPU; before it is 1.
ERF_KEEPS_NAN = (1, 28)

# Up to so many scores, in all heads together, a call has few.
FEW_SCORES = {"unmasked": 2**24, "causal": 2**20, "masked": 2**21}
# Beyond so many it has very many.
VERY_MANY_SCORES = 2**26
# The forms to take, the best first, by provider and by what the call is like; measured, see
# tests/benchmarks.
_CPU: dict[str, tuple[str, ...]] = {
    "unmasked, few scores": ("attention", "primitive"),
    "unmasked, many scores": ("multi_head", "tiled", "primitive"),
    "unmasked, very many scores": ("multi_head", "tiled", "primitive"),
    "causal, few scores": ("attention", "tiled", "primitive"),
    "causal, many scores": ("tiled", "primitive"),
    "causal, very many scores": ("grouped_query", "tiled", "primitive"),
    "masked, few scores": ("primitive",),
    "masked, many scores": ("tiled", "primitive"),
    "masked, very many scores": ("tiled", "primitive"),
}
_CUDA: dict[str, tuple[str, ...]] = dict.fromkeys(_CPU, ("attention", "tiled", "primitive")) | {
    "masked, few scores": ("attention", "primitive"),
    "unmasked, few scores": ("attention", "primitive"),
    "causal, few scores": ("attention", "primitive"),
}
# Of the forms that WebGPU has kernels for: its Attention falls back to the CPU.
_WEB: dict[str, tuple[str, ...]] = {
    case: ("primitive",) if case.endswith("few scores") else ("tiled", "primitive") for case in _CPU
}
PREFERRED: dict[str, dict[str, tuple[str, ...]]] = {"cpu": _CPU, "web": _WEB, "cuda": _CUDA}

DEFAULT_RUNTIME = "onnxruntime>=1.28;cpu"
_RUNTIME = re.compile(r"onnxruntime>=(\d+)\.(\d+)(?:\.\d+)?;(\w+)")


def runtime_text(provider: str, release: str) -> str:
    """A release of onnxruntime with the provider of that full name."""
    (short,) = (name for name, full in PROVIDERS.items() if full == provider)
    return f"onnxruntime>={release};{short}"


@dataclass(frozen=True, slots=True)
class Runtime:
    """The oldest onnxruntime that a graph is for, and the provider that it is meant to run on."""

    release: tuple[int, int]
    provider: str

    @classmethod
    def parse(cls, function: str, text: object) -> Runtime:
        """The runtime that is written as `onnxruntime>=1.28;cpu`."""
        found = _RUNTIME.fullmatch(text.replace(" ", "")) if isinstance(text, str) else None
        if found is None or found[3] not in PREFERRED:
            rule = f"`runtime` must be 'onnxruntime>=RELEASE;PROVIDER', the provider {', '.join(PREFERRED)}"
            raise ValueError(message(function, rule, {"runtime": repr(text)}))
        release = (int(found[1]), int(found[2]))
        if release < FIRST_RELEASE["primitive"]:
            oldest = ".".join(map(str, FIRST_RELEASE["primitive"]))
            rule = f"`runtime` must be a release that was tried, onnxruntime>={oldest} or later"
            raise ValueError(message(function, rule, {"runtime": repr(text)}))
        return cls(release, found[3])

    @property
    def softmax_hides_nan(self) -> bool:
        """Whether Softmax gives 0 for NaN: on WebGPU it ends in `max(value, 0)`, "to protect against NaN".

        Before 1.24 it also gives 0 for a row of the smallest finite numbers, which do not mask.
        """
        return self.provider == "web"

    def __str__(self) -> str:
        return f"onnxruntime>={self.release[0]}.{self.release[1]};{self.provider}"
