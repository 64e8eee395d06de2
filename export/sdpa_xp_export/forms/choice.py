"""Which form computes a call right on a runtime, and of those the one that suits it best."""

from __future__ import annotations

import math
from types import ModuleType

from sdpa_xp.checks import message
from sdpa_xp_export._call.call import ExportCall
from sdpa_xp_export._call.mask_analysis import only_causal, unmasked
from sdpa_xp_export._runtime.releases import (
    FEW_SCORES,
    FIRST_RELEASE,
    FIRST_RELEASE_OF_OPSET,
    OPSETS,
    PREFERRED,
    VERY_MANY_SCORES,
    WRONG_ON,
    Runtime,
)
from sdpa_xp_export.forms import attention, grouped_query, multi_head, primitive, tiled

FORMS: dict[str, ModuleType] = {
    "attention": attention,
    "multi_head": multi_head,
    "grouped_query": grouped_query,
    "tiled": tiled,
    "primitive": primitive,
}


def choose(function: str, call: ExportCall, form: str, opset: int | None, target: Runtime) -> tuple[str, str]:
    """The form, and why it is that one."""
    if form not in (*FORMS, "auto"):
        rule = f"`form` must be auto, {', '.join(FORMS)}"
        raise ValueError(message(function, rule, {"form": repr(form)}))
    if opset is not None and (isinstance(opset, bool) or not isinstance(opset, int)):
        raise TypeError(message(function, "`opset` must be an integer", {"opset": repr(opset)}))
    if opset is not None and not any(opset in opsets for opsets in OPSETS.values()):
        first, last = OPSETS["primitive"][0], OPSETS["primitive"][-1]
        rule = f"`opset` must be {first} to {last}, and no form takes {opset!r}"
        raise ValueError(message(function, rule, {"opset": repr(opset)}))
    if opset is not None:
        check_loaded_opset(function, opset, target)
    if form == "auto":
        return _best(call, opset, target)
    if why := unsupported_reason(form, call, target):
        hint = "form='primitive' computes it."
        raise ValueError(message(function, f"`form` cannot be {form!r}: {why}", {"form": form}, hint))
    return form, "asked for"


def unsupported_reason(name: str, call: ExportCall, target: Runtime) -> str | None:
    """Why the form does not compute the call right on that runtime and on later ones; None where it does."""
    oldest = FIRST_RELEASE[name]
    if target.release < oldest:
        return f"onnxruntime computes it right from {oldest[0]}.{oldest[1]} on, and `runtime` is {target}"
    if wrong := WRONG_ON.get(target.provider, {}).get(name):
        return f"{wrong}, and `runtime` is {target}"
    why: str | None = FORMS[name].refusal(call, target)
    return why


def check_loaded_opset(function: str, opset: int, target: Runtime) -> None:
    """The runtime loads graphs of that opset."""
    oldest = FIRST_RELEASE_OF_OPSET.get(opset, (0, 0))
    if target.release < oldest:
        rule = f"`opset` {opset} is loaded from onnxruntime {oldest[0]}.{oldest[1]} on"
        raise ValueError(message(function, rule, {"opset": opset, "runtime": target}))


def check_form_opset(function: str, form: str, opset: int) -> None:
    """The form has that opset."""
    allowed = OPSETS[form]
    if opset not in allowed:
        rule = f"`opset` must be {allowed[0]} to {allowed[-1]} for form {form!r}"
        raise ValueError(message(function, rule, {"opset": repr(opset)}))


def _best(call: ExportCall, opset: int | None, target: Runtime) -> tuple[str, str]:
    """The first form of the table that computes the call, and what kept those before it from being taken."""
    case = _case(call)
    passed_over: list[str] = []
    for name in PREFERRED[target.provider][case]:
        why = unsupported_reason(name, call, target)
        if opset is not None and opset not in OPSETS[name]:
            why = f"opset {opset} was asked for"
        if why is None:
            return name, "; ".join([f"the best for {case} on {target.provider}", *passed_over])
        passed_over.append(f"not {name}: {why}")
    raise AssertionError("the primitive form states every call")


def _case(call: ExportCall) -> str:
    """What the table goes by: what masks the call, and whether its scores are known to be few."""
    kind = "unmasked" if unmasked(call) else "causal" if only_causal(call) and not call.cached else "masked"
    sizes = (*call.sizes.batch, call.sizes.query_heads, call.sizes.queries, call.sizes.keys)
    if not all(isinstance(size, int) for size in sizes):
        return f"{kind}, many scores"
    count = math.prod(sizes)
    few, very = count <= FEW_SCORES[kind], count > VERY_MANY_SCORES
    return f"{kind}, {'few' if few else 'very many' if very else 'many'} scores"
