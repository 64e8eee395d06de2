"""Where a graph will run, and what is known of the releases: data, measured release by release."""

from __future__ import annotations

import re
from dataclasses import dataclass

from sdpa_xp.checks import message

PROVIDERS = {"cpu": "CPUExecutionProvider", "cuda": "CUDAExecutionProvider"}

# The first release on which each form computes every call that it takes. ai.onnx Attention gives wrong
# numbers before 1.28: masked keys leak with a softcap (to 1.26), causal masks move (1.25 to 1.27).
FIRST_RELEASE = {"attention": (1, 28), "primitive": (1, 23)}
# The opsets that each form may be asked for; 26 is the last that onnxruntime 1.31 loads.
OPSETS = {"attention": range(23, 25), "primitive": range(17, 25)}
DEFAULT_OPSET = {"attention": 23, "primitive": 17}

DEFAULT_RUNTIME = "onnxruntime>=1.28;cpu"
_RUNTIME = re.compile(r"onnxruntime>=(\d+)\.(\d+)(?:\.\d+)?;(\w+)")


def runtime_of(provider: str) -> str:
    """The default runtime, with the provider of that full name."""
    (short,) = (name for name, full in PROVIDERS.items() if full == provider)
    return DEFAULT_RUNTIME.replace("cpu", short)


@dataclass(frozen=True, slots=True)
class Runtime:
    """The oldest onnxruntime that a graph is for, and the provider that it is meant to run on."""

    release: tuple[int, int]
    provider: str

    @classmethod
    def parse(cls, function: str, text: object) -> Runtime:
        """The runtime that is written as `onnxruntime>=1.28;cpu`."""
        found = _RUNTIME.fullmatch(text.replace(" ", "")) if isinstance(text, str) else None
        if found is None or found[3] not in PROVIDERS:
            rule = f"`runtime` must be 'onnxruntime>=RELEASE;PROVIDER', the provider {' or '.join(PROVIDERS)}"
            raise ValueError(message(function, rule, {"runtime": repr(text)}))
        release = (int(found[1]), int(found[2]))
        if release < FIRST_RELEASE["primitive"]:
            oldest = ".".join(map(str, FIRST_RELEASE["primitive"]))
            rule = f"`runtime` must be a release that was tried, onnxruntime>={oldest} or later"
            raise ValueError(message(function, rule, {"runtime": repr(text)}))
        return cls(release, found[3])

    def __str__(self) -> str:
        return f"onnxruntime>={self.release[0]}.{self.release[1]};{self.provider}"
