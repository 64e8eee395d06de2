"""Every code block of the pages runs, in order, in one namespace a page.

`python`, `pycon` and `console` run here, and `toml` is what `console` reads; `html` runs in a browser,
_site/browser/guide.cjs, and `mermaid` is drawn there.
"""

from __future__ import annotations

import importlib.util
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
from internals import override, providers, verify_inputs
from sybil import Document, Example, Region, Sybil
from sybil.evaluators.doctest import NUMBER, DocTestEvaluator
from sybil.evaluators.python import PythonEvaluator
from sybil.parsers.abstract.doctest import DocTestStringParser
from sybil.parsers.markdown import SkipParser
from sybil.parsers.markdown.lexers import RawFencedCodeBlockLexer

from sdpa_xp_export.cli import main

os.environ.setdefault("ORT_DISABLE_TELEMETRY", "1")
ROOT = Path(__file__).parents[1]
sys.path += [
    str(ROOT / folder) for folder in ("docs/_site", "tests", "benchmarks")
]  # as _site/hooks.py does

verify_inputs.new_seed = lambda: (
    0
)  # so that each run of the pages does the same


class Blocks:
    """Fenced blocks of a language, whatever stands behind its name."""

    def __init__(self, language: str, evaluate: Any) -> None:
        self.lexer = RawFencedCodeBlockLexer(
            re.compile(rf"(?P<language>{language})(?:[ \t][^\n]*)?$\n", re.M)
        )
        self.evaluate = evaluate

    def __call__(self, document: Document) -> Iterable[Region]:
        for region in self.lexer(document):
            region.parsed = region.lexemes["source"]
            region.evaluator = self.evaluate
            yield region


class Sessions(Blocks):
    """Blocks as a reader of Python's prompt sees them, whose output is compared."""

    def __call__(self, document: Document) -> Iterable[Region]:
        parser = DocTestStringParser(DocTestEvaluator(NUMBER))
        for region in super().__call__(document):
            for inner in parser(region.parsed, document.path):
                inner.adjust(region, region.parsed)
                yield inner


def typed(example: Example) -> None:
    """Run the lines of a `console` block that start with `$ sdpa-xp` or `$ python`; others install or serve."""
    for line in example.parsed.splitlines():
        command, *arguments = shlex.split(
            line.removeprefix("$ "), comments=True
        ) or [""]
        if line.startswith("$ sdpa-xp "):
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(sys, "argv", [command, *arguments])
                with pytest.raises(SystemExit) as ended:
                    main()
            assert not ended.value.code, line
        elif line.startswith("$ python "):
            subprocess.run(
                [sys.executable, *arguments],
                check=True,
                stdout=subprocess.DEVNULL,
            )


def written(example: Example) -> None:
    """Write a block with a title to the file that it names, for the blocks behind it."""
    title = re.match(
        r'```toml title="([\w.]+)"', example.document.text[example.start :]
    )
    assert title is not None, "a `toml` block has a title"
    Path(title[1]).write_text(example.parsed)


def absent(module: str) -> bool:
    return importlib.util.find_spec(module) is None


def starts(provider: str) -> bool:
    """Whether onnxruntime starts a provider; the wheel for GPUs offers CUDA on every machine."""
    return provider in providers()


def elsewhere(namespace: dict[str, Any]) -> None:
    """Each page writes its files to a folder of its own."""
    namespace |= {"absent": absent, "starts": starts}


pytest_collect_file = Sybil(
    parsers=[
        SkipParser(),
        Blocks("python", PythonEvaluator()),
        Sessions("pycon", None),
        Blocks("console", typed),
        Blocks("toml", written),
    ],
    pattern="*.md",
    setup=elsewhere,
    fixtures=["folder"],
).pytest()


@pytest.fixture(scope="session")
def runtime() -> Iterable[Any]:
    """One process for the models of all pages."""
    from short_runs import one_process

    with one_process() as shared:
        yield shared


@pytest.fixture(scope="module")
def folder(
    tmp_path_factory: pytest.TempPathFactory, runtime: Any
) -> Iterable[None]:
    """Where the blocks of a page write: they share it, and nothing else does.

    The playground gets its models of 2 heads and one soft cap alone, models are
    verified in one process and without the longest runs; where the site is
    built, nothing is left out.
    """
    from short_runs import leave_out_long_runs, run_models_by

    with pytest.MonkeyPatch.context() as patch:
        run_models_by(patch, runtime)
        patch.setattr("playground.HEADS", (2,))
        patch.setattr("playground.SOFTCAPS", (4,))
        leave_out_long_runs(patch)
        override(patch, "LONGEST_TRIAL", 140)
        override(patch, "OTHER_SIZES", ((64, 64),))
        patch.chdir(tmp_path_factory.mktemp("page"))
        yield
