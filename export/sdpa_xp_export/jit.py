"""A layer in array-API code, computed by onnxruntime on the arrays of the caller."""

from __future__ import annotations

import os
import sys
import weakref
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial, update_wrapper
from inspect import BoundArguments
from operator import attrgetter
from pathlib import Path
from threading import RLock
from types import FunctionType, MethodType
from typing import Any, TypeAlias, TypedDict, Unpack, cast, overload

from sdpa_xp._checks import brief
from sdpa_xp._checks.keywords import check_flag, explains_keywords
from sdpa_xp._libraries import array_signatures, has_override
from sdpa_xp.errors import ArgumentTypeError, ArgumentValueError

from ._call.call import FormChoice
from ._files.model import Model, initializers, without_numbers
from ._layer.call_signature import Identity, LayerCall, TracedSignature, UnknownArgumentError, flatten
from ._layer.contents import MOST
from ._layer.layer import as_returned, located_error, named_outputs, with_arrays
from ._layer.open_lengths import lengths_of_pasts, most_open
from ._layer.state import State
from ._runtime.releases import DEFAULT_RUNTIME, PROVIDERS, ProviderName, Runtime
from ._runtime.session import OnArrays, errors_reworded, installed_runtime, on_arrays, open_session
from .forms.choice import check_form, check_loaded_opset, check_opset
from .forms.traced_attention import TracedAttention
from .save import save
from .spec import SymbolicShape
from .to_onnx import NOT_CALLABLE_HINT, model_of_call
from .verify import verify_layer

FUNCTION = "jit"
Prepared: TypeAlias = tuple[OnArrays, TracedSignature]
"""What computes the outputs from the arrays of a call, and the signature that it belongs to."""
MOST_SHAPES = 4096
"""The most combinations of shapes whose session is remembered; for others it is looked for among all."""


class _Options(TypedDict, total=False):
    runtime: str
    form: FormChoice
    opset: int | None
    verify: bool


@overload
def jit(layer: Callable[..., Any], **options: Unpack[_Options]) -> JittedLayer: ...
@overload
def jit(**options: Unpack[_Options]) -> Callable[[Callable[..., Any]], JittedLayer]: ...
@explains_keywords
def jit(
    layer: Callable[..., Any] | None = None,
    *,
    runtime: str = DEFAULT_RUNTIME,
    form: FormChoice = "auto",
    opset: int | None = None,
    verify: bool = False,
) -> JittedLayer | Callable[[Callable[..., Any]], JittedLayer]:
    """Return a function that computes `layer` in onnxruntime, on arrays of the caller's library.

    It is also a decorator: `@jit`, or `@jit(form="tiled")`.

    The first call with a signature writes the graph of the layer, as `to_onnx` does, and opens a session, which
    later calls run. A signature has the dtypes and axes of the arrays, which lengths are equal or fixed, and
    all arguments that are not arrays. All lengths stay open but those that the layer uses as Python numbers, a
    length of 1 in the first call, and the heads and the width of attention.

    The graph contains the weights. Each call checks whether the layer holds the same objects as when the graph
    was written, in attributes, containers, closures and globals, and whether torch has counted a write into a
    tensor; after a change it writes the graph again. After any other write into the memory of an array, call
    `refresh()` of the result: into a NumPy array, or in torch by `tensor.data`, a fused optimizer or inference
    mode. A layer that changes what it computes with is traced in each call. What it changes without an effect
    on the graph, such as a counter or a random generator, stays as it was when the graph was written.

    Each Python number is part of a signature. Pass one that often changes, such as a position, as an array
    without axes.

    Args:
        layer: A function, a method or a layer in array-API code, as for `to_onnx`. It returns arrays, also in
            tuples, lists, mappings and dataclasses, and beside them None, numbers and text, which stay as they
            were in the first call of a signature. All other arguments and errors are as in `to_onnx`.
        runtime: As for `export_attention`, with cpu or cuda. The onnxruntime that is installed must be this
            release or a later one.
        verify: Whether the first call with each signature also runs `verify_layer`, which takes seconds.

    Returns:
        The function, with the arguments and results of the layer; without `layer`, a decorator.

    Raises:
        TypeError: `layer` is not callable, or another argument has a wrong type.
        ValueError: `runtime` is for a newer onnxruntime than the installed one, or for a provider that it does
            not offer; or the form or the opset does not exist.
        ModuleNotFoundError: onnxruntime is not installed.

    Examples:
        >>> import numpy as np
        >>> from sdpa_xp import scaled_dot_product_attention
        >>> def layer(x):
        ...     return scaled_dot_product_attention(x, x, x, is_causal=True)
        >>> fast = jit(layer)
        >>> fast(np.ones((2, 5, 8), "float32")).shape
        (2, 5, 8)
        >>> fast(np.ones((3, 7, 8), "float32")).shape, len(fast.models)
        ((3, 7, 8), 1)

    References:
        onnxruntime's Python API.
    """
    if layer is None:
        return partial(jit, runtime=runtime, form=form, opset=opset, verify=verify)
    if not callable(layer):
        got = {"layer": type(layer).__name__}
        raise ArgumentTypeError(FUNCTION, "`layer` must be callable", got, NOT_CALLABLE_HINT)
    parsed = Runtime.parse(FUNCTION, runtime)
    _check_here(parsed)
    check_opset(FUNCTION, opset, parsed)
    check_loaded_opset(FUNCTION, opset, parsed)
    check_form(FUNCTION, form)
    verify = check_flag(FUNCTION, "verify", verify)
    return JittedLayer(layer, parsed, {"runtime": str(parsed), "form": form, "opset": opset, "verify": verify})


def _check_here(runtime: Runtime) -> None:
    """Check that the onnxruntime that is installed is one that the runtime names."""
    if runtime.provider not in ("cpu", "cuda"):
        rule = "`runtime` must be onnxruntime on a provider of this process, cpu or cuda"
        hint = "Write a file for a browser or for another program with `to_onnx` and `save`."
        raise ArgumentValueError(FUNCTION, rule, {"runtime": runtime}, hint)
    onnxruntime = installed_runtime(FUNCTION)
    if runtime.older_note(onnxruntime.__version__):
        rule = "`runtime` must not be newer than the onnxruntime that is installed"
        got = {"runtime": runtime, "installed": onnxruntime.__version__}
        raise ArgumentValueError(FUNCTION, rule, got, "Update onnxruntime, or name its release in `runtime`.")
    if PROVIDERS[runtime.provider] not in onnxruntime.get_available_providers():
        rule = "`runtime` must be for a provider that onnxruntime offers here"
        got = {"runtime": runtime, "offered": ", ".join(onnxruntime.get_available_providers())}
        hint = "Install onnxruntime-gpu in place of onnxruntime, or leave `runtime` out."
        raise ArgumentValueError(FUNCTION, rule, got, hint)


class JittedLayer:
    """A layer that onnxruntime computes; `jit` returns it. Threads may call it at once.

    Examples:
        >>> import numpy as np
        >>> fast = jit(lambda x: x + 1)
        >>> fast(np.asarray([1.0, 2.0]))
        array([2., 3.])
        >>> [value.name for value in fast.model.graph.input]
        ['x']
    """

    __slots__ = ("__dict__", "__weakref__", "_lock", "_options", "_runs", "_runtime", "_traced")

    def __init__(self, layer: Callable[..., Any], runtime: Runtime, options: _Options) -> None:
        self.__wrapped__ = layer
        update_wrapper(self, layer, updated=["__dict__"] * isinstance(layer, FunctionType))
        self._runtime, self._options = runtime, options
        self._lock = RLock()
        self._forget()
        _LAYERS.add(self)

    def _forget(self) -> None:
        self._traced: tuple[TracedSignature, ...] = ()
        self._runs: dict[object, Prepared] = {}

    def __repr__(self) -> str:
        return f"jit({brief(self.__wrapped__)}, runtime={str(self._runtime)!r})"

    def __copy__(self) -> JittedLayer:
        return self  # as a function

    def __reduce__(self) -> str | tuple[Any, ...]:  # sessions stay here; a copy opens its own
        layer: Any = self.__wrapped__
        name = getattr(layer, "__qualname__", "")
        owner = getattr(layer, "__self__", None)
        if self in getattr(owner, "__dict__", {}).get("_jitted", {}).values():
            return getattr, (owner, layer.__name__)
        with suppress(AttributeError):
            if attrgetter(name)(sys.modules[layer.__module__]) is self:
                return name  # the decorator has put it in the place of the function
        return partial(jit, **self._options), (layer,)

    def __get__(self, instance: Any, _owner: type | None = None) -> JittedLayer:
        """Return the method of an object, which keeps it: it has graphs of its own, and lives as long."""
        if instance is None or not isinstance(self.__wrapped__, FunctionType):
            return self
        methods = _methods_of(instance)
        if self not in methods:
            methods[self] = jit(MethodType(self.__wrapped__, instance), **self._options)
        return methods[self]

    def _is_method_of(self, owner: object) -> bool:
        kinds = owner.__mro__ if isinstance(owner, type) else type(owner).__mro__
        members = (vars(kind).get(getattr(self.__wrapped__, "__name__", "")) for kind in kinds)
        return any(self in (member, getattr(member, "__func__", None)) for member in members)

    def __call__(self, *args: Any, **keywords: Any) -> Any:
        """Return what the layer returns.

        Args:
            args: The positional arguments of the layer: arrays of one library and on one device, also in
                tuples, lists, dictionaries, masks and biases. Numbers, text, None and dtypes are part of the
                signature. Pass the `key` and `value` of a `KVCache`, and make the cache in the layer. NumPy
                arrays and tensors of torch on the CPU are not copied if they are contiguous.
            keywords: The keyword arguments of the layer.

        Returns:
            New arrays of the library of the arguments, on their device, in the structure that the layer
                returns.

        Raises:
            TypeError: An argument is of another kind; the arrays have several libraries; or the layer cannot be
                traced. The message then has the line of your code, and what to write there.
            ValueError: An array is on another device than the runtime, or needs a gradient; the graph and the
                layer do not agree (with `verify`); or onnxruntime cannot compute the graph.
        """
        structure: list[object] = []
        arrays: list[Any] = []
        try:
            flatten(args, structure, arrays)
            if keywords:
                structure.append(tuple(keywords))
                flatten(keywords.values(), structure, arrays)
        except UnknownArgumentError as unknown:
            if args and unknown.argument is args[0] and self._is_method_of(args[0]):
                return self.__get__(args[0])(*args[1:], **keywords)  # called by its class, with the object
            raise unknown.as_type_error(FUNCTION, self.__wrapped__, args, keywords) from None
        signatures = array_signatures(arrays)
        key = (*structure, signatures)
        prepared = self._runs.get(key)
        if prepared is None or not prepared[1].state.is_same():
            if has_override(*arrays):  # values of a graph: this layer is called by another one that is traced
                return self.__wrapped__(*args, **keywords)
            call = LayerCall.from_arguments(FUNCTION, self.__wrapped__, args, keywords)
            call.check_arrays(FUNCTION, arrays, self._runtime)
            if call.is_empty:  # onnxruntime's operators refuse lengths of 0, some of them in some releases
                return self.__wrapped__(*args, **keywords)
            prepared = self._prepared(call, arrays)
            if signatures is not None:
                if len(self._runs) >= MOST_SHAPES:  # a past that grows has each length once
                    self._runs.clear()
                self._runs[key] = prepared
        run, traced = prepared
        try:
            return traced.outputs(run(arrays))
        except Exception as error:  # onnxruntime's errors have no other base
            with errors_reworded("run", FUNCTION):
                raise error

    def _prepared(self, call: LayerCall, arrays: Sequence[Any]) -> Prepared:
        """Return what computes a call, from a session that is open or from a new one."""
        known = self._open(call)
        if known is None:
            with self._lock:
                known = self._open(call) or self._trace(call)  # another thread may have opened it meanwhile
        return on_arrays(known.session, call.order, arrays), known

    def _open(self, call: LayerCall) -> TracedSignature | None:
        alike = (traced for traced in self._traced if traced.takes(call))
        return next((traced for traced in alike if traced.state.is_same()), None)

    def _trace(self, call: LayerCall) -> TracedSignature:
        """Write the graph of a call, with open lengths where the layer allows it, and open its session."""
        shapes, (model, result), state = self._exported(call)
        # A layer that changes something itself is traced again in its next call. If both graphs are equal, what
        # it changes in each call, such as a counter, is ignored from then on.
        for other in self._traced:
            if other.takes(call) and _are_equal(model, other.model):
                state.ignore_repeated(other.state)
        if self._options["verify"]:
            _verify(model, self.__wrapped__, call.with_shapes(shapes), self._runtime)
        session = open_session(model, PROVIDERS[self._runtime.provider], FUNCTION, spins=True)
        traced = TracedSignature(
            call.structure,
            call.dtypes,
            shapes,
            model,
            session,
            as_returned(result),
            lengths_of_pasts(call.names, shapes),
            state,
        )
        kept = [other for other in self._traced if other.state.is_same() or other.waits_beside(call)]
        if len(kept) < len(self._traced):
            self._runs = {key: one for key, one in [*self._runs.items()] if one[1] in kept}
        self._traced = (*kept, traced)
        return traced

    def _exported(self, call: LayerCall) -> tuple[Sequence[SymbolicShape], tuple[Model, Any], State]:
        """Return the graph of a call, and the state that it was written from.

        The state is taken before the layer is called, so that the next call sees what another thread changed
        meanwhile. A layer that cannot be traced with some lengths is called again, from the same state.
        """
        layer, runtime, options = self.__wrapped__, self._runtime, self._options
        functions = [part.value for part in call.structure if isinstance(part, Identity)]

        tried: list[State] = []

        def exported(shapes: Sequence[SymbolicShape]) -> tuple[tuple[Model, Any], State, State]:
            if tried:
                tried[0].restore()
            state = State(layer, functions)
            tried.append(state)
            attention = TracedAttention(options["form"], runtime, options["opset"])
            traced = model_of_call(layer, call.with_shapes(shapes), attention, call.caller, state)
            return traced, state, state.after_call()

        try:
            specs = [*zip(call.names, call.specs, strict=True)]
            shapes, (traced, state, after) = most_open(specs, exported)
            if not state.is_whole:
                raise _too_much(self.__wrapped__)
        except Exception as error:  # the layer is anyone's function, and raises what it likes
            tried[0].restore()
            raise located_error(FUNCTION, error) from error
        after.restore()
        return shapes, traced, state

    def refresh(self) -> None:
        """Forget all graphs, so that the next call writes one with what the layer holds then."""
        with self._lock:
            self._forget()

    @property
    def models(self) -> tuple[Model, ...]:
        """The model of each signature, in the order of the first calls."""
        return tuple(traced.model for traced in self._traced)

    @property
    def model(self) -> Model:
        """The model that computes the calls, if all calls so far have one signature.

        Raises:
            ValueError: There was no call yet, or there were calls of several signatures.
        """
        traced = self._traced
        if len(traced) == 1:
            return traced[0].model
        rule = "`model` must be asked for after calls of one signature"
        hint = "Take one of `models`." if traced else "Call the layer first."
        raise ArgumentValueError(FUNCTION, rule, {"signatures": "; ".join(map(str, traced)) or "none"}, hint)

    def save(self, path: str | os.PathLike[str], *, overwrite: bool = False) -> Path:
        """Write `model` to a file, as the function `save` does.

        Args:
            path: As for `save`.
            overwrite: As for `save`.

        Returns:
            The path of the file, with links resolved.

        Raises:
            ValueError: As for `model` and `save`.
            OSError: As for `save`.
        """
        return save(self.model, path, overwrite=overwrite)


class _Methods(dict[JittedLayer, JittedLayer]):
    """The methods of one object that onnxruntime computes, by those of its class. A copy of it is empty."""

    def __init__(self, owner: object) -> None:
        super().__init__()
        self.owner = owner

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.owner,)


def _methods_of(owner: Any) -> _Methods:
    """Return the methods of an object, which its dictionary keeps; a copy that shares them gets others."""
    if not hasattr(owner, "__dict__"):
        rule, hint = "an object with a method of `jit` must have a `__dict__`", "Leave `__slots__` out."
        raise ArgumentTypeError(FUNCTION, rule, {"object": type(owner).__name__}, hint)
    methods: _Methods | None = vars(owner).get("_jitted")
    if methods is None or methods.owner is not owner:
        methods = _Methods(owner)
        (type if isinstance(owner, type) else object).__setattr__(owner, "_jitted", methods)
    return methods


def _are_equal(one: Model, other: Model) -> bool:
    """Return whether two models have the same nodes, and the same numbers in their initializers."""
    pairs = zip(initializers(one), initializers(other), strict=True)
    is_alike = without_numbers(one) == without_numbers(other)
    return is_alike and all(a is b or a.tobytes() == b.tobytes() for (_, a), (_, b) in pairs)


def _too_much(layer: Callable[..., Any]) -> ArgumentValueError:
    rule = f"`layer` must lead to at most {MOST:,} objects, which each call compares"
    hint = "Write a function with what it needs in its closure, in place of an object with the whole program."
    return ArgumentValueError(FUNCTION, rule, {"layer": brief(layer)}, hint)


def _verify(model: Model, layer: Callable[..., Any], bound: BoundArguments, runtime: Runtime) -> None:
    """Check that the graph of a layer agrees with it."""
    names = ([value.name for value in values] for values in (model.graph.input, model.graph.output))
    by_inputs = partial(_called_by_inputs, layer, bound, *names)
    report = verify_layer(model, by_inputs, provider=cast(ProviderName, runtime.provider))
    if not report.agrees:
        rule = "the graph of `layer` must agree with it"
        worst = report.worst
        got = {
            "error": f"{worst.agreement.absolute:.1e}",
            "allowed": f"{worst.agreement.bound:.1e}",
            "inputs": worst.inputs,
        }
        raise ArgumentValueError(FUNCTION, rule, got, "`verify_layer` returns the whole report.")


def _called_by_inputs(
    layer: Callable[..., Any],
    bound: BoundArguments,
    names: Sequence[str],
    computed: Sequence[str],
    **inputs: Any,
) -> Any:
    """Call a layer with the inputs of its graph in place of the specs, in the order of the specs."""
    ordered = (inputs[name] for name in names)
    arguments = {
        name: with_arrays(argument, name, lambda _name, _spec: next(ordered))
        for name, argument in bound.arguments.items()
    }
    filled = BoundArguments(bound.signature, cast(Any, arguments))
    outputs = named_outputs(layer(*filled.args, **filled.kwargs))
    return {name: outputs[name] for name in computed}  # without numbers that the graph does not compute


_LAYERS: weakref.WeakSet[JittedLayer] = weakref.WeakSet()


def _renew_locks() -> None:
    """Give the layers of a forked process locks of their own: a thread that held one is missing there."""
    for layer in _LAYERS:
        layer._lock = RLock()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_renew_locks)
