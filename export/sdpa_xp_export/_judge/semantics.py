"""What attention of a case is, by the answers that a function gives to the questions of the file.

Libraries mean different things by attention: of a query without keys, one makes 0, another NaN, and a third the
mean of all values. A function is judged by what it means itself, so the reference follows its answers.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from functools import lru_cache
from typing import Any

import array_api_compat.numpy as numpy_namespace
import numpy as np
from numpy.typing import NDArray

from .._dtypes.dtype import numpy_dtype
from .._verify.expected import expected_rows
from .._verify.judging import ExpectedRows
from .._verify.reference import attention_and_scores, stages, with_heads
from .cases import Arrays, HardCase, data, finfo

Answers = Mapping[str, str]
"""An answer by the field of its question. What is not answered is as in the contract."""
REFUSED, LACKS, WRONG = "refused", "no such argument", "none of these"
LEAKS, OVERFLOWS = "reaches queries that mask it", "overflows"
"""They have no expected numbers: a NaN anywhere is this answer."""
ALIGNMENTS = ("upper left", "lower right")
BOOLEAN = {"not 0 may attend": True, "0 may attend": False}
"""The function has boolean masks alone, and reads a floating one as one: whether what is not 0 may attend."""
GRADIENTS = ("query", "key", "value")
OF_OPTIONS = "gradients of options"
"""An output: those of the bias and of the sinks, too."""


def is_judged(case: HardCase, answers: Answers) -> bool:
    """Return whether it is known what the case should give: a NaN that leaks may reach anything."""
    if case.heads[:1] != case.heads[-1:] and "gradients" in case.outputs and answers.get("groups") == "h % H":
        return False
    if case.bias is not None and answers.get("floating") in BOOLEAN:
        return False
    is_capped = case.bias is not None and "softcap" in case.options
    if is_capped and OF_OPTIONS in case.outputs and answers.get("order") == "bias, softcap":
        return False
    contract = {entry["field"]: entry["answers"][0] for entry in data()["questions"]}
    masks_some = answers.get("unasked") in ALIGNMENTS and "R26" in case.rules
    needs = (*case.needs, *(("NaN for some",) if masks_some else ()))
    return all(answers.get(field, contract[field]) in (contract[field], WRONG) for field in needs)


def expected(case: HardCase, dtype: str, answers: Answers) -> dict[str, ExpectedRows]:
    """Return the expected rows of each output of the case, in float64, with what bounds the errors."""
    return _expected(case, dtype, tuple(sorted(answers.items())))


@lru_cache(maxsize=2048)  # most of the time of a judgement, and the same for most functions
def _expected(case: HardCase, dtype: str, answered: tuple[tuple[str, str], ...]) -> dict[str, ExpectedRows]:
    arrays, answers = case.arrays(dtype), dict(answered)
    if not math.prod(case.pairs):  # numbers have no maximum where there are none
        fill = np.nan if answers.get("no keys") == "NaN" else 0.0
        output = np.full((*case.pairs[:-1], case.widths[1]), fill)
        return {"output": ExpectedRows(output, output)}
    arguments = _arguments(case, arrays, answers)
    rows: dict[str, ExpectedRows] = {}
    outputs = [name for name in case.outputs if not name.startswith("gradients")]
    if outputs:
        rows = expected_rows(outputs, arguments, dtype)
        if case.equal:
            rows = {n: replace(x, magnitude=None) for n, x in rows.items()}
        without = ~_attended(case, arguments, by_mask=False)
        if without.any() and "output" in rows and "sinks" not in case.options:
            by_mask = ~_attended(case, arguments, by_mask=True)
            meant = np.where(by_mask, answers.get("empty", "0"), answers.get("empty by -inf", "0"))
            rows["output"] = _with_empty_rows(rows["output"], arguments, without, meant)
    if "lse" in rows and answers.get("lse") == "in base 2":
        names, natural = ("reference", "textbook", "magnitude", "terms", "spread"), rows["lse"]
        in_2 = {name: x / math.log(2) for name in names if (x := getattr(natural, name)) is not None}
        rows["lse"] = replace(natural, **in_2)
    if "lse" in rows and answers.get("empty lse") == "+inf":
        lse = rows["lse"].reference
        rows["lse"] = replace(rows["lse"], reference=np.where(np.isneginf(lse), np.inf, lse))
    if "gradients" in case.outputs:
        rows |= _gradients(case, arguments, arrays["cotangent"], dtype)
    return rows


def _arguments(case: HardCase, arrays: Arrays, answers: Answers) -> Arrays:
    """Return the arguments of the reference, with what the answers change."""
    key, value = arrays["key"], arrays["value"]
    if answers.get("groups") == "h % H" and case.heads:
        order = np.arange(case.heads[0]) % case.heads[-1]
        key, value = key[..., order, :, :], value[..., order, :, :]
    allowed, bias = arrays["mask"], arrays["bias"]
    always = answers.get("unasked")
    if case.options.get("is_causal", always in ALIGNMENTS):
        alignment = always if always in ALIGNMENTS else answers.get("causal")
        queries, keys = case.lengths
        causal = np.tri(queries, keys, keys - queries if alignment == "lower right" else 0, dtype=bool)
        allowed = causal if allowed is None else allowed & causal
    if bias is not None and (wanted := BOOLEAN.get(answers.get("floating", ""))) is not None:
        allowed, bias = np.asarray((bias != 0) == wanted), None
    if bias is not None and answers.get("finfo.min") == "masks":
        bias = np.where(bias == finfo(bias.dtype).min, -np.inf, bias)
    softcap = case.options.get("softcap")
    terms: tuple[Any, ...] = () if bias is None else (bias,)
    if softcap and bias is not None and answers.get("order") == "bias, softcap":
        cap, softcap = softcap, None
        terms = (bias, lambda score, *_indices: cap * np.tanh(score / cap))
    scale = case.options.get("scale")
    if scale is None:
        scale = 1.0 if answers.get("scale") == "1" else 1 / math.sqrt(case.widths[0])
    arguments = {"query": arrays["query"], "key": key, "value": value, "attn_mask": allowed, "bias": terms}
    return arguments | {"scale": scale, "softcap": softcap, "sinks": arrays["sinks"]}


def _attended(case: HardCase, arguments: Arrays, *, by_mask: bool) -> NDArray[np.bool_]:
    """Return which rows have a key, (..., Hq, L); only by the mask, or by mask and biases."""
    pairs = np.ones(case.pairs, bool)
    if arguments["attn_mask"] is not None:
        pairs &= arguments["attn_mask"]
    for term in arguments["bias"]:
        if not by_mask and not callable(term):
            pairs &= ~np.isneginf(term.astype(np.float64))
    return np.asarray(pairs.any(axis=-1))


def _with_empty_rows(
    rows: ExpectedRows, arguments: Arrays, empty: NDArray[np.bool_], answers: NDArray[Any]
) -> ExpectedRows:
    """Return the rows with what the function means a query without keys to give."""
    value = arguments["value"].astype(np.float64)
    value = with_heads(np, value, empty.shape[-2]) if value.ndim > 2 else value
    fills = {"0": (0.0, 0.0), "NaN": (np.nan, 0.0), WRONG: (0.0, 0.0), REFUSED: (0.0, 0.0)}
    fills["mean"] = value.mean(axis=-2, keepdims=True), np.abs(value).mean(axis=-2, keepdims=True)
    names = ("reference", "textbook", "magnitude", "terms")
    arrays = {name: x for name in names if (x := getattr(rows, name)) is not None}
    for answer, (fill, size) in fills.items():
        chosen = (empty & (answers == answer))[..., None]
        for name, x in arrays.items():
            arrays[name] = np.where(chosen, fill if name in ("reference", "textbook") else size, x)
    return replace(rows, **arrays)


def _gradients(
    case: HardCase, arguments: Arrays, cotangent: NDArray[Any], dtype: str
) -> dict[str, ExpectedRows]:
    """Return the gradients of sum(output * cotangent); of bias and sinks, if the case asks for them."""
    # A case with a NaN needs functions in which it has no effect: no query attends to it.
    arguments = arguments | {name: np.nan_to_num(arguments[name]) for name in GRADIENTS}
    weights = attention_and_scores(**arguments)[2]
    names = [*GRADIENTS]
    if OF_OPTIONS in case.outputs:
        names += [name for name in ("bias", "sinks") if name in case.options or getattr(case, name, None)]
    exact, sizes = _pulled_back(case, arguments, weights, cotangent, "float64")
    tokens = {name: arguments[name].astype(numpy_dtype(dtype)) for name in GRADIENTS}
    rounded = np.asarray(stages(numpy_namespace, **arguments | tokens)["weights"])
    textbook, _ = _pulled_back(case, arguments, rounded, cotangent, dtype)
    return {f"d {name}": ExpectedRows(exact[name], textbook[name], terms=sizes[name]) for name in names}


def _pulled_back(
    case: HardCase, arguments: Arrays, weights: NDArray[Any], cotangent: NDArray[Any], dtype: str
) -> tuple[Arrays, Arrays]:
    """Return the gradients, and the sums of the sizes of their terms."""
    q, k, v, weights, cotangent = (
        np.asarray(x).astype(numpy_dtype(dtype))
        for x in (arguments["query"], arguments["key"], arguments["value"], weights, cotangent)
    )
    group = case.heads[0] // k.shape[-3] if case.heads else 1
    k, v = (np.repeat(x, group, axis=-3) if group > 1 else x for x in (k, v))
    scale, softcap = np.asarray(arguments["scale"]).astype(q.dtype), arguments["softcap"]
    slope: Any = 1.0
    if softcap:
        slope = 1 - np.tanh(q @ np.swapaxes(k, -1, -2) * scale / np.asarray(softcap, q.dtype)) ** 2
    of_sink = 1 - np.sum(weights, axis=-1, keepdims=True)
    bias = next((term for term in arguments["bias"] if not callable(term)), None)
    of_lse = cotangent[..., :1] * ("lse" in case.outputs)

    def back(sign: Any, difference: Any) -> Arrays:
        pulled = sign(cotangent) @ np.swapaxes(sign(v), -1, -2)
        mean = np.sum(weights * pulled, axis=-1, keepdims=True)
        of_biased = weights * (difference(pulled, mean) + sign(of_lse))
        of_scores = of_biased * slope * sign(scale)
        of_keys = np.swapaxes(of_scores, -1, -2) @ sign(q), np.swapaxes(weights, -1, -2) @ sign(cotangent)
        shared = (
            x.reshape(*x.shape[:-3], x.shape[-3] // group, group, *x.shape[-2:]).sum(axis=-3)
            if group > 1
            else x
            for x in of_keys
        )
        others = {} if bias is None else {"bias": _summed_to(of_biased, bias.shape)}
        if arguments["sinks"] is not None:
            of_sinks = (of_sink * difference(sign(of_lse), mean))[..., 0]
            others["sinks"] = _summed_to(of_sinks, (case.heads[0], 1))[:, 0]
        tokens = zip(GRADIENTS, (of_scores @ sign(k), *shared), strict=True)
        return {name: _summed_to(x, case.shapes[name]) for name, x in tokens} | others

    return back(lambda x: x, np.subtract), back(np.abs, np.add)


def _summed_to(x: NDArray[Any], shape: tuple[int, ...]) -> NDArray[Any]:
    """Return the sums of x over the axes along which an array of that shape was repeated."""
    whole = (1,) * (x.ndim - len(shape)) + shape
    axes = tuple(n for n, length in enumerate(whole) if length == 1)
    return np.asarray(np.sum(x, axis=axes, keepdims=True).reshape(shape))
