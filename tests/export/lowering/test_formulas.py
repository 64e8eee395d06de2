"""No formula twice: a mask and a bias are written once, in the library, whose code writes their graphs."""

from __future__ import annotations

import ast
import importlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from edits import nodes
from graphs import BATCH, FORMS, models, qkv
from internals import metadata_of

import sdpa_xp
import sdpa_xp_export
from sdpa_xp.biases import Bias
from sdpa_xp.masks import Mask
from sdpa_xp.masks.algebra import FormulaMask
from sdpa_xp_export import TensorSpec, export_attention

NAMES = {BATCH: "B", 5: "L", 9: "S"}
WORDS = {"blocks", "causal", "keys"}
"""Also an axis of arrays, and a kind of calls."""


def classes(kind: type) -> Iterator[type]:
    for subclass in kind.__subclasses__():
        yield subclass
        yield from classes(subclass)


def words(file: Path) -> tuple[set[str], set[str]]:
    """The names in the code of a file, and its texts."""
    nodes = [*ast.walk(ast.parse(file.read_text(encoding="utf-8")))]
    fields = [getattr(node, field, None) for node in nodes for field in ("id", "attr", "name")]
    texts = {node.value for node in nodes if isinstance(node, ast.Constant) and isinstance(node.value, str)}
    return {name for name in fields if isinstance(name, str)}, texts


def test_forms_and_lowering_name_no_mask_and_no_bias() -> None:
    library, exporter = (Path(str(package.__file__)).parent for package in (sdpa_xp, sdpa_xp_export))
    for file in [*library.glob("masks/*.py"), *library.glob("biases/*.py"), library / "caches/at_positions.py"]:
        importlib.import_module(".".join(["sdpa_xp", *file.relative_to(library).with_suffix("").parts]))
    kinds = [kind for kind in [*classes(Mask), *classes(Bias)] if kind.__module__.startswith("sdpa_xp.")]
    known, called = ({str(getattr(kind, name)) for kind in kinds} for name in ("__name__", "name"))
    assert {"Causal", "Alibi", "MaskAtPositions"} <= known
    assert {"causal", "relative", "at_positions"} <= called
    for file in (*exporter.glob("forms/*.py"), *exporter.glob("lowering/*.py")):
        names, texts = words(file)
        assert not known & names - {"Sum"}, file.name
        assert not called & texts - {"", *WORDS}, file.name


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class Stripes(FormulaMask):
    """A new mask: query i attends keys i, i - 2 and so on, up to `reach` keys before it."""

    name = "stripes"
    reach: int

    def allowed_in(self, tile: Any) -> Any:
        distance = tile.query_index - tile.key_index
        return (distance >= 0) & (distance <= self.reach) & (distance % 2 == 0)

    def key_bounds(self, tile: Any) -> Any:
        return tile.first_position - self.reach, tile.last_position + 1


@pytest.mark.usefixtures("small_blocks")
@pytest.mark.parametrize("reach", [0, 4, 200])
def test_a_new_mask_needs_no_line_here(rng: np.random.Generator, reach: int) -> None:
    """In every form; `tiled` has nodes for its bounds."""
    written = {}
    for mask in (Stripes(reach), Stripes(reach) | Stripes(reach)):  # of which the second has no bounds
        exported = models(qkv(rng), lambda mask=mask: {"attn_mask": mask}, {}, names=NAMES, forms=[*FORMS])
        written[mask.name] = {metadata_of(model)["sdpa_xp.form"]: len(nodes(model.graph)) for model in exported}
    assert written["stripes"].keys() == {"attention", "tiled", "primitive"}
    assert written["stripes"]["tiled"] > written["|"]["tiled"]


@pytest.mark.parametrize("op", ["Max", "Min"])
def test_the_bounds_of_all_masks_limit_a_block(op: str) -> None:
    spec = TensorSpec("float32", (1, "L", 8))

    def limits(mask: Mask) -> int:
        model = export_attention(spec, spec, spec, attn_mask=mask, form="tiled")
        return sum(node.op_type == op for node in nodes(model.graph))

    assert limits(Stripes(2) & Stripes(200)) == limits(Stripes(2)) + 1
