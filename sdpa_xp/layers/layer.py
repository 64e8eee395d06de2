"""The arrays of a layer by name, and copies of the layer with other arrays, also in another library."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import fields
from html import escape
from typing import TYPE_CHECKING, Any, Self, cast

from .._checks import Immutable, call_of, shown
from .._checks.keywords import check_keys, explains_keywords
from .._display import nested
from .._libraries import FLOATING, computing, dtype_name, is_array, is_number, library_of, namespace_name
from .._libraries.base import CUDA
from .._libraries.protocols import AnyArray, Array, Device
from .._libraries.trees import Tree, leaves, with_arrays
from ..errors import ArgumentTypeError, ArgumentValueError, summary

if TYPE_CHECKING:
    from _typeshed import DataclassInstance


@explains_keywords
class Layer(Tree, Immutable):
    """The base class of layers: an immutable dataclass whose fields are arrays, other layers and options.

    Examples:
        >>> from dataclasses import dataclass
        >>> import numpy as np
        >>> from sdpa_xp.layers import Linear
        >>> @dataclass(frozen=True, repr=False)
        ... class Residual(Layer):
        ...     inner: Linear
        ...     def __call__(self, x):
        ...         return x + self.inner(x)
        >>> block = Residual(Linear.init(np.random.default_rng(0), 4, 4))
        >>> [*block.parameters], block.to(np)
        (['inner.weight', 'inner.bias'], Residual(Linear(4 -> 4, float32)))
    """

    __slots__ = ()

    @property
    def parameters(self) -> dict[str, AnyArray]:
        """The arrays of the layer by name, such as "inner.weight" for a layer in the field `inner`."""
        return {leaf.path[1:]: leaf.array for leaf in leaves(self, _is_layer)}

    def with_parameters(self, parameters: Mapping[str, AnyArray]) -> Self:
        """Return a copy of the layer in which the named arrays are replaced. The other arrays stay.

        Args:
            parameters: New arrays, by their names in `parameters`.

        Raises:
            TypeError: A value is not an array, or the arrays have several libraries or dtypes.
            ValueError: A name is not in `parameters`, or the shapes do not fit.
        """
        function = f"{type(self).__name__}.with_parameters"
        check_keys(function, "parameters", parameters, [*self.parameters])
        for name, value in parameters.items():
            if not (is_array(value) or is_number(value)):  # arrays of no axes become numbers in NumPy
                rule = f'`parameters["{name}"]` must be an array'
                raise ArgumentTypeError(function, rule, {name: shown(value)})
        arrays = iter([parameters.get(name, array) for name, array in self.parameters.items()])
        return with_arrays(self, lambda _: next(arrays), is_array, _is_layer)

    def to(self, like: object = None, device: object = None, *, dtype: object = None) -> Self:
        """Return the layer with its arrays copied to another library, device or dtype.

        Args:
            like: The library, as a module (numpy, torch, jax.numpy, ...), or an array of it. With a `device` or
                `dtype`, None means the library and the device that the layer has.
            device: A device of that library. None means the device of the array, or the library's default.
            dtype: float16, bfloat16, float32 or float64 for the floating arrays, as a string or a dtype of any
                library. With None, each array keeps its dtype if the library has it, or becomes float32.

        Returns:
            Another layer. What torch has recorded for gradients is not copied.

        Raises:
            TypeError: `like` is neither a module of arrays nor an array.
            ValueError: The library has no such device or dtype.

        Examples:
            >>> import numpy as np
            >>> from sdpa_xp.layers import Linear
            >>> Linear.init(np.random.default_rng(0), 4, 4).to(dtype="float16")
            Linear(4 -> 4, float16)
        """
        arrays = cast(dict[str, Array], self.parameters)
        if like is None and not (device is None and dtype is None):
            like = next(iter(arrays.values()), None)
        copy_of = copier(f"{type(self).__name__}.to", like, device, dtype)
        return self.with_parameters({name: copy_of(array) for name, array in arrays.items()})

    def __repr__(self) -> str:
        return call_of(cast("DataclassInstance", self), type(self).__name__)

    def _repr_html_(self) -> str:
        """Return the tree that a notebook shows: the layers in this one, and the shape of each array."""
        return _tree(self, is_open=True)


def copier(function: str, like: Any, device: Device = None, dtype: Any = None) -> Callable[[Array], Array]:
    """Return a function that copies arrays to the library of `like`, which is its module or an array of it.

    Without a `device`, they get the device of the array, or the default of the library. Without a `dtype`, a
    copy keeps its dtype if the library has it, and is float32 if not.
    """
    is_module = not is_array(like)
    # A class, as numpy.float16, has the methods of arrays, but is none.
    if isinstance(like, type) or (is_module and not callable(getattr(like, "zeros", None))):
        rule = "`like` must be a library of arrays, or an array of it"
        hint = "Pass its module, such as `numpy`. A device is passed as device=..., and a dtype as dtype=..."
        raise ArgumentTypeError(function, rule, {"like": getattr(like, "__name__", shown(like))}, hint)
    example: Array = like.zeros((0,)) if is_module else like
    target, library_name = library_of(example), namespace_name(example)
    xp: Any = target.namespace(example)
    place = target.device(example) if device is None and not is_module else device
    try:
        if (name := dtype_name(device)) in FLOATING:
            raise TypeError(f"it is a dtype, so write dtype={name!r}")
        if device is not None:
            xp.asarray(example, device=device)
    except Exception as error:  # each library has its own
        rule = f"`device` must be one that {library_name} has here"
        got = {"device": name if name in FLOATING else shown(device), "its error": summary(error)}
        raise ArgumentValueError(function, rule, got) from error
    name = dtype_name(dtype)
    chosen = target.bfloat16(xp) if name == "bfloat16" else getattr(xp, name, None)
    is_there = name != "float64" or target.has_dtype(function, xp, place, name)
    if dtype is not None and (name not in FLOATING or chosen is None or not is_there):
        rule = f"`dtype` must be one of {', '.join(FLOATING)} that {library_name} has here"
        raise ArgumentTypeError(function, rule, {"dtype": name})

    def copy_of(array: Array) -> Array:
        source, kind = library_of(array), dtype_name(array.dtype)
        array = array if source.autograd is None else source.autograd.detach(array)
        with computing(array):
            # On a GPU, arrays stay there. On the CPU, libraries differ in which arrays they take by DLPack.
            on_cuda = hasattr(array, "__dlpack_device__") and cast(Any, array).__dlpack_device__()[0] in CUDA
            if on_cuda and target.takes_cuda():
                copy = xp.from_dlpack(array)
            else:
                values = source.to_numpy(array)
                values = values.astype("float32") if kind == "bfloat16" else values  # NumPy has no bfloat16
                copy = target.from_numpy(values, xp, place)
        kept = target.bfloat16(xp) if kind == "bfloat16" else None
        new = chosen if dtype is not None and kind in FLOATING else kept
        with computing(copy):
            copy = xp.astype(copy, copy.dtype if new is None else new, copy=True)
        # NumPy's arrays are on the CPU, and libraries take them to their default device.
        is_there = place is None or target.device(copy) == place
        return cast(Array, copy if is_there else xp.asarray(copy, device=place))

    return copy_of


def _parts_of(value: object, name: str = "") -> dict[str, Any]:
    """Return the fields of a layer, or the items of a tuple or a list, by `name` and their own; or nothing."""
    prefix = f"{name}." if name else ""
    if isinstance(value, Layer):
        names = [field.name for field in fields(cast("DataclassInstance", value))]
        return {prefix + name: getattr(value, name) for name in names}
    return {f"{prefix}{n}": item for n, item in enumerate(value)} if isinstance(value, tuple | list) else {}


def _is_layer(value: object) -> bool:
    return isinstance(value, Layer)


def _tree(layer: Layer, *, is_open: bool) -> str:
    items = [html for part in _parts_of(layer).items() for html in _shown_part(*part)]
    count = sum(math.prod(array.shape) for array in layer.parameters.values())
    return nested(f"{layer!r}: {count:,} parameters", items, is_open=is_open)


def _shown_part(name: str, value: object) -> list[str]:
    """Return the layers and arrays in a part as HTML; options are in the repr."""
    if isinstance(value, Layer):
        return [f"{escape(name)}: {_tree(value, is_open=False)}"]
    if is_array(value):
        return [f"<code>{escape(name)}</code> {dtype_name(value.dtype)} {tuple(value.shape)}"]
    return [html for part in _parts_of(value, name).items() for html in _shown_part(*part)]
