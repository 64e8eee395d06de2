"""The badges of the README, which are files of the tree and need no network.

Write them again: python docs/_site/badges.py
"""

from __future__ import annotations

import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "docs" / "assets" / "badges"
HEIGHT, LETTER, MARGIN = 20, 6.2, 6
"""In pixels; a letter is as wide as it is in a font of 11 pixels, on average."""


def badges() -> dict[str, tuple[str, str]]:
    """Return by file what a badge says, on its left and on its right side."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    versions = [line.rpartition(" ")[2] for line in project["classifiers"] if "Python :: 3." in line]
    return {
        "python": ("Python", f"{versions[0]} to {versions[-1]}"),
        "licence": ("licence", project["license"]),
        "tests": ("tested on the CPU", "NumPy, torch, JAX, MLX, Dask, array-api-strict"),
    }


def badge(left: str, right: str) -> str:
    """Return an SVG with the two texts side by side."""
    widths = [round(len(text) * LETTER + 2 * MARGIN) for text in (left, right)]
    texts = "".join(
        f'<rect x="{x}" width="{width}" height="{HEIGHT}" fill="{colour}"/>'
        f'<text x="{x + MARGIN}" y="14" textLength="{width - 2 * MARGIN}">{text}</text>'
        for text, x, width, colour in zip(
            (left, right), (0, widths[0]), widths, ("#555", "#1f6feb"), strict=True
        )
    )
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{sum(widths)}" height="{HEIGHT}" role="img">'
        f"<title>{left}: {right}</title>"
        f'<g fill="#fff" font-family="Verdana,DejaVu Sans,sans-serif" font-size="11">{texts}</g></svg>\n'
    )


def write() -> None:
    """Write all files."""
    FOLDER.mkdir(exist_ok=True)
    for name, (left, right) in badges().items():
        (FOLDER / f"{name}.svg").write_text(badge(left, right))


if __name__ == "__main__":
    write()
