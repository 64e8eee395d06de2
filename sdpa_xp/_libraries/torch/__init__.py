"""torch: tensors on any device, also inside autograd, torch.compile, torch.export and torch.func."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any, TypeVar, cast

import array_api_compat as compat

from ..base import Compute, Generators, Library, Tangent, at_addresses, has_repeats, is_compiling
from ..protocols import Access, Array, Device, Namespace

A = TypeVar("A")


# Private names of torch below: all are in 2.13, the lowest version that sdpa_xp takes, and none has a public
# counterpart that is as cheap, for each call asks. If a release drops one, the first call with a tensor raises
# AttributeError (`_current_level`, `_is_tracing`, `peek_interpreter_stack`, `_nn`), or the first call in such a
# mode does. The nightly run with the newest releases finds that.

UNCHANGED = nullcontext()
EXPERIMENTAL = "torch.distributed.tensor.experimental"
"""The module of `context_parallel`."""
PARTS = (
    "for parts of the batch, heads or queries call the function for each part; for parts of the keys use "
    "`attention_state` and `merge_states`"
)


class TorchGenerators(Generators):
    """torch.Generator, each on a device of its own."""

    name = "torch.Generator"

    def owns(self, rng: object) -> bool:
        return isinstance(rng, sys.modules["torch"].Generator)

    def refusing_compiler(self) -> str:
        return "torch.compile" if is_compiling() else ""  # it cannot trace what has a state

    def state(self, rng: Any) -> Any:
        return rng.get_state()

    def set_state(self, rng: Any, state: Any) -> None:
        rng.set_state(state)

    def random_words(self, rng: Any, count: int, _xp: Any, device: Device) -> Array:
        torch, least, most = sys.modules["torch"], -(2**31), 2**31 - 1
        words = torch.randint(least, most, (count,), generator=rng, device=rng.device, dtype=torch.int32)
        return cast(Array, words.to(device))

    def uniform(self, rng: Any, count: int, xp: Any) -> Array:
        return cast(Array, xp.rand(count, generator=rng, dtype=xp.float32, device=rng.device))


class TorchAutograd:
    """Autograd in both modes, and torch.func."""

    def is_transforming(self) -> bool:
        # A traced tensor may have symbols as lengths, and forward mode computes tangents along with the values.
        # `_current_level` is -1 outside of every `forward_ad.dual_level`.
        torch = sys.modules["torch"]
        if is_tracing() or torch._C._is_tracing() or torch.autograd.forward_ad._current_level >= 0:
            return True
        # Each call comes here: no more is asked unless something has replaced torch's attention. `_C._nn` has
        # the function that the public name stands for until then.
        attention = torch.nn.functional.scaled_dot_product_attention
        return attention is not torch._C._nn.scaled_dot_product_attention and is_context_parallel()

    def records(self, arrays: Sequence[Array]) -> bool:
        # Autograd must not see an array written to in place, so tiles are joined then, as on a device.
        is_recorded = any(cast(Any, array).requires_grad for array in arrays)
        torch = sys.modules["torch"]
        return (is_recorded and torch.is_grad_enabled()) or has_tangents()

    def differentiates(self, arrays: Sequence[Any]) -> bool:
        if is_compiling():
            return takes_operators(arrays) and self.records(arrays)
        if arrays[0].device.type == "meta" or not takes_functions():
            return False
        is_plain = sys.modules["torch"]._C._functorch.peek_interpreter_stack() is None
        return self.records(arrays) if is_plain else True

    def recomputed(self, compute: Callable[[], A]) -> A:
        torch = sys.modules["torch"]
        if not torch.is_grad_enabled() or has_tangents():
            return compute()
        # The operations are the same both times, so torch need not compare them, nor keep the state of its rng.
        options = {"use_reentrant": False, "preserve_rng_state": False, "determinism_check": "none"}
        return cast(A, torch.utils.checkpoint.checkpoint(compute, **options))

    def detach(self, array: Any) -> Any:
        return array.detach()

    def attach_zero_gradient(
        self, output: Array, arrays: Callable[[], Iterable[Array]], sole: Any = None
    ) -> Array:
        is_connected = cast(Any, output).requires_grad and (sole is None or not sole.requires_grad)
        if is_connected or not sys.modules["torch"].is_grad_enabled():
            return output
        total = None
        for x in arrays():
            if cast(Any, x).requires_grad:
                xp = cast(Namespace, compat.array_namespace(output))
                # The sum of no elements: 0, even if x has NaN.
                zero = xp.astype(xp.sum(xp.reshape(x, (-1,))[:0]), output.dtype, copy=False)
                total = zero if total is None else total + zero
        return output if total is None else output + total


class TorchTangentRules:
    """The derivatives of an `autograd.Function`, for calls that torch itself differentiates."""

    def may_record(self, access: Access) -> bool:
        if access.is_writeable or not takes_functions():
            return False
        return bool(sys.modules["torch"].is_grad_enabled() or has_tangents())

    def constant(self, array: Array) -> Array:
        return cast(Array, cast(Any, array).detach())

    def define(self, compute: Compute, tangent: Tangent, *arrays: Array, of_pairs: bool = False) -> Array:
        del of_pairs
        from . import function

        return cast(Array, function.apply(function.OfTangent(compute, tangent), arrays)[0])


class Torch(Library):
    name = "torch"
    generators = TorchGenerators()
    autograd, tangent_rules = TorchAutograd(), TorchTangentRules()
    module = "torch"
    conversion = "torch.asarray"
    cast_code = ("{array}.to({dtype})", "torch.{name}")
    multiplies_halves = copies_open_views = sets_elements = writes_in_place = True

    def owns(self, array: object) -> bool:
        return bool(compat.is_torch_array(array))

    def takes_cuda(self) -> bool:
        return bool(sys.modules["torch"].cuda.is_available())

    def is_accelerator(self, device: Device) -> bool:
        return getattr(device, "type", device) not in ("cpu", "meta")

    def to_cpu(self, array: Any) -> Any:
        return array.detach().cpu()

    def to_numpy(self, array: Any) -> Any:
        # A third of the time of the exchange by DLPack, 1.6 us, which each array of a call by `jit` takes.
        is_known = array.dtype is not sys.modules["torch"].bfloat16
        return self.to_cpu(array).resolve_neg().numpy() if is_known else super().to_numpy(array)

    def from_numpy(self, array: Any, xp: Any, device: Device) -> Any:
        is_plain = array.dtype.kind in "fiub" and array.dtype.isnative and array.flags.carray
        return xp.asarray(array, device=device) if is_plain else super().from_numpy(array, xp, device)

    def has_dtype(self, _function: str, _xp: Namespace, device: Device, name: str) -> bool:
        # torch.compile cannot trace `__array_namespace_info__`.
        return name != "float64" or getattr(device, "type", device) != "mps"

    def is_traced(self, array: Any) -> bool:
        return is_tracing() or self.device(array).type == "meta"

    def is_known(self, length: object) -> bool:
        torch = sys.modules["torch"]
        # torch.compile takes a symbol for an int. The lengths of torch.jit.trace are tensors with values.
        if not is_compiling() and not isinstance(length, torch.SymInt | torch.SymBool):
            return True
        return bool(sys.modules["torch.fx.experimental.symbolic_shapes"].has_static_value(length))

    def values_at_hand(self, array: Any) -> Any:
        # A tensor of torch.jit.trace, torch.func or a mode that watches operations (fake tensors, make_fx) has
        # the type of others. Read, it would become a constant of the trace, or raise an error.
        torch = sys.modules["torch"]
        is_here = type(array) in (torch.Tensor, torch.nn.Parameter) and self.device(array).type == "cpu"
        is_traced = is_compiling() or torch._C._is_tracing() or torch._C._len_torch_dispatch_stack()
        if not is_here or is_traced or torch._C._functorch.is_functorch_wrapped_tensor(array):
            return None
        return array.detach()

    def sharing(self) -> tuple[object, AbstractContextManager[object]] | None:
        # Autograd refuses tensors of the inference mode.
        return None if makes_fakes() else ((), sys.modules["torch"].inference_mode(False))

    def array_signature(self, array: Any) -> object:
        torch = sys.modules["torch"]
        if type(array) not in (torch.Tensor, torch.nn.Parameter):  # a subclass may change what operations mean
            return None
        if array.layout is not torch.strided or array.is_nested:
            return None
        records = array.requires_grad and torch.is_grad_enabled()
        return type(array), array.shape, array.dtype, array.device, records

    def is_writeable(self, array: Any) -> bool:
        # Autograd refuses to write to a leaf.
        return not has_repeats(array.shape, array.stride(), 1) and not (array.requires_grad and array.is_leaf)

    def unsupported_reason(self, array: Any) -> str:
        bias = sys.modules.get("torch.nn.attention.bias")
        if bias is not None and isinstance(array, bias.CausalBias):
            return "It has no elements: use `masks.causal()` or `masks.causal('lower_right')` instead."
        masked = sys.modules.get("torch.masked")
        if masked is not None and isinstance(array, masked.MaskedTensor):
            return "Pass `.get_data()` of a masked tensor, and its `.get_mask()` as `attn_mask`."
        if array.layout is not sys.modules["torch"].strided or array.is_nested:
            if array.is_nested and array.layout is sys.modules["torch"].jagged:
                return "Pass the `.values()` and `.offsets()` of a jagged tensor to `varlen_attention`."
            return "Make a sparse or nested tensor dense: use `.to_dense()`, or pad it."
        return distributed_reason(array)

    def frozen(self, array: Any) -> Any:
        return array.clone()

    def base_form(self, array: A) -> A:
        """Return a plain tensor, unless its class has its own `__torch_function__` or `__torch_dispatch__`."""
        torch, kind = sys.modules["torch"], cast(Any, type(array))
        if kind in (torch.Tensor, torch.nn.Parameter):
            return array
        function = getattr(kind.__torch_function__, "__func__", None)
        is_default = function is torch.Tensor.__torch_function__.__func__
        if not is_default or kind.__torch_dispatch__ is not torch.Tensor.__torch_dispatch__:
            return array
        return cast(A, cast(Any, array).as_subclass(torch.Tensor))

    def addresses(self, array: Any) -> Any:
        size = array.element_size()
        strides = tuple(step * size for step in array.stride())
        return at_addresses(array.data_ptr(), tuple(array.shape), strides, size)

    def context_maker(self, array: Array) -> Callable[[], AbstractContextManager[object]]:
        kind = self.device(array).type
        mode = None if is_compiling() else getattr(array, "fake_mode", None)
        if mode is not None:  # a fake tensor outside of its mode meets no constant
            return lambda: cast(AbstractContextManager[object], mode)
        available = sys.modules["torch"].amp.is_autocast_available(kind)
        return partial(_without_autocast, kind) if available else nullcontext


def takes_functions() -> bool:
    """Return whether a call may consist of functions of `autograd`, not of plain operations alone."""
    # torch.compile and tracers take the plain operations, and a mode of shapes has no values.
    torch = sys.modules["torch"]
    if is_compiling() or torch._C._is_tracing() or makes_fakes():
        return False
    if torch._C._functorch.peek_interpreter_stack() is None:
        return True
    # A function has no rule for `torch.func.functionalize`.
    levels = torch._C._functorch.get_interpreter_stack()
    return all(level.key() != torch._C._functorch.TransformType.Functionalize for level in levels)


def takes_operators(arrays: Sequence[Any]) -> bool:
    """Return whether torch.compile keeps a call of `arrays` as an operator of ours.

    An exported program must run without sdpa_xp. On a device the operator would wait for values, and it has no
    rules for forward mode and `vmap`.
    """
    torch = sys.modules["torch"]
    if torch.compiler.is_exporting() or has_tangents():
        return False
    is_on_cpu = all(x.device.type == "cpu" for x in arrays)
    return is_on_cpu and torch._C._functorch.get_dynamic_layer_stack_depth() == 0


def makes_fakes() -> bool:
    """Return whether tensors have no values to look at: inside FakeTensorMode, and in make_fx."""
    torch = sys.modules["torch"]
    if torch._C._dispatch_tls_is_dispatch_key_included(torch._C.DispatchKey.PreDispatch):  # as in torch 2.13
        return True
    if not torch._C._len_torch_dispatch_stack():
        return False
    # Other modes count or log operations, and leave the values. These two have their own places on the stack.
    kinds = torch._C._TorchDispatchModeKey
    return any(torch._C._get_dispatch_mode(kind) is not None for kind in (kinds.FAKE, kinds.PROXY))


def has_tangents() -> bool:
    """Return whether torch computes forward-mode derivatives of the current call."""
    torch = sys.modules.get("torch")
    # Inside the forward pass of a function of `autograd`, a level is open, but nothing is recorded.
    if torch is None or torch.autograd.forward_ad._current_level < 0:
        return False
    return is_compiling() or bool(torch._C._is_fwd_grad_enabled())  # which a compiler does not trace


def is_tracing() -> bool:
    """Return whether torch.compile, torch.export, torch.func, FakeTensorMode or make_fx traces the call."""
    torch = sys.modules["torch"]
    # `peek_interpreter_stack` is None outside of vmap, grad, jvp and functionalize.
    if torch.compiler.is_compiling() or torch._C._functorch.peek_interpreter_stack() is not None:
        return True
    # Each call comes here: `makes_fakes` is called only if something watches operations.
    pre_dispatch = torch._C._dispatch_tls_is_dispatch_key_included(torch._C.DispatchKey.PreDispatch)
    return bool(pre_dispatch or (torch._C._len_torch_dispatch_stack() and makes_fakes()))


def _without_autocast(kind: str) -> AbstractContextManager[object]:
    torch = sys.modules["torch"]
    if not torch.is_autocast_enabled(kind):
        return UNCHANGED
    return cast(AbstractContextManager[object], torch.autocast(kind, enabled=False))


def distributed_reason(array: Any) -> str:
    """Return why a tensor that lies on several processes is refused, and what to do; "" if it does not."""
    distributed = sys.modules.get("torch.distributed.tensor")
    if distributed is not None and isinstance(array, getattr(distributed, "DTensor", ())):
        return f"Pass the part of this process, `.to_local()`: {PARTS}."
    if is_context_parallel():
        return f"Inside of torch's `context_parallel` it is a part of the sequence. Leave it; {PARTS}."
    return ""


def is_context_parallel() -> bool:
    """Return whether torch's `context_parallel` has replaced torch's attention."""
    if EXPERIMENTAL not in sys.modules:
        return False
    attention = sys.modules["torch"].nn.functional.scaled_dot_product_attention
    return str(attention.__module__).startswith(EXPERIMENTAL)


TORCH = Torch()
