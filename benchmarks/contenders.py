"""The contenders: how each library states a call, ready to run.

Setup that a library does once for many calls (arrays, masks, sessions, compilation) is not timed.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np
from bare_loop import COLUMNS, ROWS, bare_loop
from cells import Call
from numpy.typing import NDArray

from sdpa_xp import masks, scaled_dot_product_attention

QUADRATIC = 4096
"""The longest call of a contender that makes arrays of L x S."""


class Ready(NamedTuple):
    """A call to be timed, and its result as a NumPy array of (1, heads, length, width) or None."""

    run: Callable[[], Any]
    array: Callable[[Any], Any] = np.asarray


def tensor(array: NDArray[Any]) -> Any:
    """Return a tensor in the memory of an array; torch does not know the bfloat16 of ml_dtypes."""
    import torch

    if array.dtype != ml_dtypes.bfloat16:
        return torch.from_numpy(array)
    return torch.from_numpy(array.view(np.int16)).view(torch.bfloat16)


def of_tensor(output: Any) -> NDArray[np.float32]:
    return output.float().numpy()


def ready(call: Call, names: Iterable[str]) -> dict[str, Ready]:
    """Return the contenders of `names` that support the call, ready to run."""
    contenders = {name: CONTENDERS[name](call) for name in names}
    return {name: contender for name, contender in contenders.items() if contender is not None}


def ours_numpy(call: Call) -> Ready:
    return Ready(_ours(call, np.asarray))


def textbook(call: Call) -> Ready | None:
    """Vaswani et al., arXiv 1706.03762, equation 1."""
    if call.keys > QUADRATIC or call.window:
        return None
    query, key, value = call.arrays()
    attended, group = call.attended(), call.heads // call.key_heads
    if call.is_causal:
        attended = np.tri(call.queries, call.keys, dtype=bool)

    def run() -> Any:
        k, v = (x if group == 1 else np.repeat(x, group, axis=1) for x in (key, value))
        s = query @ np.swapaxes(k, -1, -2) / math.sqrt(call.width)
        s = s if attended is None else np.where(attended, s, -np.inf)
        p = np.exp(s - np.max(s, axis=-1, keepdims=True))
        return p / np.sum(p, axis=-1, keepdims=True) @ v

    return Ready(run)


def torch_sdpa(call: Call) -> Ready | None:
    if call.window:
        return None
    import torch

    query, key, value = map(tensor, call.arrays())
    attended = call.attended()
    return Ready(
        partial(
            torch.nn.functional.scaled_dot_product_attention,
            query,
            key,
            value,
            attn_mask=None if attended is None else torch.from_numpy(attended),
            is_causal=call.is_causal,
            enable_gqa=call.heads != call.key_heads,
        ),
        of_tensor,
    )


def ours_numpy_by_torch(call: Call) -> Ready:
    return Ready(_ours(call, np.asarray, implementation="torch"))


def ours_torch(call: Call) -> Ready:
    return Ready(_ours(call, tensor), of_tensor)


def ours_torch_portable(call: Call) -> Ready | None:
    return None if call.keys > QUADRATIC else Ready(_ours(call, tensor, implementation="xp"), of_tensor)


def jax_nn(call: Call) -> Ready | None:
    """Use the layout of `jax.nn`, heads after the length, so that no transposition is timed."""
    if call.keys > QUADRATIC or call.window:
        return None
    import jax

    query, key, value = (jax.numpy.asarray(np.swapaxes(x, 1, 2)) for x in call.arrays())
    attended = call.attended()
    options: dict[str, Any] = {}
    if call.padding == "value":
        options["key_value_seq_lengths"] = jax.numpy.asarray([call.real_keys])
    elif attended is not None:
        options["mask"] = jax.numpy.asarray(attended)
    compiled = jax.jit(partial(jax.nn.dot_product_attention, is_causal=call.is_causal))
    return Ready(
        lambda: compiled(query, key, value, **options).block_until_ready(),
        lambda output: np.swapaxes(np.asarray(output), 1, 2),
    )


def ours_jax(call: Call) -> Ready | None:
    """Pass a mask that is an array as an argument of the compiled function, as `jax_nn` does."""
    if call.keys > QUADRATIC:
        return None
    import jax

    arrays = [jax.numpy.asarray(x) for x in call.arrays()]
    if call.padding == "array":
        arrays.append(jax.numpy.asarray(call.attended()))
        compiled = jax.jit(scaled_dot_product_attention)
    else:
        compiled = jax.jit(
            partial(scaled_dot_product_attention, attn_mask=_mask(call), is_causal=call.is_causal)
        )
    return Ready(lambda: compiled(*arrays).block_until_ready())


def multi_head(call: Call) -> Ready | None:
    return _exported(call, "multi_head") if call.plain else None


def grouped_query(call: Call) -> Ready | None:
    return _exported(call, "grouped_query") if call.is_causal else None


def matmuls(call: Call) -> Ready | None:
    """Compute only the matrix products, tile by tile, one thread per head: the lower limit for NumPy."""
    if not call.plain or call.queries == 1:
        return None
    from threadpoolctl import ThreadpoolController

    query, key, value = (x[0] for x in call.arrays())
    query = query * call.width**-0.5
    blas = ThreadpoolController().select(user_api="blas")
    threads = ThreadPoolExecutor(max(library.num_threads for library in blas.lib_controllers))

    def head(index: int) -> NDArray[np.float32]:
        output = np.zeros((call.queries, call.width), np.float32)
        for row in range(0, call.queries, ROWS):
            q, total = query[index, row : row + ROWS], output[row : row + ROWS]
            s, part = np.empty((len(q), COLUMNS), np.float32), np.empty_like(total)
            for column in range(0, call.keys, COLUMNS):
                k, v = (x[index, column : column + COLUMNS] for x in (key, value))
                total += np.matmul(np.matmul(q, k.T, out=s[:, : len(k)]), v, out=part)
        return output

    def run() -> list[NDArray[np.float32]]:
        with blas.limit(limits=1):
            return list(threads.map(head, range(call.heads)))

    return Ready(run, lambda _: None)


def loop(call: Call) -> Ready | None:
    """Compute the products and the softmax, with no library around them."""
    is_stated = call in (Call(call.queries, call.keys), Call(call.queries, call.keys, is_causal=True))
    return Ready(bare_loop(call)) if is_stated else None


def _ours(call: Call, asarray: Callable[[Any], Any], **options: Any) -> Callable[[], Any]:
    query, key, value = map(asarray, call.arrays())
    mask = asarray(call.attended()) if call.padding == "array" else _mask(call)
    return partial(scaled_dot_product_attention, query, key, value, mask, is_causal=call.is_causal, **options)


def _mask(call: Call) -> Any:
    if call.window:
        return masks.sliding_window(call.window - 1, 0)
    return masks.padding([call.real_keys]) if call.padding == "value" else None


def _exported(call: Call, form: str) -> Ready:
    from sessions import RUNTIME, session

    from sdpa_xp_export import TensorSpec, export_attention

    names, arrays = ("query", "key", "value"), call.arrays()
    specs = [TensorSpec("float32", x.shape) for x in arrays]
    model = export_attention(*specs, is_causal=call.is_causal, form=form, runtime=RUNTIME)
    loaded, feeds = session(model.SerializeToString()), dict(zip(names, arrays, strict=True))
    return Ready(lambda: loaded.run(None, feeds)[0])


NUMPY, TEXTBOOK, MATMULS = "sdpa_xp on NumPy", "textbook NumPy", "the two matmuls alone"
LOOP = "a bare loop"
BY_TORCH = 'sdpa_xp on NumPy, implementation="torch"'
TORCH, ON_TORCH, PORTABLE = "torch SDPA", "sdpa_xp on torch", "sdpa_xp on torch, portable"
ON_JAX = "sdpa_xp on JAX, jitted"

CONTENDERS: dict[str, Callable[[Call], Ready | None]] = {
    NUMPY: ours_numpy,
    BY_TORCH: ours_numpy_by_torch,
    TEXTBOOK: textbook,
    MATMULS: matmuls,
    LOOP: loop,
    TORCH: torch_sdpa,
    ON_TORCH: ours_torch,
    PORTABLE: ours_torch_portable,
    "jax.nn, jitted": jax_nn,
    ON_JAX: ours_jax,
    "onnxruntime, MultiHeadAttention": multi_head,
    "onnxruntime, GroupQueryAttention": grouped_query,
}
"""A contender is None if its library cannot state the call, or needs L x S memory for a long call."""

CORE = (NUMPY, LOOP, MATMULS, TORCH, ON_TORCH, PORTABLE)
"""The contenders that one process measures together. The process imports only NumPy, torch and sdpa_xp. No
contender may free an array of several MB: the C library would then allocate differently for the others."""
OTHERS = tuple(name for name in CONTENDERS if name not in (*CORE, BY_TORCH))
