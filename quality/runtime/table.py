"""The results as Markdown: a table of releases and forms, then why a form is refused, and what is wrong."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping
from typing import Any


def markdown(results: Mapping[str, Any]) -> str:
    """runtimes.json -> runtimes.md."""
    return "\n".join(_lines(results)) + "\n"


def _lines(results: Mapping[str, Any]) -> Iterator[str]:
    releases: Mapping[str, Any] = results["releases"]
    forms = list(next(iter(releases.values()))["forms"])
    versions = {"Python": results["python"]} | results["packages"]
    packages = ", ".join(f"{name} {version}" for name, version in versions.items())
    yield "# What each release of onnxruntime computes right"
    yield ""
    yield f"{results['calls']} calls: ONNX's own cases of Attention, and our list of features in four dtypes."
    yield "Each form was exported for the release, and run on the CPU in it and in each later one here."
    yield "A graph is right if it agrees with the float64 reference in all of them."
    yield f"Written by `make runtimes` on {results['date']}, {results['machine']}: {packages}."
    yield ""
    yield "Right / refused when exported / wrong:"
    yield ""
    yield from _table(
        ["onnxruntime", *forms], ([name, *_counts(results_of)] for name, results_of in releases.items())
    )
    yield ""
    yield 'What `form="auto"` takes:'
    yield ""
    choices = (
        [name, *(str(results_of["auto"][form]) for form in forms)] for name, results_of in releases.items()
    )
    yield from _table(["onnxruntime", *forms], choices)
    yield ""
    yield "Why a form is refused, and for how many calls in each release:"
    yield ""
    yield from _table(["form", "reason", *releases], _reasons(releases, forms))
    wrong = list(_wrong(releases))
    if wrong:
        yield ""
        yield "What is wrong:"
        yield ""
        yield from _table(["onnxruntime", "form", "call", "fault"], wrong)


def _table(header: list[str], rows: Iterator[list[str]] | list[list[str]]) -> Iterator[str]:
    for cells in (header, ["---"] * len(header), *rows):
        yield f"| {' | '.join(cell.replace('|', '/') for cell in cells)} |"


def _counts(release: Mapping[str, Any]) -> Iterator[str]:
    for form in release["forms"].values():
        yield f"{form['right']} / {sum(form['refused'].values())} / {len(form['wrong'])}"


def _reasons(releases: Mapping[str, Any], forms: list[str]) -> Iterator[list[str]]:
    for form in forms:
        by_reason: dict[str, dict[str, int]] = defaultdict(dict)
        for name, release in releases.items():
            for reason, count in release["forms"][form]["refused"].items():
                by_reason[reason][name] = count
        for reason, counts in sorted(by_reason.items()):
            yield [form, reason, *(str(counts.get(name, "")) for name in releases)]


def _wrong(releases: Mapping[str, Any]) -> Iterator[list[str]]:
    for name, release in releases.items():
        for form, outcome in release["forms"].items():
            for call, fault in outcome["wrong"].items():
                yield [name, form, call, fault]
