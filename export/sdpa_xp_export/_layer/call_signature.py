"""The signature of a call of a layer: its arrays, what else was passed, and the lengths that may be open.

An array is an input of the graph, wherever it stands: in tuples, lists and dictionaries, and in masks and
biases, whose lists of integers are inputs too. Everything else is fixed in the graph.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import EllipsisType, NoneType
from typing import Any, TypeAlias, cast

import numpy as np

from sdpa_xp import KVCache
from sdpa_xp._checks import shown, type_name
from sdpa_xp._checks.arrays import check_one_device, check_one_library, check_plain_array
from sdpa_xp._libraries import dtype_name, has_standard_name, is_array, library_of
from sdpa_xp.biases import Bias
from sdpa_xp.errors import ArgumentTypeError, ArgumentValueError
from sdpa_xp.masks import Mask

from .._call.operands import kind_of, with_operands
from .._files.model import Model
from .._runtime.releases import Runtime
from ..spec import DTYPES, SymbolicShape, TensorSpec, as_lengths
from .layer import bound_arguments, with_arrays
from .open_lengths import PAST, fits
from .state import State

Structure: TypeAlias = tuple[object, ...]
"""Everything that was passed but arrays, with their places. Equal structures can have equal graphs."""
ARRAY, INTEGERS = object(), object()
"""Stand in a structure for an array, and for a list of integers in a mask, which becomes an array of NumPy."""
PLAIN = frozenset({bool, int, str, bytes, NoneType, EllipsisType})
"""Types of arguments that are interchangeable if they are equal."""


class UnknownArgumentError(Exception):
    """An argument that is no array, and cannot be compared with the argument of another call."""

    def __init__(self, argument: object) -> None:
        super().__init__(argument)
        self.argument = argument

    def as_type_error(
        self, function: str, layer: Callable[..., Any], args: Sequence[Any], keywords: Mapping[str, Any]
    ) -> TypeError:
        """Return the error as it names the argument, which is neither an array nor part of a signature."""
        argument = self.argument
        bound = bound_arguments(function, layer, args, keywords, "Pass the arguments of the layer.")
        names = (name for name, part in bound.arguments.items() if _leads_to(part, argument))
        name = next(names, "arguments")
        if hasattr(argument, "dtype"):
            check_plain_array(function, name, argument)
        rule = (
            f"`{name}` must be an array, a mask, a bias, a number, text, a dtype or None, or a tuple, a list "
            "or a dictionary of them"
        )
        hint = f"Fix it beforehand: functools.partial(layer, {name}=...)."
        if isinstance(argument, KVCache):
            hint = "Pass its `key` and its `value`, and make the cache in the layer."
        return ArgumentTypeError(function, rule, {name: shown(argument)}, hint)


@dataclass(frozen=True, slots=True, eq=False)
class Identity:
    """An object that is equal to itself alone. It stays alive, so that no other object gets its number."""

    value: object

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Identity) and other.value is self.value

    def __hash__(self) -> int:
        return id(self.value)


@dataclass(frozen=True, slots=True)
class Caller:
    """What the library of the arrays decides in a layer that is called with them."""

    dtypes: tuple[str, str]
    """The dtypes of a float and of an integer that are combined with no array."""
    is_numpy: bool
    """Whether a float64 of NumPy is more than a Python float, as it is beside arrays of NumPy."""

    @classmethod
    def from_arrays(cls, arrays: Sequence[Any]) -> Caller:
        """Return it for arrays of one library, and perhaps integers in arrays of NumPy."""
        other = next((array for array in arrays if not isinstance(array, np.ndarray)), None)
        xp: Any = np if other is None else library_of(other).namespace(other)
        floats, integers = (dtype_name(xp.asarray(number).dtype) for number in (0.5, 1))
        return cls((floats, integers), is_numpy=other is None)


@dataclass(frozen=True, slots=True)
class ArgumentSpec(TensorSpec):
    """The spec of an array of a call."""

    number: int
    """Its number among the arrays in the order in which they were passed."""
    is_of_caller: bool
    """Whether it is not a list of integers in a mask."""


def flatten(arguments: Iterable[Any], structure: list[object], arrays: list[Any]) -> None:
    """Append the structure of arguments to one list, and their arrays to the other."""
    for argument in arguments:  # of each call, so the cheap questions come first
        kind = type(argument)
        if kind is np.ndarray:
            structure.append(ARRAY)
            arrays.append(argument)
        elif kind in PLAIN:
            structure += (kind, argument)  # with its type, since True == 1
        elif kind is tuple or kind is list:
            structure += (kind, len(argument))
            flatten(argument, structure, arrays)
        elif kind is dict:
            structure += (kind, tuple(argument))
            flatten(argument.values(), structure, arrays)
        elif isinstance(argument, Mask | Bias):
            _flatten_modifier(argument, structure, arrays)
        elif _is_input(argument):
            structure.append(ARRAY)
            arrays.append(argument)
        else:
            structure += (kind, _comparable(argument))


def _is_input(argument: object) -> bool:
    return not isinstance(argument, type) and is_array(argument)  # numpy.float32 has the methods of arrays


def _comparable(argument: Any) -> object:
    """Return what is equal only for arguments that are interchangeable."""
    if isinstance(argument, np.generic):
        return argument.dtype, argument.tobytes()
    if type(argument) is float:
        return argument.hex()  # 0.0 == -0.0, and NaN is not equal to itself
    is_dtype = isinstance(argument, type) or "dtype" in type(argument).__name__.lower()
    if not (is_dtype and has_standard_name(argument)):
        raise UnknownArgumentError(argument)
    return argument


def _flatten_modifier(argument: Any, structure: list[object], arrays: list[Any]) -> None:
    if not kind_of(argument):  # a class of the caller may have more than its arguments
        structure += (Identity, Identity(argument))
        return
    structure.append(type(argument))
    for operand in argument.arguments.values():
        if callable(operand):
            structure += (Identity, Identity(operand))
        elif _are_integers(operand):
            structure.append(INTEGERS)
            arrays.append(np.asarray(operand, np.int64))
        else:
            flatten((operand,), structure, arrays)


def _are_integers(operand: object) -> bool:
    """Return whether an operand of a mask has one integer for each batch entry, or for each token."""
    return isinstance(operand, tuple) and bool(operand) and all(type(number) is int for number in operand)


def with_specs(argument: Any, specs: Iterator[ArgumentSpec]) -> Any:
    """Return an argument with the next spec in place of each array, in the order of `flatten`."""
    if isinstance(argument, Mask | Bias):
        return with_operands(argument, lambda _, x: _with_specs(x, specs)) if kind_of(argument) else argument
    if type(argument) in (tuple, list):
        return type(argument)(with_specs(element, specs) for element in argument)
    if type(argument) is dict:
        return {name: with_specs(element, specs) for name, element in argument.items()}
    return next(specs) if _is_input(argument) else argument


def _with_specs(operand: Any, specs: Iterator[ArgumentSpec]) -> Any:
    """Return an operand of a mask or a bias with specs in place of its arrays and lists of integers."""
    if callable(operand):
        return operand
    return next(specs) if _are_integers(operand) else with_specs(operand, specs)


@dataclass(frozen=True, slots=True)
class LayerCall:
    """A call of a layer, with a spec in place of each array."""

    bound: inspect.BoundArguments
    names: tuple[str, ...]
    """The name of each array as an error names it, in the order of the inputs of a graph."""
    specs: tuple[ArgumentSpec, ...]
    caller: Caller
    structure: Structure

    @classmethod
    def from_arguments(
        cls, function: str, layer: Callable[..., Any], args: Sequence[Any], keywords: Mapping[str, Any]
    ) -> LayerCall:
        """Return a call; it may hold arrays of any library, dtype and device."""
        passed: list[object] = []
        arrays: list[Any] = []
        flatten((*args, *keywords.values()), passed, arrays)
        marks = [part is ARRAY for part in passed if part is ARRAY or part is INTEGERS]
        numbered = iter(
            [
                ArgumentSpec(dtype_name(array.dtype), tuple(array.shape), number, is_of_caller)
                for number, (array, is_of_caller) in enumerate(zip(arrays, marks, strict=True))
            ]
        )
        with_all = [with_specs(argument, numbered) for argument in args]
        named = {name: with_specs(argument, numbered) for name, argument in keywords.items()}
        bound = bound_arguments(function, layer, with_all, named, "Pass the arguments of the layer.")
        caller = Caller.from_arrays(
            [array for array, is_of_caller in zip(arrays, marks, strict=True) if is_of_caller]
        )
        structure: list[object] = [caller, tuple(bound.arguments)]
        flatten(bound.arguments.values(), structure, [])  # with specs as arrays
        inputs: list[tuple[str, ArgumentSpec]] = []

        def noted(name: str, spec: ArgumentSpec) -> ArgumentSpec:
            inputs.append((name, spec))
            return spec

        for name, argument in bound.arguments.items():
            with_arrays(argument, name, cast(Any, noted))
        return cls(
            bound,
            tuple(_unique(name for name, _ in inputs)),
            tuple(spec for _, spec in inputs),
            caller,
            tuple(structure),
        )

    @property
    def order(self) -> list[int]:
        """The number of each input of a graph among the arrays as they were passed."""
        return [spec.number for spec in self.specs]

    @property
    def dtypes(self) -> list[str]:
        return [spec.dtype for spec in self.specs]

    @property
    def lengths(self) -> list[tuple[int, ...]]:
        """The shape of each array."""
        return [as_lengths(spec.shape) for spec in self.specs]

    @property
    def is_empty(self) -> bool:
        """Whether an array without elements is passed that is no past."""
        return any(
            0 in spec.shape and PAST not in name for name, spec in zip(self.names, self.specs, strict=True)
        )

    def check_arrays(self, function: str, arrays: Sequence[Any], runtime: Runtime) -> None:
        """Check that a session can take the arrays of the call."""
        named = {
            name: arrays[spec.number]
            for name, spec in zip(self.names, self.specs, strict=True)
            if spec.is_of_caller
        }
        if not named:
            rule = "there must be an array among the arguments of `layer`"
            got = {name: shown(argument) for name, argument in self.bound.arguments.items()}
            raise ArgumentTypeError(function, rule, got, "Convert numbers and lists with `asarray`.")
        for name, array in named.items():
            library = library_of(array)
            dtype = dtype_name(array.dtype)
            if dtype not in DTYPES:
                rule = f"`{name}` must be of a dtype that a graph holds, {', '.join(DTYPES)}"
                raise ArgumentTypeError(function, rule, {f"{name}.dtype": array.dtype})
            runtime.check_dtype(function, f"{name}.dtype", dtype)
            if library.is_traced(array):
                rule = f"`{name}` must have its values when the layer is called"
                hint = "Compute a lazy array first, and call the layer outside of what another compiler traces."
                raise ArgumentTypeError(function, rule, {name: type_name(array)}, hint)
            if library.autograd is not None and library.autograd.records([array]):
                rule = f"`{name}` must need no gradient, since onnxruntime computes none"
                hint = f"Pass {name}.detach(), or call the layer itself to train it."
                raise ArgumentValueError(function, rule, {f"{name}.requires_grad": True}, hint)
            if runtime.provider == "cpu" and library.is_accelerator(device := library.device(array)):
                rule = f"`{name}` must be on the CPU, as `runtime` is"
                hint = f"Move it, or pass runtime='{str(runtime).removesuffix('cpu')}cuda'."
                raise ArgumentValueError(function, rule, {f"{name}.device": device, "runtime": runtime}, hint)
        _, checked = check_one_library(function, named)
        check_one_device(function, checked)

    def with_shapes(self, shapes: Sequence[SymbolicShape]) -> inspect.BoundArguments:
        """Return the arguments with specs of these shapes."""
        by_number = {spec.number: shape for spec, shape in zip(self.specs, shapes, strict=True)}

        def opened(_: str, spec: TensorSpec) -> TensorSpec:
            return TensorSpec(spec.dtype, by_number[cast(ArgumentSpec, spec).number])

        arguments = {name: with_arrays(x, name, opened) for name, x in self.bound.arguments.items()}
        return inspect.BoundArguments(self.bound.signature, cast(Any, arguments))


@dataclass(frozen=True, slots=True, eq=False)
class TracedSignature:
    """The session of all calls that are alike but for their numbers and open lengths."""

    structure: Structure
    dtypes: Sequence[str]
    shapes: Sequence[SymbolicShape]
    model: Model
    session: Any
    outputs: Callable[[Sequence[Any]], Any]
    """Returns arrays as the layer returns them."""
    may_be_empty: frozenset[str]
    """The names of lengths that may be 0."""
    state: State
    """What the layer held when the graph was written."""

    def __str__(self) -> str:
        pairs = zip(self.dtypes, self.shapes, strict=True)
        return ", ".join(f"{dtype}[{','.join(map(str, shape))}]" for dtype, shape in pairs)

    def waits_beside(self, call: LayerCall) -> bool:
        """Return whether the graph is to be compared with that of a later call, which is unlike this one."""
        return self.state.was_changed and not self.takes(call)

    def takes(self, call: LayerCall) -> bool:
        """Return whether the session computes a call."""
        is_alike = call.structure == self.structure and call.dtypes == self.dtypes
        return is_alike and fits(self.shapes, call.lengths, self.may_be_empty)


def _unique(names: Iterable[str]) -> Iterator[str]:
    """Yield names, with the count of those before it behind one that comes again."""
    seen_names: list[str] = []
    for name in names:
        count = seen_names.count(name)
        seen_names.append(name)
        yield f"{name}[{count}]" if count else name


def _leads_to(part: object, argument: object) -> bool:
    try:
        flatten((part,), [], [])
    except UnknownArgumentError as unknown:
        return unknown.argument is argument
    return False
