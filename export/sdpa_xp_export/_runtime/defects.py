"""What programs are known to compute wrong, by release: each fact stands once, in defects.json."""

from __future__ import annotations

import json
import re
from collections.abc import Collection
from functools import cache
from pathlib import Path
from typing import NamedTuple, TypeAlias

Release: TypeAlias = tuple[int, ...]
"""Major and minor number, and the patch if it is not 0."""
KERNELS = {"wasm": "cpu", "openvino": "openvino", "webgpu": "webgpu", "cpu": "cpu"}
"""Whose defects a provider has: WebAssembly has the kernels of the CPU, and CUDA's were not tried."""
NEVER: Release = (9999,)


class Defect(NamedTuple):
    """Something that an operator computes wrong."""

    node: str
    provider: str
    what: str
    since: Release
    """The first release that has it; () is the oldest that was tried."""
    until: Release
    """The first release that is right again."""
    form: str
    """The form of a graph that is refused because of it; "" if the exporter writes what does not meet it."""
    dtype: str
    """The one dtype in which it is wrong; "" for others, too."""


@cache
def known_defects() -> dict[str, Defect]:
    """Return all of them by name."""
    listed = json.loads(Path(__file__).with_suffix(".json").read_text("utf-8"))["defects"]
    return {name: _defect(**facts) for name, facts in listed.items()}


def _defect(
    node: str, provider: str, what: str, since: str = "", until: str = "", form: str = "", dtype: str = ""
) -> Defect:
    return Defect(node, provider, what, numbers_of(since), numbers_of(until) or NEVER, form, dtype)


def first_right(form: str, oldest: Release) -> Release:
    """Return the first release without a defect for which the form is refused, those aside that have no end."""
    ends = (defect.until for defect in known_defects().values() if defect.form == form)
    return max([oldest, *(end for end in ends if end != NEVER)])


def still_wrong(form: str, provider: str) -> str:
    """Return the defect without an end for which the form is refused on a provider; "" if there is none."""
    wanted = (form, provider, NEVER)
    known = (x.what for x in known_defects().values() if (x.form, x.provider, x.until) == wanted)
    return next(known, "")


def defect_notes(
    nodes: Collection[str], dtypes: Collection[str], provider: str, release: str
) -> tuple[str, ...]:
    """Return what the release of a provider is known to compute wrong in these operators and dtypes."""
    numbers = numbers_of(release)
    known = (defect for defect in known_defects().values() if defect.provider == KERNELS.get(provider))
    there = (defect for defect in known if defect.since <= numbers < defect.until and defect.node in nodes)
    there = (defect for defect in there if defect.dtype in ("", *dtypes))
    return tuple(f"a known defect of {defect.node} in {release}: {defect.what}" for defect in there)


def numbers_of(release: str) -> Release:
    """Return the numbers of a release, without a patch of 0; () if the text is none."""
    match = re.match(r"(\d+)\.(\d+)(?:\.(\d+))?", release)
    if match is None:
        return ()
    major, minor, patch = (int(number or 0) for number in match.groups())
    return (major, minor, patch) if patch else (major, minor)
