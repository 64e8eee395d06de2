"""The values of a graph as an array library: the code of sdpa_xp itself runs on them, and writes the graph.

So what the library computes from arrays, such as a derivative, is exported by no code of its own here.
"""

from __future__ import annotations

from typing import Any, NoReturn, TypeAlias

import numpy as np

from sdpa_xp._libraries.base import Generators, Library
from sdpa_xp._libraries.jets import Jet
from sdpa_xp.errors import ArgumentValueError

Graph: TypeAlias = Any
"""The class of `graph.py`, which imports this file."""
FILLED = {"empty": 0.0, "ones": 1.0, "zeros": 0.0}
"""The functions that fill an array with a number."""


class GraphGenerators(Generators):
    """No generators: their numbers would be the same in each run."""

    def __init__(self, graph: Graph) -> None:
        self.graph = graph

    def random_words(self, *_: object) -> NoReturn:
        rule = "`dropout_p` must be 0, since a graph draws no random numbers"
        raise ArgumentValueError(self.graph.function, rule, {"dropout_p": "more than 0"})


class ValueNamespace:
    """The array API of the values of one graph, in which the functions that make arrays return values, too."""

    def __init__(self, graph: Graph) -> None:
        self.graph, self.root = graph, graph.namespace
        self.__name__ = graph.namespace.__name__

    def __getattr__(self, name: str) -> Any:
        if name in FILLED:
            return lambda shape, **more: self.full(shape, FILLED[name], **more)
        if (number := FILLED.get(name.removesuffix("_like"))) is not None:
            return lambda x, **more: self.full_like(x, number, **more)
        function = getattr(self.root, name)
        if name in ("arange", "asarray", "eye", "linspace"):
            return lambda *arguments, **more: self.value(function(*arguments, **more))
        return function

    def full(self, shape: Any, number: float, *, dtype: Any = None, device: object = None) -> Any:
        """Return an array of one number, which is no constant of that shape."""
        return self.root.full(shape, self.value(self.root.asarray(number, dtype=dtype)), device=device)

    def full_like(self, x: Any, number: float, *, dtype: Any = None, device: object = None) -> Any:
        return self.full(x.shape, number, dtype=x.dtype if dtype is None else dtype, device=device)

    def value(self, array: Any) -> Any:
        """Return an array as a value. Equal arrays of numbers are one constant."""
        if isinstance(array, np.ndarray):
            return self.graph.constant(array, array.dtype.name)
        return self.graph.operand(array)


class GraphLibrary(Library):
    """The library of the values of one graph. A name of a length is known to be no number: see `Length`."""

    name = "a graph"

    def __init__(self, graph: Graph) -> None:
        self.graph, self.xp = graph, ValueNamespace(graph)
        self.generators = GraphGenerators(graph)

    def owns(self, array: object) -> bool:
        return getattr(array, "__sdpa_xp_library__", None) is self

    def namespace(self, _array: object) -> Any:
        return self.xp

    def is_traced(self, _array: object) -> bool:
        return True

    def adopted(self, array: Any) -> Any:
        return (
            None if isinstance(array, Jet) else self.graph.operand(array)
        )  # a jet's own library adopts values
