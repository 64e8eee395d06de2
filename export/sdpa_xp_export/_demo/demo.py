"""Attention of a real encoder on every library that is installed, and the graph that computes the same."""

from __future__ import annotations

import os
from collections.abc import Iterator
from io import BytesIO
from pathlib import Path

from sdpa_xp.errors import Message
from sdpa_xp_export._agree.backends import find_backends
from sdpa_xp_export._agree.comparison import Job, JobInputs, Row, compare
from sdpa_xp_export._call.call import ExportCall, checked_call
from sdpa_xp_export._demo.encoder import Activations, activations
from sdpa_xp_export._demo.picture import HEAD, LAYER, attention_maps, draw
from sdpa_xp_export._files.atomic import publish
from sdpa_xp_export._files.paths import PathArgument
from sdpa_xp_export._runtime.session import providers
from sdpa_xp_export.export import export_call
from sdpa_xp_export.save import save
from sdpa_xp_export.spec import TensorSpec

SENTENCES = (
    "The animal did not cross the street because it was too tired.",
    "She put the cup on the table and it broke.",
)
WORD = "it"
MODEL, PICTURE = "attention.onnx", "attention.png"


def call(dtype: str) -> ExportCall:
    """Return the attention of the encoder: 12 heads of width 32 and a padding mask, any batch, any length."""
    qkv = TensorSpec(dtype, ("B", 12, "L", 32))
    return checked_call("demo", qkv, qkv, qkv, attn_mask=TensorSpec("bool", ("B", 1, 1, "L")))


def rows(encoded: Activations, dtypes: tuple[str, ...] = ("float32", "float16")) -> Iterator[Row]:
    """Yield the rows of the table: each backend and each exported form on the inputs of every layer."""
    for dtype in dtypes:
        jobs = {}
        for index, layer in enumerate(encoded.layers, start=1):
            arrays = {"query": layer.query, "key": layer.key, "value": layer.value}
            inputs = {name: x.astype(dtype) for name, x in arrays.items()} | {"attn_mask": encoded.mask}
            jobs[f"layer {index}"] = Job(call(dtype), (JobInputs(inputs, inputs),))
        yield from compare(jobs, dtype, find_backends(), providers())


def findings(encoded: Activations) -> Iterator[str]:
    """Yield what the head of the picture shows, a line for each sentence."""
    for attention_map in attention_maps(encoded):
        token, weight = attention_map.most_attended(WORD)
        place = f"layer {LAYER}, head {HEAD} (from 0)"
        yield f'{place}: "{WORD}" attends most to "{token}", weight {weight:.2f}'


def check_folder(folder: Path, *, overwrite: bool) -> None:
    """Check that the files of the demo do not exist, or may be replaced."""
    for name in (MODEL, PICTURE):
        if os.path.lexists(folder / name) and not overwrite:  # also a broken link
            hint = "Pass `overwrite=True` to replace it."
            rule = "a file of `output` must not exist yet"
            raise FileExistsError(Message("demo", rule, {"file": folder / name}, hint))


def write(encoded: Activations, folder: Path, *, overwrite: bool) -> tuple[Path, Path]:
    """Save the exported graph and the picture in `folder`; return their paths."""
    folder.mkdir(parents=True, exist_ok=True)
    save(export_call(call("float32")), folder / MODEL, overwrite=overwrite)
    drawn = BytesIO()
    draw(attention_maps(encoded)).savefig(drawn, dpi=150)
    publish(drawn.getvalue(), folder / PICTURE, PathArgument("demo", "output"), overwrite=overwrite)
    return folder / MODEL, folder / PICTURE


def encode() -> Activations:
    """Return the attention inputs of the two sentences."""
    return activations(SENTENCES)
