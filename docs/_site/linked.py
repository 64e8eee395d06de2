"""Names of the library in running text lead to their place in the reference."""

from __future__ import annotations

import importlib
import re

MODULES = ("masks", "biases", "positional", "layers", "plot", "integrations.transformers")


def places() -> dict[str, str]:
    """By each way to write a public name, the path that the reference renders it under."""
    found = {}
    packages = {"sdpa_xp": "", "sdpa_xp_export": ""} | {f"sdpa_xp.{each}": f"{each}." for each in MODULES}
    for package, short in packages.items():
        for name in importlib.import_module(package).__all__:
            found |= dict.fromkeys((f"{short}{name}", f"{package}.{name}"), f"{package}.{name}")
    for name in importlib.import_module("sdpa_xp.layers").__all__:
        found[name] = f"sdpa_xp.layers.{name}"
    return found


PLACES = places()
TEXT = re.compile(
    r"(?P<kept><(?P<tag>a|autoref|pre|h[1-6]|span|svg)\b.*?</(?P=tag)>)|<code>(?P<name>[\w.]+)</code>",
    re.DOTALL,
)


def linked(html: str) -> str:
    """The HTML of a page with each name as a link, but in links, headings, signatures and blocks."""

    def with_link(found: re.Match[str]) -> str:
        place = PLACES.get(found["name"] or "")
        return f'<autoref identifier="{place}" optional>{found[0]}</autoref>' if place else found[0]

    return TEXT.sub(with_link, html)
