"""What the judge finds of a function: its profile, then its faults, and what was not judged."""

from __future__ import annotations

import re
import textwrap
from collections import Counter
from dataclasses import asdict, dataclass
from typing import Any

from sdpa_xp._checks import Immutable
from sdpa_xp._display import folded, table

WIDTH = 100
SHOWN = 8
"""The most faults that are printed."""


@dataclass(frozen=True, slots=True)
class Answer(Immutable):
    """What a function means, in one respect."""

    question: str
    answer: str
    """One of the answers of the file, `refused`, `no such argument`, or `none of these`."""
    contract: str
    """The answer of sdpa_xp."""
    rule: str
    """The rule of the contract, such as `R23`."""

    @property
    def agrees(self) -> bool:
        """Whether the function means what sdpa_xp means, or has nothing that could mean anything else."""
        return self.answer in (self.contract, "no such argument", "refused")


@dataclass(frozen=True, slots=True)
class Fault(Immutable):
    """A case in which a function is wrong by its own semantics."""

    case: str
    dtype: str
    rules: tuple[str, ...]
    what: str
    """The element that is furthest beyond its bound, or what else is wrong."""
    error: float
    """The absolute error; inf for another shape, or NaN or inf in other places."""
    bound: float
    textbook: float
    """The error over that of the textbook formula in the same dtype."""
    smallest: str
    """The smallest call that was found to fail in this way."""
    why: str = ""
    """The defect of the field that the case comes from."""

    def __str__(self) -> str:
        why = f" [the case is for: {self.why}]" if self.why else ""
        return (
            f"{self.case}, {self.dtype} ({', '.join(self.rules)}): {self.what}{why}; smallest: {self.smallest}"
        )


@dataclass(frozen=True, slots=True)
class NotJudged(Immutable):
    """A case that says nothing of a function: the function refuses it, or has no argument for it."""

    case: str
    dtype: str
    reason: str


@dataclass(frozen=True, slots=True, repr=False)
class Verdict(Immutable):
    """What `judge` found; `print` shows it."""

    function: str
    """Its name."""
    library: str
    """The array library, its version and its device."""
    profile: tuple[Answer, ...]
    """What the function means by attention."""
    faults: tuple[Fault, ...]
    """Where it is wrong by its own semantics."""
    judged: int
    """The number of cases, each in one dtype, that were judged."""
    not_judged: tuple[NotJudged, ...]
    """The cases that say nothing of it, with the reason."""
    seconds: float
    """The time of all cases."""
    contract: bool = False
    """Whether the faults are by the contract of sdpa_xp, not by the function's own semantics."""

    @property
    def agrees(self) -> bool:
        """Whether there is no fault, in at least one case: a function that refuses all has shown nothing."""
        return bool(self.judged) and not self.faults

    @property
    def departures(self) -> tuple[Answer, ...]:
        """The answers that are not those of sdpa_xp's contract."""
        return tuple(answer for answer in self.profile if not answer.agrees)

    def to_json(self) -> dict[str, Any]:
        """Return all of it as JSON takes it, with infinite errors as text."""
        contents = asdict(self) | {"agrees": self.agrees}
        for fault in contents["faults"]:
            fault |= {name: str(fault[name]) for name in ("error", "bound", "textbook")}
        return contents

    def __repr__(self) -> str:
        return f"<Verdict: {self.function} {self._summary()}>"

    def __str__(self) -> str:
        lines = [f"{self.function} on {self.library}: {self._summary()}", "", "What it means by attention:"]
        for answer in self.profile:
            other = "" if answer.agrees else f"  (sdpa_xp: {answer.contract})"
            lines.append(f"  {answer.rule:4} {answer.question}: {answer.answer}{other}")
        if self.profile[0].answer in ("none of these", "refused"):
            what = "It is wrong in the plainest call, or refuses it: are `library`, `layout` and `names` right?"
            lines += ["", what]
        if self.faults:
            lines += ["", f"Where it is wrong by {'the contract' if self.contract else 'its own semantics'}:"]
            lines += [_wrapped(str(fault)) for fault in self.faults[:SHOWN]]
            lines += [f"  and {len(self.faults) - SHOWN} more"] if len(self.faults) > SHOWN else []
        if reasons := self._reasons():
            lines += ["", "Not judged:", *(_wrapped(f"{_counted(n, 'case')}: {why}") for why, n in reasons)]
        return "\n".join(lines)

    def _repr_html_(self) -> str:
        rows = [(a.rule, a.question, a.answer, a.contract) for a in self.profile]
        faults = [(f.case, f.dtype, ", ".join(f.rules), f.what, f.smallest) for f in self.faults]
        shown = table("What it means by attention", rows, ("rule", "question", "answer", "sdpa_xp"))
        if faults:
            shown += table("Where it is wrong", faults, ("case", "dtype", "rules", "what", "smallest"))
        not_judged = [(str(n), why) for why, n in self._reasons()]
        shown += table("Not judged", not_judged, ("cases", "why")) if not_judged else ""
        return folded(f"{self.function}: {self._summary()}", shown)

    def _summary(self) -> str:
        faults = _counted(len(self.faults), "fault") if self.faults else "no fault"
        if not self.judged:
            faults = "nothing shown"
        others = f", {_counted(len(self.departures), 'answer')} unlike sdpa_xp's" if self.departures else ""
        return f"{faults} in {self.judged} cases{others}, {len(self.not_judged)} not judged"

    def _reasons(self) -> list[tuple[str, int]]:
        """Return the reasons, the most frequent first; of those that differ in numbers alone, the first."""
        reasons = {re.sub(r"\d+", "n", entry.reason): entry.reason for entry in reversed(self.not_judged)}
        counts = Counter(re.sub(r"\d+", "n", entry.reason) for entry in self.not_judged)
        return [(reasons[reason], n) for reason, n in counts.most_common()]


def _counted(n: int, noun: str) -> str:
    return f"{n} {noun}" if n == 1 else f"{n} {noun}s"


def _wrapped(text: str) -> str:
    return textwrap.fill(text, WIDTH, initial_indent="  ", subsequent_indent="    ", break_long_words=False)
