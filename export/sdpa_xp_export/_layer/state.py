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

A layer may change what it reads. Then its next call is traced again, from what the layer holds then. If two
graphs in a row are equal, what the layer changed in both calls is not watched any more: a counter, or what is
added to a list, but not what was in the list before. A layer that cannot be traced with open lengths is called
again, and what it has changed is put back first. If the program has other threads, it is not: the change may be
theirs.

What cannot be seen: numbers that are written into the memory of an array, unless torch counts it (it does not
for `tensor.data.mul_(2)`, by fused optimizers and in inference mode); the state of iterators, generators and
queues; gradients of tensors; what another library keeps, such as torch's default dtype, and what Python's own
functions read, as `os.getenv`, `eval` and `globals()[name]` do. Then the old graph stays until `refresh()` is
called. An object behind a weak reference lives as long as its state.

What a layer cannot ask while it is traced: `isinstance` of a length is answered as in a run, but the type and
the text of a length are those of a name, and an argument is a value of the graph, not an array of the caller,
and another one for each argument. `verify=True` compares the graph of such a branch with the layer.

The state also tells what a layer kept of a graph that was being written: such a value means nothing in another.
"""

from __future__ import annotations

import array
import functools
import numbers
import operator
import threading
import types
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from contextvars import ContextVar
from dataclasses import dataclass, field
from itertools import chain, repeat
from operator import is_
from typing import Any, NamedTuple, TypeAlias

from .._graph import FloatOfLengths, GraphValue, Length
from .._packages import package_of
from .contents import MISSING, MOST, Named, attributes_of, containers, contents, home_of, is_held_array

_COMPARED = (numbers.Number, str, bytes, types.NoneType)
"""Types of values that are the same if they are equal."""
_OF_TENSORS: dict[str, Callable[[Any], object]] = {
    **{name: operator.methodcaller(name) for name in ("data_ptr", "stride")},
    **{name: operator.attrgetter(name) for name in ("shape", "_version", "dtype")},
}
"""What tells of other memory of a tensor of torch, and of a write: torch has no public name for its count."""
PlaceChange: TypeAlias = tuple[int, Any]
"""A place that changed, as the identity of its target and a key; None stands for any key."""
_ORDER = object()
"""The key of a change of the order of a dictionary."""
_CONTENTS, _DICTIONARY = operator.attrgetter("cell_contents"), operator.attrgetter("__dict__")


@dataclass(slots=True, eq=False)
class _StatePlace:
    """A container, and what it held."""

    container: Any
    """A mapping, a list, a set, a deque, a cell or `Named`."""
    target: Any
    """The object that an assignment changes: the container, or the object with these attributes."""
    label: str
    """What an error writes before a key: "Layer." before an attribute."""
    owner: tuple[_StatePlace, Any] | None
    """The place where the object with this container was found, and its key there."""
    parts: dict[Any, Any] = field(default_factory=dict)
    grows: bool = False
    """Whether the layer adds to the container in each call: what it adds is not watched."""

    def get(self, key: Any, missing: object) -> Any:
        """Return what the container holds now, of a place that grows, or a cell that was empty."""
        container = self.container
        if isinstance(container, set):
            return key if key in container else missing
        if isinstance(container, types.CellType):
            return contents(container).get(key, missing)
        if isinstance(container, Mapping):
            return container.get(key, missing)
        return container[key] if key < len(container) else missing

    def name(self, key: object) -> str:
        if isinstance(self.container, types.CellType):
            return self.label
        return f"{self.label}{key}" if self.label[-1:] in ("", ".") else f"{self.label}[{key!r}]"


class _Views(NamedTuple):
    """What a state compares: pairs of what is iterated over now, and what was there."""

    sized: tuple[list[Any], list[int]]
    live: tuple[list[Iterable[Any]], list[Any]]
    cells: tuple[list[Any], list[Any]]
    dictionaries: tuple[list[Any], list[Any]]
    kinds: list[type]
    """The classes of the objects with these dictionaries."""
    named: list[tuple[Callable[[Any, Any], Any], list[Any], list[Any]]]

    def are_same(self) -> bool:
        if [*map(len, self.sized[0])] != self.sized[1]:
            return False
        is_same = all(map(is_, chain.from_iterable(self.live[0]), self.live[1]))
        is_same = is_same and all(map(is_, map(_CONTENTS, self.cells[0]), self.cells[1]))
        is_same = is_same and all(map(is_, map(_DICTIONARY, self.dictionaries[0]), self.dictionaries[1]))
        is_same = is_same and all(map(is_, map(type, self.dictionaries[0]), self.kinds))
        for get, names, parts in self.named:
            is_same = is_same and all(map(is_, map(get, names, repeat(MISSING)), parts))
        return is_same


class State:
    """What a layer, and other functions that it may call, lead to.

    Attributes:
        is_whole: Whether it has all of it: the layer leads to no more than `MOST` objects.
    """

    def __init__(self, layer: Callable[..., Any], others: Iterable[object] = ()) -> None:
        self._layer, self._others = layer, [*others]
        self._ignored: frozenset[PlaceChange] = frozenset()
        self._changed: frozenset[PlaceChange] = frozenset()  # by the layer, while its graph was written
        self._home = package_of(home_of(layer))
        self._places: dict[int, _StatePlace] = {}  # by the identity of the target
        self._values: list[tuple[_StatePlace, Any]] = []  # where values of a graph stand, or lead to
        self._lengths: list[tuple[_StatePlace, Any]] = []  # the same for lengths
        self._marks: dict[tuple[int, Any], tuple[Callable[[], object], object]] = {}
        self._attributes: list[tuple[Any, dict[str, Any], type]] = []  # of each object that has a dictionary
        known: dict[int, object] = {}  # alive, so that no other object gets its number
        self._waiting = deque[tuple[Any, str, tuple[_StatePlace, Any] | None]](
            (root, "", None) for root in (layer, *self._others)
        )
        while self._waiting and len(known) < MOST:
            value, label, owner = self._waiting.popleft()
            if isinstance(value, GraphValue | Length | FloatOfLengths):
                places = self._values if isinstance(value, GraphValue) else self._lengths
                places += [owner] if owner else []
            elif id(value) not in known and value is not MISSING and not isinstance(value, _COMPARED):
                known[id(value)] = value
                self._look(value, label, owner)
        self.is_whole = not self._waiting
        self._views = self._new_views()

    def _new_views(self) -> _Views:
        """Return what each call compares, in lists over which a loop runs in C."""
        places = self._places.values()
        cells = [place for place in places if isinstance(place.container, types.CellType) and place.parts]
        empty = [place for place in places if isinstance(place.container, types.CellType) and not place.parts]
        named = [place for place in places if isinstance(place.container, Named)]
        others = [place for place in places if not isinstance(place.container, types.CellType | Named)]
        of_many, growing = ([place for place in others if place.grows is grows] for grows in (False, True))
        live: list[Iterable[Any]] = []
        parts: list[Any] = []
        for place in of_many:
            if isinstance(place.container, Mapping) and place.parts:
                live += [place.container, place.container.values()]
                parts += [*place.parts, *place.parts.values()]
            elif place.parts:
                live.append(place.container)
                parts += place.parts.values()
        return _Views(
            ([place.container for place in of_many], [len(place.parts) for place in of_many]),
            (live, parts),
            ([place.container for place in cells], [place.parts[""] for place in cells]),
            ([x for x, *_ in self._attributes], [attributes for _, attributes, _ in self._attributes]),
            [kind for *_, kind in self._attributes],
            [(p.container.get, p.container.names, [*p.parts.values()]) for p in named]
            + [(p.get, [*p.parts], [*p.parts.values()]) for p in growing]
            + [(p.get, [""], [MISSING]) for p in empty],
        )

    def is_same(self) -> bool:
        """Return whether each place holds what it did, apart from those whose changes are ignored."""
        try:
            if self._views.are_same() and all(mark() == was for mark, was in self._marks.values()):
                return True
            if not self.changes() <= self._ignored:
                return False
            for number, key in self._ignored:
                if (place := self._places.get(number)) is not None:
                    now = contents(place.container)
                    place.parts = {key: now.get(key, MISSING) for key in place.parts} if place.grows else now
            self._views = self._new_views()
        except (AttributeError, ReferenceError, RuntimeError, ValueError):
            return False  # it changes just now, or an object is gone
        return True

    def after_call(self) -> State:
        """Return the state that a call has left; this one notes what the layer changed in it."""
        self._changed = frozenset(self.changes())
        return State(self._layer, self._others) if self._changed else self

    @property
    def was_changed(self) -> bool:
        """Whether the layer changed something while its graph was written."""
        return bool(self._changed)

    def ignore_repeated(self, earlier: State) -> None:
        """Ignore what the layer has changed in two calls, of which `earlier` is the state before the first.

        What it adds to a list, a set or a dictionary in both calls is ignored, too, but not what was there.
        """
        self._ignored = self._changed & earlier._changed
        attributes = {id(attributes) for _, attributes, _ in self._attributes}
        for number in self._grown() & earlier._grown() - attributes:
            self._places[number].grows = True
        self._views = self._new_views()

    def _grown(self) -> set[int]:
        """Return the containers to which the layer added something."""
        places = ((number, key, self._places.get(number)) for number, key in self._changed)
        return {
            number for number, key, place in places if place and key is not _ORDER and key not in place.parts
        }

    def restore(self) -> None:
        """Put back what has changed since, as far as it can be, unless another thread may have changed it."""
        for number, key in self.changes() if threading.active_count() == 1 else ():
            with suppress(Exception):  # an object may refuse it
                _put_back(self._places[number], key)

    def changes(self) -> set[PlaceChange]:
        """Return the places that hold something else, each as the identity of its target and a key."""
        changed: set[PlaceChange] = {key for key, (mark, was) in self._marks.items() if mark() != was}
        for owner, attributes, kind in self._attributes:
            if owner.__dict__ is not attributes or type(owner) is not kind:
                changed.add((id(owner), "__dict__"))
        for number, place in self._places.items():
            before, now = place.parts, contents(place.container)
            for key in before if place.grows else before.keys() | now.keys():
                if not _are_same(before.get(key, MISSING), now.get(key, MISSING)):
                    changed.add((number, key))
            if len(before) == len(now) and not all(map(_are_same, before, now)):
                changed.add((number, _ORDER))
        return changed

    def names_of_values(self) -> list[str]:
        """Return the names of the places with a value of a graph."""
        return [*map(_name, self._values)]

    def put_back(self) -> list[str]:
        """Take back what now leads to values of a graph, and return the names of its places."""
        kept, kept_values = dict[str, None](), dict[str, None]()
        while (now := State(self._layer, self._others))._values or now._lengths:
            values, lengths = ([*map(self._known_place, places)] for places in (now._values, now._lengths))
            names = [*map(_name, values + lengths)]
            if {*names} <= kept.keys():  # what cannot be taken back stays
                break
            kept |= dict.fromkeys(names)
            kept_values |= dict.fromkeys(map(_name, values))
            for place, key in values + lengths:
                if id(place.target) in self._places:
                    _put_back(self._places[id(place.target)], key)
        return [*kept_values]  # a length is no number elsewhere, and is dropped without a word

    def _known_place(self, value: tuple[_StatePlace, Any]) -> tuple[_StatePlace, Any]:
        """Return the place that led to another one, and was there before."""
        where: tuple[_StatePlace, Any] | None = value
        while where and id(where[0].target) not in self._places:
            where = where[0].owner
        return where or value

    def _look(self, value: Any, label: str, owner: tuple[_StatePlace, Any] | None) -> None:
        """Note the places of what one object holds, to look at them later."""
        if is_held_array(value):
            self._marks |= _marks_of_tensor(value)
        elif isinstance(value, bytearray | array.array):
            self._marks[id(value), bytes] = functools.partial(bytes, value), bytes(value)
        for container, target, prefix in containers(value, self._home):
            if isinstance(container, tuple | frozenset):  # they do not change
                self._waiting.extend((part, label, owner) for part in container)
                continue
            if container is attributes_of(value) and container is not None:
                self._attributes.append((value, container, type(value)))
            place = self._places.get(id(target))
            if place is not None and not isinstance(place.container, Named):
                continue  # it is watched as a whole
            if place is None:
                empty = Named(container.get, []) if isinstance(container, Named) else container
                place = self._places[id(target)] = _StatePlace(empty, target, prefix or label, owner)
            new = contents(container)
            if isinstance(place.container, Named):  # functions of a module name others of its globals
                new = {name: part for name, part in new.items() if name not in place.parts}
                place.container.names += new
            place.parts |= new
            self._waiting.extend((part, place.name(key), (place, key)) for key, part in new.items())
            if isinstance(container, Mapping):
                self._waiting.extend((key, label, owner) for key in new)


def _name(where: tuple[_StatePlace, Any]) -> str:
    return where[0].name(where[1])


def _put_back(place: _StatePlace, key: Any) -> None:
    """Let a container hold what it held under a key; a list, a deque or a set, all that it held."""
    container, target, part = place.container, place.target, place.parts.get(key, MISSING)
    if isinstance(container, types.CellType):
        container.cell_contents = part
    elif isinstance(target, ContextVar):
        target.set(None if part is MISSING else part)
    elif isinstance(container, list):
        container[:] = place.parts.values()
    elif isinstance(container, set | deque):
        container.clear()
        (container.update if isinstance(container, set) else container.extend)(place.parts.values())
    elif isinstance(target, dict):
        target.pop(key) if part is MISSING else dict.__setitem__(target, key, part)
    else:
        owner: Any = type if isinstance(target, type) else object  # past what the class itself does
        owner.__delattr__(target, key) if part is MISSING else owner.__setattr__(target, key, part)


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
