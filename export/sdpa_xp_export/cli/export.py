"""`sdpa-xp export`: from flags or a file to a graph on the disk."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import onnx
import typer

from sdpa_xp._checks.shapes import LAYOUTS
from sdpa_xp.errors import Message, renamed
from sdpa_xp_export._call.call import OUTPUTS
from sdpa_xp_export._dtypes.promotion import FLOATING
from sdpa_xp_export._files.paths import PathArgument
from sdpa_xp_export._model.entries import metadata_of
from sdpa_xp_export._model.large_model import Model
from sdpa_xp_export._runtime.releases import DEFAULT_RUNTIME, OPSETS, PREFERRED
from sdpa_xp_export.cli import settings
from sdpa_xp_export.cli.options import AsJson, Force, check_output, completed_from
from sdpa_xp_export.cli.printing import say, say_json
from sdpa_xp_export.export import export_attention
from sdpa_xp_export.save import save
from sdpa_xp_export.spec import TensorSpec

Spec = Annotated[
    str | None, typer.Option(help="dtype[length,...], such as float32[B,8,L,64]; a name is an open length.")
]
PastSpec = Annotated[str | None, typer.Option(help="A cache, dtype[length,...], such as float32[B,2,P,64].")]
OUTPUT = PathArgument("export", "output")
DEFAULT_OUTPUT = "attention.onnx"
RUNTIMES = [DEFAULT_RUNTIME.replace("cpu", provider) for provider in PREFERRED]


def export(
    query: Spec = None,
    key: Spec = None,
    value: Annotated[str | None, typer.Option(help="Default: the same as --key.")] = None,
    attn_mask: Annotated[
        str | None,
        typer.Option(help="An array, such as bool[B,1,1,S], or masks, such as causal() & padding(int64[B])."),
    ] = None,
    bias: Annotated[
        str | None, typer.Option(help="An array, such as float32[8,L,S], or biases, such as alibi(8).")
    ] = None,
    is_causal: Annotated[
        bool | None, typer.Option("--is-causal/--no-is-causal", help="Query i attends to key j only if j <= i.")
    ] = None,
    scale: Annotated[
        str | None, typer.Option(help="A number, or dtype[length,...] for an input. Default: 1/sqrt(E).")
    ] = None,
    softcap: Annotated[float | None, typer.Option(help="A positive number; 0 turns it off.")] = None,
    sinks: Annotated[
        str | None, typer.Option(help="One logit for each query head, dtype[Hq], such as float32[8].")
    ] = None,
    softmax_dtype: Annotated[
        str | None,
        typer.Option(
            help="float64 computes float32 inputs more precisely.", autocompletion=completed_from(FLOATING[2:])
        ),
    ] = None,
    layout: Annotated[
        str | None, typer.Option(help="...HLE (default) or ...LHE.", autocompletion=completed_from(LAYOUTS))
    ] = None,
    past_key: PastSpec = None,
    past_value: PastSpec = None,
    past_lengths: Annotated[
        str | None, typer.Option(help="The number of tokens in a cache with free space, such as int64[B].")
    ] = None,
    outputs: Annotated[
        str | None,
        typer.Option(
            help=f"One or more of {','.join(OUTPUTS)}. Default: output.", autocompletion=completed_from(OUTPUTS)
        ),
    ] = None,
    dtype: Annotated[
        str | None,
        typer.Option(
            help="Replaces the dtype of query, key, value and cache.", autocompletion=completed_from(FLOATING)
        ),
    ] = None,
    form: Annotated[
        str | None,
        typer.Option(
            help=f"The form of the graph: auto (default), {', '.join(OPSETS)}.",
            autocompletion=completed_from(["auto", *OPSETS]),
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
                f"({', '.join(PREFERRED)}), in quotes. Default: '{DEFAULT_RUNTIME}'."
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
) -> None:
    """Write the ONNX graph of one attention call."""
    flags = {name: flag for name, flag in locals().items() if name in settings.KINDS and flag is not None}
    stated = (settings.read(config) if config else {}) | flags
    has_output = "output" in stated
    target = Path(stated.pop("output", DEFAULT_OUTPUT))
    check_output(OUTPUT, target, {config: "the file of --config"} if config else {})
    model = export_attention(**settings.export_arguments(stated))
    if not has_output and not force and target.is_file():
        rule = "the default file of `output` must not exist"
        hint = "Pass `output` with another name, or `overwrite=True` to replace the file."
        raise FileExistsError(Message("export", rule, {"default": target.resolve()}, hint))
    path = save(model, target, overwrite=force)
    facts = _facts(model, path)
    if as_json:
        say_json(facts)
    else:
        flag_of = {name: "--" + name.replace("_", "-") for name in settings.KINDS}
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
