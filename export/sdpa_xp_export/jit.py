"""A layer in array-API code, computed by onnxruntime on the arrays of the caller."""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable, Sequence
from functools import partial
from inspect import BoundArguments
from pathlib import Path
from threading import RLock
from typing import Any, TypeAlias, cast

from sdpa_xp._checks.keywords import check_flag, explains_keywords
from sdpa_xp._checks.messages import brief
from sdpa_xp._libraries import array_signatures, has_override
from sdpa_xp.errors import ArgumentTypeError, ArgumentValueError
from sdpa_xp_export._call.call import FormChoice
from sdpa_xp_export._files.model import Model
from sdpa_xp_export._layer.call_signature import (
    Identity,
    LayerCall,
    UnknownArgumentError,
    check_arrays,
    flatten,
    unknown_argument_error,
)
from sdpa_xp_export._layer.layer import located_error, with_arrays
from sdpa_xp_export._layer.open_lengths import lengths_of_pasts, most_open
from sdpa_xp_export._layer.traced_signature import TracedSignature, as_returned
from sdpa_xp_export._layer.watch import Watch, watch
from sdpa_xp_export._runtime.array_session import Run, runner
from sdpa_xp_export._runtime.releases import DEFAULT_RUNTIME, PROVIDERS, ProviderName, Runtime
from sdpa_xp_export._runtime.session import errors_reworded, installed_runtime, open_session
from sdpa_xp_export.forms.choice import check_form, check_loaded_opset, check_opset
from sdpa_xp_export.save import save
from sdpa_xp_export.spec import SymbolicShape
from sdpa_xp_export.to_onnx import NOT_CALLABLE_HINT, model_of_call
from sdpa_xp_export.verify_layer import verify_layer

FUNCTION = "jit"
Prepared: TypeAlias = tuple[Run, Callable[[Sequence[Any]], Any]]
"""What computes the outputs from the arrays of a call, and what returns them as the layer returns them."""
MOST_SHAPES = 4096
"""The most combinations of shapes whose session is remembered; for others it is looked for among all."""


@explains_keywords
def jit(
    layer: Callable[..., Any],
    *,
    runtime: str = DEFAULT_RUNTIME,
    form: FormChoice = "auto",
    opset: int | None = None,
    verify: bool = False,
) -> JittedLayer:
    """Return a function that computes `layer` in onnxruntime, on arrays of the caller's library.

    The first call with a signature writes the graph of the layer, as `to_onnx` does, and opens a session, which
    later calls run. A signature has the dtypes and axes of the arrays, which lengths are equal or fixed, and
    all arguments that are not arrays. A length stays open if the layer allows it; one that it uses as a Python
    number, a length of 1 in the first call, and the heads and the width of attention are fixed.

    The graph contains the weights. If the layer later holds other arrays or numbers, in an attribute, a
    closure, a global or a container, the next call writes the graphs again. Writes into a torch tensor of the
    layer are noticed, those into a NumPy array are not: call `jit` again.

    Args:
        layer: A function, a method or a layer in array-API code, as for `to_onnx`. It returns an array, a
            tuple, a list, a NamedTuple or a mapping of arrays. All other arguments and errors are as in
            `to_onnx`.
        runtime: As for `export_attention`: the oldest onnxruntime that will run `model`, with cpu or cuda.
            The onnxruntime that is installed must be this release or a later one.
        verify: Whether the first call with each signature also compares the graph with the layer in float64, as
            `verify_layer` does. That takes seconds.

    Returns:
        The function. It takes the arguments of the layer and returns what the layer returns.

    Raises:
        TypeError: `layer` is not callable, or another argument has a wrong type.
        ValueError: `runtime` is for a newer onnxruntime than the installed one, or for a provider that it does
            not offer; or the form or the opset does not exist.
        ModuleNotFoundError: onnxruntime is not installed.

    Examples:
        >>> import numpy as np
        >>> from sdpa_xp import scaled_dot_product_attention
        >>> weight = np.eye(8, dtype="float32")
        >>> def layer(x):
        ...     return scaled_dot_product_attention(x @ weight, x, x, is_causal=True)
        >>> fast = jit(layer)
        >>> fast(np.ones((2, 5, 8), "float32")).shape, fast(
        ...     np.ones((3, 7, 8), "float32")
        ... ).shape
        ((2, 5, 8), (3, 7, 8))
        >>> len(fast.models)
        1

    References:
        The Python array API standard 2025.12; onnxruntime's Python API.
    """
    if not callable(layer):
        got = {"layer": type(layer).__name__}
        raise ArgumentTypeError(FUNCTION, "`layer` must be callable", got, NOT_CALLABLE_HINT)
    target = Runtime.parse(FUNCTION, runtime)
    _check_here(target)
    check_opset(FUNCTION, opset)
    check_loaded_opset(FUNCTION, opset, target)
    check_form(FUNCTION, form)
    return JittedLayer(layer, target, form, opset, verifies=check_flag(FUNCTION, "verify", verify))


def _check_here(target: Runtime) -> None:
    """Check that the onnxruntime that is installed is one that the runtime names."""
    if target.provider not in ("cpu", "cuda"):
        rule = "`runtime` must be onnxruntime on a provider of this process, cpu or cuda"
        hint = "Write a file for a browser or for another program with `to_onnx` and `save`."
        raise ArgumentValueError(FUNCTION, rule, {"runtime": target}, hint)
    onnxruntime = installed_runtime(FUNCTION)
    if target.older_note(onnxruntime.__version__):
        rule = "`runtime` must not be newer than the onnxruntime that is installed"
        got = {"runtime": target, "installed": onnxruntime.__version__}
        raise ArgumentValueError(FUNCTION, rule, got, "Update onnxruntime, or name its release in `runtime`.")
    if PROVIDERS[target.provider] not in onnxruntime.get_available_providers():
        rule = "`runtime` must be for a provider that onnxruntime offers here"
        got = {"runtime": target, "offered": ", ".join(onnxruntime.get_available_providers())}
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

    def __init__(
        self, layer: Callable[..., Any], target: Runtime, form: FormChoice, opset: int | None, *, verifies: bool
    ) -> None:
        self.__wrapped__ = layer
        self._target, self._form, self._opset, self._verifies = target, form, opset, verifies
        self._lock = RLock()
        self._forget()
        _LAYERS.add(self)

    def _forget(self) -> None:
        self._traced: tuple[TracedSignature, ...] = ()
        self._runs: dict[object, Prepared] = {}
        self._watch = Watch()

    def __repr__(self) -> str:
        return f"jit({brief(self.__wrapped__)}, runtime={str(self._target)!r})"

    def __copy__(self) -> JittedLayer:
        return self  # as a function

    def __reduce__(self) -> tuple[Any, ...]:  # sessions stay here; a copy opens its own
        runtime, form, opset, verify = str(self._target), self._form, self._opset, self._verifies
        return partial(jit, runtime=runtime, form=form, opset=opset, verify=verify), (self.__wrapped__,)

    def __call__(self, *args: Any, **keywords: Any) -> Any:
        """Return what the layer returns.

        Args:
            args: The positional arguments of the layer: arrays of one library and on one device, also in
                tuples, lists, dictionaries, masks and biases; lists of integers in masks are inputs of the
                graph, too. Numbers, text, None and dtypes are part of the signature. Pass the `key` and `value`
                of a `KVCache`, and make the cache in the layer. NumPy arrays and tensors of torch on the CPU
                are not copied if they are contiguous. JAX, MLX and array-api-strict work too.
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
            raise unknown_argument_error(FUNCTION, unknown.args[0], self.__wrapped__, args, keywords) from None
        signatures = array_signatures(arrays)
        key = (*structure, signatures)
        runs = self._runs  # of the present weights, whatever another thread finds
        prepared = runs.get(key) if self._watch.is_same() else None
        if prepared is None:
            if has_override(*arrays):  # values of a graph: this layer is called by another one that is traced
                return self.__wrapped__(*args, **keywords)
            call = LayerCall.from_arguments(FUNCTION, self.__wrapped__, args, keywords)
            check_arrays(FUNCTION, call, arrays, self._target)
            if call.is_empty:  # onnxruntime's operators refuse lengths of 0, some of them in some releases
                return self.__wrapped__(*args, **keywords)
            prepared = self._prepared(call, arrays)
            if signatures is not None:
                _remember(runs, key, prepared)
        run, outputs = prepared
        try:
            return outputs(run(arrays))
        except Exception as error:  # onnxruntime's errors have no other base
            with errors_reworded("run", FUNCTION):
                raise error

    def _prepared(self, call: LayerCall, arrays: Sequence[Any]) -> Prepared:
        """Return what computes a call, from a session that is open or from a new one."""
        known = self._open(call) if self._watch.is_same() else None
        if known is None:
            with self._lock:
                if not self._watch.is_same():
                    self._forget()
                known = self._open(call) or self._trace(call)  # another thread may have opened it meanwhile
        return runner(known.session, call.order, arrays), known.outputs

    def _open(self, call: LayerCall) -> TracedSignature | None:
        return next((traced for traced in self._traced if traced.takes(call)), None)

    def _trace(self, call: LayerCall) -> TracedSignature:
        """Write the graph of a call, with open lengths where the layer allows it, and open its session."""
        layer, target = self.__wrapped__, self._target

        def exported(shapes: Sequence[SymbolicShape]) -> tuple[Model, Any]:
            return model_of_call(layer, call.with_shapes(shapes), self._form, self._opset, target)

        try:
            shapes, (model, result) = most_open([*zip(call.names, call.specs, strict=True)], exported)
        except Exception as error:  # the layer is anyone's function, and raises what it likes
            raise located_error(FUNCTION, error) from error
        if self._verifies:
            _verify(model, layer, call.with_shapes(shapes), target)
        session = open_session(model, PROVIDERS[target.provider], FUNCTION, spins=True)
        traced = TracedSignature(
            call.structure,
            call.dtypes,
            shapes,
            model,
            session,
            as_returned(result),
            lengths_of_pasts(call.names, shapes),
        )
        self._traced = (*self._traced, traced)
        kept = [part.value for one in self._traced for part in one.structure if isinstance(part, Identity)]
        self._watch = watch(layer, kept)  # after the call of the layer, which may change what it holds
        return traced

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


def _remember(runs: dict[object, Prepared], key: object, prepared: Prepared) -> None:
    if len(runs) >= MOST_SHAPES:  # a past that grows has each length once
        runs.clear()
    runs[key] = prepared


def _verify(model: Model, layer: Callable[..., Any], bound: BoundArguments, target: Runtime) -> None:
    """Check that the graph of a layer agrees with it."""
    by_inputs = partial(_called_by_inputs, layer, bound, [value.name for value in model.graph.input])
    report = verify_layer(model, by_inputs, provider=cast(ProviderName, target.provider))
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
    layer: Callable[..., Any], bound: BoundArguments, names: Sequence[str], **inputs: Any
) -> Any:
    """Call a layer with the inputs of its graph in place of the specs, in the order of the specs."""
    ordered = (inputs[name] for name in names)
    arguments = {
        name: with_arrays(argument, name, lambda _name, _spec: next(ordered))
        for name, argument in bound.arguments.items()
    }
    filled = BoundArguments(bound.signature, cast(Any, arguments))
    return layer(*filled.args, **filled.kwargs)


_LAYERS: weakref.WeakSet[JittedLayer] = weakref.WeakSet()


def _renew_locks() -> None:
    """Give the layers of a forked process locks of their own: a thread that held one is missing there."""
    for layer in _LAYERS:
        layer._lock = RLock()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_renew_locks)
