"""A picture of the tiles that a call computes, as its own plan has them."""

from __future__ import annotations

from typing import Any

from sdpa_xp._call.options import CallOptions
from sdpa_xp._call.prepare import prepare
from sdpa_xp._tiles.plan import plan_tiles
from sdpa_xp.masks import Mask
from sdpa_xp.plot.panels import FONT, THEMES, paint


def computed(x: Any, mask: Mask) -> list[tuple[range, range, bool]]:
    """Queries and keys of each tile of self-attention of `x` (L, E), and whether all its pairs may attend."""
    options = CallOptions(attn_mask=mask, implementation="xp")
    call = prepare("explain", {"query": x, "key": x, "value": x}, options, has_kernels=True)
    scores = call.scores_without_dropout()
    plan = plan_tiles(call.grid, scores.group, 2 * call.sizes.width)
    return [
        (tile.rows, tile.columns, allowed is True)
        for task in plan.tasks()
        for tile, allowed in scores.slice_leading(task.leading).tiles(task.rows, plan)
    ]


def draw(x: Any, masks: list[Mask], *, theme: str) -> Any:
    """A panel a mask; tiles that are not computed are left empty."""
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch

    colours, length = THEMES[theme], x.shape[-2]
    figure = Figure(figsize=(3.2 * len(masks), 3.9), layout="constrained", facecolor="none")
    for axes, mask in zip(figure.subplots(1, len(masks), squeeze=False).flat, masks, strict=True):
        for rows, columns, whole in computed(x, mask):
            axes.fill_between(
                [columns.start, columns.stop],
                rows.start,
                rows.stop,
                facecolor=colours.full if whole else colours.contrast,
                edgecolor=colours.ink,
                linewidth=0.4,
            )
        axes.set(xlim=(0, length), ylim=(length, 0), aspect="equal", xlabel="key", ylabel="query")
        axes.set(title=str(mask), facecolor=colours.empty)
        paint(axes, colours)
        axes.set_facecolor(colours.empty)
    kinds = {"no mask needed": colours.full, "masked in part": colours.contrast, "skipped": colours.empty}
    patches = [Patch(facecolor=fill, edgecolor=colours.ink, label=name) for name, fill in kinds.items()]
    figure.legend(
        handles=patches,
        loc="outside lower center",
        ncols=3,
        frameon=False,
        labelcolor=colours.ink,
        fontsize=FONT,
    )
    return figure
