"""Check integers that a mask or a bias has for each batch entry."""

from __future__ import annotations

from typing import cast

from sdpa_xp._checks.shapes import check_broadcasts
from sdpa_xp.errors import ArgumentValueError
from sdpa_xp_export._graph.lengths import broadcasts_to
from sdpa_xp_export.spec import SymbolicShape

_WRITTEN = {
    "key_lengths": "masks.padding({})",
    "query_lengths": "masks.padding(None, {})",
    "length": "masks.prefix({})",
}
"""How the integers of an argument are passed, if not by its name."""


def check_batch_integers(function: str, name: str, shape: SymbolicShape, batch: SymbolicShape) -> None:
    """Check that integers of `shape` broadcast to the batch; `name` is the argument, as attn_mask.offset."""
    if batch and len(shape) <= len(batch) and not broadcasts_to(shape, batch):
        lengths = ", ".join(f'"{length}"' if isinstance(length, str) else str(length) for length in batch)
        spec = f'TensorSpec("int64", ({lengths}{"," if len(batch) == 1 else ""}))'
        argument = name.rpartition(".")[2]
        hint = f"Write {_WRITTEN.get(argument, f'{argument}={{}}').format(spec)}."
        rule = f"`{name}` must have one integer for each batch entry"
        raise ArgumentValueError(function, rule, {f"{name}.shape": shape, "batch": batch}, hint)
    numbers, target = (cast(tuple[int, ...], lengths) for lengths in (shape, batch))
    check_broadcasts(function, name, numbers, target, "(...), one per batch entry")
