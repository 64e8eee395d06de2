"""The library of jets: the answers of the library that they are over, whose arrays are parts of jets.

What a library says of itself, such as whether it computes in our threads, is true of its jets as well. Only
what takes arrays is asked about their parts. So a call of jets takes the way that a call of their values takes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import cache, partial, reduce
from typing import Any

from . import dtype_name, library_of
from .base import is_compiling
from .capabilities import Loops
from .jet_rules import linear, on_values
from .jets import Jet, JetNamespace

LINEAR = {"base_form", "constant", "detach", "frozen", "in_blocks", "in_rows", "rows_from", "take", "view"}
"""What a library does with each part of a jet."""
_KINDS: dict[tuple[object, ...], JetNamespace] = {}
"""The kinds of jets. No lock: two threads that make one at once use two, one of which is lost with its call."""


def kind_of_jets(array: Any, count: int, *, has_bend: bool = False) -> JetNamespace:
    """Return the kind of jets along `count` directions, over arrays like `array`."""
    library = library_of(array)
    key = library, library.namespace(array), count, has_bend
    if key in _KINDS:
        return _KINDS[key]
    kind = new_kind_of_jets(array, count, has_bend=has_bend)
    if not is_compiling():  # a trace that noted it would be out of date at once
        _KINDS[key] = kind
    return kind


def new_kind_of_jets(array: Any, count: int, *, has_bend: bool = False) -> JetNamespace:
    """Return a kind of jets that meets no others over the same arrays."""
    library = library_of(array)
    kind = JetNamespace(library.namespace(array), count, has_bend)
    kind.library = JetLibrary(library, kind)
    if kind.level == 1 and library.loops is not None:
        _register(library.loops)
    return kind


@cache
def _register(loops: Loops) -> None:
    loops.register(Jet, lambda jet: (jet.parts, jet.kind), Jet)


class Over:
    """What a library or a part of it answers: its functions get the values of jets, or each of their parts."""

    def __init__(self, inner: Any, kind: JetNamespace) -> None:
        self.inner, self.kind = inner, kind

    def __getattr__(self, name: str) -> Any:
        answer, kind = getattr(self.inner, name), self.kind
        if name in WRAPPERS and answer is not None:
            answer = WRAPPERS[name](answer, kind)
        elif callable(answer) and not isinstance(answer, type):
            answer = partial(linear if name in LINEAR else on_values, kind, answer)
        setattr(self, name, answer)  # the next look-up does not come here
        return answer


class OverAutograd(Over):
    """Of arrays that the library records: it differentiates the plain operations of jets."""

    def records(self, arrays: Sequence[Any]) -> bool:
        return bool(self.inner.records([*_parts_of(arrays, self.kind)]))

    def differentiates(self, _arrays: Sequence[Any]) -> bool:
        return False

    def attach_zero_gradient(self, output: Any, _arrays: object, _sole: object = None) -> Any:
        return output


class OverRules(Over):
    """Products with derivatives of their own, which the library differentiates."""

    def define(
        self, compute: Callable[..., Any], tangent: Callable[..., Any], *arrays: Any, of_pairs: bool = False
    ) -> Any:
        """Return a product of the first two arrays, each part of which has these derivatives."""
        left, right, *masks = arrays
        computes = (self.kind.unlifted(f) for f in (compute, tangent))
        define = partial(self.inner.define, *computes, of_pairs=of_pairs)
        product = self.kind.bilinear(lambda s, t: define(s, t, *masks), left, right)
        if masks and of_pairs and self.kind.owns(product):
            # What follows may have a slope of NaN where a pair may not attend, as in `differentiable.py`.
            where, masked = self.kind.of_values.where, product.parts[1:]
            product.parts[1:] = [None if x is None else where(masks[0], x, 0.0) for x in masked]
        return product


class OverGenerators(Over):
    """Of random numbers, which have no derivatives."""

    def random_words(self, rng: Any, count: int, xp: Any, device: Any) -> Any:
        return self.inner.random_words(rng, count, xp.of_values, device)


WRAPPERS: dict[str, type[Over]] = {
    **dict.fromkeys(("diagonals", "loops", "rows", "settings"), Over),
    "autograd": OverAutograd,
    "generators": OverGenerators,
    "tangent_rules": OverRules,
}


class JetLibrary(Over):
    """The answers of the library of a kind of jets that are not those of the library they are over."""

    name, meshes = "jets", None
    keeps_buffers = has_ufuncs = has_free_shift = False

    @property
    def functions(self) -> Any:
        return self.kind

    @property
    def tile_share(self) -> int:
        return 1 + self.kind.has_bend

    def namespace(self, _array: Any) -> Any:
        return self.kind

    def array_signature(self, _array: Any) -> None:
        return None

    def is_traced(self, array: Any) -> bool:
        return any(map(self.inner.is_traced, _parts_of([array], self.kind)))

    def is_writeable(self, array: Any) -> bool:
        return bool(array.is_memory if self.kind.owns(array) else self.inner.is_writeable(array))

    def to_list(self, array: Any) -> Any:
        """Return the elements; of booleans that all derivatives have, whether they are true in all parts."""
        value, *others = _parts_of([array], self.kind)
        if others and dtype_name(value.dtype) == "bool":
            value = reduce(self.kind.of_values.logical_and, others, value)  # a device is waited for once
        return self.inner.to_list(value)

    # What only jets are asked: see `Library`

    def adopted(self, array: Any) -> Any:
        if self.kind.owns(array):
            return array
        inner = array if library_of(array) is self.inner else self.inner.adopted(array)
        return None if inner is None else Jet(self.kind, (inner, *self.kind.zeros_of_parts))

    def values(self, array: Any) -> Any:
        return self.kind.value(array)

    def with_derivatives(self, array: Any, like: Any) -> Any:
        if not self.kind.owns(like):
            return self.kind.value(array)
        return Jet(self.kind, [self.kind.value(array), *self.kind.plus(self.adopted(array), like).parts[1:]])

    def bilinear(self, function: Callable[[Any, Any], Any], left: Any, right: Any) -> Any:
        return self.kind.bilinear(self.kind.unlifted(function), left, right)


def _parts_of(arrays: Iterable[Any], kind: JetNamespace) -> Iterator[Any]:
    """Return the values and derivatives of some arrays, of which some may be no jets of this kind."""
    for array in arrays:
        yield from (part for part in kind.parts(array) if part is not None)
