"""Hold any attention function to hard cases: what it means by attention, and where it is wrong by that."""

from __future__ import annotations

import os
import unittest
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from ._judge.cases import HardCase
from ._judge.function import find_function
from ._judge.judgement import DTYPES, Judgement
from ._judge.verdict import Verdict

__all__ = ["JudgedCase", "Verdict", "judge", "judge_cases"]
Layout = Literal["...HLE", "...LHE"]


def judge(
    function: Callable[..., Any] | str | os.PathLike[str],
    *,
    library: str | None = None,
    names: Mapping[str, Any] | None = None,
    layout: Layout | None = None,
    dtypes: Sequence[str] = DTYPES,
    contract: bool = False,
    watch: Callable[[int, int, str], object] | None = None,
) -> Verdict:
    """Judge an attention function: first what it means by attention, then where it is wrong by that.

    Some 610 cases are data, each named for the rule of the contract that it checks. The answers are computed in
    float64, row by row, in code that shares nothing with sdpa_xp's attention. An output may be off by twice the
    error of the textbook formula in the same dtype, and a few roundings (the rule of flash-attention's tests).

    Args:
        function: `function(query, key, value, ...)` on arrays (..., H, L, E); or its name, `module:function`;
            or an ONNX file with inputs `query`, `key`, `value`, which runs in onnxruntime in this process.
        library: The array library that it is called with, such as `"torch"`. By default that of its module, or
            NumPy.
        names: Its keyword for `mask`, `bias`, `is_causal`, `scale`, `softcap`, `sinks` or `group heads`, if it
            is not a usual one; `("mask", "causal")` for a value that asks for it.
        layout: `"...LHE"` if lengths come before heads.
        dtypes: Those to judge, of `float32`, `float64`, `float16` and `bfloat16`.
        contract: Judge by the contract of sdpa_xp, not by what the function itself means.
        watch: Called with the number of cases done, of all, and the name of the next.

    Returns:
        The verdict. What the function has no argument for, or refuses, is not judged; `not_judged` says why.

    Raises:
        TypeError: `function` is neither a function nor a name, or `dtypes` is no sequence of names.
        ValueError: There is none of that name; or a library, a name, a layout or a dtype is not known.
    """
    target = find_function(function, library=library, names=names, layout=layout)
    return Judgement(target, dtypes, contract=contract).verdict(watch)


@dataclass(frozen=True, slots=True)
class JudgedCase:
    """One case as a test: `check` raises AssertionError if the function is wrong there.

    It raises unittest.SkipTest, which pytest takes for a skipped test, if the case is not judged.
    """

    case: HardCase
    dtype: str
    judgement: Judgement

    def __str__(self) -> str:
        return f"{self.case.name}, {self.dtype}"

    def check(self) -> None:
        """Check the function in this case; the first check judges all of them."""
        verdict, key = self.judgement.only, (self.case.name, self.dtype)
        for entry in verdict.not_judged:
            if (entry.case, entry.dtype) == key:
                raise unittest.SkipTest(entry.reason)
        for fault in verdict.faults:
            if (fault.case, fault.dtype) == key:
                raise AssertionError(str(fault))


def judge_cases(
    function: Callable[..., Any] | str | os.PathLike[str],
    *,
    library: str | None = None,
    names: Mapping[str, Any] | None = None,
    layout: Layout | None = None,
    dtypes: Sequence[str] = ("float32",),
) -> list[JudgedCase]:
    """Return the cases of `judge` as tests of a function, for `pytest.mark.parametrize`.

    A test calls `check()` of its case: it raises AssertionError if the function is wrong there, and
    unittest.SkipTest if the case is not judged. Nothing is computed before the first one. All other arguments
    are as in `judge`.

    Args:
        dtypes: Those to judge.
    """
    judged = Judgement(find_function(function, library=library, names=names, layout=layout), dtypes)
    return [JudgedCase(case, dtype, judged) for case, dtype in judged.planned()]
