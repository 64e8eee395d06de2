"""Names of the library in running text become links to the reference."""

from __future__ import annotations

import importlib
import re

FRAMEWORKS = ("transformers", "flax", "equinox", "keras")
MODULES = ("masks", "biases", "positional", "layers", "plot", *(f"integrations.{name}" for name in FRAMEWORKS))


def places() -> dict[str, str]:
    """Return, for each way to write a public name, its path in the reference."""
    paths = {}
    packages = {"sdpa_xp": "", "sdpa_xp_export": ""} | {f"sdpa_xp.{module}": f"{module}." for module in MODULES}
    for package, short in packages.items():
        for name in importlib.import_module(package).__all__:
            paths |= dict.fromkeys((f"{short}{name}", f"{package}.{name}"), f"{package}.{name}")
    for name in importlib.import_module("sdpa_xp.layers").__all__:
        paths[name] = f"sdpa_xp.layers.{name}"
    return paths


PLACES = places()
TEXT = re.compile(
    r"(?P<kept><(?P<tag>a|autoref|pre|h[1-6]|span|svg)\b.*?</(?P=tag)>)|<code>(?P<name>[\w.]+)</code>",
    re.DOTALL,
)


def linked(html: str) -> str:
    """Return the HTML of a page with names as links, except in links, headings, signatures and blocks."""

    def with_link(match: re.Match[str]) -> str:
        place = PLACES.get(match["name"] or "")
        return f'<autoref identifier="{place}" optional>{match[0]}</autoref>' if place else match[0]

    return TEXT.sub(with_link, html)
