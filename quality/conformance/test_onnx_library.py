"""The library against ONNX's node tests of Attention: all 93, and every output that they ask for."""

from __future__ import annotations

import numpy as np
import pytest
from internals import reference
from libraries import LIBRARIES

from quality.conformance.onnx_calls import WEIGHTS, library_call, plain_call, until, with_layout, without
from quality.conformance.onnx_cases import CASES, Case, named
from quality.conformance.onnx_numbers import check, dtype_of, exact_stage, in_library, plain_stage
from sdpa_xp import KVCache, attention_scores, attention_weights, scaled_dot_product_attention

BACKENDS = ("numpy", "torch")  # beside onnxruntime; a process that holds every library may hang


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("case", CASES, ids=named)
def test_output(case: Case, backend: str) -> None:
    """Y, with the keys of the past before the new ones."""
    library = LIBRARIES[backend][1]()
    result = library.call(scaled_dot_product_attention, **library_call(case, library.put))
    assert dtype_of(result) == case.dtype
    call = plain_call(case)
    exact = reference.attention(**call)[0]
    check(with_layout(case, library.get(result)), in_library(library, call), exact, case.output)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("case", [case for case in CASES if case.mode is not None], ids=named)
def test_qk_matmul_output(case: Case, backend: str) -> None:
    """The scores, as far as the mode goes, or the weights."""
    library, mode = LIBRARIES[backend][1](), case.mode
    assert mode is not None
    call = without(library_call(case, library.put), "value")
    if mode == WEIGHTS:
        result = library.call(attention_weights, **call)
    else:
        result = library.call(attention_scores, **until(call, mode))
    assert dtype_of(result) == case.dtype
    call = plain_call(case)
    plain, exact = plain_stage(library, call, mode), exact_stage(call, mode)
    check(library.get(result), plain, exact, case.outputs["qk_matmul_output"])


@pytest.mark.usefixtures("small_tiles")
@pytest.mark.parametrize("in_place", [False, True], ids=["copied", "in-place"])
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("case", [case for case in CASES if case.past], ids=named)
def test_cache(case: Case, backend: str, in_place: bool) -> None:
    """present_key and present_value are those of a cache that took the new ones, and Y is what it attends."""
    library = LIBRARIES[backend][1]()
    past, new = (
        [library.put(with_layout(case, arrays[name])) for name in ("key", "value")]
        for arrays in (case.past, case.new)
    )
    queries, tokens = case.query.shape[-2], case.arrays["key"].shape[-2]
    cache = KVCache(*past, capacity=tokens if in_place else None, layout=case.layout)
    cache = cache.append(*new, in_place=in_place)
    for name in ("key", "value"):
        present = with_layout(case, library.get(getattr(cache, name)))
        np.testing.assert_array_equal(present, case.outputs[f"present_{name}"], strict=True)

    call = without(library_call(case, library.put, first=tokens - queries), "key", "value", "layout")
    result = library.call(cache.attend, **call)
    assert dtype_of(result) == case.dtype
    call = plain_call(case)
    exact = reference.attention(**call)[0]
    check(with_layout(case, library.get(result)), in_library(library, call), exact, case.output)


@pytest.mark.parametrize("backend", BACKENDS)
def test_softmax_precision_is_kept(backend: str) -> None:
    """What is held in float64 is rounded once: to the float32 that is nearest to the reference.

    The rule of `check` is that of the dtype of the case and would let a softmax in float32 pass.
    """
    (case,) = (case for case in CASES if case.softmax_dtype == "float64")
    library = LIBRARIES[backend][1]()
    call = library_call(case, library.put)
    output = library.get(library.call(scaled_dot_product_attention, **call))
    weights = library.get(library.call(attention_weights, **without(call, "value")))
    exact, _, exact_weights = reference.attention(**plain_call(case))
    np.testing.assert_array_equal(output, exact.astype(np.float32), strict=True)
    np.testing.assert_array_equal(weights, exact_weights.astype(np.float32), strict=True)


@pytest.mark.parametrize(
    "case",
    [case for case in CASES if case.mask is not None and case.mask.shape != case.inputs["attn_mask"].shape],
    ids=named,
)
def test_a_mask_shorter_than_the_keys_is_refused(case: Case) -> None:
    """ONNX goes on as masked. The library does not guess: what it is given broadcasts, or is a mistake.

    ONNX's numbers do not tell what it goes on as, since in each of these cases the keys behind are padding.
    """
    library, short = LIBRARIES["numpy"][1](), case.inputs["attn_mask"]
    assert case.key_lengths is not None
    assert case.key_lengths.max() <= short.shape[-1]
    call = library_call(case, library.put) | {"bias": short}
    with pytest.raises(ValueError, match="`bias` must broadcast"):
        library.call(scaled_dot_product_attention, **call)
