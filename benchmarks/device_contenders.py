"""The contenders of the GPU's table: how each library states a call in float16, ready to run.

On the device "cpu", NumPy takes the place of CuPy and the others compute on the CPU, so that the table can be
tried without a GPU.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any, Literal, NamedTuple, TypeAlias

import numpy as np
from cells import Call
from measuring import internals
from numpy.typing import NDArray

from sdpa_xp import scaled_dot_product_attention

DTYPE = "float16"
Device: TypeAlias = Literal["cuda", "cpu"]
Arrays: TypeAlias = Sequence[NDArray[Any]]
"""Query, key and value."""


class Library(NamedTuple):
    """How to move arrays to the device and back, wait for the device, and measure its memory."""

    put: Callable[[NDArray[Any]], Any]
    get: Callable[[Any], NDArray[Any]]
    wait: Callable[[], object] = lambda: None
    """Wait until all calls are done."""
    above: Callable[[Callable[[], object]], int | None] = lambda _: None
    """Return the peak memory of a call above the memory before it, in bytes; None if it is not known."""


class Contender(NamedTuple):
    """A call, started by `run`."""

    run: Callable[[], Any]
    library: Library
    within: Callable[[], AbstractContextManager[Any]] = nullcontext

    def repeat(self, calls: int) -> Any:
        """Run several calls, wait until they are done, and return the last result."""
        with self.within():
            for _ in range(calls):
                output = self.run()
            self.library.wait()
        return output


def ours(
    implementation: str, library_on: Callable[[Device], Library]
) -> Callable[[Call, Arrays, Device], Contender]:
    def make(call: Call, arrays: Arrays, device: Device) -> Contender:
        library = library_on(device)
        inputs = [library.put(x) for x in arrays]
        options: dict[str, Any] = {"is_causal": call.is_causal, "implementation": implementation}
        return Contender(partial(scaled_dot_product_attention, *inputs, **options), library)

    return make


def torch_sdpa(backend: str) -> Callable[[Call, Arrays, Device], Contender]:
    def make(call: Call, arrays: Arrays, device: Device) -> Contender:
        from torch.nn.attention import SDPBackend, sdpa_kernel
        from torch.nn.functional import scaled_dot_product_attention as of_torch

        library = on_torch(device)
        inputs = [library.put(x) for x in arrays]
        within = partial(sdpa_kernel, getattr(SDPBackend, backend))
        return Contender(partial(of_torch, *inputs, is_causal=call.is_causal), library, within)

    return make


def exported(call: Call, arrays: Arrays, device: Device) -> Contender:
    """Bind inputs and output to memory of the device, so that no copy is timed."""
    from onnxruntime import OrtValue

    from sdpa_xp_export import TensorSpec, export_attention

    (provider,) = internals.providers(device)
    specs = [TensorSpec(DTYPE, x.shape) for x in arrays]
    model = export_attention(*specs, is_causal=call.is_causal, runtime=f"onnxruntime>=1.28;{device}")
    session = internals.open_session(model, provider).inner
    binding = session.io_binding()
    inputs = [OrtValue.ortvalue_from_numpy(x, device, 0) for x in arrays]
    result = OrtValue.ortvalue_from_shape_and_type(arrays[0].shape, arrays[0].dtype, device, 0)
    for name, value in zip(("query", "key", "value"), inputs, strict=True):
        binding.bind_ortvalue_input(name, value)
    binding.bind_ortvalue_output(session.get_outputs()[0].name, result)

    def run(_inputs: object = inputs) -> Any:  # the binding does not keep memory alive
        session.run_with_iobinding(binding)
        return result

    return Contender(run, Library(np.asarray, lambda value: value.numpy(), binding.synchronize_outputs))


def on_cupy(device: Device) -> Library:
    if device == "cpu":
        return Library(np.asarray, np.asarray)
    import cupy

    wait, pool = cupy.cuda.Device().synchronize, cupy.get_default_memory_pool()

    def above(run: Callable[[], object]) -> int:
        pool.free_all_blocks()
        before = pool.total_bytes()
        run()
        wait()
        return int(pool.total_bytes() - before)

    return Library(cupy.asarray, cupy.asnumpy, wait, above)


def on_torch(device: Device) -> Library:
    import torch

    put, get = partial(torch.asarray, device=device), lambda x: x.cpu().numpy()
    if device == "cpu":
        return Library(put, get)
    wait = torch.cuda.synchronize

    def above(run: Callable[[], object]) -> int:
        wait()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        run()
        wait()
        return int(torch.cuda.max_memory_allocated() - before)

    return Library(put, get, wait, above)


FLASH, MATH = "torch SDPA, flash", "torch SDPA, math"
CUPY = "sdpa_xp on CuPy, portable"
TORCH, TORCH_NATIVE = "sdpa_xp on torch, portable", "sdpa_xp on torch, native"
EXPORTED = "onnxruntime, exported by auto"

CONTENDERS: dict[str, Callable[[Call, Arrays, Device], Contender]] = {
    FLASH: torch_sdpa("FLASH_ATTENTION"),
    MATH: torch_sdpa("MATH"),
    CUPY: ours("xp", on_cupy),
    TORCH: ours("xp", on_torch),
    TORCH_NATIVE: ours("native", on_torch),
    EXPORTED: exported,
}
"""A contender raises if its library cannot compute the call on the device."""
