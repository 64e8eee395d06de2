"""The runtime that a graph is for, and facts about each release of onnxruntime, as data that was measured."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable
from contextlib import suppress
from dataclasses import dataclass
from typing import Literal, TypeAlias, get_args

from sdpa_xp._checks import nearest_hint
from sdpa_xp.errors import ArgumentTypeError, ArgumentValueError

from .._files.model import Metadata
from .defects import KERNELS, Release, known_defects, numbers_of

ProviderName: TypeAlias = Literal[
    "cpu", "cuda", "wasm", "webgpu", "CPUExecutionProvider", "CUDAExecutionProvider", "WebGpuExecutionProvider"
]
"""A provider on which `verify` can run models, by its short name or by onnxruntime's own name."""
OnnxruntimeProvider: TypeAlias = Literal["cpu", "cuda", "wasm", "webgpu", "web"]
"""A provider of onnxruntime that graphs can be written for."""
RuntimeProvider: TypeAlias = OnnxruntimeProvider | Literal["openvino", "onnx"]
"""What graphs are written for: a provider of onnxruntime, OpenVINO on the CPU, or any reader of ONNX."""
WRITTEN_FOR: tuple[OnnxruntimeProvider, ...] = get_args(OnnxruntimeProvider)

PROVIDERS = {
    "cpu": "CPUExecutionProvider",
    "cuda": "CUDAExecutionProvider",
    "wasm": "wasm",
    "webgpu": "WebGpuExecutionProvider",
}
"""The providers that `verify` runs models on, by short name."""
PLUGINS = {
    "wasm": (
        "Node.js and its package onnxruntime-web",
        "Install Node.js, and run `npm install onnxruntime-web` in this folder, or name the node_modules that "
        "has it in NODE_PATH.",
    ),
    "webgpu": (
        "onnxruntime's plugin for WebGPU, and an adapter",
        "Run `pip install onnxruntime-ep-webgpu`. Without a GPU, set ORT_WEBGPU_EP_ALLOW_SOFTWARE_ADAPTER=1, "
        "and name the JSON file of a software driver for Vulkan, such as SwiftShader's, in VK_ICD_FILENAMES.",
    ),
}
"""What a provider that is in no wheel of onnxruntime needs, and how to install it."""
SAME_KERNELS = {PROVIDERS["cpu"], PROVIDERS["wasm"]}
RIGHT_ON: dict[RuntimeProvider, tuple[RuntimeProvider, ...]] = {"web": ("wasm", "webgpu")}
"""The providers on which a graph must be right, if the runtime stands for several. onnxruntime-web has two:
WebAssembly has the kernels of the CPU, and WebGPU has its own."""

OLDEST = (1, 23)
"""The oldest release that graphs were run in."""
NEWEST_TRIED = "1.32.0"
"""The newest release that graphs were run in. A later one is taken to compute what this one does."""
OPSETS = range(17, 28)
"""The opsets that graphs are written in."""
FIRST_RELEASE_OF = {24: (1, 24), 25: (1, 32), 26: (1, 32), 27: (1, 32)}
"""The first release that loads every graph of an opset, if it is not the first release of all."""
LAST_OPSET: dict[RuntimeProvider, int] = {"cuda": 24, "openvino": 24}
"""The last opset that graphs for a provider are written in, if it is not the last of all."""

OLDEST_OPENVINO = (2026, 4)
"""The oldest release of OpenVINO that graphs were run in."""
NEWEST_OPENVINO = "2026.4.1"
"""The newest one."""
NEWEST_ELSEWHERE = {"openvino": NEWEST_OPENVINO, "wasm": "1.30.0", "webgpu": "1.31.1", "web": "1.30.0"}
"""The newest release that graphs were run in, if not `NEWEST_TRIED`: onnxruntime-web has 1.30.0 so far."""

EngineName: TypeAlias = Literal["onnxruntime", "openvino", "reference"]
"""A program in which `verify` can run models."""
ENGINES = {"onnxruntime": "onnxruntime", "openvino": "OpenVINO", "reference": "ONNX's reference evaluator"}
"""What reports call each of them."""
DEFAULT_RUNTIME = "onnxruntime>=1.28;cpu"
OPENVINO_RUNTIME = "openvino>=2026.4;cpu"
STANDARD_RUNTIME = "onnx"
PROGRAMS = {"onnxruntime": WRITTEN_FOR, "openvino": ("cpu",), STANDARD_RUNTIME: ()}
"""What graphs are written for, and the providers of each."""
_RUNTIME = re.compile(r"(onnxruntime|openvino)>=(\d+(?:\.\d+){1,2});(\w+)")


def runtime_text(provider: str, release: str) -> str:
    """Return the text that `Runtime.parse` reads, of a release and the full name of a provider."""
    (short,) = (name for name, full in PROVIDERS.items() if full == provider)
    return f"onnxruntime>={release};{short}"


def short_provider(name: object) -> str | None:
    """Return the short name of a provider that has this name or this name in onnxruntime; else None."""
    return next((short for short, full in PROVIDERS.items() if name in (short, full)), None)


def newer_note(installed: str, engine: EngineName = "onnxruntime") -> str:
    """Return that the installed release is newer than every release that was tried; empty if it is not."""
    newest = {"onnxruntime": NEWEST_TRIED, "openvino": NEWEST_OPENVINO}.get(engine)
    if newest is None or not _is_untried(numbers_of(installed), newest):
        return ""
    return f"{ENGINES[engine]} {installed} is newer than {newest}, the newest release that was tried"


def _is_untried(release: Release, newest_tried: str) -> bool:
    """Return whether a release is newer than the newest that was tried, patch releases aside."""
    return release[:2] > numbers_of(newest_tried)[:2]


def release_text(release: Release) -> str:
    return ".".join(map(str, release))


def _unread_hint(text: str) -> str:
    """Return what to write instead of a text that is no runtime."""
    if text == "onnxruntime":  # the shell took the rest of `onnxruntime>=1.28;cpu`
        return f"In a shell, quote it, as in '{DEFAULT_RUNTIME}': without quotes, > writes to a file."
    program, _, provider = text.replace(" ", "").partition(";")
    program = re.split(r"[^\w-]", program)[0]
    near = nearest_provider(provider, PROGRAMS.get(program, ()))
    if program not in PROGRAMS:
        near = nearest_hint(program, PROGRAMS)
    return near or (
        f"As in '{DEFAULT_RUNTIME}'. Other providers were not tried: '{STANDARD_RUNTIME}' writes "
        "standard operators alone."
    )


def nearest_provider(name: object, providers: Iterable[str]) -> str:
    """Return the provider that is most like an unknown name, as a hint; "" if none is, or if it is known."""
    providers = [*providers]
    return "" if name in providers else nearest_hint(name, providers, likeness=0.7)  # "gpu" is not like "cpu"


def _provider(program: str, provider: str) -> RuntimeProvider | None:
    """Return what a graph for a provider of onnxruntime or of OpenVINO is written for; None if nothing is."""
    if program == "openvino":
        return "openvino" if provider == "cpu" else None
    return next((name for name in WRITTEN_FOR if name == (short_provider(provider) or provider)), None)


def _same_kernels(provider: RuntimeProvider) -> set[str]:
    """Return the full names of the providers that compute with the kernels of this one."""
    full = PROVIDERS.get(provider, provider)
    return SAME_KERNELS if full in SAME_KERNELS else {full}


@dataclass(frozen=True, slots=True)
class Runtime:
    """The program that a graph is for, in its oldest release, and the provider that it is meant to run on."""

    release: Release
    """(0, 0) for any program that follows the standard."""
    provider: RuntimeProvider

    @classmethod
    def parse(cls, function: str, text: object) -> Runtime:
        """Read the runtime that is written as `onnxruntime>=1.28;cpu`."""
        if isinstance(text, str) and text == STANDARD_RUNTIME:
            return cls((0, 0), "onnx")
        match = _RUNTIME.fullmatch(text.replace(" ", "")) if isinstance(text, str) else None
        provider = None if match is None else _provider(match[1], match[3])
        if match is None or provider is None:
            rule = (
                f"`runtime` must be 'onnxruntime>=RELEASE;PROVIDER', the provider {', '.join(WRITTEN_FOR)}; "
                f"'openvino>=RELEASE;cpu'; or '{STANDARD_RUNTIME}'"
            )
            raise ArgumentValueError(
                function, rule, {"runtime": repr(text)}, _unread_hint(text if isinstance(text, str) else "")
            )
        release = numbers_of(match[2])
        if release < (oldest := OLDEST_OPENVINO if provider == "openvino" else OLDEST):
            rule = f"`runtime` must be a release that was tried, {match[1]}>={release_text(oldest)} or later"
            hint = "Older releases were not tried with any form."
            raise ArgumentValueError(function, rule, {"runtime": repr(text)}, hint)
        return cls(release, provider)

    @property
    def is_onnxruntime(self) -> bool:
        return self.provider not in ("openvino", "onnx")

    @property
    def is_openvino(self) -> bool:
        """Whether OpenVINO runs the graph. Release 2026.4 computes integers of 64 bits in 32, rounds the
        quotients of bytes, and its TopK leaves the order of equal elements open."""
        return self.provider == "openvino"

    def is_before(self, release: Release) -> bool:
        """Return whether the graph is for an onnxruntime that is older than that release."""
        return self.is_onnxruntime and self.release < release

    @property
    def engine(self) -> EngineName | None:
        """The engine that the graph is for; None if it is for all of them."""
        return None if self.provider == "onnx" else "onnxruntime" if self.is_onnxruntime else "openvino"

    def older_note(self, installed: str, engine: EngineName = "onnxruntime", file: str = "the file") -> str:
        """Return that the installed engine is older than this one, or another one; empty if it is neither.

        `file` is what the note calls the graph, which may be a part of one.
        """
        if self.engine is None:
            return ""
        if engine != self.engine:
            return f"{file} is for {self}, and not for {ENGINES[engine]}"
        release = numbers_of(installed)
        if not release or release >= self.release:
            return ""
        return f"{ENGINES[engine]} {installed} is older than {file}'s {self}"

    def other_provider_note(self, ran_on: Iterable[str], file: str = "the file") -> str:
        """Return that a provider with other kernels than this one ran the graph; empty if none did."""
        right = {kernels for name in self.right_on for kernels in _same_kernels(name)}
        others = [name for name in ran_on if name not in right]
        return f"{file} is for {self}: results on {' and '.join(others)} are not promised" if others else ""

    def not_run_note(self, ran_on: Collection[str], file: str = "the file") -> str:
        """Return that a provider, of several that the graph is for, did not run it; empty if all did."""
        if len(self.right_on) < 2:
            return ""
        missing = [name for name in self.right_on if _same_kernels(name).isdisjoint(ran_on)]
        return f"{file} is for {self}, and was not run on {' and '.join(missing)}" if missing else ""

    @property
    def untried_note(self) -> str:
        """That no graph was run in this release or a later one; empty if one was."""
        newest = NEWEST_ELSEWHERE.get(self.provider, NEWEST_TRIED)
        return f"the newest release tried is {newest}" if _is_untried(self.release, newest) else ""

    def check_dtype(self, function: str, name: str, dtype: str) -> None:
        """Check that a program can pass tensors of a dtype to the runtime, and that it computes in it."""
        # The types of a tensor in onnxruntime-common 1.30 have no bfloat16. OpenVINO 2026.4 computes float64 in
        # float32 on the CPU, whatever precision it is asked for.
        why, instead = "", "float32 or float16"
        if dtype == "bfloat16" and not {"wasm", "webgpu"}.isdisjoint(self.right_on):
            why = "onnxruntime's JavaScript API has no such tensor"
        if self.is_openvino and dtype == "float64":
            why = "OpenVINO computes it in float32 on the CPU"
        if self.is_openvino and dtype == "int64" and name in ("query_ids.dtype", "key_ids.dtype"):
            why, instead = "OpenVINO compares its integers in 32 bits", "int32"
        if why:
            rule = f"`{name.removesuffix('.dtype')}` must not be {dtype} for {self.provider}, since {why}"
            got = {name: dtype, "runtime": self}
            raise ArgumentTypeError(function, rule, got, f"Pass it in {instead}.")

    @property
    def right_on(self) -> tuple[RuntimeProvider, ...]:
        """The providers on which the graph must be right."""
        return RIGHT_ON.get(self.provider, (self.provider,))

    def may_meet(self, defect: str) -> bool:
        """Return whether the graph may run in a release that has a known defect, on a provider that has it."""
        known = known_defects()[defect]
        is_there = not self.is_onnxruntime or self.release < known.until
        return is_there and any(KERNELS.get(provider) == known.provider for provider in self.right_on)

    def __str__(self) -> str:
        if self.provider == "onnx":
            return STANDARD_RUNTIME
        program, provider = ("onnxruntime", self.provider) if self.is_onnxruntime else (self.provider, "cpu")
        return f"{program}>={release_text(self.release)};{provider}"


def stated_runtimes(parts: Iterable[Metadata]) -> tuple[Runtime, ...]:
    """Return the runtimes that a model was written for: one, or none, or those of the parts that were merged.

    Of several releases of a provider, the newest counts.
    """
    newest: dict[str, Runtime] = {}
    for part in parts:
        with suppress(ValueError):  # anyone may have written the file
            stated = Runtime.parse("verify", part.runtime)
            known = newest.setdefault(stated.provider, stated)
            newest[stated.provider] = max(known, stated, key=lambda runtime: runtime.release)
    return tuple(newest.values())


def runtime_notes(
    runtimes: Collection[Runtime],
    installed: str,
    ran_on: Iterable[str],
    engine: EngineName = "onnxruntime",
    *,
    is_finished: bool = False,
) -> tuple[str, ...]:
    """Return how the installed release and the providers differ from the runtimes that a model is for.

    Also that the release is newer than all that were tried, and if the model `is_finished` on all providers,
    which ones of its runtimes did not run it.
    """
    notes, names = [], [*ran_on]
    file = "the file" if len(runtimes) == 1 else "a part of the file"
    for stated in runtimes:
        older = stated.older_note(installed, engine, file)
        notes.append(f"{older}: results are not promised" if older else "")
        if engine == stated.engine == "onnxruntime":
            notes.append(stated.other_provider_note(names, file))
    notes.append(newer_note(installed, engine))
    if is_finished and engine == "onnxruntime":
        notes += [stated.not_run_note(names, file) for stated in runtimes]
    return tuple(filter(None, notes))
