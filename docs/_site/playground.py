"""The models of the playground: one exported graph for each mask, softcap and number of heads."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from itertools import product

import onnx
from internals import metadata_of

from sdpa_xp import masks
from sdpa_xp_export import TensorSpec, export_attention, verify

WIDTH = 32
"""The width of a token, which the heads share; assets/playground/vectors.js draws as many numbers."""
MASKS = {
    "none": None,
    "causal": masks.causal(),
    "window": masks.sliding_window(2, 0),
    "band": masks.sliding_window(2, 2),
    "prefix": masks.causal() | masks.prefix(3),
    "chunks": masks.causal() & masks.chunked(4),
    "future": ~masks.causal(),
}
SOFTCAPS = (0, 1, 4)
HEADS = (1, 2, 4)


def name_of(mask: str, softcap: int, heads: int) -> str:
    """Return the file name of a model. assets/playground/texts.js builds the same name."""
    return f"{mask}-softcap{softcap}-heads{heads}.onnx"


@cache
def models() -> dict[str, onnx.ModelProto]:
    """Return the models by file name."""
    exported = {}
    for mask, softcap, heads in product(MASKS, SOFTCAPS, HEADS):
        tokens = TensorSpec("float32", (heads, "L", WIDTH // heads))
        exported[name_of(mask, softcap, heads)] = export_attention(
            tokens,
            tokens,
            tokens,
            MASKS[mask],
            scale=TensorSpec("float32", ()),
            softcap=softcap,
            outputs=("output", "weights"),
            runtime="onnxruntime>=1.28;web",
        )
    return exported


def table() -> str:
    """Verify models; return an HTML table of masks, with the exporter's choices and links to the models."""
    for name in checked():
        report = verify(models()[name], seed=0)  # one seed, so that a site is built as it was before
        if not report.agrees:
            raise ValueError(f"{name}: {report}")
    softcaps = "".join(f"<th>{f'softcap {softcap}' if softcap else 'no softcap'}</th>" for softcap in SOFTCAPS)
    rows = "".join(f"<tr>{''.join(f'<td>{cell}</td>' for cell in _row(mask))}</tr>" for mask in MASKS)
    heading = f"<tr><th>mask</th><th>form, opset</th>{softcaps}</tr>"
    return f"<table><thead>{heading}</thead><tbody>{rows}</tbody></table>"


def checked() -> Iterator[str]:
    """Yield a model of each mask and softcap, in turns of each number of heads, which changes no operator."""
    for row, mask in enumerate(MASKS):
        for column, softcap in enumerate(SOFTCAPS):
            names = [name_of(mask, softcap, heads) for heads in HEADS]
            operators = {tuple(node.op_type for node in models()[name].graph.node) for name in names}
            if len(operators) > 1:
                raise ValueError(f"the graphs must have the same operators; got {names}")
            yield names[(row + column) % len(HEADS)]


def _row(mask: str) -> Iterator[str]:
    yield "none" if MASKS[mask] is None else f"<code>{MASKS[mask]}</code>"
    (form_and_opset,) = {_form_and_opset(models()[name_of(mask, *rest)]) for rest in product(SOFTCAPS, HEADS)}
    yield form_and_opset
    for softcap in SOFTCAPS:
        names = {name_of(mask, softcap, heads): heads for heads in HEADS}
        yield ", ".join(
            f'<a href="../assets/playground/{name}" download aria-label="{heads} ({name})">{heads}</a>'
            for name, heads in names.items()
        )


def _form_and_opset(model: onnx.ModelProto) -> str:
    """Return the form and the opset that the model states in its metadata."""
    opset = next(entry.version for entry in model.opset_import if not entry.domain)
    return f"{metadata_of(model)['sdpa_xp.form']}, {opset}"
