"""`sdpa-xp judge`: what an attention function means by attention, and where it is wrong by that."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import typer

from sdpa_xp._checks.arrays import LAYOUTS
from sdpa_xp.errors import ArgumentValueError

from .._backends import LIBRARIES
from .._judge.cases import data
from .._judge.judgement import DTYPES
from ..judge import judge as judged
from . import DISAGREES
from .terminal import flags, progress, say, say_json


@flags(
    settings={
        "dtype": {"values": DTYPES},
        "library": {"values": LIBRARIES},
        "layout": {"values": LAYOUTS},
    },
    dtypes=", ".join(DTYPES),
    libraries=", ".join(LIBRARIES),
    names=", ".join([*data()["names"]][1:]),
)
def judge(
    function: Path,
    library: str | None = None,
    name: list[str] | None = None,
    layout: str | None = None,
    dtype: list[str] | None = None,
    contract: bool = False,
    json: bool = False,
) -> None:
    """Judge any attention function by hard cases.

    First what it means by attention, then where it is wrong by that. Exits with 1 if it is wrong somewhere, or
    if nothing could be judged. The function runs in this process: judge code and files that you trust.

    Args:
        function: module:function, as torch.nn.functional:scaled_dot_product_attention, or an ONNX file with
            inputs query, key and value.
        library (<library>): The arrays that it gets: {libraries}. Default: by its module, or numpy.
        name (<name>): mask=keyword says which keyword is its mask, mask=keyword:value which value asks for it.
            Also for {names}.
        layout (<layout>): ...HLE or ...LHE. Default: ...HLE.
        dtype (<dtype>): {dtypes}; repeat the option for several. Default: all.
        contract: Judge by the contract of sdpa_xp, not by what the function itself means.
        json: Print JSON for scripts.
    """
    names = dict(map(_named, name or ()))
    chosen: Any = layout
    with progress("judge", quiet=json) as steps:
        verdict = judged(
            str(function),
            library=library,
            names=names,
            layout=chosen,
            dtypes=dtype or DTYPES,
            contract=contract,
            watch=lambda _done, total, case: steps.end(case, total),
        )
    if json:
        say_json(verdict.to_json())
    else:
        for line in str(verdict).splitlines():
            say(line)
    if not verdict.agrees:
        raise typer.Exit(DISAGREES)


def _named(text: str) -> tuple[str, Any]:
    """Read name=keyword, or name=keyword:value."""
    name, _, keyword = text.partition("=")
    keyword, colon, value = keyword.partition(":")
    if not name or not keyword:
        raise ArgumentValueError("judge", "`names` must be written as name=keyword", {"names": repr(text)})
    return name, (keyword, value) if colon else keyword
