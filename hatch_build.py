"""The README as a package index shows it: its links and its picture lead to the repository.

A package index resolves no relative links, and gives headings no addresses. The repository is `Source` under
[project.urls] in pyproject.toml. While there is none, links become plain text and the picture is left out.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from hatchling.metadata.plugin.interface import MetadataHookInterface

LINK = re.compile(r"(?P<image>!?)\[(?P<text>[^\]]*)\]\((?!https?://)(?P<path>[^)\s]+)\)")


class ReadmeHook(MetadataHookInterface):
    """Sets `readme`, which pyproject.toml lists as dynamic."""

    def update(self, metadata: dict[str, Any]) -> None:
        source = metadata.get("urls", {}).get("Source", "")
        text = absolute(
            (Path(self.root) / "README.md").read_text(encoding="utf-8"), source, metadata["version"]
        )
        metadata["readme"] = {"content-type": "text/markdown", "text": text}


def absolute(text: str, source: str, version: str) -> str:
    """Return the Markdown with absolute links, to the tag of that version in the repository at `source`."""

    def lead(link: re.Match[str]) -> str:
        if not source:
            return "" if link["image"] else link["text"]
        kind = "raw" if link["image"] else "blob"
        path = f"README.md{link['path']}" if link["path"].startswith("#") else link["path"]
        return f"{link['image']}[{link['text']}]({source.rstrip('/')}/{kind}/v{version}/{path})"

    return LINK.sub(lead, text)
