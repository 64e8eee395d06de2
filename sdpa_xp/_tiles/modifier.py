"""What masks and biases have in common: small immutable values that compare by their arguments."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, fields
from importlib import import_module
from typing import Any, ClassVar, Literal

from .._checks import Immutable, call_of
from .._libraries import is_array
from .._libraries.trees import Tree, leaves
from ..errors import PACKAGE

PLAIN_TYPES = frozenset({type(None), bool, int, float, str})
"""Two values of one of these types are interchangeable if they are equal."""
MOST_NUMBERS = 256
"""A modifier with a longer list is not kept in the cache of prepared calls, which would keep its arrays
alive."""


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class ScoreModifier(Tree, Immutable):
    """A mask or a bias. Its fields are the arguments of the public function that made it."""

    name: ClassVar[str] = ""
    """The function that made it, such as "causal" or "alibi", or the operator: "&", "|", "~" or "+"."""
    counts: ClassVar[Literal["slots", "distances", "positions"]] = "positions"
    """What it reads of a token: its place in the arrays, its distance from other tokens, or its position. In
    most calls they are the same, but not in a cache from which tokens were dropped."""
    ignores_heads: ClassVar[bool] = False
    """Whether it tells heads apart by the axis of an array alone, so that a graph may take them as batch
    entries."""
    array_axes: ClassVar[Mapping[str, tuple[int | None, ...]]] = {}
    _caches: ClassVar[tuple[str, ...]] = ("_signature",)
    __array_ufunc__: ClassVar[None] = None  # so that in `array & mask` the mask decides, not the array
    _signature: tuple[object] | None = field(init=False, repr=False, compare=False, default=None)
    """`signature`, once it is known."""

    def arrays(self) -> Iterator[tuple[str, object]]:
        """Return the arrays among the arguments, by the names of these."""
        return ((leaf.argument, leaf.array) for leaf in leaves(self))

    @property
    def parts(self) -> tuple[Any, ...]:
        """The values that an operator joined to this one."""
        return ()

    @property
    def arguments(self) -> dict[str, object]:
        """The arguments by name. `name` and these arguments describe the value completely."""
        return {argument.name: getattr(self, argument.name) for argument in fields(self) if argument.repr}

    @property
    def signature(self) -> object:
        """A key by which calls are cached: equal for equal values, None for those that are not to be cached.

        Arrays may be written to between two calls, and the answer of a function may change.
        """
        try:
            known = self._signature
        except AttributeError:  # a caller's class without slots has no default for it
            known = None
        if known is None:
            known = (self._new_signature(),)
            # Frozen, but for what follows from its fields: threads that get here at once set equal tuples.
            object.__setattr__(self, "_signature", known)
        return known[0]

    def _new_signature(self) -> object:
        if self._has_class_of_caller():  # a caller's class may have more than its fields
            return None
        signature: list[object] = [type(self)]
        for _, argument in self._fields():
            items = argument if isinstance(argument, tuple) else (argument,)
            if len(items) > MOST_NUMBERS:
                return None
            signature += [*map(signature_of, items), len(items) if isinstance(argument, tuple) else ""]
        return None if None in signature else tuple(signature)

    def _has_class_of_caller(self) -> bool:
        return not type(self).__module__.startswith(f"{PACKAGE}.")

    def has_code_of_caller(self) -> bool:
        """Return whether a function or a class of the caller takes part, which may read other arrays."""
        if self._has_class_of_caller():
            return True
        is_function = any(callable(argument) for _, argument in self._fields())
        return is_function or any(part.has_code_of_caller() for part in self.parts)

    def has_known_gradients(self) -> bool:
        """Return whether the derivatives of its arrays are known, and not only to the library of these."""
        return not self.has_code_of_caller() and all(part.has_known_gradients() for part in self.parts)

    def __repr__(self) -> str:
        return call_of(self, self.name)

    def __eq__(self, other: object) -> bool:
        """Return whether both are the same mask or bias, of equal arguments."""
        return isinstance(other, ScoreModifier) and self._key() == other._key()

    def __hash__(self) -> int:
        return hash(self._key())

    def _key(self) -> tuple[object, ...]:
        return type(self), *(
            self._key_of_array(argument) if is_array(argument) else argument for _, argument in self._fields()
        )

    def _key_of_array(self, array: Any) -> object:
        return id(array)

    def _fields(self) -> Iterator[tuple[str, object]]:
        return ((argument.name, getattr(self, argument.name)) for argument in fields(self) if argument.init)


def signature_of(value: object) -> object:
    """Return a key that only interchangeable values share; None if calls with them are not to be cached."""
    if isinstance(value, ScoreModifier):
        return value.signature
    return (type(value), value) if type(value) in PLAIN_TYPES else None


def loaded(package: str, name: str, files: Mapping[str, str]) -> object:
    """Return what a file of `package` defines as `name`, which is first used (PEP 562).

    `files` has the names of each file, in one text.
    """
    for file, names in files.items():
        if name in names.split():
            value = getattr(import_module(f"{package}.{file}"), name)
            setattr(sys.modules[package], name, value)
            return value
    raise AttributeError(f"module {package!r} has no attribute {name!r}", name=name, obj=sys.modules[package])
