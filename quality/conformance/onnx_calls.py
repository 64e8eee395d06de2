"""A node of ONNX as a call: of the library, and of the plain formulas that it is judged by.

The two are made apart. For the library, what the attributes of a node say of its pairs are values of
`sdpa_xp.masks`; for the formulas it is a boolean array, made of the same attributes by NumPy alone.

Where the rules of ONNX are not those of the library, the call says in its own words what ONNX means:

- is_causal and windows count from the end of the past, or of the real keys, where the library counts from the
  first key unless told: an offset. It is negative where there are fewer real keys than queries
  (test_attention_4d_causal_nonpad_negative_offset_structural_empty). The one case with a window in float16,
  test_attention_local_window_ext_cache_float16_mask, cannot tell: its values are all 1.
- A `KVCache` takes the queries for the last of its tokens. ONNX lets them be more or fewer than the new keys
  (test_attention_local_window_with_past): an offset, again, by how many they differ.
- A mask shorter than the keys goes on as masked (test_attention_4d_padded_kv_bf16). In the library it has to
  fit: `Case.mask` is as long as the keys.
- A softmax is as precise as the dtype of the case, or as softmax_precision says. Here it is never below
  float32, so that only DOUBLE asks for something (test_attention_local_window_gqa_rank4_mask).
"""

from __future__ import annotations

from collections.abc import Callable
from functools import reduce
from operator import and_
from typing import Any

import numpy as np
from numpy.typing import NDArray

from quality.conformance.onnx_cases import Case
from sdpa_xp import masks
from sdpa_xp.masks import Mask

Call = dict[str, Any]

WEIGHTS = 3
AFTER = {
    0: ("softcap", "attn_mask", "bias", "is_causal"),
    1: ("attn_mask", "bias", "is_causal"),
    2: (),
    WEIGHTS: (),
}
"""What `qk_matmul_output` does not yet hold, by its mode.

In mode 0 ONNX documents the products alone, and its reference caps them. No case has both.
"""


def plain_call(case: Case) -> Call:
    """The keywords of `reference.attention` and `textbook`, in NumPy."""
    call: Call = case.arrays | case.rules | {"is_causal": _by_keyword(case, case.offset)}
    allowed, mask = _allowed(case), case.mask
    if allowed is None:
        return call if mask is None else call | {"attn_mask": mask}
    if mask is not None and mask.dtype == np.bool_:
        return call | {"attn_mask": allowed & mask}
    return call | {"attn_mask": allowed} | ({} if mask is None else {"bias": mask})


def library_call(case: Case, put: Callable[[NDArray[Any]], Any], first: int = 0) -> Call:
    """The keywords of `scaled_dot_product_attention`, in the layout of the node.

    Masks hold arrays that were `put` into a library; the arrays of the call itself are still NumPy's. The
    function counts the first query at key number `first` by itself.
    """
    offset, (left, right) = case.offset - first, case.window
    is_causal, first_query = _by_keyword(case, offset), _placed(offset, put)
    call: Call = {name: with_layout(case, array) for name, array in case.arrays.items()}
    call |= case.rules | {"is_causal": is_causal, "layout": case.layout}
    if case.softmax_dtype is not None:
        call["softmax_dtype"] = case.softmax_dtype
    parts: list[Mask] = []
    if case.is_causal and not is_causal:
        parts.append(masks.causal(first_query))
    if case.window != (None, None):
        parts.append(masks.sliding_window(left, right, offset=first_query))
    if case.key_lengths is not None:
        parts.append(masks.padding(put(case.key_lengths)))
    mask = case.mask
    if not parts:
        return call if mask is None else call | {"attn_mask": mask}
    structure = reduce(and_, parts)
    if mask is not None and mask.dtype == np.bool_:
        return call | {"attn_mask": structure & put(mask)}
    return call | {"attn_mask": structure} | ({} if mask is None else {"bias": mask})


def until(call: Call, mode: int) -> Call:
    """The call of which `qk_matmul_output` in this mode holds the scores."""
    return {name: argument for name, argument in call.items() if name not in AFTER[mode]}


def without(call: Call, *names: str) -> Call:
    """The call for a function that does not take arguments of these names."""
    return {name: argument for name, argument in call.items() if name not in names}


def with_layout(case: Case, array: NDArray[Any]) -> NDArray[Any]:
    """(B, H, L, E) -> as the layout of the node has it, and back."""
    return array if case.layout == "...HLE" else array.swapaxes(-2, -3)


def _by_keyword(case: Case, offset: int | NDArray[np.int64]) -> bool:
    """Whether `is_causal` means what the node does."""
    return case.is_causal and isinstance(offset, int) and offset == 0


def _placed(offset: int | NDArray[np.int64], put: Callable[[NDArray[Any]], Any]) -> Any:
    return offset if isinstance(offset, int) else put(offset)


def _allowed(case: Case) -> NDArray[np.bool_] | None:
    """Which pairs the attributes let attend, (B or 1, 1, L, S); None where `is_causal` says it all."""
    lengths = {name: array.shape[-2] for name, array in case.arrays.items()}
    i = np.arange(lengths["query"])[:, np.newaxis] + np.reshape(case.offset, (-1, 1, 1, 1))
    j = np.arange(lengths["key"])
    left, right = case.window
    rules = []
    if case.is_causal and not _by_keyword(case, case.offset):
        rules.append(j <= i)
    if left is not None:
        rules.append(i - left <= j)
    if right is not None:
        rules.append(j <= i + right)
    if case.key_lengths is not None:
        rules.append(j < np.reshape(case.key_lengths, (-1, 1, 1, 1)))
    return np.logical_and.reduce(np.broadcast_arrays(*rules)) if rules else None
