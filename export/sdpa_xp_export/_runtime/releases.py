"""The runtime that a graph is for, and facts about each release of onnxruntime, as data that was measured."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal, TypeAlias, get_args

from sdpa_xp.errors import ArgumentTypeError, ArgumentValueError

ProviderName: TypeAlias = Literal["cpu", "cuda", "CPUExecutionProvider", "CUDAExecutionProvider"]
"""A provider on which `verify` can run models, by its short name or by onnxruntime's own name."""
TargetProvider: TypeAlias = Literal["cpu", "cuda", "wasm", "webgpu", "web"]
"""A provider that graphs can be written for."""
TARGETS: tuple[TargetProvider, ...] = get_args(TargetProvider)

PROVIDERS = {"cpu": "CPUExecutionProvider", "cuda": "CUDAExecutionProvider"}
"""The providers that `verify` runs models on, by short name."""
RIGHT_ON: dict[TargetProvider, tuple[TargetProvider, ...]] = {"web": ("wasm", "webgpu")}
"""The providers on which a graph must be right, if the target stands for several. onnxruntime-web has two:
WebAssembly has the kernels of the CPU, and WebGPU has its own."""

OLDEST = (1, 23)
"""The oldest release that graphs were run in."""
NEWEST_TRIED = "1.32.0"
"""The newest release that graphs were run in. A later one is taken to compute what this one does."""
OPSETS = range(17, 25)
"""The opsets that graphs are written in; 26 is the last that onnxruntime 1.31 loads."""
FIRST_RELEASE_OF_OPSET = {24: (1, 24)}
"""The first release that loads an opset, if it is not the first release of all."""
ERF_KEEPS_NAN = (1, 28)
"""From this release on, Erf of NaN is NaN on the CPU; before, it is 1."""

DEFAULT_RUNTIME = "onnxruntime>=1.28;cpu"
_RUNTIME = re.compile(r"onnxruntime>=(\d+)\.(\d+)(?:\.\d+)?;(\w+)")


def runtime_text(provider: str, release: str) -> str:
    """Return the text that `Runtime.parse` reads, of a release and the full name of a provider."""
    (short,) = (name for name, full in PROVIDERS.items() if full == provider)
    return f"onnxruntime>={release};{short}"


def short_provider(name: object) -> str | None:
    """Return the short name of a provider that has this name or this name in onnxruntime; else None."""
    return next((short for short, full in PROVIDERS.items() if name in (short, full)), None)


def newer_note(installed: str) -> str:
    """Return that the installed release is newer than every release that was tried; empty if it is not."""
    release = _major_minor(installed)
    if release is None or not _is_untried(release):
        return ""
    return f"onnxruntime {installed} is newer than {NEWEST_TRIED}, the newest release that was tried"


def _major_minor(release: str) -> tuple[int, int] | None:
    match = re.match(r"(\d+)\.(\d+)", release)
    return None if match is None else (int(match[1]), int(match[2]))


def _is_untried(release: tuple[int, int]) -> bool:
    """Return whether a release is newer than the newest that was tried, patch releases aside."""
    newest = _major_minor(NEWEST_TRIED)
    return newest is not None and release > newest


@dataclass(frozen=True, slots=True)
class Runtime:
    """The oldest onnxruntime that a graph is for, and the provider that it is meant to run on."""

    release: tuple[int, int]
    provider: TargetProvider

    @classmethod
    def parse(cls, function: str, text: object) -> Runtime:
        """Read the runtime that is written as `onnxruntime>=1.28;cpu`."""
        match = _RUNTIME.fullmatch(text.replace(" ", "")) if isinstance(text, str) else None
        wanted = match and (short_provider(match[3]) or match[3])
        provider = next((name for name in TARGETS if name == wanted), None)
        if match is None or provider is None:
            rule = f"`runtime` must be 'onnxruntime>=RELEASE;PROVIDER', the provider {', '.join(TARGETS)}"
            hint = (
                "As in 'onnxruntime>=1.28;cpu'. Other providers were not tried: leave `runtime` out, and pass "
                "`form='primitive'`."
            )
            if text == "onnxruntime":  # the shell took the rest of `onnxruntime>=1.28;cpu`
                hint = f"In a shell, quote it, as in '{DEFAULT_RUNTIME}': without quotes, > writes to a file."
            raise ArgumentValueError(function, rule, {"runtime": repr(text)}, hint)
        release = (int(match[1]), int(match[2]))
        if release < OLDEST:
            oldest = ".".join(map(str, OLDEST))
            rule = f"`runtime` must be a release that was tried, onnxruntime>={oldest} or later"
            hint = "Older releases were not tried with any form."
            raise ArgumentValueError(function, rule, {"runtime": repr(text)}, hint)
        return cls(release, provider)

    def older_note(self, installed: str) -> str:
        """Return that the installed release is older than this one; empty if it is not."""
        release = _major_minor(installed)
        if release is None or release >= self.release:
            return ""
        return f"onnxruntime {installed} is older than the file's {self}"

    def other_provider_note(self, ran_on: Iterable[str]) -> str:
        """Return that a provider other than this one ran the graph; empty if none did, or in a browser."""
        others = [name for name in ran_on if name != PROVIDERS.get(self.provider, name)]
        return f"the file is for {self}: results on {' and '.join(others)} are not promised" if others else ""

    @property
    def untried_note(self) -> str:
        """That no graph was run in this release or a later one; empty if one was."""
        return f"the newest release tried is {NEWEST_TRIED}" if _is_untried(self.release) else ""

    def check_tensor(self, function: str, name: str, dtype: str) -> None:
        """Check that a program can pass an input or an output of that dtype to the runtime."""
        if self.is_for_browsers and dtype == "bfloat16":
            # The types of a tensor in onnxruntime-common 1.30 have no bfloat16.
            reason = "since onnxruntime's JavaScript API has no such tensor"
            rule = f"`{name}` must not be bfloat16 for {self.provider}, {reason}"
            got = {f"{name}.dtype": dtype, "runtime": self}
            raise ArgumentTypeError(function, rule, got, "Pass it in float32 or float16.")

    @property
    def right_on(self) -> tuple[TargetProvider, ...]:
        """The providers on which the graph must be right."""
        return RIGHT_ON.get(self.provider, (self.provider,))

    @property
    def is_for_browsers(self) -> bool:
        return not {"wasm", "webgpu"}.isdisjoint(self.right_on)

    @property
    def softmax_hides_nan(self) -> bool:
        """Whether Softmax returns 0 for NaN: on WebGPU it ends in `max(value, 0)`, "to protect against NaN".

        Before 1.24 it also returns 0 for a row of the most negative finite numbers, which do not mask.
        """
        return "webgpu" in self.right_on

    def __str__(self) -> str:
        return f"onnxruntime>={self.release[0]}.{self.release[1]};{self.provider}"
