"""The command `sdpa-xp`, run as a user runs it."""

from __future__ import annotations

import io
import re
import sys
from contextlib import redirect_stderr, redirect_stdout
from typing import Any

import pytest

from sdpa_xp_export.cli import main
from sdpa_xp_export.cli.app import KEYWORDS
from sdpa_xp_export.cli.export import KEYS

KEYWORD = re.compile(rf"`({'|'.join({*KEYS, *KEYWORDS, 'html', 'provider'})})`(?! in `--)")
"""A keyword of Python, which has no meaning on the command line, unless it is the key of a file."""

QKV = ["--query", "float32[B,8,L,64]", "--key", "float32[B,2,S,64]"]


def run(*arguments: Any) -> tuple[int, str, str]:
    """Exit code, standard output, standard error."""
    out, err = (io.TextIOWrapper(io.BytesIO(), "utf-8", newline="") for _ in range(2))
    with pytest.MonkeyPatch.context() as patch, redirect_stdout(out), redirect_stderr(err):
        patch.setattr(sys, "argv", ["sdpa-xp", *map(str, arguments)])
        with pytest.raises(SystemExit) as exited:
            main()
    for stream in (out, err):
        stream.seek(0)
    return int(exited.value.code or 0), out.read(), err.read()


def printed(*arguments: Any) -> str:
    """Standard output of a command that succeeds, and says nothing else."""
    code, out, err = run(*arguments)
    assert (code, err) == (0, "")
    return out


def refused(*arguments: Any) -> str:
    """The one line on standard error of a command that exits 2; it names flags, and no keywords."""
    code, out, err = run(*arguments)
    assert (code, out) == (2, "")
    assert err.startswith("sdpa-xp: ")
    assert err.count("\n") == 1
    assert not KEYWORD.search(err)
    assert "overwrite" not in err
    return err
