"""Every exported form against ONNX's node tests of Attention, and what the exporter cannot say yet."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from inspect import signature
from typing import Any

import numpy as np
import pytest
from conformance.onnx_calls import library_call, plain_call, with_layout
from conformance.onnx_cases import CASES, Case, named
from conformance.onnx_numbers import check, dtype_of, in_numpy

import sdpa_xp_export
from sdpa_xp_export import TensorSpec, export_attention, reference
from sdpa_xp_export.export import FORMS
from sdpa_xp_export.session import open_session

OPSETS = {"attention": (23, 24), "primitive": (17,)}

# Why a case cannot be exported, in the order in which the exporter would say so, and how it says so.
NOT_YET: dict[str, tuple[Callable[[Case], bool], str]] = {
    "bfloat16: a dtype of TensorSpec": (
        lambda case: case.dtype == "bfloat16",
        "`dtype` must be one of",
    ),
    "softmax_precision: a softmax in float64 of float32 inputs": (
        # Others are normalised in float32 at least, which is as precise as any other case asks for.
        lambda case: case.softmax_dtype == "float64" and case.dtype != "float64",
        "unexpected keyword argument 'softmax_dtype'",
    ),
    "left_window_size, right_window_size: masks.sliding_window": (
        lambda case: case.window != (None, None),
        "`attn_mask` must be a TensorSpec",
    ),
    "nonpad_kv_seqlen: masks.padding": (
        lambda case: case.key_lengths is not None,
        "`attn_mask` must be a TensorSpec",
    ),
    "is_causal after past_key: the offset of masks.causal": (
        lambda case: case.is_causal and bool(case.past),
        "`attn_mask` must be a TensorSpec",
    ),
}
# reason -> the cases that it keeps from running; literal, so that it changes only when someone changes it.
LISTED = {
    "bfloat16: a dtype of TensorSpec": [
        "test_attention_3d_causal_bf16",
        "test_attention_4d_attn_mask_causal_bf16",
        "test_attention_4d_causal_bf16",
        "test_attention_4d_causal_padded_kv_bf16",
        "test_attention_4d_padded_kv_bf16",
    ],
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
        "test_attention_4d_diff_heads_mask4d_padded_kv",
        "test_attention_4d_gqa_causal_nonpad_decode",
        "test_attention_4d_gqa_causal_nonpad_decode_fp16",
    ],
    "is_causal after past_key: the offset of masks.causal": [
        "test_attention_4d_causal_with_past_and_present",
        "test_attention_4d_with_past_and_present_qk_matmul_bias_3d_mask_causal",
        "test_attention_4d_with_past_and_present_qk_matmul_bias_4d_mask_causal",
    ],
}


def reason(case: Case) -> str | None:
    """Why the case cannot be exported; None where it can."""
    return next((reason for reason, (needs, _) in NOT_YET.items() if needs(case)), None)


RUNNING = [case for case in CASES if reason(case) is None]


def test_every_case_runs_or_is_listed() -> None:
    found: dict[str, list[str]] = {reason: [] for reason in NOT_YET}
    for case in CASES:
        if (why := reason(case)) is not None:
            found[why].append(case.name)
    assert {why: sorted(names) for why, names in found.items()} == LISTED
    assert len(RUNNING) + sum(map(len, LISTED.values())) == len(CASES)


def specs(call: Mapping[str, Any]) -> dict[str, Any]:
    """A spec for each array; whatever else is in a call stays."""
    return {
        name: TensorSpec(x.dtype.name, x.shape) if isinstance(x, np.ndarray) else x for name, x in call.items()
    }


@pytest.mark.parametrize("case", [case for case in CASES if reason(case) is not None], ids=named)
def test_what_is_listed_is_refused(case: Case) -> None:
    """Whoever teaches the exporter one of these finds here that its cases have to run from then on."""
    call = library_call(case, np.asarray)
    call |= {name: with_layout(case, call[name]) for name in ("query", "key", "value")}
    del call["layout"]
    _, how = NOT_YET[str(reason(case))]
    with pytest.raises((TypeError, ValueError), match=how):
        export_attention(**specs(call))


def test_no_other_output_is_exported() -> None:
    """Neither the keys and values so far nor the scores: whoever adds one compares it here, as Y is."""
    names = {*sdpa_xp_export.__all__, *signature(export_attention).parameters}
    assert not [name for name in names if re.search("past|present|cache|score|weight|qk|output", name)]


def test_every_form_is_exported() -> None:
    assert set(OPSETS) == set(FORMS)


@pytest.mark.parametrize(
    ("case", "form", "opset"),
    [
        pytest.param(case, form, opset, id=f"{case.name}-{form}-{opset}")
        for case in RUNNING
        for form, opsets in OPSETS.items()
        for opset in opsets
        if opset <= max(case.opset, opsets[0])  # the operator as the case means it, or as it was before
    ],
)
def test_export(case: Case, form: str, opset: int) -> None:
    """Y alone; a past is given as the first of the keys."""
    call = plain_call(case)
    arrays = {name: array for name, array in call.items() if isinstance(array, np.ndarray)}
    model = export_attention(**specs(call), form=form, opset=opset)
    (result,) = open_session(model, "CPUExecutionProvider").run(None, arrays)
    assert dtype_of(result) == case.dtype
    check(result, in_numpy(call), reference.attention(**call)[0], case.output)
