"""One judgement: the questions, the cases, and the smallest calls that fail."""

from __future__ import annotations

import math
import re
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np

from sdpa_xp.errors import ArgumentTypeError, ArgumentValueError

from .._verify.judging import Compared, judge_rows
from ..report import Agreement
from .cases import HardCase, all_cases, data, questions
from .function import JudgedFunction, LacksError, RefusedError, WrongError
from .semantics import BOOLEAN, LACKS, LEAKS, OVERFLOWS, REFUSED, WRONG, expected, is_judged
from .verdict import Answer, Fault, NotJudged, Verdict

DTYPES = ("float32", "float64", "float16", "bfloat16")
OF_LENGTHS = ("causal", "no keys")
"""The fields of questions that are about unlike lengths."""
REFUSES = "refused: "
"""How the reason begins if the function raised."""
SHRINKS = 59
"""The most calls by which the smallest failing one is sought, for each fault."""
SHRUNK = 4
"""The number of faults whose smallest call is sought: the first ones, which are the smallest cases."""


@dataclass(frozen=True)
class Tried:
    """One case in one dtype, and what the function gave."""

    case: HardCase
    dtype: str
    compared: Mapping[str, Compared]
    wrong: str = ""
    """What is wrong beside numbers."""


class Judgement:
    """One judgement: the function, its answers, and what was tried."""

    def __init__(self, function: JudgedFunction, dtypes: Sequence[str], *, contract: bool = False) -> None:
        if isinstance(dtypes, str) or not all(isinstance(dtype, str) for dtype in dtypes):
            raise ArgumentTypeError("judge", "`dtypes` must be a list of names", {"dtypes": repr(dtypes)})
        if not dtypes or not {*dtypes} <= {*DTYPES}:
            rule = f"`dtypes` must be among {', '.join(DTYPES)}"
            raise ArgumentValueError("judge", rule, {"dtypes": repr(dtypes)})
        self.function, self.dtypes, self.contract = function, dtypes, contract
        self.answers: dict[str, str] = {}
        self.axes = 4
        """The number of axes of its arrays, if it takes no other."""

    @cached_property
    def only(self) -> Verdict:
        return self.verdict()

    def planned(self) -> Iterator[tuple[HardCase, str]]:
        """Yield each case with each of its dtypes, the smallest first; by the contract, of questions too."""
        every = (*all_cases(), *(questions().values() if self.contract else ()))
        cases = [case.with_axes(self.axes) for case in every]
        for case in sorted(cases, key=lambda case: case.size):
            yield from ((case, dtype) for dtype in case.dtypes if dtype in self.dtypes)

    @np.errstate(all="ignore")  # of a wrong function, errors overflow
    def verdict(self, watch: Callable[[int, int, str], object] | None = None) -> Verdict:
        start, backend = time.perf_counter(), self.function.backend
        profile, tried, left_out = self._profile(), list[Tried](), list[NotJudged]()
        self.answers = {} if self.contract else self.answers
        planned = [*self.planned()]
        takes = {dtype: backend.holds(dtype) for dtype in self.dtypes}
        for count, (case, dtype) in enumerate(planned):
            if watch:
                watch(count, len(planned), case.name)
            result = self._tried(case, dtype) if takes[dtype] else f"no {dtype} on {backend.name}"
            if isinstance(result, str):
                left_out.append(NotJudged(case.name, dtype, result))
            else:
                tried.append(result)
        faults = self._faults(tried) + self._refusals(tried, left_out)
        library = f"{backend.name} {backend.version}, {backend.device}"
        elapsed = time.perf_counter() - start
        return Verdict(
            self.function.name, library, profile, faults, len(tried), tuple(left_out), elapsed, self.contract
        )

    def _profile(self) -> tuple[Answer, ...]:
        """Ask the questions of the file, one after the other: each builds on the answers before it."""
        profile, entries = [], data()["questions"]
        self.axes = next((axes for axes in (4, 3, 2) if self._answer_to(entries[0], axes) != REFUSED), 4)
        for entry in entries:
            answer = self.answers[entry["field"]] = self._answer_to(entry, self.axes)
            profile.append(Answer(entry["question"], answer, entry["answers"][0], entry["rule"]))
        return (*profile, self._kept_dtype(data()["dtype"]))

    def _answer_to(self, entry: Mapping[str, Any], axes: int) -> str:
        case, field = questions()[entry["question"]].with_axes(axes), entry["field"]
        if case.bias is not None and self.answers.get("floating") in BOOLEAN:
            return LACKS
        answer = self._answer(case, field, entry["answers"])
        if answer == REFUSED and field not in OF_LENGTHS:  # it may take as many keys as queries alone
            answer = self._answer(replace(case, lengths=(7, 7)), field, entry["answers"])
        return answer

    def _kept_dtype(self, entry: Mapping[str, Any]) -> Answer:
        """Ask whether the result has the dtype of the query, in each dtype that the function takes."""
        case, got = questions()[entry["question"]].with_axes(self.axes), dict[str, str]()
        for dtype in filter(self.function.backend.holds, self.dtypes):
            with suppress(LacksError, RefusedError, WrongError):  # a dtype that it refuses has no result
                got[dtype] = self.function.results(case, dtype, self.answers)["output"].dtype.name
        others = ", ".join(f"{name} of {dtype}" for dtype, name in got.items() if name != dtype)
        answer = self.answers["dtype"] = others or (entry["answers"][0] if got else REFUSED)
        return Answer(entry["question"], answer, entry["answers"][0], entry["rule"])

    def _answer(self, case: HardCase, field: str, answers: Iterable[str]) -> str:
        dtype = case.dtypes[0]
        if not self.function.backend.holds(dtype):
            return REFUSED
        for answer in answers:
            answered = self.answers | {field: answer}
            try:
                results = self.function.results(case, dtype, answered)
            except LacksError:
                return LACKS
            except WrongError:
                return WRONG
            except RefusedError as error:
                if re.search(r"missing .*\bscale\b", str(error)) and not self.function.needed:
                    self.function = replace(self.function, needed=frozenset({"scale"}))
                    return self._answer(case, field, answers)
                return REFUSED
            if answer in (LEAKS, OVERFLOWS):
                return answer if any(np.isnan(x.astype(np.float64)).any() for x in results.values()) else WRONG
            rows = expected(case, dtype, answered)
            if all(judge_rows([Compared(x, rows[n])], dtype)[0].agrees for n, x in results.items()):
                return answer
        return WRONG

    def _tried(self, case: HardCase, dtype: str) -> Tried | str:
        """Return what the function gives in a case, beside what is expected; or why it is not judged."""
        if not is_judged(case, self.answers):
            return "its profile says that it means something else"
        try:
            results = self.function.results(case, dtype, self.answers)
        except LacksError as error:
            return str(error)
        except WrongError as error:
            return Tried(case, dtype, {}, str(error))
        except RefusedError as error:
            return f"{REFUSES}{error}"[:220]
        rows = expected(case, dtype, self.answers)
        of_query = data()["dtype"]["answers"][0]
        kept = self.answers.get("dtype", of_query) in (of_query, REFUSED)
        other = [n for n, x in results.items() if kept and n != "lse" and x.dtype.name != dtype]
        wrong = f"{other[0]} is {results[other[0]].dtype.name}" if other else ""
        size = float(case.draw.get("query", {}).get("times", 1.0))
        # What the errors of a case depend on beside the size of its scores.
        kind = " ".join(sorted(n for n, rule in case.draw.items() if {"times", "uneven", "plus"} & {*rule}))
        compared = {n: Compared(x, rows[n], max(size, 1.0), kind, dtype) for n, x in results.items()}
        return Tried(case, dtype, compared, wrong)

    def _faults(self, tried: Sequence[Tried]) -> tuple[Fault, ...]:
        """Judge each output of all cases of a dtype together: one bound of all is no looser, and no luck."""
        worst: dict[int, tuple[Agreement, str]] = {}
        for dtype in self.dtypes:
            for output in {name for one in tried for name in one.compared if one.dtype == dtype}:
                those = [(n, x) for n, x in enumerate(tried) if x.dtype == dtype and output in x.compared]
                agreements = judge_rows([one.compared[output] for _, one in those], dtype)
                for (n, _), agreement in zip(those, agreements, strict=True):
                    if not agreement.agrees and (n not in worst or agreement.share > worst[n][0].share):
                        worst[n] = agreement, output
        faults: list[Fault] = []
        for n, one in enumerate(tried):
            if n in worst or one.wrong:
                faults.append(self._fault(one, *worst.get(n, (None, "")), shrinks=len(faults) < SHRUNK))
        return tuple(faults)

    def _refusals(self, tried: Sequence[Tried], left_out: Sequence[NotJudged]) -> tuple[Fault, ...]:
        """Return a fault if the function takes plain calls of some lengths, and raises in those of others."""
        every = {case.name: case.with_axes(self.axes) for case in all_cases() if case.is_plain}
        plain = {name: case for name, case in every.items() if len(case.pairs) <= self.axes}
        names = {one.case.name for one in tried} & plain.keys()
        takes = {one.dtype for one in tried if one.case.name in names}
        refused = [x for x in left_out if x.case in plain and x.dtype in takes and x.reason.startswith(REFUSES)]
        unlike = {name for name, case in plain.items() if case.lengths[0] != case.lengths[1]}
        several = {name for name, case in plain.items() if case.lengths[0] > 1}
        for others in (unlike, several):  # it may take as many keys as queries alone, or one query
            refused = [x for x in refused if others & names or x.case not in others]
        if self.function.is_model or not refused:
            return ()
        first, shown = refused[0], plain[refused[0].case].described()
        what = f"{first.reason}, and so in {len(refused)} plain calls, but not in others"
        return (Fault(first.case, first.dtype, ("R1",), what, math.inf, 0.0, math.inf, shown),)

    def _fault(self, one: Tried, agreement: Agreement | None, output: str, *, shrinks: bool) -> Fault:
        case, small, what, error, bound, times = one.case, one.case, one.wrong, math.inf, 0.0, math.inf
        if agreement is not None:
            result, exact = one.compared[output].result, one.compared[output].expected
            what, error, bound = f"{output} has shape {result.shape}", agreement.absolute, agreement.bound
            if result.shape == exact.reference.shape:
                index = agreement.index
                got, right = float(result[index]), float(exact.reference[index])
                allowed = float(np.max(np.abs(exact.textbook - exact.reference), initial=0.0))
                times = error / allowed if allowed else math.inf
                what = f"{output}{list(index)} is {got:.6g}, not {right:.6g}"
                if math.isfinite(times):
                    what += f": off by {error:.2g}, {times:.3g} times the textbook's largest error"
            small = self._smallest(case, one.dtype) if shrinks else case
        shown = small.described()
        return Fault(case.name, one.dtype, case.rules, what, error, bound, times, shown, case.why)

    def _smallest(self, case: HardCase, dtype: str) -> HardCase:
        """Return the smallest case like this one that still fails, each length tried smaller in turn."""
        failing: HardCase | None = case
        calls = iter(range(SHRINKS))
        while failing is not None:
            small, tried = failing, zip(_smaller(failing), calls, strict=False)
            failing = next((smaller for smaller, _ in tried if self._fails(smaller, dtype)), None)
        return small

    def _fails(self, case: HardCase, dtype: str) -> bool:
        try:
            one = self._tried(case, dtype)
        except (ValueError, IndexError):  # a smaller shape that the rules of the case do not fit
            return False
        return not isinstance(one, str) and not all(
            judge_rows([x], dtype)[0].agrees for x in one.compared.values()
        )


def _smaller(case: HardCase) -> Iterator[HardCase]:
    """Yield cases that are smaller in one respect: halves first, then three quarters and one less."""
    for name in ("batch", "lengths", "widths"):
        numbers = getattr(case, name)
        for n, number in enumerate(numbers):
            for less in dict.fromkeys((1, number // 2, number - number // 4, number - 1)):
                if 0 < less < number:
                    smaller: dict[str, Any] = {name: (*numbers[:n], less, *numbers[n + 1 :])}
                    yield replace(case, **smaller)
    if len(case.heads) == 2 and case.heads[0] > 1:
        yield replace(case, heads=(case.heads[0] // case.heads[1], 1) if case.heads[1] > 1 else (1, 1))
