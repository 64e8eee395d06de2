"""`sdpa-xp export`: from flags, or from the settings in a TOML file, to a graph on the disk.

    query = "float32[B,8,L,64]"
    key = "float32[B,2,S,64]"
    attn_mask = "causal('lower_right') & padding(int64[B])"
    outputs = ["output", "lse"]
    output = "attention.onnx"

The keys of a file are the flags of the command, with underscores. As with flags, a path is relative to the
working directory, not to the file. Whether another file may be replaced is for the command line alone to say.
"""

from __future__ import annotations

import codecs
import inspect
import os
import shlex
import tomllib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

from sdpa_xp._checks import nearest_hint
from sdpa_xp.errors import ArgumentTypeError, ArgumentValueError, Message, renamed

from .._call.call import OPTIONS, OptionKind
from .._call.text import Expression, parse
from .._dtypes.dtype import FLOATING
from .._files.model import Model, exported_models
from .._files.paths import PathArgument, absence_hint
from .._runtime.releases import DEFAULT_RUNTIME, OPENVINO_RUNTIME, STANDARD_RUNTIME, WRITTEN_FOR
from .._verify.model import shown_type
from ..export import export_attention
from ..forms.choice import FORMS
from ..save import save
from ..spec import TensorSpec, dtype_hint
from .terminal import check_output, flags, option, say, say_json

OUTPUT = PathArgument("export", "output")
DEFAULT_OUTPUT = "attention.onnx"
RUNTIMES = [
    *(DEFAULT_RUNTIME.replace("cpu", provider) for provider in WRITTEN_FOR),
    OPENVINO_RUNTIME,
    STANDARD_RUNTIME,
]


class Source(NamedTuple):
    """The command that reads settings from a file, and the argument that names the file: for messages."""

    function: str
    argument: str
    keys_are_flags: bool
    """Whether each setting is a flag of the command, too."""

    def named(self, setting: str) -> str:
        """Return how a message names a setting."""
        return f"`{setting}`" if self.keys_are_flags else f"`{setting}` in `{self.argument}`"


def _spec(source: Source, name: str, text: str, kind: str = "a spec") -> TensorSpec:
    try:
        return TensorSpec.parse(text)
    except (ArgumentTypeError, ArgumentValueError) as error:
        # In its own words the spec is `text`, and its dtype and shape have names that flags have, too.
        of_spec = error.rule.replace("`text` must be ", "").replace("`shape`", "its shape")
        of_spec = of_spec.replace("`dtype`", "its dtype")
        rule = f"{source.named(name)} must be {kind}: {of_spec}"
        raise ArgumentValueError(source.function, rule, {name: repr(text)}, error.hint) from error


def _number_or_spec(source: Source, name: str, text: str) -> float | TensorSpec:
    try:
        return float(text)
    except ValueError:
        return _spec(source, name, text, "a number or a spec")


def _modifier(source: Source, name: str, text: str) -> Expression:
    return parse(source.function, name, text, shown=source.named(name))


def _names(_source: Source, _name: str, text: str) -> list[str]:
    return [name.strip() for name in text.split(",")]


@dataclass(frozen=True, slots=True)
class Kind:
    """How an option of a kind is passed to the command, and in TOML."""

    metavar: str | None
    """What the help writes for its value."""
    read: Callable[[Source, str, str], object] | None = None
    """Reads its text; None if it is as it stands in TOML."""
    types: tuple[type, ...] = (str,)
    """Its types in TOML; the last one is that of its flag."""


KINDS: dict[OptionKind | None, Kind] = {
    "spec": Kind("<spec>", _spec),
    "array": Kind("<spec>", _spec),
    "number or array": Kind("<number or spec>", _number_or_spec, (int, float, str)),
    "modifier": Kind("<text>", _modifier),
    "number": Kind("<number>", types=(int, float)),
    "flag": Kind(None, types=(bool,)),
    "word": Kind("<word>"),
    "names": Kind("<names>", _names, (list, str)),
}
CALL_KEYS = {name: KINDS[option.kind].types for name, option in OPTIONS.items() if option.kind}
OTHER_KEYS: dict[str, tuple[type, ...]] = dict.fromkeys(("dtype", "form", "opset", "runtime", "output"), (str,))
KEYS = CALL_KEYS | OTHER_KEYS | {"opset": (int,)}
"""The types of each setting. The last five are no options of a call, but of its graph and file."""

MOST_BYTES = 2**24
NOT_WAITING = getattr(os, "O_NONBLOCK", 0)
"""A pipe that nobody writes to is empty; to open it must not wait for somebody."""


def _flags_of_a_call() -> Iterator[inspect.Parameter]:
    """Yield a flag for each option of a call."""
    for name, types in CALL_KEYS.items():
        stated, flag = OPTIONS[name], "--" + name.replace("_", "-")
        names = [f"{flag}/--no-{flag[2:]}"] if stated.kind == "flag" else [flag]
        read = option(None, *names, values=stated.choices, help=stated.help, metavar=KINDS[stated.kind].metavar)
        kind = inspect.Parameter.POSITIONAL_OR_KEYWORD
        yield inspect.Parameter(name, kind, default=read, annotation=types[-1] | None)


@flags(
    *_flags_of_a_call(),
    settings={
        "dtype": {"values": FLOATING},
        "form": {"values": ["auto", *FORMS]},
        "runtime": {"values": RUNTIMES},
    },
    forms=", ".join(FORMS),
    providers=", ".join(WRITTEN_FOR),
    default=DEFAULT_RUNTIME,
    openvino=OPENVINO_RUNTIME,
    standard=STANDARD_RUNTIME,
    file=DEFAULT_OUTPUT,
)
def export(
    dtype: str | None = None,
    form: str | None = None,
    opset: int | None = None,
    runtime: str | None = None,
    output: Path | None = None,
    config: Path | None = None,
    force: bool = False,
    json: bool = False,
    **call: Any,
) -> None:
    """Write the ONNX graph of one attention call.

    Args:
        dtype (<dtype>): Replaces the dtype of query, key, value and cache.
        form (<form>): The form of the graph: auto (default), {forms}.
        opset (<number>): The ONNX opset, 17 to 27. The default depends on the form.
        runtime (<runtime>): The oldest onnxruntime that will run the file, and its provider ({providers}), in
            quotes. Or '{openvino}', or '{standard}' for standard operators alone. Default: '{default}'.
        output: The file to write. Default: {file}.
        config: A TOML file with these options, such as is_causal = true. Flags override it.
        force: Replace an existing file.
        json: Print JSON for scripts.
    """
    others = {"dtype": dtype, "form": form, "opset": opset, "runtime": runtime, "output": output}
    passed = {name: flag for name, flag in (call | others).items() if flag is not None}
    stated = (read(config) if config else {}) | passed
    has_output = "output" in stated
    target = Path(stated.pop("output", DEFAULT_OUTPUT))
    check_output(OUTPUT, target, {config: "the file of --config"} if config else {})
    model = export_attention(**export_arguments(stated))
    # `save` would name the flag for a path that was passed, but here none was.
    if not has_output and not force and target.is_file():
        rule = f"`output` must be passed, because {DEFAULT_OUTPUT} exists already"
        hint = "Pass another name, or `overwrite=True` to replace the file."
        raise FileExistsError(Message("export", rule, {"file": target.resolve()}, hint))
    path = save(model, target, overwrite=force)
    facts = _facts(model, path)
    if json:
        say_json(facts)
    else:
        flag_of = {name: "--" + name.replace("_", "-") for name in KEYS}
        say(f"wrote {path}")
        say(f"form: {facts['form']} ({renamed(str(facts['reason']), flag_of)})")
        say(f"opset: {facts['opset']}")
        say(f"runtime: {facts['runtime']}")
        file = path if str(target).startswith("-") else target  # a name that is no flag
        say(f"next: sdpa-xp verify {shlex.quote(str(file))}{_where(str(facts['runtime']))}")


def _where(runtime: str) -> str:
    """Return the flags by which `verify` runs a model in what it was written for."""
    program, _, provider = runtime.partition(";")
    if program == STANDARD_RUNTIME:
        return " --engine reference"
    if program.startswith("openvino"):
        return " --engine openvino"
    in_browsers = {"wasm": "wasm", "webgpu": "webgpu", "web": "wasm"}
    return f" --provider {in_browsers[provider]}" if provider in in_browsers else ""


def _facts(model: Model, path: Path) -> dict[str, object]:
    """Return what was written, for people and for scripts."""
    (metadata,) = exported_models(model)
    return {
        "path": str(path),
        "form": metadata.form,
        "reason": metadata.reason,
        "opset": next(opset.version for opset in model.opset_import if opset.domain == ""),
        "runtime": metadata.runtime,
        "inputs": {value.name: shown_type(value) for value in model.graph.input},
        "outputs": {value.name: shown_type(value) for value in model.graph.output},
        "nodes": len(model.graph.node),
    }


CONFIG = Source("export", "config", keys_are_flags=True)
CALL = Source("verify", "call", keys_are_flags=False)


def read(path: Path, source: Source = CONFIG) -> dict[str, Any]:
    """Read the settings that a file holds."""
    function, argument, _ = source
    if not path.is_file() and not path.is_fifo():  # a pipe is <(command) in a shell
        raise ArgumentValueError(function, f"`{argument}` must be a file", {argument: path}, absence_hint(path))
    try:
        settings = tomllib.loads(_text(path))
    except (ValueError, RecursionError) as error:  # a UnicodeDecodeError, too
        raise ArgumentValueError(function, f"`{argument}` must be TOML ({error})", {argument: path}) from error
    for name, value in settings.items():
        if name not in KEYS:
            hint = nearest_hint(name, KEYS) or f"There are {', '.join(KEYS)}."
            rule = f"a key of `{argument}` must be known"
            raise ArgumentValueError(function, rule, {"name": repr(name)}, hint)
        if type(value) not in KEYS[name]:  # to isinstance, True is an int
            kinds = " or ".join(kind.__name__ for kind in KEYS[name])
            rule = f"{name} in `{argument}` must be of type {kinds}"  # the key of the file, not the flag
            raise ArgumentValueError(function, rule, {"setting": repr(value)})
    return settings


def _text(path: Path) -> str:
    """Return the text of a file, which may have a byte order mark; editors of Windows write one."""
    descriptor = os.open(path, os.O_RDONLY | getattr(os, "O_BINARY", 0) | NOT_WAITING)
    with os.fdopen(descriptor, "rb") as file:
        if NOT_WAITING:
            os.set_blocking(descriptor, True)
        data: bytes = file.read(MOST_BYTES + 1)  # nobody knows before how much a pipe has
    if len(data) > MOST_BYTES:
        raise ValueError(f"at most {MOST_BYTES} bytes")
    encoding = "utf-16" if data.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)) else "utf-8-sig"
    # As Python reads text files: tomllib refuses a carriage return alone.
    return data.decode(encoding).replace("\r\n", "\n").replace("\r", "\n")


def export_arguments(settings: dict[str, Any], source: Source = CONFIG) -> dict[str, Any]:
    """Return the arguments of `export_attention` that `settings` state."""
    arguments = {name: value for name, value in settings.items() if name != "dtype"}
    for name, stated in OPTIONS.items():
        read = KINDS[stated.kind].read if stated.kind else None
        if read and isinstance(arguments.get(name), str):
            arguments[name] = read(source, name, arguments[name])
    if "query" not in arguments:
        rule = f"{source.named('query')} must be given"
        got = {name: repr(value) for name, value in settings.items()}
        hint = "Write it as --query 'float32[B,8,L,64]', or pass --config with a file that has it."
        raise ArgumentValueError(source.function, rule, got, hint if source.keys_are_flags else "")
    arguments.setdefault("key", arguments["query"])  # self-attention
    arguments.setdefault("value", arguments["key"])  # most calls have keys and values of one shape
    if "dtype" in settings:
        arguments |= _with_dtype(source, arguments, settings["dtype"])
    return arguments


def _with_dtype(source: Source, arguments: dict[str, Any], dtype: str) -> dict[str, TensorSpec]:
    """Return the floating specs of tokens in another dtype; the others stay, and will be refused."""
    if dtype not in FLOATING:
        rule = f"{source.named('dtype')} must be one of {', '.join(FLOATING)}"
        raise ArgumentValueError(source.function, rule, {"dtype": repr(dtype)}, dtype_hint(dtype, FLOATING))
    specs = {
        name: arguments[name] for name, option in OPTIONS.items() if option.kind == "spec" and name in arguments
    }
    return {name: replace(spec, dtype=dtype) for name, spec in specs.items() if spec.floating}
