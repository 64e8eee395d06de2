"""The 93 node tests that ONNX ships for Attention: what they ask, and that the reference means the same."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import onnx
import pytest
from internals import judge, reference
from libraries import LIBRARIES
from numpy.typing import NDArray

from quality.conformance.onnx_calls import AFTER, WEIGHTS, Call, plain_call
from quality.conformance.onnx_cases import CASES, Case, named
from quality.conformance.onnx_numbers import exact_stage, in_numpy, plain_stage

INPUTS = {"Q", "K", "V", "attn_mask", "past_key", "past_value", "nonpad_kv_seqlen"}
ATTRIBUTES = {
    *("scale", "softcap", "is_causal", "left_window_size", "right_window_size"),
    *("q_num_heads", "kv_num_heads", "qk_matmul_output_mode", "softmax_precision"),
}
OUTPUTS = {"Y", "present_key", "present_value", "qk_matmul_output"}

# What needs a translation, since the rules of ONNX are not those of the library: see `onnx_calls`.
TRANSLATED: dict[str, tuple[Callable[[Case], bool], list[str]]] = {
    "an offset: is_causal after a past": (
        lambda case: case.is_causal and bool(case.past),
        [
            "test_attention_4d_causal_with_past_and_present",
            "test_attention_4d_with_past_and_present_qk_matmul_bias_3d_mask_causal",
            "test_attention_4d_with_past_and_present_qk_matmul_bias_4d_mask_causal",
            "test_attention_local_window_with_past",
        ],
    ),
    "an offset in a cache, too: other queries than those of the new keys": (
        lambda case: case.is_causal and bool(case.past) and case.query.shape[-2] != case.new["key"].shape[-2],
        [
            "test_attention_4d_with_past_and_present_qk_matmul_bias_3d_mask_causal",
            "test_attention_4d_with_past_and_present_qk_matmul_bias_4d_mask_causal",
            "test_attention_local_window_with_past",
        ],
    ),
    "an offset per batch entry: is_causal before padding": (
        lambda case: case.is_causal and case.key_lengths is not None,
        [
            "test_attention_4d_causal_nonpad_attn_mask_composition",
            "test_attention_4d_causal_nonpad_batch_prefill",
            "test_attention_4d_causal_nonpad_continued_prefill",
            "test_attention_4d_causal_nonpad_negative_offset_structural_empty",
            "test_attention_4d_causal_padded_kv_bf16",
            "test_attention_4d_gqa_causal_nonpad_decode",
            "test_attention_4d_gqa_causal_nonpad_decode_fp16",
            "test_attention_local_window_ext_cache_float16_mask",
            "test_attention_local_window_ext_cache_rank2_mask",
            "test_attention_local_window_ext_cache_rank3_head_mask",
            "test_attention_local_window_ext_cache_rank4_batch_mask",
        ],
    ),
    "a whole mask: one shorter than the keys": (
        lambda case: case.mask is not None and case.mask.shape != case.inputs["attn_mask"].shape,
        [
            "test_attention_4d_causal_padded_kv_bf16",
            "test_attention_4d_diff_heads_mask4d_padded_kv",
            "test_attention_4d_padded_kv_bf16",
        ],
    ),
    "softmax_dtype: softmax_precision": (
        lambda case: case.softmax_dtype is not None,
        [
            "test_attention_24_qk_matmul_output_mode3_softmax_precision",
            "test_attention_local_window_gqa_rank4_mask",
        ],
    ),
}


def test_there_are_93_cases() -> None:
    """Another release of onnx may ship more: these then need a look at what they ask."""
    assert len({case.name for case in CASES}) == len(CASES) == 93, f"onnx {onnx.__version__}"


def test_whatever_a_case_asks_is_read() -> None:
    """An input, attribute or mode that no call knows of would be left out of every comparison."""
    assert {name for case in CASES for name in case.inputs} == INPUTS
    assert {name for case in CASES for name in case.attributes} == ATTRIBUTES
    assert {name for case in CASES for name in case.outputs} == OUTPUTS
    assert {case.mode for case in CASES} == {None, WEIGHTS, *AFTER}
    assert all(("present_key" in case.outputs) == bool(case.past) for case in CASES)


@pytest.mark.parametrize("difference", TRANSLATED)
def test_which_cases_are_translated(difference: str) -> None:
    needs, names = TRANSLATED[difference]
    assert sorted(case.name for case in CASES if needs(case)) == names


@pytest.mark.parametrize("case", CASES, ids=named)
def test_onnx_means_what_the_reference_means(case: Case) -> None:
    """A rule of ONNX that differs shows here, beyond what rounding in the dtype of the case explains.

    Rounding is what the textbook formula loses against itself in float64. What it is off from the reference
    would not do: where the reference is wrong that is large, and would allow for everything.
    """
    call = plain_call(case)
    exact, plain, doubled = reference.attention(**call)[0], in_numpy(call), in_numpy(_in_float64(call))
    _explained_by_rounding(case.output, exact, plain, doubled)
    if case.mode is not None:
        library = LIBRARIES["numpy"][1]()
        exact = exact_stage(call, case.mode)
        plain, doubled = (plain_stage(library, x, case.mode) for x in (call, _in_float64(call)))
        _explained_by_rounding(case.outputs["qk_matmul_output"], exact, plain, doubled)


def _explained_by_rounding(
    expected: NDArray[Any], exact: NDArray[np.float64], plain: NDArray[Any], doubled: NDArray[np.float64]
) -> None:
    rounding = judge(expected, doubled, plain, expected.dtype.name)
    assert rounding.agrees
    assert judge(expected, exact, plain, expected.dtype.name).absolute <= rounding.bound


def _in_float64(call: Call) -> Call:
    floating = {name: x for name, x in call.items() if isinstance(x, np.ndarray) and x.dtype != np.bool_}
    return call | {name: x.astype(np.float64) for name, x in floating.items()}
