"""A picture of the tiles that a call computes, as its own plan has them."""

from __future__ import annotations

from typing import Any

from internals import CallOptions, plan_tiles, prepare

from sdpa_xp.masks import Mask
from sdpa_xp.plot.panels import FONT, THEMES, Theme, paint


def computed(x: Any, mask: Mask) -> list[tuple[range, range, bool]]:
    """Return queries and keys of each tile of self-attention of `x` (L, E), and whether all pairs attend."""
    options = CallOptions(attn_mask=mask, implementation="xp")
    call = prepare.prepare("explain", {"query": x, "key": x, "value": x}, options, has_kernels=True)
    scores = call.scores()
    plan = plan_tiles(call.grid, scores.group, 2 * call.sizes.width)
    return [
        (tile.rows, tile.columns, allowed is True)
        for task in plan.tasks()
        for leading, rows in zip(task.slices, task.ranges, strict=True)
        for tile, allowed in scores.slice_leading(leading).tiles(rows, plan)
    ]


def draw(x: Any, masks: list[Mask], *, theme: str) -> Any:
    """Draw one panel for each mask. Tiles that are not computed stay empty."""
    from matplotlib.figure import Figure

    colours = THEMES[theme]
    figure = Figure(figsize=(3.2 * len(masks), 3.9), layout="constrained", facecolor="none")
    for axes, mask in zip(figure.subplots(1, len(masks), squeeze=False).flat, masks, strict=True):
        draw_panel(axes, x, mask, colours)
        axes.set(title=str(mask))
        paint(axes, colours)
        axes.set_facecolor(colours.empty)
    legend(figure, colours)
    return figure


def draw_panel(axes: Any, x: Any, mask: Mask, colours: Theme) -> None:
    """Draw the tiles of self-attention of `x` (L, E) under `mask`."""
    for rows, columns, whole in computed(x, mask):
        axes.fill_between(
            [columns.start, columns.stop],
            rows.start,
            rows.stop,
            facecolor=colours.full if whole else colours.contrast,
            edgecolor=colours.ink,
            linewidth=0.4,
        )
    length = x.shape[-2]
    axes.set(xlim=(0, length), ylim=(length, 0), aspect="equal", xlabel="key", ylabel="query")
    axes.set_facecolor(colours.empty)


def legend(figure: Any, colours: Theme) -> None:
    """Say below the panels what the colours mean."""
    from matplotlib.patches import Patch

    kinds = {"no mask needed": colours.full, "masked in part": colours.contrast, "skipped": colours.empty}
    figure.legend(
        handles=[Patch(facecolor=fill, edgecolor=colours.ink, label=name) for name, fill in kinds.items()],
        loc="outside lower center",
        ncols=3,
        frameon=False,
        labelcolor=colours.ink,
        fontsize=FONT,
    )
