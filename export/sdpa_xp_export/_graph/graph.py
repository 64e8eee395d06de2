"""A graph while it is being written, and its values: arrays whose operators write nodes.

So a mask is lowered by the line that defines it, `key_index <= query_index + offset`, and a caller's function
of the indices becomes ONNX when it is called. A value finds the functions of its array API, and the attention
that it may be used in, through its graph; whoever begins a graph passes them.
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from types import ModuleType
from typing import TYPE_CHECKING, Any, NoReturn, TypeAlias, cast

import array_api_compat
import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import helper, numpy_helper

from sdpa_xp._checks.arrays import broadcast
from sdpa_xp._libraries.jets import Jet
from sdpa_xp.errors import ArgumentTypeError, ArgumentValueError

from .._dtypes.dtype import FLOATING, ONNX_DTYPE, Dtype, dtype_name, holds, numpy_dtype, to_numpy
from .._files.model import Weight
from .._runtime.releases import Runtime
from ..spec import SymbolicShape, addends, as_lengths
from .length_names import NamedLengths
from .lengths import DEVICE, Device, FloatOfLengths, Length, plain
from .library import GraphLibrary
from .written import Written

Attend: TypeAlias = Callable[["Graph", str, Mapping[str, object], Mapping[str, object]], Any]
"""Writes a call of the library: the graph, the public function, its arrays by name, its other arguments."""
CONTRIB = "com.microsoft"
"""The domain of onnxruntime's own operators."""
_NODE_NAME = re.compile(r"(constant|[A-Z]\w*)_\d+")
BRANCH_HINT = "No `if` can choose by it: combine conditions with `&`, `|` and `~`, and choose with `where`."
_Operator: TypeAlias = Callable[..., "GraphValue"]


def refuse_attention(
    graph: Graph, function: str, _inputs: Mapping[str, object], _rules: Mapping[str, object]
) -> NoReturn:
    """Refuse a call of the library where none can be written, as in a function of the indices."""
    rule = "a function of the indices must call no attention"
    raise ArgumentTypeError(graph.function, rule, {"function": function})


@dataclass(frozen=True, slots=True, kw_only=True)
class GraphSettings:
    """What a graph is written for, and how messages call it. A part of a graph has nearly the same."""

    opset: int
    runtime: Runtime
    namespace: ModuleType
    """The array API of the values, whose functions write nodes."""
    attend: Attend = refuse_attention
    """Writes a call of the library that has values of this graph; in a part there is none."""
    function: str = "export_attention"
    """The function that messages name."""
    float_dtype: str = "float32"
    """The dtype of floats that are computed from integers: the dtype that scores are held in."""
    numpy_floats_promote: bool = False
    """Whether a float64 of NumPy is an array without axes, as among arrays of NumPy, and not a Python float."""
    is_part: bool = False
    """Whether this is a part of a graph, for a call of attention or the body of a loop. Operands of different
    kinds promote to one dtype there, as functions of the indices expect. A part of a layer is written as a call
    that is exported by itself: see `as_part`."""

    def as_part(self, **changes: Any) -> GraphSettings:
        """Return the settings of a part, where only what holds for all exported calls is made use of."""
        return replace(self, is_part=True, numpy_floats_promote=False, attend=refuse_attention, **changes)


@dataclass(slots=True)
class Graph:
    """A graph whose values are arrays; `add` names what it adds after the operator and a count.

    The graph of a layer takes arrays of the caller as initializers. A part of it, for one call of attention or
    for the body of a loop, takes them as constants, as the formulas of masks and biases do.
    """

    settings: GraphSettings
    written: Written = field(default_factory=Written)
    lengths: NamedLengths = field(default_factory=NamedLengths)
    named: dict[str, GraphValue] = field(default_factory=dict)
    """Inputs and initializers, by name; in the part of a call, by the names that the call has for them."""
    array_names: dict[int, str] = field(default_factory=dict)
    """The name that the initializer of an array gets, by the identity of the array."""
    initializers: dict[int, tuple[Any, GraphValue]] = field(default_factory=dict)
    """Each array that met a value, which keeps it alive, and its initializer, by identity."""
    concatenated: dict[str, tuple[int, GraphValue, GraphValue]] = field(default_factory=dict)
    """The axis and the two parts of a value that joins two others, by its name. A cache is such a value."""
    equal_values: dict[str, GraphValue] = field(default_factory=dict)
    """Another value with the same numbers, which an attention node returns anyway, by the name of a value."""
    outer: Graph | None = None
    """The graph around this one, if this is the body of a loop."""
    captured: dict[str, GraphValue] = field(default_factory=dict)
    """What a body uses of the outer graph, by name, apart from constants: a body has its own."""
    takes_values_alone: bool = False
    """Inside a function of the indices: arrays and lengths are refused."""
    library: GraphLibrary = field(init=False, repr=False)
    """The library of the values."""

    def __post_init__(self) -> None:
        self.library = GraphLibrary(self)

    @property
    def function(self) -> str:
        """The function that messages name."""
        return self.settings.function

    @property
    def runtime(self) -> Runtime:
        """What the graph must be right on."""
        return self.settings.runtime

    @property
    def namespace(self) -> ModuleType:
        """The array API of the values."""
        return self.settings.namespace

    @property
    def is_part(self) -> bool:
        """Whether this is a part of the graph of a layer."""
        return self.settings.is_part

    def part_of_call(self, named: dict[str, GraphValue], float_dtype: str) -> Graph:
        """Return this graph as the graph of one call of attention, whose inputs are values of this graph."""
        settings = self.settings.as_part(float_dtype=float_dtype)
        return Graph(settings, self.written, NamedLengths(stated=self.lengths.stated), named)

    def loop_body(self) -> Graph:
        """Return the graph of a loop inside this one."""
        written, lengths = Written(self.written.count), NamedLengths(stated=self.lengths.stated)
        return Graph(self.settings.as_part(), written, lengths, outer=self)

    def input(self, name: str, dtype: str, shape: SymbolicShape) -> GraphValue:
        """Add an input. That of a body also gets a count, because no name may stand in both graphs."""
        name = name if self.outer is None else f"{name}_{next(self.written.count)}"
        self.written.inputs.append(helper.make_tensor_value_info(name, ONNX_DTYPE[dtype], shape))
        if not self.is_part:
            self.lengths.stated.update(*(addends(length) for length in shape if isinstance(length, str)))
        self.named[name] = GraphValue(self, name, dtype, shape)
        return self.named[name]

    def argument(self, name: str) -> GraphValue:
        """Return what a call of attention has under that name."""
        return self.here(self.named[name] if self.outer is None else self.outer.argument(name))

    def weight(self, name: str, array: NDArray[Any]) -> GraphValue:
        """Add an initializer."""
        if array.dtype.kind in "iu" and array.size:
            self.check_integers(name, array.min(), array.max())
        self.written.weights.append(Weight(name, array))
        self.named[name] = GraphValue(self, name, array.dtype.name, array.shape)
        return self.named[name]

    @property
    def used_names(self) -> set[str]:
        """The names of all values, inputs and constants."""
        return self.written.names | self.named.keys()

    def free_name(self, name: str) -> str:
        """Return `name`, with a number if it is taken, and never a name that a node or a constant may get."""
        used, name = self.used_names, f"{name}_" if _NODE_NAME.fullmatch(name) else name
        candidates = (f"{name}_{n}" if n else name for n in itertools.count())
        return next(candidate for candidate in candidates if candidate not in used)

    def check_integers(self, name: str, *numbers: Any) -> None:
        """Refuse integers of the caller that the program cannot compute with."""
        for number in map(int, numbers):
            if self.runtime.is_openvino and not holds("int32", number):
                rule = f"`{name}` must hold integers of 32 bits for openvino, which computes no others"
                hint = "Use smaller ones, or export for onnxruntime."
                raise ArgumentValueError(self.function, rule, {"integer": number}, hint)

    def operand(self, operand: object) -> GraphValue:
        """Return a value unchanged, and an array as `from_array` converts it."""
        if isinstance(operand, FloatOfLengths):
            return cast(GraphValue, operand.value)
        return operand if isinstance(operand, GraphValue) else self.from_array(operand)

    def from_array(self, array: object) -> GraphValue:
        """Convert an array of any library to an initializer, one for each array, and a length to a number."""
        if self.takes_values_alone:
            rule = "a function of the indices must compute with its arguments and with numbers alone"
            raise ArgumentTypeError(self.function, rule, {"operand": type(array).__name__})
        if isinstance(array, Length):
            axes = self.constant([0], "int64")
            return self.add("Squeeze", self.length(plain(array)), axes, dtype="int64", shape=())
        if not array_api_compat.is_array_api_obj(array):
            rule = "values of a graph must be computed with arrays and numbers"
            raise ArgumentTypeError(self.function, rule, {"operand": type(array).__name__})
        if self.is_part:
            numbers = to_numpy(self.function, "array", array)
            return self.constant(numbers, numbers.dtype.name)
        # By identity, as arrays have no hash. The entry keeps the array alive, so no other one gets its number.
        if id(array) not in self.initializers:
            name = self.free_name(self.array_names.get(id(array)) or f"weight_{len(self.written.weights)}")
            initializer = self.weight(name, to_numpy(self.function, name, array))
            self.initializers[id(array)] = array, initializer
        return self.initializers[id(array)][1]

    def array_of(self, value: object) -> object:
        """Return the array that an initializer was converted from, None for other values, else `value`."""
        if not isinstance(value, GraphValue):
            return value
        return next((array for array, known in self.initializers.values() if known.name == value.name), None)

    def loose(self, shape: Sequence[int | str]) -> SymbolicShape:
        """Return a shape whose lengths are equal to others unless a difference of lengths is negative."""
        return tuple(map(self.lengths.loose, shape))

    def joint_shape(self, *shapes: SymbolicShape) -> SymbolicShape:
        """Return the shape that `shapes` broadcast to."""
        if (joint := broadcast(*map(as_lengths, shapes))) is not None:
            return joint
        if (joint := broadcast(*map(as_lengths, map(self.loose, shapes)))) is not None:
            axes = reversed([*itertools.zip_longest(*map(reversed, shapes), fillvalue=1)])
            return tuple(map(self.lengths.joint, axes, joint))
        rule = "shapes must broadcast; a name broadcasts only with itself and with 1"
        raise ArgumentValueError(self.function, rule, {"shapes": ", ".join(map(str, shapes))})

    def float_of(self, operation: str, *operands: Any) -> FloatOfLengths:
        """Return the result of an operation on lengths and numbers, in float64."""
        values = (
            self.constant(operand, "float64")
            if isinstance(operand, int | float)
            else self.operand(operand).astype("float64")
            for operand in operands
        )
        return FloatOfLengths(self, getattr(self.namespace, operation)(*values))

    @contextmanager
    def values_alone(self) -> Iterator[None]:
        """Refuse arrays and lengths, as in a function of the indices."""
        before, self.takes_values_alone = self.takes_values_alone, True
        try:
            yield
        finally:
            self.takes_values_alone = before

    def length(self, length: int | str) -> GraphValue:
        """Return a length, (1,)."""
        if isinstance(length, int):
            return self.constant([length], "int64")
        if self.takes_values_alone:
            rule = "a function of the indices must use no length that is known only when the graph runs"
            raise ArgumentTypeError(self.function, rule, {"length": length})
        if self.outer is not None and not self.lengths.knows(length):
            names = {length, *(name for names in self.lengths.terms(length) for name in names)}
            for name in names & self.outer.lengths.sources.keys() - self.lengths.sources.keys():
                self.here(self.outer.lengths.sources[name][0])
        return cast(GraphValue, self.lengths.read(self, length))

    def here(self, value: GraphValue) -> GraphValue:
        """Return a value of an outer graph as a value of this graph, so that its operators write nodes here."""
        if self.outer is None or value.graph is self:
            return GraphValue(self, value.name, value.elem_type, value.dims)
        # A body's own constants stay on the host of a GPU; onnxruntime would move captured ones in each step.
        for (dtype, *_), constant in self.outer.written.constants.items():
            if constant.name == value.name:
                return self.constant(numpy_helper.to_array(constant), dtype)
        if value.name not in self.captured:
            # Tools rename the inputs and the nodes that a body captures; onnx 1.23.2 leaves its initializers.
            is_weight = any(weight.name == value.name for weight in self.outer.written.weights)
            self.captured[value.name] = self.outer.copy(value) if is_weight else value
        return GraphValue(self, self.captured[value.name].name, value.elem_type, value.dims)

    def constant(self, value: object, dtype: str) -> GraphValue:
        """Return an initializer; equal numbers share one."""
        with np.errstate(over="ignore"):  # a number that a dtype cannot hold becomes an infinity
            array = np.asarray(value, dtype=numpy_dtype(dtype))
        name = self.written.constant(dtype, array, in_body=self.outer is not None)
        return GraphValue(self, name, dtype, array.shape)

    def add(
        self, op: str, *inputs: GraphValue | None, dtype: str, shape: SymbolicShape, **attributes: Any
    ) -> GraphValue:
        """Add a node with one output of `dtype` and `shape`; None leaves out an optional input."""
        (value,) = self.add_many(op, *inputs, outputs=[(dtype, shape)], **attributes)
        return value

    def add_many(
        self,
        op: str,
        *inputs: GraphValue | None,
        outputs: list[tuple[str, SymbolicShape]],
        domain: str = "",
        **attributes: Any,
    ) -> list[GraphValue]:
        """Add a node with one output for each dtype and shape in `outputs`, unless a node computes them."""
        for value in inputs:
            if value is not None and value.graph.written.count is not self.written.count:
                rule = "a value must be used in the graph that it was computed for"
                hint = "Compute it again in each call of the layer: it was kept from an earlier one."
                raise ArgumentValueError(self.function, rule, {"value": value}, hint)
        input_names = ["" if value is None else value.name for value in inputs]
        names = self.written.node(op, input_names, len(outputs), attributes | {"domain": domain})
        return [GraphValue(self, output, *like) for output, like in zip(names, outputs, strict=True)]

    def copy(self, value: GraphValue) -> GraphValue:
        """value -> Identity(value): the output of a node where an input or an initializer may not stand."""
        return self.add("Identity", value, dtype=value.elem_type, shape=value.dims)

    def is_product(self, value: GraphValue) -> bool:
        """Return whether `value` is the output of a MatMul."""
        return any(node.op_type == "MatMul" and value.name in node.output for node in self.written.nodes)

    def single_number(self, value: GraphValue) -> float | None:
        """Return the number that an initializer with one element has; None for other values."""
        if any(length != 1 for length in value.dims):
            return None
        numbers = self.written.numbers(value.name)
        return None if numbers is None else float(numbers.reshape(()))

    def declare(self, value: GraphValue) -> None:
        """Declare a shape that follows from no operator: the runtime can then compute later nodes in place."""
        self.written.declared.append(value_info(value.name, value))

    def prune(self, outputs: Iterable[GraphValue]) -> None:
        """Remove everything that no output depends on, except inputs."""
        self.written.prune(value.name for value in outputs)

    def subgraph(self, outputs: list[GraphValue]) -> onnx.GraphProto:
        """Return this graph as the body of a loop."""
        infos, written = [value_info(value.name, value) for value in outputs], self.written
        constants = written.used_constants()
        return helper.make_graph(
            written.nodes, "body", written.inputs, infos, constants, value_info=written.declared
        )


def value_info(name: str, value: GraphValue) -> onnx.ValueInfoProto:
    """Return the type of a value under a name."""
    return helper.make_tensor_value_info(name, ONNX_DTYPE[value.elem_type], value.dims)


def _operator(function: str) -> _Operator:
    """Return an operator with the value as its left or only operand: a function of the value's array API."""

    def operate(value: GraphValue, *other: object) -> Any:
        if any(isinstance(x, Jet) for x in other):
            return NotImplemented  # an array with derivatives on the right computes it
        return getattr(value.graph.namespace, function)(value, *other)

    return operate


def _reflected(function: str) -> _Operator:
    """Return an operator with the value as its right operand."""
    return lambda value, other: getattr(value.graph.namespace, function)(other, value)


def _augmented(operator: str) -> _Operator:
    """Return the augmented assignment of an operator, `x += y`: the result takes the name of the value."""

    def assign(value: GraphValue, other: object) -> GraphValue:
        result: GraphValue = value.graph.namespace.in_place_result(value, getattr(value, operator)(other))
        return result

    return assign


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class GraphValue:
    """An edge of the graph, with the operators of the array API."""

    graph: Graph
    name: str
    elem_type: str
    """The name of the dtype."""
    dims: SymbolicShape
    """The shape, in which a name is text that can be compared with other names."""

    def __post_init__(self) -> None:
        dims = tuple(map(plain, self.dims))
        object.__setattr__(
            self, "dims", self.graph.lengths.learnt(self, dims)
        )  # frozen, so that it can be shared

    def __repr__(self) -> str:
        return f"{self.name}: {self.elem_type}[{','.join(map(str, self.dims))}]"

    @property
    def dtype(self) -> Dtype:
        """The dtype for a layer: it equals the dtypes of all libraries that have its name."""
        return Dtype(self.elem_type)

    @property
    def shape(self) -> tuple[int | Length, ...]:
        """The shape for a layer: a name stands for a number, and is not compared while the graph is written."""
        return Length.in_shape(self.graph, self.dims)

    @property
    def device(self) -> Device:
        """The device of each value of a graph, whatever runs the graph."""
        return DEVICE

    @property
    def ndim(self) -> int:
        return len(self.dims)

    def __array_namespace__(self, *, api_version: str | None = None) -> ModuleType:
        return self.graph.namespace

    @property
    def __sdpa_xp_library__(self) -> GraphLibrary:
        return self.graph.library

    def __sdpa_xp__(self, function: str, inputs: Mapping[str, object], rules: Mapping[str, object]) -> Any:
        """Write a call of the library that has this value among its query, key and value."""
        return self.graph.settings.attend(self.graph, function, inputs, rules)

    def astype(self, dtype: Any) -> GraphValue:
        """value -> Cast(value), to the dtype of any library; the value itself if it has the dtype."""
        name = dtype_name(dtype)
        if self.elem_type == name:
            return self
        if name == "bool" and self.graph.runtime.is_openvino and self.elem_type in FLOATING:
            # To OpenVINO, NaN is False.
            nonzero: GraphValue = self != 0.0
            return nonzero
        return self.graph.add("Cast", self, dtype=name, shape=self.dims, to=ONNX_DTYPE[name])

    def __array_ufunc__(self, ufunc: np.ufunc, method: str, *inputs: Any, **keywords: Any) -> Any:
        """Compute an operator that NumPy starts, with an array or a number on the left."""
        return self.graph.namespace.of_ufunc(self, ufunc, method, inputs, **keywords)

    def __array_function__(self, function: Callable[..., object], *_: object) -> Any:
        raise self.graph.namespace.numpy_error(self, function.__name__)

    if not TYPE_CHECKING:  # a type checker would allow any attribute

        def __getattr__(self, name: str) -> Any:
            raise self.graph.namespace.attribute_error(self, name)

    __add__, __radd__ = _operator("add"), _reflected("add")
    __sub__, __rsub__ = _operator("subtract"), _reflected("subtract")
    __mul__, __rmul__ = _operator("multiply"), _reflected("multiply")
    __truediv__, __rtruediv__ = _operator("divide"), _reflected("divide")
    __mod__, __rmod__ = _operator("remainder"), _reflected("remainder")
    __floordiv__, __rfloordiv__ = _operator("floor_divide"), _reflected("floor_divide")
    __pow__, __rpow__ = _operator("pow"), _reflected("pow")
    __lshift__, __rlshift__ = _operator("bitwise_left_shift"), _reflected("bitwise_left_shift")
    __rshift__, __rrshift__ = _operator("bitwise_right_shift"), _reflected("bitwise_right_shift")
    __matmul__, __rmatmul__ = _operator("matmul"), _reflected("matmul")
    # `&`, `|` and `^` commute, so one function serves both sides.
    __and__ = __rand__ = _operator("bitwise_and")
    __or__ = __ror__ = _operator("bitwise_or")
    __xor__ = __rxor__ = _operator("bitwise_xor")
    __iadd__, __isub__, __imul__ = _augmented("__add__"), _augmented("__sub__"), _augmented("__mul__")
    __itruediv__, __ifloordiv__ = _augmented("__truediv__"), _augmented("__floordiv__")
    __imod__, __ipow__, __imatmul__ = _augmented("__mod__"), _augmented("__pow__"), _augmented("__matmul__")
    __iand__, __ior__, __ixor__ = _augmented("__and__"), _augmented("__or__"), _augmented("__xor__")
    __ilshift__, __irshift__ = _augmented("__lshift__"), _augmented("__rshift__")
    __le__, __lt__ = _operator("less_equal"), _operator("less")
    __ge__, __gt__ = _operator("greater_equal"), _operator("greater")
    __eq__ = _operator("equal")  # type: ignore[assignment]  # object's returns a bool, an array's one for each element
    __ne__ = _operator("not_equal")  # type: ignore[assignment]  # as __eq__
    __neg__, __pos__, __abs__ = _operator("negative"), _operator("positive"), _operator("abs")
    __invert__ = _operator("bitwise_invert")
    __getitem__ = _operator("item")
    mT = property(_operator("matrix_transpose"))  # noqa: N815, the standard's name

    @property
    def T(self) -> GraphValue:  # noqa: N802, the standard's name
        """The transpose of a matrix."""
        if self.ndim != 2:
            rule = "`x.T` is of arrays with two axes"
            hint = "Write x.mT for matrices in a batch, or xp.permute_dims(x, axes)."
            raise ArgumentValueError(self.graph.function, rule, {"shape": self.dims}, hint)
        return cast(GraphValue, self.mT)

    @property
    def size(self) -> int | Length:
        """The number of elements."""
        return math.prod(self.shape)

    def __len__(self) -> int:
        if not self.dims or isinstance(self.dims[0], str):
            rule = "len() of a value must be a number that is known while the graph is written"
            hint = "Write x.shape[0], the name of the length, which can be computed with."
            raise ArgumentTypeError(self.graph.function, rule, {"shape": self.dims}, hint)
        return self.dims[0]

    def to_device(self, device: object, /, *, stream: object = None) -> GraphValue:
        """Return the value itself: the session of a run chooses the device."""
        del device, stream
        return self

    def __iter__(self) -> Iterator[GraphValue]:
        if self.dims and isinstance(self.dims[0], str):
            rule = "a loop over a length that is known only when the graph runs cannot be exported"
            hint = "With xp = x.__array_namespace__(), write xp.sum(x, axis=0) for sum(x); or fix the length."
            raise ArgumentTypeError(self.graph.function, rule, {"shape": self.dims}, hint)
        return iter(self.graph.namespace.unstack(self))

    def __bool__(self) -> NoReturn:
        rule = "a value of a graph is neither true nor false while the graph is written"
        raise ArgumentTypeError(self.graph.function, rule, {"value": self}, BRANCH_HINT)

    def _no_number(self) -> NoReturn:
        rule = "a value of a graph cannot be used as a Python number while the graph is written"
        hint = "Write xp = x.__array_namespace__(), and xp.sqrt(x) in place of math.sqrt(x)."
        raise ArgumentTypeError(self.graph.function, rule, {"value": self}, hint)

    __float__ = __int__ = __complex__ = __index__ = _no_number
