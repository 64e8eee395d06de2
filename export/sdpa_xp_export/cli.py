"""Attention on every array library, and the ONNX graph that computes the same."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Iterable
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

try:
    import typer
    from rich.box import SIMPLE_HEAD
    from rich.console import Console
    from rich.table import Table
except ModuleNotFoundError as missing:
    sys.exit(f"sdpa-xp: {missing.name} is not installed; `pip install 'sdpa_xp[cli,export]'` brings it")

from sdpa_xp_export import backends, demo, files
from sdpa_xp_export.agree import Row, compare, feature_jobs
from sdpa_xp_export.export import export_attention
from sdpa_xp_export.session import providers
from sdpa_xp_export.spec import TensorSpec
from sdpa_xp_export.verify import verify

DISAGREES = 1
BAD_ARGUMENTS = 2
DTYPES = ("float32", "float16", "float64")

app = typer.Typer(no_args_is_help=True, add_completion=False, rich_markup_mode=None, help=__doc__)
out = Console(width=max(100, Console().width))  # a table is not cut in a pipe

Spec = Annotated[str, typer.Option(help="dtype[length,...], as float32[B,8,L,64]; a name is a free length.")]
OptionalSpec = Annotated[str | None, typer.Option(help="dtype[length,...]; broadcasts to (..., Hq, L, S).")]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON for scripts.")]


def main() -> None:
    """The console script: bad arguments are one line and exit code 2."""
    try:
        app()
    except ModuleNotFoundError as error:
        print(f"sdpa-xp: {error}; `pip install 'sdpa_xp[demo]'` brings all that it uses", file=sys.stderr)
        sys.exit(BAD_ARGUMENTS)
    except (ValueError, TypeError, OSError) as error:
        print(f"sdpa-xp: {error}", file=sys.stderr)
        sys.exit(BAD_ARGUMENTS)


@app.command("demo")
def run_demo(
    folder: Annotated[Path, typer.Option("--output", "-o", help="Where the files go.")] = Path("demo-output"),
    force: Annotated[bool, typer.Option("--force", help="Replace the files if they are there.")] = False,
) -> None:
    """Attention of a real sentence encoder on everything found here; exits 1 if anything disagrees."""
    demo.check_folder(folder, overwrite=force)
    encoded = demo.encode()
    _say(f"all-MiniLM-L6-v2, attention of {len(encoded.layers)} layers x 12 heads on:")
    for tokens in encoded.tokens:
        _say("  " + " ".join(tokens))
    _finish(demo.rows(encoded))
    for path in demo.write(encoded, folder):
        _say(f"wrote {path}")


@app.command()
def agree(
    dtype: Annotated[list[str] | None, typer.Option(help="Again for several; default all.")] = None,
    backend: Annotated[list[str] | None, typer.Option(help="Again for several; default all found.")] = None,
    as_json: AsJson = False,
) -> None:
    """Every feature on every array library and in every exported form; exits 1 if anything disagrees."""
    found = backends.find(backend)
    rows = (row for each in dtype or DTYPES for row in compare(feature_jobs(each), each, found, providers()))
    _finish(rows, as_json)


@app.command("backends")
def list_backends(as_json: AsJson = False) -> None:
    """The array libraries and the onnxruntime providers found here."""
    import onnxruntime

    found = [(each.name, each.version, each.device) for each in backends.find()]
    found += [("onnxruntime", onnxruntime.__version__, name) for name in providers()]
    if as_json:
        _say_json([dict(zip(("name", "version", "device"), row, strict=True)) for row in found])
        return
    table = _plain_table("library", "version", "device or provider")
    for row in found:
        table.add_row(*row)
    out.print(table)


@app.command()
def export(
    query: Spec,
    key: Spec,
    value: Annotated[str | None, typer.Option(help="Default: as --key.")] = None,
    output: Annotated[Path, typer.Option("--output", "-o")] = Path("attention.onnx"),
    attn_mask: OptionalSpec = None,
    bias: OptionalSpec = None,
    is_causal: Annotated[bool, typer.Option("--is-causal", help="j <= i, from the upper left.")] = False,
    scale: Annotated[float | None, typer.Option(help="Default 1 / sqrt(E).")] = None,
    softcap: Annotated[float | None, typer.Option()] = None,
    form: Annotated[str, typer.Option(help="auto, attention or primitive.")] = "auto",
    opset: Annotated[int | None, typer.Option(help="Default 23 for attention, 17 for primitive.")] = None,
    runtime: Annotated[str, typer.Option(help="Oldest release; provider.")] = "onnxruntime>=1.28;cpu",
    force: Annotated[bool, typer.Option("--force", help="Replace the file if it is there.")] = False,
) -> None:
    """Write the ONNX graph of one call of attention."""
    specs = {
        "query": query,
        "key": key,
        "value": key if value is None else value,
        "attn_mask": attn_mask,
        "bias": bias,
    }
    model = export_attention(
        **{name: TensorSpec.parse(spec) for name, spec in specs.items() if spec is not None},
        is_causal=is_causal,
        scale=scale,
        softcap=softcap,
        form=form,
        opset=opset,
        runtime=runtime,
    )
    path = files.save(model, output, overwrite=force)
    chosen = {entry.key: entry.value for entry in model.metadata_props}
    opset_used = model.opset_import[0].version
    _say(f"wrote {path}: {chosen['sdpa_xp.form']}, opset {opset_used} ({chosen['sdpa_xp.reason']})")


@app.command("verify")
def run_verify(
    model: Annotated[Path, typer.Argument(help="A file that sdpa-xp export wrote.")],
    provider: Annotated[str | None, typer.Option(help="cpu or cuda; default all offered.")] = None,
    as_json: AsJson = False,
) -> None:
    """Run a model in onnxruntime against the float64 reference; exits 1 if it disagrees."""
    report = verify(model, provider=provider)
    if as_json:
        _say_json(asdict(report) | {"agrees": report.agrees})
    else:
        runs = _plain_table("lengths", "provider", "error", "bound", "agrees", "ms")
        for run in report.runs:
            error, bound = f"{run.agreement.absolute:.2g}", f"{run.agreement.bound:.2g}"
            runs.add_row(
                run.inputs, run.provider, error, bound, _yes(run.agreement.agrees), f"{run.seconds * 1e3:.2f}"
            )
        nodes = _plain_table("node that ran", "op", "provider", "asked")
        for placement in report.placements:
            nodes.add_row(placement.node, placement.op, placement.provider, placement.asked)
        out.print(runs, nodes)
        _say(str(report))
    if not report.agrees:
        raise typer.Exit(DISAGREES)


def _say(text: str) -> None:
    """A line as it is: neither cut nor read as markup."""
    out.print(text, markup=False, highlight=False, soft_wrap=True)


def _say_json(value: object) -> None:
    """JSON has no infinity: an error that is infinite is null."""

    def finite(value: object) -> object:
        if isinstance(value, dict):
            return {name: finite(each) for name, each in value.items()}
        if isinstance(value, list | tuple):
            return [finite(each) for each in value]
        return None if isinstance(value, float) and not math.isfinite(value) else value

    print(json.dumps(finite(value), allow_nan=False))


def _finish(rows: Iterable[Row], as_json: bool = False) -> None:
    """Print the rows, each with the worst error of its jobs; exit 1 if one disagrees."""
    seen = list(rows)
    if as_json:
        _say_json([asdict(row) | {"agrees": row.agrees} for row in seen])
    else:
        out.print(_table(seen))
    for row in seen:
        if not row.agrees:
            name = f"{row.backend} {row.implementation} {row.dtype} {row.device}"
            _say(f"DISAGREES: {name}: {', '.join(row.disagreeing)}")
    if not all(row.agrees for row in seen):
        raise typer.Exit(DISAGREES)


def _table(rows: Iterable[Row]) -> Table:
    columns = ("backend", "implementation", "dtype", "device", "abs", "rel", "bound", "agrees", "ms")
    table = _plain_table(*columns)
    for row in rows:
        worst = row.worst
        table.add_row(
            row.backend,
            row.implementation,
            row.dtype,
            row.device,
            *(f"{number:.1e}" for number in (worst.absolute, worst.relative, worst.bound)),
            _yes(row.agrees),
            f"{row.seconds * 1e3:.1f}",
        )
    return table


def _plain_table(*columns: str) -> Table:
    """A table of plain lines."""
    table = Table(box=SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False)
    for column in columns:
        table.add_column(column, no_wrap=True)
    return table


def _yes(agrees: bool) -> str:
    return "[green]yes[/]" if agrees else "[bold red]NO[/]"
