"""The state of a layer: all objects that it leads to, and the places in which they stand.

A graph has the numbers of the moment when it was written, so `jit` asks before each call whether the layer
still holds what it held then.

What is watched: attributes and slots, also of the standard library's objects that hold values; items of lists,
tuples, dictionaries, sets and deques; closures, defaults, and the globals that a function names; classes,
methods, partials, context variables and weak references. The objects of array libraries, functions of installed
packages, and what the standard library has for logging, threads and files are not looked into.

How a change is seen: a place holds another object (equal numbers and texts are one); a place came or went; or
torch has counted a write into a tensor, or gave it other memory (`tensor.data = ...`). The state is taken
before the layer is called, so a change while the graph is written shows in the next call.

What cannot be seen: numbers that are written into the memory of an array, unless torch counts it (it does not
for `tensor.data.mul_(2)` and in inference mode); the state of iterators and generators; what another library
keeps; and a branch on `type(x.shape[0])`, while `isinstance` is answered as in a run. Then the old graph stays
until `refresh()` is called.

The state also tells what a layer kept of a graph that was being written: such a value means nothing in another.
"""

from __future__ import annotations

import array
import functools
import numbers
import operator
import threading
import types
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from contextvars import ContextVar
from dataclasses import dataclass, field
from itertools import chain, repeat
from operator import is_
from typing import Any

from sdpa_xp_export._arrays.operators import is_array
from sdpa_xp_export._graph.graph import GraphValue
from sdpa_xp_export._graph.lengths import FloatOfLengths, Length
from sdpa_xp_export._layer.held_arrays import code_names, home_of, slot_names, wrapped_functions
from sdpa_xp_export._packages import ARRAY_LIBRARIES, LIBRARIES, package_of

MOST = 100_000
"""The most objects that are looked at. A layer that leads to more is connected with half of the program."""
_COMPARED = (numbers.Number, str, bytes, types.NoneType)
"""Types of values that are the same if they are equal."""
_WITHOUT_STATE = ARRAY_LIBRARIES - {"sdpa_xp", "torch"}
_WITHOUT_STATE |= {
    "_io",
    "_thread",
    "asyncio",
    "concurrent",
    "io",
    "logging",
    "multiprocessing",
    "queue",
    "selectors",
}
_WITHOUT_STATE |= {"socket", "ssl", "subprocess", "threading"}
"""Modules whose objects are no parameters, or change without an effect on a layer: locks, loggers, files."""
_OF_TENSORS: dict[str, Callable[[Any], object]] = {
    **{name: operator.methodcaller(name) for name in ("data_ptr", "stride")},
    **{name: operator.attrgetter(name) for name in ("shape", "_version")},
}
"""What tells of other memory of a tensor of torch, and of a write: torch has no public name for its count."""
_CONTENTS, _DICTIONARY = operator.attrgetter("cell_contents"), operator.attrgetter("__dict__")
_MISSING = object()
"""Stands for a name that has no value."""


@dataclass(slots=True, eq=False)
class _Place:
    """A container, and what it held."""

    container: Any
    """A mapping, a list, a set, a deque, a cell or `_Named`."""
    target: Any
    """The object that an assignment changes: the container, or the object with these attributes."""
    label: str
    """What an error writes before a key: "Layer." before an attribute."""
    owner: tuple[_Place, Any] | None
    """The place where the object with this container was found, and its key there."""
    held: dict[Any, Any] = field(default_factory=dict)

    def name(self, key: object) -> str:
        if isinstance(self.container, types.CellType):
            return self.label
        return f"{self.label}{key}" if self.label[-1:] in ("", ".") else f"{self.label}[{key!r}]"


@dataclass(slots=True, eq=False)
class _Named:
    """Names of which some may have no value: those of a scope, or the slots of an object."""

    get: Callable[[Any, Any], Any]
    names: list[str]

    def __iter__(self) -> Iterator[Any]:
        return map(self.get, self.names, repeat(_MISSING))

    def __len__(self) -> int:
        return len(self.names)


class State:
    """What a layer, and other functions that it may call, lead to.

    Attributes:
        is_whole: Whether it has all of it: the layer leads to no more than `MOST` objects.
    """

    def __init__(self, layer: Callable[..., Any] | None = None, others: Iterable[object] = ()) -> None:
        self._layer, self._others = layer, [*others]
        self._home = package_of(home_of(layer))
        self._places: dict[int, _Place] = {}  # by the identity of the target
        self._values: list[tuple[_Place, Any]] = []  # where values of a graph stand
        self._marks: dict[tuple[int, Any], tuple[Callable[[], object], object]] = {}
        self._attributes: list[tuple[Any, dict[str, Any]]] = []  # of each object that has a dictionary
        known: dict[int, object] = {}  # alive, so that no other object gets its number
        self._waiting = deque[tuple[Any, str, tuple[_Place, Any] | None]](
            (root, "", None) for root in (layer, *self._others)
        )
        while self._waiting and len(known) < MOST:
            value, label, owner = self._waiting.popleft()
            if isinstance(value, GraphValue | Length | FloatOfLengths):
                self._values += [owner] if owner else []
            elif id(value) not in known and not isinstance(value, _COMPARED):
                known[id(value)] = value
                self._look(value, label, owner)
        self.is_whole = not self._waiting
        self._keep_views()

    def _keep_views(self) -> None:
        """Keep what each call compares, in lists over which a loop runs in C."""
        places = self._places.values()
        cells = [place for place in places if isinstance(place.container, types.CellType) and place.held]
        self._cells = [place.container for place in cells], [place.held[""] for place in cells]
        self._dictionaries = [x for x, _ in self._attributes], [own for _, own in self._attributes]
        named = [place for place in places if isinstance(place.container, _Named)]
        self._named = [(p.container.get, p.container.names, [*p.held.values()]) for p in named]
        of_many = [place for place in places if not isinstance(place.container, types.CellType | _Named)]
        self._sized = [place.container for place in of_many], [len(place.held) for place in of_many]
        self._live: list[Iterable[Any]] = []
        self._held: list[Any] = []
        for place in of_many:
            if isinstance(place.container, Mapping) and place.held:
                self._live += [place.container, place.container.values()]
                self._held += [*place.held, *place.held.values()]
            elif place.held:
                self._live.append(place.container)
                self._held += place.held.values()

    def is_same(self) -> bool:
        """Return whether each place holds what it held."""
        try:
            (sized, lengths), (cells, contents) = self._sized, self._cells
            if [*map(len, sized)] != lengths:
                return False
            is_same = all(map(is_, chain.from_iterable(self._live), self._held))
            is_same = is_same and all(map(is_, map(_CONTENTS, cells), contents))
            is_same = is_same and all(map(is_, map(_DICTIONARY, self._dictionaries[0]), self._dictionaries[1]))
            for get, names, held in self._named:
                is_same = is_same and all(map(is_, map(get, names, repeat(_MISSING)), held))
            if not is_same and self.changes():
                return False
            for mark, was in self._marks.values():
                if mark() != was:
                    return False
        except (AttributeError, RuntimeError, ValueError):  # it changes just now, or a cell is empty
            return False
        return True

    def changes(self) -> set[tuple[int, Any]]:
        """Return the places that hold something else, each as the identity of its target and a key."""
        changed = {key for key, (mark, was) in self._marks.items() if mark() != was}
        changed |= {(id(owner), "__dict__") for owner, own in self._attributes if owner.__dict__ is not own}
        for number, place in self._places.items():
            held, now = place.held, _contents(place.container)
            for key in held.keys() | now.keys():
                if not _are_same(held.get(key, _MISSING), now.get(key, _MISSING)):
                    changed.add((number, key))
        return changed

    def names_of_values(self) -> list[str]:
        """Return the names of the places with a value of a graph."""
        return [place.name(key) for place, key in self._values]

    def put_back(self) -> list[str]:
        """Take back what now leads to values of a graph, and return the names of its places."""
        kept: list[str] = []
        while found := State(self._layer, self._others)._values:
            places = {place.name(key): (place, key) for place, key in map(self._known_place, found)}
            if places.keys() <= {*kept}:  # what cannot be taken back stays
                break
            kept += places
            for place, key in places.values():
                if id(place.target) in self._places:
                    _put_back(self._places[id(place.target)], key)
        return kept

    def _known_place(self, found: tuple[_Place, Any]) -> tuple[_Place, Any]:
        """Return the place that led to another one, and was there before."""
        where: tuple[_Place, Any] | None = found
        while where and id(where[0].target) not in self._places:
            where = where[0].owner
        return where or found

    def _look(self, value: Any, label: str, owner: tuple[_Place, Any] | None) -> None:
        """Note the places of what one object holds."""

        def add(container: Any, label: str = label, target: Any = None) -> None:
            target = container if target is None else target
            place = self._places[id(target)] = _Place(container, target, label, owner)
            self._note(place, _contents(container))

        def walk(*parts: Any) -> None:
            self._waiting.extend((part, label, owner) for part in parts)

        if is_array(value) and not isinstance(value, type):
            self._marks |= _marks_of_tensor(value)
        elif isinstance(value, types.FunctionType):
            if self._is_own(value):
                for name, cell in zip(value.__code__.co_freevars, value.__closure__ or (), strict=True):
                    add(cell, name)
                walk(*value.__defaults__ or ())
                add(value.__dict__, f"{value.__name__}.")
                if value.__kwdefaults__:
                    add(value.__kwdefaults__, f"{value.__name__}.")
                self._name_globals(value)
        elif isinstance(value, types.MethodType):
            walk(value.__func__, value.__self__)
        elif isinstance(value, functools.partial):
            walk(value.func, *value.args)
            add(value.keywords)
        elif functions := wrapped_functions(value):
            walk(*functions.values())
        elif isinstance(value, type):
            if package_of(value) not in LIBRARIES:
                add(vars(value), f"{value.__name__}.", value)
                walk(*value.__bases__)
        elif isinstance(value, ContextVar):
            add(_Named(lambda _, missing: value.get(missing), ["value"]), target=value)
        elif isinstance(value, weakref.ref):
            add(_Named(lambda *_: value(), ["object"]), target=value)
        elif isinstance(value, bytearray | array.array):
            self._marks[id(value), bytes] = functools.partial(bytes, value), bytes(value)
        elif package_of(type(value)) == "sdpa_xp_export":
            walk(getattr(value, "__wrapped__", None))  # another layer of jit, which is called as it is
        elif not isinstance(value, types.ModuleType | types.BuiltinFunctionType) and value is not _MISSING:
            if isinstance(value, dict | list | set | deque | types.MappingProxyType):
                add(value, label or type(value).__name__)
            elif isinstance(value, tuple | frozenset):
                walk(*value)
            kind, label_of_attributes = type(value), f"{type(value).__name__}."
            if package_of(kind) in _WITHOUT_STATE and kind is not threading.local:
                return
            walk(kind)
            if isinstance(own := getattr(value, "__dict__", None), dict):
                self._attributes.append((value, own))
                add(own, label_of_attributes)
            if slots := slot_names(kind):
                add(_Named(functools.partial(getattr, value), slots), label_of_attributes, value)

    def _note(self, place: _Place, contents: Mapping[Any, Any]) -> None:
        """Note what a container holds, and look at that later."""
        place.held |= contents
        self._waiting.extend((part, place.name(key), (place, key)) for key, part in contents.items())

    def _name_globals(self, function: types.FunctionType) -> None:
        """Note the globals that a function names, and what it names of modules."""
        scope, names = function.__globals__, {*code_names(function.__code__)}
        self._name(scope, "", names)
        for name in names & scope.keys():
            part = scope[name]
            if isinstance(part, types.ModuleType) and part.__name__.partition(".")[0] not in ARRAY_LIBRARIES:
                self._name(vars(part), f"{name}.", names & vars(part).keys())

    def _name(self, scope: dict[str, Any], label: str, names: Iterable[str]) -> None:
        if id(scope) not in self._places:
            self._places[id(scope)] = _Place(_Named(scope.get, []), scope, label, None)
        place = self._places[id(scope)]
        if isinstance(named := place.container, _Named):  # else it is watched as a whole
            new = [name for name in names if name not in place.held]
            named.names += new
            self._note(place, {name: scope.get(name, _MISSING) for name in new})

    def _is_own(self, function: types.FunctionType) -> bool:
        """Return whether a function may hold what the caller changes, and is of no installed package."""
        package = package_of(function)
        is_installed = "site-packages" in function.__code__.co_filename
        return package not in LIBRARIES and (package == self._home or not is_installed)


def _contents(container: Any) -> dict[Any, Any]:
    """Return what a container holds, by key."""
    if isinstance(container, Mapping):
        return dict(container)
    if isinstance(container, types.CellType):
        try:
            return {"": container.cell_contents}
        except ValueError:  # a name that is assigned later
            return {}
    if isinstance(container, _Named):
        return dict(zip(container.names, container, strict=True))
    return {part: part for part in container} if isinstance(container, set) else dict(enumerate(container))


def _put_back(place: _Place, key: Any) -> None:
    """Let a container hold what it held under a key; a list, a deque or a set, all that it held."""
    container, target, held = place.container, place.target, place.held.get(key, _MISSING)
    if isinstance(container, types.CellType):
        container.cell_contents = held
    elif isinstance(container, list):
        container[:] = place.held.values()
    elif isinstance(container, set | deque):
        container.clear()
        (container.update if isinstance(container, set) else container.extend)(place.held.values())
    elif isinstance(target, dict):
        target.pop(key) if held is _MISSING else dict.__setitem__(target, key, held)
    else:
        owner: Any = type if isinstance(target, type) else object  # past what the class itself does
        owner.__delattr__(target, key) if held is _MISSING else owner.__setattr__(target, key, held)


def _are_same(one: object, other: object) -> bool:
    is_equal = type(one) is type(other) and isinstance(one, _COMPARED) and repr(one) == repr(other)
    return one is other or is_equal  # 0.0 == -0.0, and a NaN is not equal to itself


def _marks_of_tensor(tensor: Any) -> dict[tuple[int, Any], tuple[Callable[[], object], object]]:
    """Return what tells of another memory of a tensor of torch, and of a write that torch counts."""
    marks: dict[tuple[int, Any], tuple[Callable[[], object], object]] = {}
    if hasattr(tensor, "data_ptr"):
        for name, mark in _OF_TENSORS.items():
            with suppress(RuntimeError):  # in inference mode nothing is counted; a sparse tensor has no strides
                marks[id(tensor), name] = functools.partial(mark, tensor), mark(tensor)
    return marks
