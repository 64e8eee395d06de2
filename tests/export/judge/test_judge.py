"""The judge is judged: planted faults are found, right functions raise no alarm, and refusals never pass."""

from __future__ import annotations

import inspect
import itertools
import json
import math
import re
import unittest
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from internals import JudgedFunction, judge_cases_data, judge_semantics
from planted_attention import FAULTS, RIGHT, attention
from planted_gradients import FAULTS as GRADIENT_FAULTS
from planted_gradients import attention as differentiable

from sdpa_xp import attention_state, scaled_dot_product_attention
from sdpa_xp_export import TensorSpec, Verdict, export_attention, judge, judge_cases, save

CASES = judge_cases_data.all_cases()
CONTRACT = (Path(__file__).parents[3] / "docs" / "reference" / "contract.md").read_text("utf-8")


def with_plant(plant: dict[str, Callable[..., Any]], function: Any = attention) -> Callable[..., Any]:
    """The right attention with a fault."""

    def planted(*tokens: Any, **rules: Any) -> Any:
        return function(*tokens, **rules, plant=plant)

    planted.__signature__ = inspect.signature(function)  # type: ignore[attr-defined]
    return planted


@pytest.mark.sampled(6)
@pytest.mark.parametrize("name", FAULTS)
def test_a_planted_fault_is_found(name: str) -> None:
    by_the_contract = name in ("masked by the least number", "products overflow in float16")
    verdict = judge(with_plant(FAULTS[name]), contract=by_the_contract)
    assert verdict.faults, verdict
    assert not verdict.agrees


@pytest.mark.parametrize("name", RIGHT)
def test_a_right_function_raises_no_alarm(name: str) -> None:
    verdict = judge(RIGHT[name])
    assert verdict.agrees, verdict
    assert verdict.judged > 100


@pytest.mark.parametrize("arrays_of", ["numpy", "torch", "array-api-strict"])
def test_the_library_itself_is_right_and_keeps_the_contract(arrays_of: str) -> None:
    verdict = judge(scaled_dot_product_attention, library=arrays_of, dtypes=["float32"])
    assert verdict.agrees, verdict
    assert not verdict.departures


def departing(change: Callable[[Any, Any, Any], Any]) -> Callable[..., Any]:
    """Another answer to what a query without a key gives."""
    return with_plant({"output": change})


def mean(output: Any, value: Any, allowed: Any) -> Any:
    return np.where(allowed.any(axis=-1)[..., None], output, value.mean(axis=-2, keepdims=True))


def nan(output: Any, _value: Any, allowed: Any) -> Any:
    return np.where(allowed.any(axis=-1)[..., None], output, math.nan)


def interleaved(repeated: Any, key: Any, value: Any, query: Any) -> Any:
    if query.ndim == 2:
        return repeated
    heads = np.arange(query.shape[-3]) % key.shape[-3]
    return tuple(x.astype(query.dtype)[..., heads, :, :] for x in (key, value))


OTHER_MEANINGS: dict[str, tuple[dict[str, Callable[..., Any]], str, str]] = {
    "mean": ({"output": mean}, "A query whose keys are all masked gives", "mean"),
    "NaN": ({"output": nan}, "A query whose keys are all masked gives", "NaN"),
    "lower right": (
        {"causal": lambda _, pairs: np.tri(*pairs[-2:], pairs[-1] - pairs[-2], dtype=bool)},
        "With is_causal and more keys than queries, the diagonal starts at the",
        "lower right",
    ),
    "inverted masks": ({"mask": lambda mask, *_: ~np.asarray(mask)}, "A boolean mask says", "False may attend"),
    "interleaved heads": (
        {"groups": interleaved},
        "Query head h reads the key head",
        "h % H",
    ),
    "a cap of all": (
        {
            "cap": lambda cap, bias: cap if bias is None else None,
            "added": lambda scores, cap: cap * np.tanh(scores / cap) if cap else scores,
        },
        "Softcap and bias, in this order",
        "bias, softcap",
    ),
    "the least number masks": (
        {"bias": lambda b, *_: None if b is None else np.where(b == np.finfo(b.dtype).min, -np.inf, b)},
        "A bias of the most negative finite number",
        "masks",
    ),
    "NaN without keys": (
        {"output": lambda output, value, _: output if value.shape[-2] else output * math.nan},
        "Without keys, the output is",
        "NaN",
    ),
    "NaN spreads": (
        {"hidden": lambda _: False},
        "A NaN in a value that all queries mask",
        "reaches queries that mask it",
    ),
    "no scale": (
        {"scale": lambda s, q, v, passed: 1.0 if passed is None else s},
        "The scale, if none is passed",
        "1",
    ),
}


@pytest.mark.parametrize("name", OTHER_MEANINGS)
def test_another_meaning_is_said_and_is_no_fault_unless_the_contract_is_asked_for(name: str) -> None:
    plant, question, answer = OTHER_MEANINGS[name]
    verdict = judge(with_plant(plant), dtypes=["float32"])
    assert {a.question: a.answer for a in verdict.departures}[question] == answer
    assert verdict.agrees, verdict
    assert judge(with_plant(plant), dtypes=["float32"], contract=True).faults


def test_each_answer_of_the_file_is_given_by_a_function() -> None:
    """But for a leak by one of several ways, and what the right functions and the next test give."""
    entries = judge_cases_data.data()["questions"]
    other = {answer for entry in entries for answer in entry["answers"][1:]}
    assert other == {answer for *_, answer in OTHER_MEANINGS.values()} | {
        *("upper left", "not 0 may attend", "0 may attend", "in base 2", "+inf", "overflows"),
    }


def test_a_product_that_overflows_in_float16_is_said_and_is_no_fault() -> None:
    """The textbook formula in float16 does it, too."""
    verdict = judge(with_plant(FAULTS["products overflow in float16"]))
    assert {a.question.partition(" above")[0]: a.answer for a in verdict.departures} == {
        "A float16 product": "overflows"
    }
    assert verdict.agrees, verdict


@pytest.mark.parametrize("axes", [2, 3])
def test_a_function_of_two_or_three_axes_is_judged_in_calls_of_its_own(axes: int) -> None:
    """Those that ask for heads or for a batch are left out; a fault is found as in four axes."""

    def theirs(query: Any, key: Any, value: Any, attn_mask: Any = None, *, is_causal: bool = False) -> Any:
        if query.ndim != axes or query.shape[:-2] != key.shape[:-2]:
            raise ValueError(f"{axes} axes")
        return attention(query, key, value, attn_mask, is_causal=is_causal)

    def in_tiles(query: Any, key: Any, value: Any, attn_mask: Any = None) -> Any:
        mask = None if attn_mask is None else attn_mask[..., :64]
        return theirs(query, key[..., :64, :], value[..., :64, :], mask)

    verdict = judge(theirs)
    assert verdict.agrees, verdict
    assert verdict.judged > 250
    assert {x.reason for x in verdict.not_judged if x.case.startswith("batch [2, 3]")} == {
        f"refused: ValueError: {axes} axes"
    }
    faults = judge(in_tiles, dtypes=["float32"]).faults
    assert len(faults) > 20
    assert all(len(re.findall(r"\d+", fault.smallest.partition(", key")[0])) == axes for fault in faults)


@pytest.mark.parametrize("wanted", [True, False])
def test_a_function_with_boolean_masks_alone(wanted: bool) -> None:
    """A floating one is read as one of these; so no case with a bias says anything, and no question."""

    def theirs(query: Any, key: Any, value: Any, attn_mask: Any = None) -> Any:
        return attention(query, key, value, None if attn_mask is None else (attn_mask != 0) == wanted)

    verdict = judge(theirs, dtypes=["float32"])
    profile = {a.question: a.answer for a in verdict.profile}
    assert profile["A floating mask is"] == ("not 0 may attend" if wanted else "0 may attend")
    assert profile["A bias of +inf makes its query"] == "no such argument"
    assert verdict.agrees, verdict


def test_garbage_for_a_masked_nan_is_wrong() -> None:
    """It is none of the answers: the cases are judged."""

    def theirs(query: Any, key: Any, value: Any, attn_mask: Any = None) -> Any:
        result = attention(query, key, value, attn_mask)
        return result + 1 if attn_mask is not None and np.isnan(value).any() else result

    verdict = judge(theirs, dtypes=["float32"])
    assert any("padding of value" in fault.case for fault in verdict.faults)


def test_a_function_that_is_always_causal() -> None:
    def causal(query: Any, key: Any, value: Any, attn_mask: Any = None) -> Any:
        return attention(query, key, value, attn_mask, is_causal=True)

    verdict = judge(causal, dtypes=["float32"])
    assert verdict.profile[0].answer == "upper left"
    assert verdict.agrees, verdict


def test_a_function_that_takes_equal_lengths_alone_is_asked_with_these() -> None:
    def causal(query: Any, key: Any, value: Any, attn_mask: Any = None) -> Any:
        if query.shape[-2] != key.shape[-2]:
            raise NotImplementedError("as many keys as queries")
        return attention(query, key, value, attn_mask, is_causal=True)

    verdict = judge(causal, dtypes=["float32"])
    profile = {a.question: a.answer for a in verdict.profile}
    assert profile["The dtype of the result"] == "that of the query"
    assert profile["If it is told nothing, a query attends to"] == "upper left"
    assert profile["A query whose keys are all masked gives"] == "0"
    assert verdict.agrees, verdict


def test_a_function_that_raises_for_some_lengths_only_is_wrong() -> None:
    def theirs(query: Any, key: Any, value: Any) -> Any:
        if key.shape[-2] % 8:
            raise RuntimeError("illegal memory access")
        return attention(query, key, value)

    (fault,) = judge(theirs, dtypes=["float32"]).faults
    assert "illegal memory access" in fault.what


@pytest.mark.parametrize("most", [1, 2])
def test_to_take_one_query_alone_is_no_fault(most: int) -> None:
    def theirs(query: Any, key: Any, value: Any) -> Any:
        if query.shape[-2] > most:
            raise ValueError("too many queries")
        return attention(query, key, value)

    assert judge(theirs, dtypes=["float32"]).agrees == (most == 1)


@pytest.mark.parametrize("bounds", [(-1e3, math.inf), (-math.inf, 1e4), (-1e8, 1e8)])
def test_scores_that_are_cut_are_found_without_a_mask(bounds: tuple[float, float]) -> None:
    def theirs(query: Any, key: Any, value: Any) -> Any:
        return attention(query, key, value, plant={"scores": lambda scores, *_: np.clip(scores, *bounds)})

    assert judge(theirs, dtypes=["float32"]).faults


@pytest.mark.parametrize("first", [False, True])
def test_float16_scores_that_are_scaled_first_are_right(first: bool) -> None:
    """They have no product that overflows; the scores themselves are rounded, as the textbook formula's are."""

    def theirs(query: Any, key: Any, value: Any, *, scale: Any = None) -> Any:
        factor = np.asarray(query.shape[-1] ** -0.5 if scale is None else scale, query.dtype)
        whole, half = (factor, 1) if first else (np.sign(factor) * np.sqrt(abs(factor)), np.sqrt(abs(factor)))

        def rounded(_scores: Any, q: Any, k: Any, _factor: Any) -> Any:
            halves = (x.astype(query.dtype) for x in (q, np.swapaxes(k, -1, -2)))
            left, right = (x * f for x, f in zip(halves, (whole, half), strict=True))
            return (left @ right).astype(query.dtype).astype(q.dtype)

        return attention(query, key, value, scale=scale, plant={"scores": rounded})

    verdict = judge(theirs, dtypes=["float16"])
    assert verdict.agrees, verdict
    assert not [a for a in verdict.departures if a.question.startswith("A float16 product")]


def test_to_refuse_what_is_empty_or_a_dtype_is_no_fault() -> None:
    def theirs(query: Any, key: Any, value: Any) -> Any:
        if 0 in (*query.shape, *key.shape) or query.dtype == ml_dtypes.bfloat16:
            raise ValueError("nothing to do")
        return attention(query, key, value)

    assert judge(theirs, dtypes=["float32", "bfloat16"]).agrees


def test_log_sum_exp_is_judged() -> None:
    def with_lse(base: float, of_none: float = -math.inf) -> Callable[..., Any]:
        def theirs(query: Any, key: Any, value: Any, attn_mask: Any = None) -> Any:
            state = attention_state(query, key, value, attn_mask)
            return state.output, np.where(np.isneginf(state.lse), of_none, state.lse / math.log(base))

        return theirs

    assert judge(with_lse(math.e), dtypes=["float32"]).agrees
    in_2 = judge(with_lse(2.0), dtypes=["float32"])
    assert in_2.agrees, in_2
    assert ("The log-sum-exp is", "in base 2") in {(a.question, a.answer) for a in in_2.departures}
    in_2_of_none = judge(with_lse(2.0, math.inf), dtypes=["float32"])
    assert in_2_of_none.agrees, in_2_of_none
    assert {a.answer for a in in_2_of_none.departures} >= {"in base 2", "+inf"}
    faults = judge(with_lse(3.0), dtypes=["float32"]).faults
    assert {fault.what.partition("[")[0] for fault in faults} == {"lse"}


LSE_FAULTS: dict[str, Callable[..., Any]] = {
    "another head": lambda lse, sinks: np.sort(lse, axis=-2) if lse.ndim > 2 and lse.shape[-2] > 2 else lse,
    "a later tile": lambda lse, sinks: lse + (np.arange(lse.shape[-1]) >= 64),
    "no sink": lambda lse, sinks: lse if sinks is None else np.log(np.exp(lse) - np.exp(sinks[:, None])),
}


@pytest.mark.parametrize("name", LSE_FAULTS)
def test_a_fault_of_the_log_sum_exp_alone_is_found(name: str) -> None:
    def theirs(query: Any, key: Any, value: Any, *, sinks: Any = None) -> Any:
        state = attention_state(query, key, value, sinks=sinks)
        return state.output, LSE_FAULTS[name](state.lse, sinks).astype(np.float32)

    verdict = judge(theirs, dtypes=["float32"])
    assert {fault.what.partition("[")[0] for fault in verdict.faults} == {"lse"}


@pytest.mark.needs("torch")
@pytest.mark.parametrize("is_dropped", [True, False])
def test_a_log_sum_exp_whose_gradient_is_dropped_is_wrong(is_dropped: bool) -> None:
    def theirs(query: Any, key: Any, value: Any, *, sinks: Any = None) -> Any:
        state = attention_state(query, key, value, sinks=sinks)
        return state.output, state.lse.detach() + 0 * query[..., 0] if is_dropped else state.lse

    verdict = judge(theirs, library="torch", dtypes=["float32"])
    expected = {"gradients, also of lse", "gradients of sinks, also of lse"} if is_dropped else set()
    assert {fault.case for fault in verdict.faults} == expected


def test_another_dtype_is_said() -> None:
    def theirs(query: Any, key: Any, value: Any) -> Any:
        return attention(query, key, value).astype(np.float64)

    verdict = judge(theirs, dtypes=["float32", "float16"])
    (answer,) = (a for a in verdict.departures if a.rule == "R4")
    assert answer.answer == "float64 of float32, float64 of float16"
    assert verdict.agrees
    assert judge(theirs, dtypes=["float32"], contract=True).faults


def refuses(query: Any, key: Any, value: Any) -> Any:
    raise NotImplementedError("not today")


def test_what_refuses_everything_does_not_pass() -> None:
    verdict = judge(refuses, dtypes=["float32"])
    assert not verdict.agrees
    assert not verdict.judged
    assert {entry.reason for entry in verdict.not_judged} >= {"refused: NotImplementedError: not today"}
    assert "nothing shown" in repr(verdict)
    assert {a.answer for a in verdict.profile} == {"refused", "no such argument"}


def scaling_its_query(query: Any, key: Any, value: Any) -> Any:
    result = attention(query, key, value)
    query *= 2
    return result


@pytest.mark.parametrize("number", [1, 500])
def test_an_error_of_the_judge_itself_is_no_refusal(number: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """When it asks for the profile, and in a case."""
    calls, laid_out = itertools.count(1), JudgedFunction._laid_out

    def broken_once(function: Any, x: Any) -> Any:
        if next(calls) == number:
            raise KeyError("of the judge")
        return laid_out(function, x)

    monkeypatch.setattr(JudgedFunction, "_laid_out", broken_once)
    with pytest.raises(KeyError, match="of the judge"):
        judge(attention, dtypes=["float32"])


def test_a_function_that_writes_to_its_inputs_is_wrong() -> None:
    assert "it changes its query" in {fault.what for fault in judge(scaling_its_query).faults}


@pytest.mark.needs("torch")
@pytest.mark.parametrize("name", ["query", "key", "value"])
def test_a_function_that_ignores_strides_is_wrong(name: str) -> None:
    import torch

    def whole(x: Any) -> Any:
        strides = torch.empty(x.shape).stride()
        return x.as_strided(x.shape, strides, 0)

    def theirs(query: Any, key: Any, value: Any) -> Any:
        tokens = {"query": query, "key": key, "value": value}
        return torch.nn.functional.scaled_dot_product_attention(**tokens | {name: whole(tokens[name])})

    verdict = judge(theirs, library="torch", dtypes=["float32"])
    found_in = {fault.case for fault in verdict.faults}
    ways = ("gaps in each row", "lengths before heads in memory", "a part of a wider array")
    assert found_in >= {f"{name} with {way}" for way in ways}


def test_a_fault_says_the_smallest_call_that_fails() -> None:
    verdict = judge(with_plant(FAULTS["a last partial tile of 16 is lost"]), dtypes=["float32"])
    fault = verdict.faults[0]
    keys = re.search(r"key \(1, 1, (\d+), ", fault.smallest)
    assert keys
    assert int(keys[1]) == 17
    assert fault.error > fault.bound
    assert fault.rules
    shown = str(verdict)
    assert shown.index("What it means by attention") < shown.index("Where it is wrong by its own semantics")
    assert json.loads(json.dumps(verdict.to_json()))["faults"][0]["case"] == fault.case


def test_other_names_and_another_layout() -> None:
    def theirs(q: Any, k: Any, v: Any, hide: Any = None, diagonal: str = "no") -> Any:
        q, k, v = (np.swapaxes(x, -2, -3) if x.ndim > 2 else x for x in (q, k, v))
        result = attention(q, k, v, hide, is_causal=diagonal == "yes")
        return np.swapaxes(result, -2, -3) if result.ndim > 2 else result

    names = {"mask": "hide", "is_causal": ("diagonal", "yes")}
    verdict = judge(theirs, names=names, layout="...LHE", dtypes=["float32"])
    assert verdict.agrees, verdict
    assert {a.answer for a in verdict.profile if a.rule == "R14"} == {"all pairs", "upper left", "both"}


def test_a_forgotten_layout_is_guessed() -> None:
    def theirs(q: Any, k: Any, v: Any) -> Any:
        return np.swapaxes(attention(*(np.swapaxes(x, -2, -3) for x in (q, k, v))), -2, -3)

    assert "are `library`, `layout` and `names` right?" in str(judge(theirs, dtypes=["float32"]))


def test_cases_are_tests_of_pytest() -> None:
    right, wrong = (
        judge_cases(f) for f in (RIGHT["in tiles, from the last"], with_plant(FAULTS["no maximum"]))
    )
    assert len(right) == len({str(case) for case in right}) == sum("float32" in case.dtypes for case in CASES)
    outcomes = []
    for case in [*right, *wrong]:
        try:
            case.check()
            outcomes.append("passes")
        except unittest.SkipTest:
            outcomes.append("skips")
        except AssertionError as error:
            outcomes.append("fails" if case.case.name in str(error) else "has another name")
    assert "fails" not in outcomes[: len(right)]
    assert {"passes", "skips", "fails"} == {*outcomes}


def test_a_model_is_judged(tmp_path: Path) -> None:
    query, keys = TensorSpec("float32", ("B", 2, "L", 8)), TensorSpec("float32", ("B", 2, "S", 8))
    mask = TensorSpec("bool", ("B", 1, "L", "S"))
    path = save(export_attention(query, keys, keys, attn_mask=mask), tmp_path / "right.onnx")
    verdict = judge(path, dtypes=["float32"])
    assert verdict.agrees, verdict
    assert verdict.judged > 20
    causal = judge(save(export_attention(query, keys, keys, is_causal=True), tmp_path / "causal.onnx"))
    assert causal.profile[0].answer == "upper left"


@pytest.mark.needs("torch")
def test_gradients_of_torch_are_judged() -> None:
    import torch

    class Wrong(torch.autograd.Function):
        @staticmethod
        def forward(_context: Any, x: Any) -> Any:
            return x.clone()

        @staticmethod
        def backward(_context: Any, gradient: Any) -> Any:
            return 1.001 * gradient

    def theirs(query: Any, key: Any, value: Any, attn_mask: Any = None) -> Any:
        return torch.nn.functional.scaled_dot_product_attention(query, Wrong.apply(key), value, attn_mask)

    verdict = judge(theirs, library="torch", dtypes=["float32"])
    assert {fault.what.partition("[")[0] for fault in verdict.faults if "gradients" in fault.case} == {"d key"}


@pytest.mark.needs("torch")
@pytest.mark.parametrize("name", ["", *GRADIENT_FAULTS])
def test_a_planted_fault_of_a_backward_pass_is_found(name: str) -> None:
    theirs = with_plant(GRADIENT_FAULTS.get(name, {}), differentiable)
    verdict = judge(theirs, library="torch", dtypes=["float32", "float16"])
    cases = [fault.case for fault in verdict.faults if fault.case.startswith("gradients")]
    assert len(cases) == len([fault for fault in verdict.faults if "NaN" not in fault.case])
    assert bool(cases) == bool(name), verdict


def test_a_case_names_rules_of_the_contract_and_draws_its_numbers_as_the_file_says() -> None:
    """The numbers again, from the words of the file, in integers of Python."""
    known = {*re.findall(r'<a id="r\d+"></a>(R\d+)', CONTRACT)}
    assert {rule for case in CASES for rule in case.rules} <= known
    assert len({case.name for case in CASES}) == len(CASES)

    def uniform(seed: int, number: int, index: int) -> float:
        z = (index + 1 + seed * 2**40 + number * 2**32) % 2**64
        z = z * 0x9E3779B97F4A7C15 % 2**64
        z = (z ^ z >> 30) * 0xBF58476D1CE4E5B9 % 2**64
        z = (z ^ z >> 27) * 0x94D049BB133111EB % 2**64
        return ((z ^ z >> 31) >> 11) / 2**53

    case = next(case for case in CASES if case.name == "scale 0.3")
    keys = case.arrays("float64")["key"].ravel()
    for i in (0, 1, len(keys) - 1):
        expected = math.sqrt(3) * (sum(uniform(case.seed, 2, 4 * i + j) for j in range(4)) - 2)
        assert keys[i] == pytest.approx(expected, rel=1e-15)


def test_the_reference_is_right_where_float64_is_not_enough() -> None:
    """Some rows of float32 cases, in 60 digits: the reference is off by far less than what is judged."""
    mpmath = pytest.importorskip("mpmath")
    for name in ("scores times 1000, 7 queries, 19 keys", "all scores far above 0", "33 queries, 47 keys"):
        case = next(case for case in CASES if case.name == name)
        arrays, rows = case.arrays("float32"), judge_semantics.expected(case, "float32", {})["output"]
        with mpmath.workdps(60):
            query = [mpmath.mpf(float(x)) for x in arrays["query"][1, 1, 2]]
            keys = [[mpmath.mpf(float(x)) for x in row] for row in arrays["key"][1, 1]]
            scores = [mpmath.fdot(query, row) / mpmath.sqrt(len(row)) for row in keys]
            weights = [mpmath.exp(score - max(scores)) for score in scores]
            exact = mpmath.fdot(weights, map(float, arrays["value"][1, 1, :, 3])) / mpmath.fsum(weights)
        largest = float(np.max(np.abs(rows.reference)))
        assert abs(float(exact) - rows.reference[1, 1, 2, 3]) < 1e-11 * largest, name


def test_half_dtypes_have_a_bound_of_their_own() -> None:
    """Which is twice the error of the textbook formula in float16: a last rounding to 8 bits is within it."""

    def rounds(query: Any, key: Any, value: Any) -> Any:
        return attention(query, key, value).astype(ml_dtypes.bfloat16).astype(query.dtype)

    verdict = judge(rounds)
    assert {fault.dtype for fault in verdict.faults} == {"float32", "float64"}
    assert isinstance(verdict, Verdict)
