"""onnxruntime in this process: sessions of our own graphs on arrays of any library, and what it offers.

Arrays of the host are passed as arrays of NumPy in the same memory, and so are the results. DLPack passes what
NumPy has not: bfloat16 of other libraries, and arrays on a GPU. It was run on the CPU alone, since no GPU was
at hand.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import helper

from sdpa_xp._checks import install_hint, nearest_hint
from sdpa_xp._libraries import dtype_name, library_of
from sdpa_xp.errors import ArgumentValueError, Message

from .._files.model import EXTERNAL_ABOVE, Model, initializer_bytes
from .._files.paths import temporary
from ..save import save
from .engine import OnnxruntimeSession, first_line
from .limits import failed
from .releases import ENGINES, OPSETS, PLUGINS, PROVIDERS, EngineName, nearest_provider, short_provider

MODULES: dict[EngineName, str] = {"onnxruntime": "onnxruntime", "openvino": "openvino", "reference": "onnx"}
"""The module of each engine."""
OnArrays: TypeAlias = Callable[[Sequence[Any]], Sequence[Any]]
"""Computes the outputs of a session, in order, from the arrays of a call."""
_HOST = 1
"""The type of the host in DLPack."""


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


def run_session(session: OnnxruntimeSession, feeds: Mapping[str, NDArray[Any]]) -> dict[str, NDArray[Any]]:
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


def on_arrays(session: OnnxruntimeSession, order: Sequence[int], examples: Sequence[Any]) -> OnArrays:
    """Return what runs a session on arrays that differ from `examples` in their numbers alone.

    Args:
        session: A session.
        order: The number of the array that each input of the session gets.
        examples: Arrays of one library, and perhaps integers in arrays of NumPy.
    """
    of_caller = next((array for array in examples if not isinstance(array, np.ndarray)), examples[0])
    inner, has_bfloat16 = session.inner, session.has_bfloat16
    library, names = library_of(of_caller), [value.name for value in inner.get_inputs()]
    is_on_device = library.is_accelerator(library.device(of_caller))
    if (is_on_device or (has_bfloat16 and library_of(np.empty(0)) is not library)) and _takes_dlpack():
        return _by_dlpack(inner, dict(zip(names, order, strict=True)), of_caller)
    is_plain = all(type(array) is np.ndarray and array.dtype.isnative for array in examples)
    has_uint64 = any("uint64" in value.type for value in inner.get_outputs())
    if is_plain and not has_bfloat16 and not has_uint64 and [*order] == [*range(len(names))]:
        outputs = [value.name for value in inner.get_outputs()]
        # onnxruntime copies an array only if its elements do not lie side by side in order.
        return lambda arrays: inner.run(outputs, dict(zip(names, arrays, strict=True)))
    return _by_numpy(session, dict(zip(names, order, strict=True)), of_caller)


def _by_numpy(session: OnnxruntimeSession, order: dict[str, int], of_caller: Any) -> OnArrays:
    """Return what runs a session on arrays in memory that NumPy reads."""
    inner = session.inner
    outputs = [value.name for value in inner.get_outputs()]
    library = library_of(of_caller)
    xp, device = library.namespace(of_caller), library.device(of_caller)

    def run(arrays: Sequence[Any]) -> Sequence[Any]:
        feeds = {name: _native(library_of(arrays[n]).to_numpy(arrays[n])) for name, n in order.items()}
        # onnxruntime itself reads no bfloat16 from NumPy; `session.run` also copies the outputs.
        results = session.run(feeds).values() if session.has_bfloat16 else inner.run(outputs, feeds)
        # onnxruntime's uint64 is `ulonglong` of NumPy, an equal dtype that torch refuses.
        return [library.from_numpy(result.view(np.dtype(result.dtype.name)), xp, device) for result in results]

    return run


def _native(array: NDArray[Any]) -> NDArray[Any]:
    """Return an array in the byte order of the machine: onnxruntime reads any other as if it were that."""
    array = np.asarray(array)  # a memory map, too
    return array if array.dtype.isnative else array.astype(array.dtype.newbyteorder("="))


def _takes_dlpack() -> bool:
    """Return whether the release of onnxruntime exchanges values by DLPack; 1.23 does not."""
    import onnxruntime

    return all(hasattr(onnxruntime.OrtValue, name) for name in ("from_dlpack", "__dlpack__"))


def _by_dlpack(inner: Any, order: dict[str, int], of_caller: Any) -> OnArrays:
    """Return what runs a session on arrays on the device of one of them."""
    kind, index = of_caller.__dlpack_device__()
    place = ("cpu", 0) if int(kind) == _HOST else ("cuda", int(index))
    outputs = inner.get_outputs()
    library = library_of(of_caller)
    xp: Any = library.namespace(of_caller)

    def array_of(value: Any, name: str) -> Any:
        array = xp.from_dlpack(value)
        is_same = (dtype_name(array.dtype) == "bool") == (name == "tensor(bool)")
        return array if is_same else xp.astype(array, xp.bool)  # onnxruntime passes bool as uint8

    def run(arrays: Sequence[Any]) -> Sequence[Any]:
        binding = inner.io_binding()  # one for each run, since threads may run at once
        values = {name: _value_of(arrays[n]) for name, n in order.items()}  # no binding keeps memory alive
        for name, value in values.items():
            binding.bind_ortvalue_input(name, value)
        for output in outputs:
            binding.bind_output(output.name, *place)
        if place[0] != "cpu":
            binding.synchronize_inputs()  # a GPU may still compute the arrays, in a queue of their library
        inner.run_with_iobinding(binding)
        return [array_of(value, out.type) for value, out in zip(binding.get_outputs(), outputs, strict=True)]

    return run


def _value_of(array: Any) -> Any:
    """Return a value of onnxruntime in the memory of an array, if its elements lie side by side in order."""
    from onnxruntime import OrtValue

    library = library_of(array)
    if isinstance(array, np.ndarray) or dtype_name(array.dtype) == "bool":  # DLPack's bool is refused
        return OrtValue.ortvalue_from_numpy(np.asarray(library.to_numpy(array), order="C"))
    if library.autograd is not None:
        array = library.autograd.detach(array)
    try:
        return OrtValue.from_dlpack(array)
    except RuntimeError:  # there are gaps between the elements, or they are in another order
        xp: Any = library.namespace(array)
        copied = xp.asarray(xp.reshape(array, (-1,)), copy=True)
        return OrtValue.from_dlpack(xp.reshape(copied, array.shape))
