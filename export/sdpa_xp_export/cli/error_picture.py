"""A picture of the errors of a report: how much of its bound each run uses up, by the longest length."""

from __future__ import annotations

import math
from collections.abc import Sequence

from sdpa_xp_export.report import Run

WIDTH, HEIGHT = 640, 240
LEFT, RIGHT, TOP, BOTTOM = 60, 16, 16, 44
LEAST_SHARE = 1e-4
"""Runs that use up less of their bound stand on the lower edge."""


def error_picture(runs: Sequence[Run]) -> str:
    """Return the picture as SVG: both axes are logarithmic, and a line stands where the bound is."""
    longest = max(2, *(run.longest for run in runs))
    most = max(1.0, *(min(run.agreement.share, 1e6) for run in runs))
    decades = range(round(math.log10(LEAST_SHARE)), math.ceil(math.log10(most)) + 1)

    def x(length: int) -> float:
        share = math.log(max(length, 1)) / math.log(longest)
        return LEFT + 8 + share * (WIDTH - LEFT - RIGHT - 16)

    def y(share: float) -> float:
        exponent = math.log10(min(max(share, LEAST_SHARE), 10.0 ** decades[-1]))
        height = HEIGHT - TOP - BOTTOM
        return TOP + height * (decades[-1] - exponent) / (decades[-1] - decades[0])

    edge, bottom = WIDTH - RIGHT, HEIGHT - BOTTOM
    lengths = sorted({1, *(4**power for power in range(1, 12) if 4**power < longest), longest})
    parts = [
        f'<line class="bound" x1="{LEFT}" x2="{edge}" y1="{y(1):.1f}" y2="{y(1):.1f}"/>',
        f'<text x="{edge}" y="{y(1) - 5:.1f}" text-anchor="end">bound</text>',
        f'<path class="axis" d="M{LEFT} {TOP}V{bottom}H{edge}"/>',
    ]
    parts += [
        f'<text x="{LEFT - 6}" y="{y(10.0**power) + 4:.1f}" text-anchor="end">{10.0**power:g}</text>'
        for power in decades
    ]
    parts += [
        f'<text x="{x(length):.1f}" y="{bottom + 16}" text-anchor="middle">{length}</text>'
        for length in lengths
    ]
    parts.append(f'<text x="{(LEFT + edge) / 2:g}" y="{HEIGHT - 8}" text-anchor="middle">longest length</text>')
    parts += [
        f'<circle class="{"in" if run.agreement.agrees else "beyond"}" r="3.5" '
        f'cx="{x(run.longest):.1f}" cy="{y(run.agreement.share):.1f}"/>'
        for run in runs
    ]
    beyond = sum(not run.agreement.agrees for run in runs)
    label = f"Error over bound of {len(runs)} runs, by the longest length; {beyond} are beyond their bound"
    return (
        f'<figure><svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{label}">{"".join(parts)}</svg>'
        f"<figcaption>{label}.</figcaption></figure>\n"
    )
