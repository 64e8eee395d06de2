"""Every exported form against ONNX's node tests of Attention: all 93, and every output that they ask for."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from internals import DEFAULT_RUNTIME, PROVIDERS, Runtime, checked_call, open_session, reference, run_session

from quality.conformance.onnx_calls import plain_call
from quality.conformance.onnx_cases import CASES, Case, named
from quality.conformance.onnx_exports import Export, check_outputs, exports
from sdpa_xp_export import TensorSpec
from sdpa_xp_export.export import export_call
from sdpa_xp_export.forms.choice import FORMS, unsupported_reason

EXPORTS = [export for case in CASES for export in exports(case)]
TARGET = Runtime.parse("test", DEFAULT_RUNTIME)


def test_every_case_is_exported() -> None:
    """`primitive` states whatever ONNX asks; what another form refuses is in results/runtimes.json."""
    assert [export.case for export in EXPORTS if "output" in export.call.outputs] == list(CASES)
    assert not [export.name for export in EXPORTS if unsupported_reason("primitive", export.call, TARGET)]


def test_every_output_is_exported() -> None:
    expected = {(case.name, name) for case in CASES for name in case.outputs}
    outputs = {
        (export.case.name, name) for export in EXPORTS for name in (*export.call.outputs, *_presents(export))
    }
    theirs = {"output": "Y", "scores": "qk_matmul_output", "weights": "qk_matmul_output"}
    assert {(case, theirs.get(name, name)) for case, name in outputs} == expected


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    ("export", "form", "opset"),
    [
        pytest.param(export, form, opset, id=f"{export.name}-{form}-{opset}")
        for export in EXPORTS
        for form in FORMS
        if unsupported_reason(form, export.call, TARGET) is None
        for opset in sorted({FORMS[form].default_opset, 24})  # test_newest_opset.py has 25
    ],
)
def test_export(export: Export, form: str, opset: int) -> None:
    model = export_call(export.call, form=form, opset=opset)
    check_outputs(export, run_session(open_session(model, PROVIDERS["cpu"]), export.feeds))


def test_softmax_precision_is_kept() -> None:
    """What is held in float64 is rounded once: to the float32 that is nearest to the reference.

    The rule of `check_outputs` is that of the dtype of the case and would let a softmax in float32 pass.
    """
    (export,) = (candidate for candidate in EXPORTS if candidate.case.softmax_dtype == "float64")
    session = open_session(export_call(export.call), PROVIDERS["cpu"])
    exact = reference.attention(**plain_call(export.case))[0]
    np.testing.assert_array_equal(
        run_session(session, export.feeds)["output"], exact.astype(np.float32), strict=True
    )


@pytest.mark.parametrize(
    "case",
    [case for case in CASES if case.mask is not None and case.mask.shape != case.inputs["attn_mask"].shape],
    ids=named,
)
def test_a_mask_shorter_than_the_keys_is_refused(case: Case) -> None:
    """As the library refuses it. In `EXPORTS` these masks are as long as the keys."""
    short = case.inputs["attn_mask"]
    (export,) = exports(case)
    arrays = [getattr(export.call, name) for name in ("query", "key", "value")]
    with pytest.raises(ValueError, match="`bias` must broadcast"):
        checked_call("export", *arrays, bias=TensorSpec(short.dtype.name, short.shape))


def test_a_wrong_output_is_found() -> None:
    """Nothing above compares a graph with itself: one number that is off is reported."""
    export = next(candidate for candidate in EXPORTS if candidate.case.past and candidate.case.mode is not None)
    outputs = run_session(open_session(export_call(export.call), PROVIDERS["cpu"]), export.feeds)
    check_outputs(export, outputs)
    for name in outputs:
        changed = outputs | {name: outputs[name].copy()}
        changed[name].flat[-1] += 0.01
        with pytest.raises(AssertionError):
            check_outputs(export, changed)
    with pytest.raises(AssertionError):
        check_outputs(replace(export, call=replace(export.call, outputs=("output",))), outputs)


def _presents(export: Export) -> tuple[str, ...]:
    return tuple(f"present_{name}" for name in export.case.past)
