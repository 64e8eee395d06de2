"""onnxruntime in this process: sessions of our own graphs, what it offers, and its release."""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import onnx
from numpy.typing import NDArray
from onnx import helper

from sdpa_xp._checks.messages import install_hint, nearest_hint
from sdpa_xp.errors import ArgumentValueError, Message

from .._files.metadata import exported_models
from .._files.model import EXTERNAL_ABOVE, Model, initializer_bytes
from .._files.paths import temporary
from ..save import save
from .engine import OnnxruntimeSession, first_line
from .limits import failed
from .releases import (
    ENGINES,
    OPSETS,
    PLUGINS,
    PROVIDERS,
    EngineName,
    Runtime,
    nearest_provider,
    newer_note,
    short_provider,
)

MODULES: dict[EngineName, str] = {"onnxruntime": "onnxruntime", "openvino": "openvino", "reference": "onnx"}
"""The module of each engine."""


def installed_runtime(function: str = "verify") -> Any:
    """Return the module onnxruntime, which is imported when a model is run."""
    try:
        import onnxruntime
    except ImportError as error:
        raise not_installed(error, function) from error
    return onnxruntime


def check_engine(function: str, engine: object, provider: object) -> None:
    """Check the engine that a caller names, and that it has the provider."""
    if not isinstance(engine, str) or engine not in ENGINES:
        hint = "ONNX's evaluator is 'reference'." if engine == "onnx" else nearest_hint(engine, ENGINES)
        raise ArgumentValueError(
            function, f"`engine` must be {', '.join(ENGINES)}", {"engine": repr(engine)}, hint
        )
    if engine != "onnxruntime" and provider is not None and short_provider(provider) != "cpu":
        rule = f"`provider` must be None or 'cpu' if `engine` is {engine!r}"
        raise ArgumentValueError(function, rule, {"provider": repr(provider)})


def check_installed(engine: EngineName = "onnxruntime") -> None:
    """Check that the engine can be found, and do not import it."""
    module = MODULES[engine]
    try:
        # `find_spec` raises ValueError for a loaded module without a spec, such as one that a test put there.
        is_there = module in sys.modules or find_spec(module) is not None
    except ImportError as error:
        raise not_installed(error, engine=engine) from error
    if not is_there:
        raise not_installed(f"No module named {module!r}", engine=engine)


def not_installed(
    why: object, function: str = "verify", engine: EngineName = "onnxruntime"
) -> ModuleNotFoundError:
    """Return the error of an engine that cannot be imported."""
    rule = f"{MODULES[engine]} must be installed"
    hint = install_hint("openvino" if engine == "openvino" else "export")
    return ModuleNotFoundError(Message(function, rule, {"its error": why}, hint), name=MODULES[engine])


def open_session(
    model: Model, provider: str, function: str = "verify", *, spins: bool = False
) -> OnnxruntimeSession:
    """Open an onnxruntime session of `model` on `provider`, which must really start there."""
    installed_runtime(function)
    with temporary(function), tempfile.TemporaryDirectory() as folder:
        source = source_of(model, Path(folder))
        with errors_reworded("load", function):
            session = OnnxruntimeSession(source, provider=provider, spins=spins)
    check_started(provider, session.providers, function)
    return session


def source_of(model: Model, folder: Path) -> bytes | str:
    """Return a model as onnxruntime loads it: bytes if they fit, since a file could refer to other files."""
    if isinstance(model, onnx.ModelProto) and initializer_bytes(model) <= EXTERNAL_ABOVE:
        return bytes(model.SerializeToString())
    path = folder / "model.onnx"
    return str(save(model, path, external_above=EXTERNAL_ABOVE))


def check_started(provider: str, started: Sequence[str], function: str = "verify") -> None:
    """Check that a session has the provider: onnxruntime only warns of one that is absent."""
    if provider not in started:
        rule = f"onnxruntime could not start {provider}, which needs a GPU and CUDA's libraries"
        to_cpu = '`provider="cpu"`' if function == "verify" else "a `runtime` that ends in ;cpu"
        hint = f"Pass {to_cpu} to run on the CPU." if provider == PROVIDERS["cuda"] else ""
        raise ArgumentValueError(function, rule, {"providers": ", ".join(started)}, hint)


def run(session: OnnxruntimeSession, feeds: Mapping[str, NDArray[Any]]) -> dict[str, NDArray[Any]]:
    """Return the outputs of `session` by their names."""
    with errors_reworded("run"):
        return session.run(feeds)


@contextmanager
def errors_reworded(what: str, function: str = "verify") -> Iterator[None]:
    """Raise errors of onnxruntime as a ModelFailedError of one line."""
    try:
        yield
    except Exception as error:  # onnxruntime's errors have no other base
        raise failed(what, first_line(error), function) from error


def version() -> str:
    """Return the release of onnxruntime that is installed."""
    return str(installed_runtime().__version__)


def stated_runtimes(model: Model) -> tuple[Runtime, ...]:
    """Return the runtimes that a model was written for: one, or none, or those of the parts that were merged.

    Of several releases of a provider, the newest counts.
    """
    newest: dict[str, Runtime] = {}
    for exported in exported_models(model):
        with suppress(ValueError):  # anyone may have written the file
            stated = Runtime.parse("verify", exported.runtime)
            known = newest.setdefault(stated.provider, stated)
            newest[stated.provider] = max(known, stated, key=lambda runtime: runtime.release)
    return tuple(newest.values())


def runtime_notes(
    model: Model, installed: str, ran_on: Iterable[str], engine: EngineName = "onnxruntime"
) -> tuple[str, ...]:
    """Return how the installed release and the providers differ from the model's runtimes.

    Also that the release is newer than all that were tried.
    """
    notes, names = [], [*ran_on]
    file, runtimes = _named_runtimes(model)
    for stated in runtimes:
        older = stated.older_note(installed, engine, file)
        notes.append(f"{older}: results are not promised" if older else "")
        if engine == stated.engine == "onnxruntime":
            notes.append(stated.other_provider_note(names, file))
    return tuple(filter(None, [*notes, newer_note(installed, engine)]))


def not_run_notes(model: Model, ran_on: Iterable[str]) -> tuple[str, ...]:
    """Return which providers of the model's runtimes did not run it, if a runtime stands for several."""
    names = [*ran_on]
    file, runtimes = _named_runtimes(model)
    return tuple(filter(None, (stated.not_run_note(names, file) for stated in runtimes)))


def _named_runtimes(model: Model) -> tuple[str, tuple[Runtime, ...]]:
    """Return what notes call the graph of each of a model's runtimes, and the runtimes."""
    runtimes = stated_runtimes(model)
    return "the file" if len(runtimes) == 1 else "a part of the file", runtimes


def providers(requested: str | None = None) -> list[str]:
    """Return the providers to run on in this process."""
    installed_runtime()
    return chosen_providers(requested, OnnxruntimeSession.about(wanted(requested), probe()))


def wanted(requested: str | None) -> list[str]:
    """Return the providers that a run may be on: no other is started, since a driver may hang."""
    short = short_provider(requested)
    by_default = ["cpu", "cuda"] if requested is None else ["cpu", short]
    return [full for name, full in PROVIDERS.items() if name in by_default]


def probe() -> bytes:
    """Return the smallest model, which shows whether a provider starts."""
    x, y = (helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, [1]) for name in "xy")
    graph = helper.make_graph([helper.make_node("Identity", ["x"], ["y"])], "probe", [x], [y])
    opsets = [helper.make_opsetid("", OPSETS[0])]
    model = helper.make_model(graph, opset_imports=opsets, ir_version=helper.find_min_ir_version_for(opsets))
    return bytes(model.SerializeToString())


def chosen_providers(requested: str | None, about: Mapping[str, Any]) -> list[str]:
    """Return the execution providers to run on: the one asked for, or CUDA if it starts here and the CPU."""
    offered, started = about["offered"], about["started"]
    if requested is None:
        return [name for name in (PROVIDERS["cuda"], PROVIDERS["cpu"]) if name in started]
    short = short_provider(requested)
    if short in PLUGINS and PROVIDERS[short] not in started:
        needs, hint = PLUGINS[short]
        got = {"provider": requested, "its error": about["why_not"] or "it does not start"}
        raise ArgumentValueError("verify", f"`provider` {short!r} needs {needs}", got, hint)
    if short is None or PROVIDERS[short] not in offered:
        rule = "`provider` must be one that onnxruntime offers here"
        known = [f"{name} ({full})" for name, full in PROVIDERS.items() if full in offered]
        hint = f"It may be {', '.join(PROVIDERS)}. {nearest_provider(requested, PROVIDERS)}".rstrip()
        if short == "cuda":
            hint = f"onnxruntime-gpu offers cuda: pip uninstall onnxruntime. {install_hint('export-gpu')}"
        got = {"provider": repr(requested), "offered": ", ".join(known)}
        raise ArgumentValueError("verify", rule, got, hint)
    check_started(PROVIDERS[short], started)
    return [PROVIDERS[short]]
