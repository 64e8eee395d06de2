"""Attention, and its log-sum-exp: prepare, choose a kernel, plan the tiles, compute."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, NamedTuple, TypeVar, Unpack, cast

from ._call import PreparedCall, prepare, shared_by_equal_calls
from ._call.options import AttentionOptions, CallOptions, takes_options
from ._checks.arrays import Layout
from ._checks.keywords import Implementation, check_lse_base, explains_keywords, refuse_missing_kernel
from ._libraries import overridden
from ._libraries.protocols import AnyArray, Array, Dtype, Rng
from ._programs import OneTile, ResultName, one_tile
from ._tiles import ArraySource
from .biases import Bias
from .masks import Mask

if TYPE_CHECKING:  # few calls have a kernel or a state
    from ._kernels import Kernel, NativeKernel
    from ._states import AttentionState

A = TypeVar("A", bound=AnyArray)


@explains_keywords
def scaled_dot_product_attention(
    query: A,
    key: AnyArray,
    value: AnyArray,
    attn_mask: Mask | AnyArray | None = None,
    *,
    bias: Bias | AnyArray | None = None,
    is_causal: bool = False,
    scale: float | AnyArray | None = None,
    softcap: float | None = None,
    sinks: AnyArray | None = None,
    dropout_p: float = 0.0,
    rng: Rng | None = None,
    softmax_dtype: Dtype | None = None,
    layout: Layout = "...HLE",
    implementation: Implementation | None = None,
    reproducible: bool = False,
) -> A:
    r"""Compute attention, softmax(q k^T * scale + bias) v, on the arrays of any library.

    $$\mathrm{softmax}(q k^T \cdot scale + bias)\,v$$

    Memory grows linearly with L + S outside of a trace or a lazy graph.

    Shapes:
        `L` queries, `S` keys, `E` width of a query or key, `Ev` width of a value, `Hq` query heads,
        `H` key heads, `...` leading axes, which broadcast. 2-D inputs are one head without a batch.

    Args:
        query: (..., Hq, L, E); float16, bfloat16, float32 or float64.
        key: (..., H, S, E), with the library, device and dtype of the query. Hq is a multiple of H: query
            head h attends to key head h // (Hq // H).
        value: (..., H, S, Ev), likewise.
        attn_mask: A mask of `sdpa_xp.masks`, which builds no L x S array, or an array that broadcasts to (...,
            Hq, L, S): boolean, True = may attend; or floating, added to the scores like `bias`.
        bias: A bias of `sdpa_xp.biases`, or a floating array that broadcasts to (..., Hq, L, S) and is not
            wider than the scores. It is added after `softcap`. -inf masks its pair.
        is_causal: Query i attends to key j only if j <= i, also if L != S. If you also pass a mask, both apply.
        scale: The factor of the products: a finite number, or an array that broadcasts to (..., Hq, L, 1), in
            the dtypes of `bias`, or of shape () and any floating dtype. Default 1 / sqrt(E).
        softcap: If not None or 0, scores become softcap * tanh(score / softcap) after `scale`.
        sinks: (..., Hq), or (): for each head, a logit that joins the sum of the softmax but has no value. It
            is neither scaled nor capped.
        dropout_p: From 0 to 1. A weight is dropped with this probability; others are divided by 1 - dropout_p.
        rng: Required if dropout_p > 0: a torch.Generator, a cupy.random.Generator or a key of JAX or MLX for
            arrays of these libraries, a numpy.random.Generator for all others.
        softmax_dtype: float32 or float64, for scores and sums, if it is wider than the accumulation dtype.
        layout: "...HLE" is (..., heads, length, width), as in torch and ONNX; "...LHE" is (..., length, heads,
            width), as in JAX, Keras and flash-attention, for query, key, value and the result.
        implementation: `"xp"` is the portable implementation, in array-API calls; `"native"` the fused kernel
            of the arrays' library; `"torch"` torch's kernel for NumPy arrays, which it reads without a copy. A
            kernel that is missing, or does not compute this call as documented, is an error. None takes the
            library's kernel on the CPU if it follows the contract and is not slower; `explain` says which one.
        reproducible: Return the same bits for a query and its own keys, whatever queries, batch entries or
            padding stand beside them (batch invariance). NumPy computes the call, also for arrays of other
            libraries on the CPU. A call for which this cannot be promised is refused.

    Returns:
        (..., Hq, L, Ev), or (L, Ev) for 2-D inputs, with the library, device and dtype of the query. The row
            of a query whose keys are all masked is 0.

    Raises:
        TypeError: Arrays of several libraries or dtypes, integer or complex data, a class that changes what
            arithmetic means, or a keyword of another type.
        ValueError: Shapes that do not fit, arrays on several devices, or a keyword out of its range.

    Numerics:
        Scores, normalisation and sums have the accumulation dtype: float64 for float64 inputs, float32 for all
        others. The result is rounded once; only kernels that take halves as they are (`"torch"`, and `"native"`
        on CUDA) also round the weights. torch.autocast changes no result; run the backward pass outside of it.

        A masked pair has no effect, even if its key or value is NaN or inf. A NaN that is not masked shows in
        the rows that attend to it alone. Inside a jit or a lazy graph, and with torch's kernel on a GPU, this
        is true only for keys that no query attends to (padding). The page "The contract" says for which
        derivatives it is true. A score of -inf has weight 0, and a row of them output 0.

    Examples:
        >>> import numpy as np
        >>> query, key = np.eye(2, 4), np.eye(3, 4)
        >>> value = np.asarray([[1.0, 0.0], [0.0, 1.0], [5.0, 5.0]])
        >>> scaled_dot_product_attention(query, key, value, is_causal=True).round(3)
        array([[1.   , 0.   ],
               [0.378, 0.622]])

    References:
        Vaswani et al., "Attention is all you need", arXiv 1706.03762, section 3.2.1, equation 1.
        Ainslie et al., "GQA", arXiv 2305.13245, section 2.2, for grouped heads.
        Gemma Team, "Gemma 2", arXiv 2408.00118, section 2, for the soft cap.
        Xiao et al., "Efficient Streaming Language Models with Attention Sinks", arXiv 2309.17453, section 3,
        and Miller, "Attention is off by one", 2023, for the sinks.
        He et al., "Defeating Nondeterminism in LLM Inference", Thinking Machines Lab, 2025, for `reproducible`.
    """
    others = layout, implementation, reproducible
    options = CallOptions(
        attn_mask, bias, is_causal, scale, softcap, sinks, dropout_p, rng, softmax_dtype, *others
    )
    return compute_output("scaled_dot_product_attention", query, key, value, options)


@takes_options(AttentionOptions)
def attention_state(
    query: A,
    key: AnyArray,
    value: AnyArray,
    attn_mask: Mask | AnyArray | None = None,
    *,
    lse_base: float | None = None,
    **keywords: Unpack[AttentionOptions],
) -> AttentionState[A]:
    r"""Compute attention and the log-sum-exp of its scores.

    The log-sum-exp of query i is $\log \sum_j \exp(s_{ij})$ over the scores $s_{ij}$ of its keys j.
    `merge_states` merges states over disjoint parts of the keys to the state over all keys.

    Args:
        query: (..., Hq, L, E). All other arguments and errors are as in `scaled_dot_product_attention`.
        sinks: (..., Hq). The log-sum-exp includes them: pass them to only one of the states that you merge.
        lse_base: None for the natural logarithm; 2 for base 2, as in FlashInfer.

    Returns:
        `output`, (..., Hq, L, Ev), in the dtype of the query, and `lse`, (..., Hq, L), in the dtype of the
            scores, without dropout: the accumulation dtype, or `softmax_dtype`. Of a row whose keys are all
            masked, they are 0 and -inf.

    Examples:
        >>> import numpy as np
        >>> state = attention_state(np.zeros((1, 2)), np.ones((4, 2)), np.ones((4, 3)))
        >>> state.output, state.lse.round(3)
        (array([[1., 1., 1.]]), array([1.386]))

    References:
        Dao, "FlashAttention-2", arXiv 2307.08691, section 3.1.
    """
    options = CallOptions.from_keywords(attn_mask, keywords)
    return compute_state("attention_state", query, key, value, options, lse_base=lse_base)


def compute_output(
    function: str,
    query: A,
    key: AnyArray,
    value: AnyArray,
    options: CallOptions,
    *,
    queries_at_end: bool = False,
) -> A:
    """Return the output of a call of `function`; a vendor's kernel computes it if one is chosen."""
    inputs = {"query": query, "key": key, "value": value}
    if (result := overridden(function, inputs, options._asdict)) is not NotImplemented:
        return cast(A, result)
    call = prepare(function, inputs, options, queries_at_end=queries_at_end, has_kernels=not queries_at_end)
    # The queries of a cache stand at its end. No kernel takes that position.
    kernel = None if queries_at_end else choose_kernel(call).kernel
    with call.computing():
        output = _computed(call, kernel, "output")["output"]
        returned: A = call.result(output)  # no `cast`, which a tiny call would notice
    # A tiny call would notice a function more.
    if call.grid.library.has_settings or call.converted_from is not None:
        call.checked(returned)
    return returned


def compute_state(
    function: str,
    query: A,
    key: AnyArray,
    value: AnyArray,
    options: CallOptions,
    *,
    lse_base: object = None,
    queries_at_end: bool = False,
) -> AttentionState[A]:
    """Return the output and the log-sum-exp of a call of `function`."""
    from ._states import returned_state  # a call without a state does not need it

    base = check_lse_base(function, lse_base)
    inputs = {"query": query, "key": key, "value": value}
    result = overridden(function, inputs, lambda: options._asdict() | {"lse_base": lse_base})
    if result is not NotImplemented:
        return cast("AttentionState[A]", result)
    call = prepare(function, inputs, options, queries_at_end=queries_at_end)
    return returned_state(call, partial(_computed, call, None), base)


def _torch(call: PreparedCall) -> NativeKernel:
    from ._kernels import torch, torch_traced

    return torch_traced if call.grid.access.is_traced else torch


def _jax(_call: PreparedCall) -> NativeKernel:
    from ._kernels import jax

    return jax


def _mlx(_call: PreparedCall) -> NativeKernel:
    from ._kernels import mlx

    return mlx


def _torch_on_numpy() -> Kernel:
    from ._kernels import torch_on_numpy

    return torch_on_numpy


KERNELS: dict[str, Callable[[PreparedCall], NativeKernel]] = {"jax": _jax, "mlx": _mlx, "torch": _torch}
"""The kernel of a call, by the name of the library whose arrays it takes."""
BY_NAME: dict[str, Callable[[], Kernel]] = {"torch": _torch_on_numpy}
"""By the value of `implementation` that asks for them. They are no defaults: no result may depend on whether
another library is installed."""


class KernelChoice(NamedTuple):
    """What a call is computed with, and why."""

    kernel: Kernel | None
    """None is the portable implementation."""
    reason: str


@shared_by_equal_calls
def choose_kernel(call: PreparedCall) -> KernelChoice:
    """Choose the kernel of a call, or the portable implementation.

    Raises:
        ValueError: The call asks for a kernel, and none computes it.
    """
    if call.implementation == "xp":
        return KernelChoice(None, "the call asks for it")
    name, library = call.implementation, call.grid.library.name
    native = KERNELS[library](call) if library in KERNELS else None
    kernel: Kernel | None = native
    if name in BY_NAME:
        library, kernel = name, BY_NAME[name]()
    reason = native.not_default_reason(call) if name is None and native is not None else None
    if kernel is None:
        reason = f"{call.grid.xp.__name__.removeprefix('array_api_compat.')} has no attention kernel to call"
    elif reason is None:
        reason = kernel.unsupported_reason(call)
    if reason is None:
        return KernelChoice(kernel, f"{library}'s kernel computes the call as documented")
    if name is not None:
        refuse_missing_kernel(call.grid.function, name, reason)
    return KernelChoice(None, reason)


def _computed(call: PreparedCall, kernel: Kernel | None, *names: ResultName) -> dict[str, Array]:
    """Return what is named: the output (..., Hq, L, Ev), the log-sum-exp (..., Hq, L)."""
    # Arrays that are recorded or traced are not written to: other calls need not be asked.
    if not call.grid.access.is_writeable and call.grid.library.autograd is not None:
        from . import _torch  # few programs need it

        if _torch.is_differentiated(call, has_kernel=kernel is not None):
            from ._torch import recorded

            return recorded.attend(call, kernel, *names)
    if kernel is not None and (by_kernel := kernel.attend(call)) is not None:
        return {"output": by_kernel}
    if call.grid.library.chunks is not None:
        from . import _chunked  # few programs need it

        if (in_chunks := _chunked.attend(call, *names)) is not None:
            return in_chunks
    has_formula = names == ("output",) and not call.grid.is_reproducible
    formula = _one_tile(call) if has_formula else None
    query, key, value = call.arrays.values()
    if formula is not None and (output := formula.attend(query, key, value)) is not None:
        return {"output": output}
    from ._programs.output import attend  # a small call does not need it

    return call.connected(
        attend(call.draw_scores(), ArraySource(value), call.plan(), call.result_dtype, *names)
    )


@shared_by_equal_calls
def _one_tile(call: PreparedCall) -> OneTile | None:
    plan = call.plan()
    if call.options.dropout_p or not plan.is_one_tile:
        return None
    return one_tile(call.scores(), plan, call.result_dtype)
