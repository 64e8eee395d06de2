"""Draw mutants with a seed: a file by its length, then an operator of those in it, then a site."""

from __future__ import annotations

import random
from collections import defaultdict
from pathlib import Path

from quality.mutants.sites import Mutant, differs, mutants

PACKAGES = ("sdpa_xp", "export/sdpa_xp_export")


def draw(root: Path, count: int, seed: int) -> list[Mutant]:
    """`count` different mutants of the two packages under `root`; the same ones for one tree and seed."""
    files = [path for package in PACKAGES for path in sorted((root / package).rglob("*.py"))]
    sources = {path: path.read_text() for path in files}
    sites = {path: _by_operator(mutants(root, path)) for path in files}
    files = [path for path in files if sites[path]]
    weights = [len(sources[path].splitlines()) for path in files]
    rng, drawn, tried = random.Random(seed), [], set()
    while len(drawn) < count:
        (path,) = rng.choices(files, weights)
        kinds = sites[path]
        mutant = rng.choice(kinds[rng.choice(sorted(kinds))])
        if mutant not in tried and differs(sources[path], mutant):
            drawn.append(mutant)
        tried.add(mutant)
    return drawn


def _by_operator(all_mutants: list[Mutant]) -> dict[str, list[Mutant]]:
    kinds: dict[str, list[Mutant]] = defaultdict(list)
    for mutant in all_mutants:
        kinds[mutant.operator].append(mutant)
    return kinds
