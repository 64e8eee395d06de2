"""The library and every exported form against the 93 node tests that ONNX ships for Attention.

ONNX computed its numbers in the dtype of the case, so they are off, too: each result is judged against the
float64 reference, and so are ONNX's own numbers; what is left between the two is then bounded by both errors.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import array_api_compat.numpy
import numpy as np
import onnx
import pytest
from conformance.onnx_cases import (
    CASES,
    NO_SCORES,
    NOT_YET_IN_EXPORT,
    NOT_YET_IN_LIBRARY,
    WEIGHTS,
    Arrays,
    Case,
    missing,
    running,
)
from libraries import LIBRARIES
from numpy.typing import NDArray

from sdpa_xp import attention_weights, masks, scaled_dot_product_attention
from sdpa_xp_export import TensorSpec, export_attention, reference
from sdpa_xp_export.agreement import judge, textbook
from sdpa_xp_export.export import FORMS
from sdpa_xp_export.verify import open_session

# reason -> the cases that it keeps from running; literal, so that it changes only when someone changes it.
LISTED_FOR_LIBRARY = {
    "softmax_precision: a softmax in float64 of float32 inputs": [
        "test_attention_local_window_gqa_rank4_mask",
    ],
    "left_window_size, right_window_size: masks.sliding_window": [
        "test_attention_3d_local_window",
        "test_attention_bidirectional_window",
        "test_attention_local_window",
        "test_attention_local_window_ext_cache_float16_mask",
        "test_attention_local_window_ext_cache_rank2_mask",
        "test_attention_local_window_ext_cache_rank3_head_mask",
        "test_attention_local_window_ext_cache_rank4_batch_mask",
        "test_attention_local_window_rank1_boolean_mask",
        "test_attention_local_window_with_past",
    ],
    "nonpad_kv_seqlen: masks.padding": [
        "test_attention_4d_causal_nonpad_attn_mask_composition",
        "test_attention_4d_causal_nonpad_batch_prefill",
        "test_attention_4d_causal_nonpad_continued_prefill",
        "test_attention_4d_causal_nonpad_negative_offset_structural_empty",
        "test_attention_4d_causal_padded_kv_bf16",
        "test_attention_4d_diff_heads_mask4d_padded_kv",
        "test_attention_4d_gqa_causal_nonpad_decode",
        "test_attention_4d_gqa_causal_nonpad_decode_fp16",
        "test_attention_4d_padded_kv_bf16",
    ],
    "is_causal after past_key: the offset of masks.causal": [
        "test_attention_4d_causal_with_past_and_present",
        "test_attention_4d_with_past_and_present_qk_matmul_bias_3d_mask_causal",
        "test_attention_4d_with_past_and_present_qk_matmul_bias_4d_mask_causal",
    ],
}
LISTED_FOR_EXPORT = LISTED_FOR_LIBRARY | {
    "bfloat16: a dtype of TensorSpec": [
        "test_attention_3d_causal_bf16",
        "test_attention_4d_attn_mask_causal_bf16",
        "test_attention_4d_causal_bf16",
    ],
}
OPSETS = {"attention": (23, 24), "primitive": (17,)}
BACKENDS = ("numpy", "torch")  # beside onnxruntime; a process that holds every library may hang


def _dtype(array: Any) -> str:
    return str(array.dtype).rpartition(".")[2]


def _check(
    result: NDArray[Any], plain: NDArray[Any], exact: NDArray[np.float64], expected: NDArray[Any]
) -> None:
    """`result` is as near to the reference as the textbook formula `plain`, and to ONNX's numbers likewise.

    Every comparison wants NaN and inf at the same places.
    """
    dtype = expected.dtype.name
    ours = judge(result, exact, plain, dtype)
    theirs = judge(expected, exact, plain, dtype)
    gap = judge(result, expected.astype(np.float64), plain, dtype).absolute
    assert ours.agrees, f"off by {ours.absolute:.3g}, may be {ours.bound:.3g}"
    assert gap <= ours.bound + theirs.absolute, f"{gap:.3g} from ONNX, itself off by {theirs.absolute:.3g}"


def _numpy_textbook(arrays: Arrays, case: Case) -> NDArray[Any]:
    plain: NDArray[Any] = textbook(array_api_compat.numpy, **arrays, **case.rules)
    return plain


def _identity(case: Case) -> Arrays:
    """The value with which attention returns its weights, (S, S) for each key head."""
    key = case.arrays["key"]
    return {"value": np.zeros((*key.shape[:-1], 1), key.dtype) + np.eye(key.shape[-2], dtype=key.dtype)}


def _named(case: Case) -> str:
    return case.name


def test_there_are_93_cases() -> None:
    """Another release of onnx may ship more: these then need a look, and a place below or in the lists."""
    assert len({case.name for case in CASES}) == len(CASES) == 93, f"onnx {onnx.__version__}"


@pytest.mark.parametrize(
    ("reasons", "listed"),
    [(NOT_YET_IN_LIBRARY, LISTED_FOR_LIBRARY), (NOT_YET_IN_EXPORT, LISTED_FOR_EXPORT)],
    ids=["library", "export"],
)
def test_every_case_runs_or_is_listed(reasons: dict[str, Any], listed: dict[str, list[str]]) -> None:
    found: dict[str, list[str]] = {reason: [] for reason in reasons}
    for case in CASES:
        reason = missing(case, reasons)
        if reason is not None:
            found[reason].append(case.name)
    assert {reason: sorted(names) for reason, names in found.items()} == listed
    names = [name for names in listed.values() for name in names]
    ran = [case.name for case in running(reasons)]
    assert sorted(names + ran) == sorted(case.name for case in CASES)


def test_what_is_listed_is_still_missing() -> None:
    """Whoever adds one of these finds here that its cases have to run from then on."""
    assert not {"sliding_window", "padding", "causal"} & set(dir(masks))
    with pytest.raises(ValueError, match="`dtype` must be one of"):
        TensorSpec("bfloat16", (1, 1))


def test_every_output_has_its_counterpart_or_is_listed() -> None:
    """Present keys and values are what the call was given; of the scores the library has the weights."""
    names = {name for case in CASES for name in case.outputs}
    assert names == {"Y", "present_key", "present_value", "qk_matmul_output"}
    assert {case.mode for case in CASES} == {None, WEIGHTS, *NO_SCORES}


@pytest.mark.parametrize("case", running(NOT_YET_IN_LIBRARY), ids=_named)
def test_onnx_means_what_the_reference_means(case: Case) -> None:
    """A rule of ONNX that differs shows here, beyond what rounding in the dtype of the case explains.

    Rounding is what the textbook formula loses against itself in float64. What it is off from the reference
    would not do: where the reference is wrong that is large, and would allow for everything.
    """
    output, _, weights = reference.attention(**case.arrays, **case.rules)
    comparisons = [(case.output, output, case.arrays)]
    if case.mode == WEIGHTS:
        comparisons.append((case.outputs["qk_matmul_output"], weights, case.arrays | _identity(case)))
    for expected, exact, arrays in comparisons:
        plain = _numpy_textbook(arrays, case)
        doubled = {name: x if x.dtype == np.bool_ else x.astype(np.float64) for name, x in arrays.items()}
        rounding = judge(expected, _numpy_textbook(doubled, case), plain, case.dtype)
        assert rounding.agrees
        assert judge(expected, exact, plain, case.dtype).absolute <= rounding.bound


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("case", running(NOT_YET_IN_LIBRARY), ids=_named)
def test_library(case: Case, backend: str) -> None:
    library = LIBRARIES[backend][1]()
    result = library.call(scaled_dot_product_attention, **case.arrays, **case.rules)
    assert _dtype(result) == case.dtype
    plain = library.call(partial(textbook, library.xp), **case.arrays, **case.rules)
    exact = reference.attention(**case.arrays, **case.rules)[0]
    _check(library.get(result), library.get(plain), exact, case.output)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(
    "case", [case for case in running(NOT_YET_IN_LIBRARY) if case.mode == WEIGHTS], ids=_named
)
def test_library_weights(case: Case, backend: str) -> None:
    library = LIBRARIES[backend][1]()
    arrays = {name: array for name, array in case.arrays.items() if name != "value"}
    result = library.call(attention_weights, **arrays, **case.rules)
    assert _dtype(result) == case.dtype
    plain = library.call(partial(textbook, library.xp), **(arrays | _identity(case)), **case.rules)
    exact = reference.attention(**case.arrays, **case.rules)[2]
    _check(library.get(result), library.get(plain), exact, case.outputs["qk_matmul_output"])


def test_every_form_is_exported() -> None:
    assert set(OPSETS) == set(FORMS)


@pytest.mark.parametrize(
    ("case", "form", "opset"),
    [
        pytest.param(case, form, opset, id=f"{case.name}-{form}-{opset}")
        for case in running(NOT_YET_IN_EXPORT)
        for form, opsets in OPSETS.items()
        for opset in opsets
        if opset <= max(case.opset, opsets[0])  # the operator as the case means it, or as it was before
    ],
)
def test_export(case: Case, form: str, opset: int) -> None:
    arrays = case.arrays
    specs = {name: TensorSpec(array.dtype.name, array.shape) for name, array in arrays.items()}
    model = export_attention(**specs, **case.rules, form=form, opset=opset)
    (result,) = open_session(model, "CPUExecutionProvider").run(None, arrays)
    assert _dtype(result) == case.dtype
    _check(result, _numpy_textbook(arrays, case), reference.attention(**arrays, **case.rules)[0], case.output)
