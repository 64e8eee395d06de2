"""`sdpa-xp export`: from flags or a file to a graph on the disk."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, TypeVar, cast

import onnx
import typer

from sdpa_xp.errors import Message, renamed
from sdpa_xp_export._call.call import OPTIONS
from sdpa_xp_export._dtypes.dtype import FLOATING
from sdpa_xp_export._files.model import Model, metadata_of
from sdpa_xp_export._files.paths import PathArgument
from sdpa_xp_export._runtime.releases import DEFAULT_RUNTIME, TARGETS
from sdpa_xp_export.cli import settings
from sdpa_xp_export.cli.shared import AsJson, Force, check_output, completed_from, say, say_json
from sdpa_xp_export.export import export_attention
from sdpa_xp_export.forms.choice import FORMS
from sdpa_xp_export.save import save
from sdpa_xp_export.spec import TensorSpec

OUTPUT = PathArgument("export", "output")
DEFAULT_OUTPUT = "attention.onnx"
F = TypeVar("F", bound=Callable[..., None])
RUNTIMES = [DEFAULT_RUNTIME.replace("cpu", provider) for provider in TARGETS]


def _with_flags_of_a_call(command: F) -> F:
    """Let typer read a flag for each option of a call in place of `**call`."""
    flags, kind = [], inspect.Parameter.POSITIONAL_OR_KEYWORD
    for name, types in settings.CALL_KEYS.items():
        option, flag = OPTIONS[name], name.replace("_", "-")
        names = [f"--{flag}/--no-{flag}"] if option.kind == "flag" else []
        completion = completed_from(option.choices) if option.choices else None
        default = typer.Option(None, *names, help=option.help, autocompletion=completion)
        flags.append(inspect.Parameter(name, kind, default=default, annotation=types[-1] | None))
    parameters = [
        parameter
        for parameter in inspect.signature(command, eval_str=True).parameters.values()
        if parameter.kind != inspect.Parameter.VAR_KEYWORD
    ]
    cast(Any, command).__signature__ = inspect.Signature([*flags, *parameters])
    return command


@_with_flags_of_a_call
def export(
    dtype: Annotated[
        str | None,
        typer.Option(
            help="Replaces the dtype of query, key, value and cache.", autocompletion=completed_from(FLOATING)
        ),
    ] = None,
    form: Annotated[
        str | None,
        typer.Option(
            help=f"The form of the graph: auto (default), {', '.join(FORMS)}.",
            autocompletion=completed_from(["auto", *FORMS]),
        ),
    ] = None,
    opset: Annotated[
        int | None, typer.Option(help="The ONNX opset, 17 to 24. The default depends on the form.")
    ] = None,
    runtime: Annotated[
        str | None,
        typer.Option(
            help=(
                "The oldest onnxruntime that will run the file, and its provider "
                f"({', '.join(TARGETS)}), in quotes. Default: '{DEFAULT_RUNTIME}'."
            ),
            autocompletion=completed_from(RUNTIMES),
        ),
    ] = None,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help=f"The file to write. Default: {DEFAULT_OUTPUT}.")
    ] = None,
    config: Annotated[
        Path | None,
        typer.Option(help="A TOML file with these options, such as is_causal = true. Flags override it."),
    ] = None,
    force: Force = False,
    as_json: AsJson = False,
    **call: Any,
) -> None:
    """Write the ONNX graph of one attention call."""
    others = {"dtype": dtype, "form": form, "opset": opset, "runtime": runtime, "output": output}
    flags = {name: flag for name, flag in (call | others).items() if flag is not None}
    stated = (settings.read(config) if config else {}) | flags
    has_output = "output" in stated
    target = Path(stated.pop("output", DEFAULT_OUTPUT))
    check_output(OUTPUT, target, {config: "the file of --config"} if config else {})
    model = export_attention(**settings.export_arguments(stated))
    # `save` would name the flag for a path that was passed, but here none was.
    if not has_output and not force and target.is_file():
        rule = "the default file of `output` must not exist"
        hint = "Pass `output` with another name, or `overwrite=True` to replace the file."
        raise FileExistsError(Message("export", rule, {"default": target.resolve()}, hint))
    path = save(model, target, overwrite=force)
    facts = _facts(model, path)
    if as_json:
        say_json(facts)
    else:
        flag_of = {name: "--" + name.replace("_", "-") for name in settings.KEYS}
        say(f"wrote {path}")
        say(f"form: {facts['form']} ({renamed(str(facts['reason']), flag_of)})")
        say(f"opset: {facts['opset']}")
        say(f"runtime: {facts['runtime']}")


def _facts(model: Model, path: Path) -> dict[str, object]:
    """Return what was written, for people and for scripts."""
    metadata = metadata_of(model)
    return {
        "path": str(path),
        "form": metadata["sdpa_xp.form"],
        "reason": metadata["sdpa_xp.reason"],
        "opset": next(opset.version for opset in model.opset_import if opset.domain == ""),
        "runtime": metadata["sdpa_xp.runtime"],
        "inputs": {value.name: _spec(value) for value in model.graph.input},
        "outputs": {value.name: _spec(value) for value in model.graph.output},
        "nodes": len(model.graph.node),
    }


def _spec(value: onnx.ValueInfoProto) -> str:
    tensor = value.type.tensor_type
    dtype = onnx.helper.tensor_dtype_to_np_dtype(tensor.elem_type).name
    return str(TensorSpec(dtype, tuple(dim.dim_param or dim.dim_value for dim in tensor.shape.dim)))
