"""Choose the form that suits a call best, among those that compute it right on a runtime."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import replace
from itertools import product
from typing import Literal, TypeAlias, get_args

from sdpa_xp._checks import nearest_hint
from sdpa_xp.errors import ArgumentTypeError, ArgumentValueError

from .._call.call import ExportCall, FormName
from .._call.mask_analysis import is_causal, only_causal, unmasked
from .._runtime.defects import still_wrong
from .._runtime.releases import FIRST_RELEASE_OF, LAST_OPSET, OPSETS, Runtime, RuntimeProvider, release_text
from .attention import ATTENTION
from .contrib import GROUPED_QUERY, MULTI_HEAD
from .form import Form
from .tiled import PRIMITIVE, TILED

FORMS: dict[FormName, Form] = {
    form.name: form for form in (ATTENTION, MULTI_HEAD, GROUPED_QUERY, TILED, PRIMITIVE)
}
Kind: TypeAlias = Literal["unmasked", "causal", "masked"]
Size: TypeAlias = Literal["few queries", "few scores", "many scores", "very many scores"]
# The order of the forms changes at these bounds in results/exported.md, by time and memory of 8 heads on two
# cores: from few to many scores between 128 and 2,048 tokens, to very many between 2,048 and 4,096.
FEW_SCORES: dict[Kind, int] = {"unmasked": 2**24, "causal": 2**20, "masked": 2**21}
"""The most scores, of all heads together, of a call with few scores."""
VERY_MANY_SCORES = 2**26
"""A call with more scores than this has very many."""
TIMED = ", timed with AVX-512"
"""What the CPU has that found these numbers; on others they may differ."""
FEW_QUERIES = 16
"""A call with at most this number of queries, as in decoding, has few scores for each key."""
Cases: TypeAlias = frozenset[tuple[Kind, Size]]


def _cases(kinds: Iterable[Kind], *sizes: Size) -> Cases:
    return frozenset(product(kinds, sizes))


_KINDS: tuple[Kind, ...] = get_args(Kind)
_FEW, _MANY = _cases(_KINDS, "few queries", "few scores"), _cases(_KINDS, "many scores", "very many scores")
PREFERRED: dict[FormName, dict[RuntimeProvider, Cases]] = {
    # The WebGPU provider has no kernel for Attention, which falls back to the CPU there; and a program that
    # reads ONNX may compute it with all L x S scores in memory.
    "attention": {"cpu": _cases(("unmasked", "causal"), "few queries", "few scores"), "cuda": _FEW | _MANY},
    "multi_head": {"cpu": _cases(["unmasked"], "many scores", "very many scores")},
    "grouped_query": {"cpu": _cases(["causal"], "very many scores")},
    "tiled": {
        "cpu": _MANY | _cases(["causal"], "few scores"),
        "cuda": _MANY,
        "webgpu": _MANY,
        # OpenVINO makes one kernel of MatMul and Softmax, which holds no matrix of scores. Under the diagonal,
        # blocks take 0.7 of its time at 4,096 tokens (2026.4, one thread).
        "openvino": _cases(("causal", "masked"), "many scores", "very many scores"),
    },
    "primitive": dict.fromkeys(("cpu", "cuda", "webgpu", "openvino"), _FEW | _MANY),
}
"""The calls that each form is chosen for, unless a form above it takes them: what masks them and their size, by
provider. benchmarks/exported.py measured them on the CPU; `UNMEASURED` says why others are expectations."""
SAME_ORDER: dict[RuntimeProvider, RuntimeProvider] = {"wasm": "cpu", "web": "webgpu", "onnx": "webgpu"}
"""The provider in `PREFERRED` that another one is like: WebAssembly has the kernels of the CPU."""
UNMEASURED: dict[RuntimeProvider, str] = {
    "cuda": "no graph was run there",
    **dict.fromkeys(("wasm", "webgpu", "web"), "its time was not measured there"),
    "onnx": "programs differ",
}
"""Why the order of the forms is an expectation, for each provider on which they were not timed."""


def choose(
    function: str, call: ExportCall, form: str, opset: int | None, runtime: Runtime
) -> tuple[FormName, str]:
    """Return the form to write, and why it is that one.

    Args:
        function: The function that messages name.
        call: The call.
        form: The form that was asked for, or "auto".
        opset: The opset that was asked for, or None.
        runtime: The oldest runtime, and the provider.
    """
    check_form(function, form)
    check_opset(function, opset, runtime, f"; no form supports {opset!r}")
    if form == "auto":
        check_loaded_opset(function, opset, runtime)
        name, reason = _best(call, opset, runtime)
    else:
        (name,), reason = (known for known in FORMS if known == form), "asked for"
        # What no release changes comes first, here and in `unsupported_reason`.
        allowed = FORMS[name].opsets
        if opset is not None and opset not in allowed:
            rule = f"`opset` must be {allowed[0]} to {allowed[-1]} for form {form!r}"
            raise ArgumentValueError(function, rule, {"opset": repr(opset)})
        if why := unsupported_reason(name, call, runtime):
            hint = _auto_hint(call, opset, runtime)
            got = {"form": form, "query.shape": call.query.shape}
            raise ArgumentValueError(function, f"`form` cannot be {form!r}: {why}", got, hint)
        check_loaded_opset(function, opset, runtime)
    return name, "; ".join(filter(None, [reason, runtime.untried_note]))


def check_tensors(function: str, call: ExportCall, runtime: Runtime) -> None:
    """Check that a program can pass the inputs and outputs of the call; outputs have the query's dtype."""
    for name, spec in call.inputs.items():
        runtime.check_dtype(function, f"{name}.dtype", spec.dtype)
    runtime.check_dtype(function, "softmax_dtype", call.accumulation_dtype)


def unsupported_reason(form: FormName, call: ExportCall, runtime: Runtime) -> str | None:
    """Return why the form does not compute the call right on that runtime or a later one; None if it does.

    Reasons that no release removes come before reasons that a newer release removes, also in the function of a
    form: whoever raises the release would meet the others next.
    """
    for provider in runtime.right_on:
        if wrong := FORMS[form].wrong_on.get(provider) or still_wrong(form, provider):
            return f"{wrong}, and `runtime` is {runtime}"
    # The table refuses a new option for a form that does not ask it at its own place.
    why = FORMS[form].unsupported_reason(call, runtime) or FORMS[form].missing_option(call)
    oldest = FORMS[form].since
    if why is None and runtime.is_before(oldest):
        return f"onnxruntime computes it right from {release_text(oldest)} on, and `runtime` is {runtime}"
    return why


def check_form(function: str, form: object) -> None:
    """Check the name of a form; auto is one, too."""
    if not isinstance(form, str) or form not in (*FORMS, "auto"):
        rule, known = f"`form` must be auto, {', '.join(FORMS)}", (*FORMS, "auto")
        raise ArgumentValueError(function, rule, {"form": repr(form)}, nearest_hint(form, known))


def check_opset(function: str, opset: object, runtime: Runtime, consequence: str = "") -> None:
    """Check that a form can be written in the opset for the provider; None is one that it can."""
    if isinstance(opset, bool) or not isinstance(opset, int | None):
        raise ArgumentTypeError(function, "`opset` must be an integer", {"opset": repr(opset)})
    if opset is not None and opset not in OPSETS:
        rule = f"`opset` must be {OPSETS[0]} to {OPSETS[-1]}{consequence}"
        raise ArgumentValueError(function, rule, {"opset": opset})
    last = LAST_OPSET.get(runtime.provider, OPSETS[-1])
    if opset is not None and opset > last:
        rule = f"`opset` must be at most {last} for {runtime.provider}, where no later one was tried"
        raise ArgumentValueError(function, rule, {"opset": opset, "runtime": runtime})


def check_loaded_opset(function: str, opset: int | None, runtime: Runtime) -> None:
    """Check that the runtime loads graphs of that opset; None is one that it loads."""
    oldest = _first_release(opset)
    if runtime.is_before(oldest):
        rule = f"`opset` {opset} needs onnxruntime {release_text(oldest)} or later"
        raise ArgumentValueError(function, rule, {"opset": opset, "runtime": runtime})


def _first_release(opset: int | None) -> tuple[int, int]:
    return FIRST_RELEASE_OF.get(opset, (0, 0)) if opset is not None else (0, 0)


def _auto_hint(call: ExportCall, opset: int | None, runtime: Runtime) -> str:
    """Return which form the exporter itself chooses, which may also ask for a newer release."""
    newer, release = _first_release(opset), ""
    if runtime.is_before(newer):
        runtime, release = replace(runtime, release=newer), f" from onnxruntime {release_text(newer)} on"
    form, _ = _best(call, opset, runtime)
    return f"`form='auto'` chooses {form!r}{release}."


def _best(call: ExportCall, opset: int | None, runtime: Runtime) -> tuple[FormName, str]:
    """Return the first preferred form that computes the call, and why those before it were passed over."""
    form, why_not = _first_supported(call, _size(call), opset, runtime)
    # The operator of that name is the usual one for a cache and for grouped heads, so say why not.
    grouped = call.sizes.query_heads != call.sizes.heads
    if (call.cached or grouped) and (why := unsupported_reason("grouped_query", call, runtime)):
        why_not.setdefault("grouped_query", why)
    passed_over = (f"not {name}: {why}" for name, why in why_not.items())
    return form, "; ".join([f"{_in_words(call)}: {_rank(call, form, opset, runtime)}", *passed_over])


def _first_supported(
    call: ExportCall, size: Size, opset: int | None, runtime: Runtime
) -> tuple[FormName, dict[FormName, str]]:
    """Return the form for a call of that size, and the reason against each form that is preferred to it."""
    why_not: dict[FormName, str] = {}
    case, provider = (_kind(call), size), SAME_ORDER.get(runtime.provider, runtime.provider)
    for form in (name for name, preferred in PREFERRED.items() if case in preferred.get(provider, ())):
        why = unsupported_reason(form, call, runtime)
        if opset is not None and opset not in FORMS[form].auto_opsets:
            why = f"opset {opset} was asked for"
        quadratic = FORMS[form].quadratic_on_cuda
        # An array of L x S is no harm where scores are few, be it for few queries or for few keys.
        if why is None and quadratic and runtime.provider == "cuda" and not size.startswith("few"):
            why = quadratic(call, opset)
        if why is None:
            return form, why_not
        why_not[form] = why
    raise AssertionError("the primitive form states every call")


def _rank(call: ExportCall, form: FormName, opset: int | None, runtime: Runtime) -> str:
    """Return that the form is the best, or why that is only expected."""
    is_prompt = call.cached and not _has_few_queries(call)
    why = UNMEASURED.get(runtime.provider, "not measured for a prompt with a cache" if is_prompt else None)
    best = f"the best on {runtime.provider}" if runtime.is_onnxruntime else f"the best for {runtime}"
    if why is not None:
        return f"expected to be {best}, but {why}"
    return best + (_range(call, form, opset, runtime) if _is_open(call) else "")


def _range(call: ExportCall, form: FormName, opset: int | None, runtime: Runtime) -> str:
    """Return for how many scores the form is the best, and which form is the best for other numbers."""
    ends: tuple[Size, Size] = "few scores", "very many scores"
    fewer, more = (_first_supported(call, size, opset, runtime)[0] for size in ends)
    few, very_many = (f"{count / 1e6:.2g}" for count in (FEW_SCORES[_kind(call)], VERY_MANY_SCORES))
    if form == fewer == more:
        return ""
    if form == more:
        return f" above {few} million scores{TIMED} (below: {fewer})"
    if form == fewer:
        return f" up to {very_many} million scores{TIMED} (above: {more})"
    return f" for {few} to {very_many} million scores{TIMED} (below: {fewer}, above: {more})"


def _kind(call: ExportCall) -> Kind:
    """Return what masks the call, as `PREFERRED` names it."""
    return "unmasked" if unmasked(call) else "causal" if only_causal(call) else "masked"


def _size(call: ExportCall) -> Size:
    """Return how many queries or scores the call has, as `PREFERRED` names it."""
    if _has_few_queries(call):
        return "few queries"
    count = _score_count(call)
    if count is None:  # names can be any lengths
        return "many scores"
    if count <= FEW_SCORES[_kind(call)]:
        return "few scores"
    return "very many scores" if count > VERY_MANY_SCORES else "many scores"


def _in_words(call: ExportCall) -> str:
    """Return the call as its caller would describe it: what masks it, what it has, and its size."""
    masked = "masked" if call.masks else "all pairs"
    kind = "causal" if call.masks and all(map(is_causal, call.masks)) else masked
    cache = "a cache with free space" if call.past_lengths is not None else "a cache"
    has = [what for what, it_has in ((cache, call.cached), ("a bias", call.biases)) if it_has]
    size = "open lengths" if _is_open(call) else _size(call)
    return " with ".join([kind, " and ".join(has)] if has else [kind]) + f", {size}"


def _is_open(call: ExportCall) -> bool:
    """Return whether a run says how many scores the call has, and its queries may be many."""
    return _score_count(call) is None and not _has_few_queries(call)


def _has_few_queries(call: ExportCall) -> bool:
    """Return whether the queries are known to be few, as in decoding, so that scores need little memory."""
    return isinstance(call.sizes.queries, int) and call.sizes.queries <= FEW_QUERIES


def _score_count(call: ExportCall) -> int | None:
    """Return how many scores all heads and batch entries have together; None if a run says it."""
    sizes = (*call.sizes.batch, call.sizes.query_heads, call.sizes.queries, call.sizes.keys)
    return math.prod(sizes) if all(isinstance(size, int) for size in sizes) else None
