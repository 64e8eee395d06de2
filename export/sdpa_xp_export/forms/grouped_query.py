"""com.microsoft GroupQueryAttention: causal attention with grouped heads, windows and sinks."""

from __future__ import annotations

from sdpa_xp_export import pieces
from sdpa_xp_export.array import Value
from sdpa_xp_export.call import Call
from sdpa_xp_export.forms import contrib
from sdpa_xp_export.forms.inputs import Inputs, finished, read
from sdpa_xp_export.graph import CONTRIB, Graph
from sdpa_xp_export.runtime import WINDOW_COUNTS_ITSELF, Runtime
from sdpa_xp_export.structure import is_causal

WIDTHS = 8


def refusal(call: Call, runtime: Runtime) -> str | None:
    """Why this form cannot state the call; None where it can."""
    if common := contrib.refusal(call):
        return common
    if call.cached or call.sizes.queries != call.sizes.keys:
        return "GroupQueryAttention takes as many keys as queries here"
    if not any(is_causal(mask) for mask in call.masks):
        return "GroupQueryAttention is causal"
    if _left(call) is None:
        return "GroupQueryAttention has no masks but the diagonal and one window that ends there"
    if call.value.shape[-1] != call.sizes.width or call.sizes.width % WIDTHS:
        return "GroupQueryAttention takes one width, a multiple of 8"
    if runtime.provider == "cuda" and call.query.dtype == "float32":
        return "GroupQueryAttention runs on the CPU in float32"
    if call.sinks is not None and call.sinks.shape != (call.sizes.query_heads,):
        return "GroupQueryAttention takes sinks of shape (Hq,)"
    if isinstance(call.sizes.batch[0], str):
        return "GroupQueryAttention of an empty batch ends the process: fix the batch"
    return None


def write(graph: Graph, call: Call, runtime: Runtime) -> dict[str, Value]:
    """query, key, value -> Transpose, Reshape -> GroupQueryAttention -> Reshape, Transpose.

    All keys are real: seqlens_k is S - 1 for each batch entry. The two caches that it returns have to be
    named, or releases before 1.28 do not load it.
    """
    dtype = call.query.dtype if runtime.provider == "cuda" else "float32"
    inputs = read(graph, call, dtype)
    query, key, value = (contrib.packed(each) for each in (inputs.query, inputs.key, inputs.value))
    sinks = None if call.sinks is None else inputs.pairs.whole(inputs.key).operand(call.sinks).astype(dtype)
    left = _left(call)
    window = -1 if left is None or left < 0 else left + int(runtime.release >= WINDOW_COUNTS_ITSELF)
    given = [query, key, value, None, None, *_lengths(inputs), *[None] * 4, sinks]
    output, *_ = graph.add_many(
        "GroupQueryAttention",
        *(given if sinks is not None else given[:7]),
        outputs=[(dtype, query.shape), (dtype, inputs.key.shape), (dtype, inputs.value.shape)],
        domain=CONTRIB,
        num_heads=call.sizes.query_heads,
        kv_num_heads=call.sizes.heads,
        scale=call.scale,
        softcap=call.softcap or 0.0,
        local_window_size=window,
    )
    return finished(inputs, {"output": contrib.unpacked(output, call.sizes.query_heads)})


def _lengths(inputs: Inputs) -> tuple[Value, Value]:
    """seqlens_k, S - 1 for each batch entry, and the largest S."""
    pairs = inputs.pairs
    last = pieces.unsqueeze(pairs.keys, 0) - 1
    batch = pairs.length(pairs.call.sizes.batch[0])
    each = pairs.graph.add("Expand", last, batch, dtype="int64", shape=(pairs.call.sizes.batch[0],))
    return each.astype("int32"), pairs.keys.astype("int32")


def _left(call: Call) -> int | None:
    """How many earlier keys a query sees: -1 for all of them, None for masks that say something else."""
    windows = [mask.arguments for mask in call.masks if not is_causal(mask)]
    if not windows:
        return -1
    window = windows[0]
    named = all(mask.name in ("causal", "sliding_window") for mask in call.masks)
    if len(windows) > 1 or not named or window.get("offset") != 0 or "left" not in window:
        return None
    left = window["left"]
    return -1 if left is None else int(str(left))
