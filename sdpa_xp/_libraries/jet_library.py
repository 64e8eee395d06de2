"""The library of jets: the answers of the library that they are over, whose arrays are parts of jets.

What a library says of itself, such as whether it computes in our threads, is true of its jets as well. Only
what takes arrays is asked about their parts. So a call of jets takes the way that a call of their values takes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from functools import cache, partial, reduce
from typing import Any

from . import FLOATING, JETS, dtype_name, library_of
from .base import is_compiling
from .jet_namespace import JetNamespace
from .jet_rules import linear, on_values
from .jets import Jet
from .loops import Loops
from .trees import mapped

LINEAR = {"base_form", "constant", "detach", "frozen", "in_blocks", "in_rows", "rows_from", "view"}
LINEAR |= {"take_rows", "take_tokens"}
"""What a library does with each part of a jet."""
_KINDS: dict[tuple[object, ...], JetNamespace] = {}
"""The kinds of jets. No lock: two threads that make one at once use two, one of which is lost with its call."""


RUNNING: ContextVar[tuple[JetNamespace, ...]] = ContextVar("running", default=())
"""The kinds of the functions of callers that are running in each other, the innermost last."""
COMPILED: list[JetNamespace] = []
"""The same in a trace of torch.compile, which knows no such variable, and runs in one thread."""


def _running() -> Sequence[JetNamespace]:
    return COMPILED if is_compiling() else RUNNING.get()


def in_jvp(array: Any) -> Any:
    """Return an array as one that may carry derivatives, if a function of `jvp` runs on such arrays."""
    adopted = [kind.library.adopted(array) for kind in _running()]
    return next((jet for jet in adopted[::-1] if jet is not None), array)


def kind_of_jets(array: Any, count: int, *, has_bend: bool = False) -> JetNamespace:
    """Return the kind of jets of our programs along `count` directions, over arrays like `array`."""
    library = library_of(array)
    xp = library.namespace(array)
    key = library, xp, count, has_bend
    if key in _KINDS:
        return _KINDS[key]
    kind = JetNamespace(xp, count, has_bend)
    kind.library, kind.writes = JetLibrary(library, kind), library.writes_in_place
    # A library that arrays bring themselves, as jets do, ends with them; and a note of a trace is soon wrong.
    if not hasattr(array, "__sdpa_xp_library__") and not is_compiling():
        _KINDS[key] = kind
    return kind


@contextmanager
def kind_of_caller(array: Any) -> Iterator[JetNamespace]:
    """Yield the kind of the jets that a caller's function gets, while this function runs.

    It is over that of the function around it, whose jets may be in the closure of this one: these are constants
    here.
    """
    library, running = library_of(array), _running()
    xp = library.namespace(array)
    root = getattr(xp, "root", xp)
    if around := [kind for kind in running if kind.root is root]:
        library, xp = around[-1].library, around[-1]
    kind = JetNamespace(xp, 1, False, caller_namespace(root))
    kind.library = JetLibrary(library, kind)
    if is_compiling():
        COMPILED.append(kind)
        yield kind
        COMPILED.pop()
        return
    token = RUNNING.set((*running, kind))
    try:
        yield kind
    finally:
        RUNNING.reset(token)


@cache
def caller_namespace(root: Any) -> CallerNamespace:
    return CallerNamespace(root)


class CallerNamespace:
    """The functions of the array API that a caller's function sees, for jets over arrays of one namespace."""

    def __init__(self, root: Any) -> None:
        self._root = root
        self.__name__ = f"{JETS} of {root.__name__}"

    def __getattr__(self, name: str) -> Any:
        kinds = [kind for kind in _running() if kind.root is self._root]
        if not kinds:
            raise RuntimeError("arrays with derivatives must be used in the thread and the function of `jvp`")
        function = getattr(kinds[-1], name)
        if not callable(function) or isinstance(function, type):
            return function

        def call(*arguments: Any, **keywords: Any) -> Any:
            if keywords.get("out") is not None:
                raise TypeError(f"`{name}` cannot write to an array with derivatives: leave out `out`")
            result = function(*arguments, **keywords)
            while isinstance(result, Jet) and dtype_name(result.dtype) not in FLOATING:
                result = result.value  # integers and booleans have no derivatives
            return result

        return call


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
            # What follows may have a slope of NaN where a pair may not attend, as in `differentiable_product`.
            where, masked = self.kind.of_values.where, product.parts[1:]
            product.parts[1:] = [None if x is None else where(masks[0], x, 0.0) for x in masked]
        return product


class OverGenerators(Over):
    """Of random numbers, which have no derivatives."""

    def random_words(self, rng: Any, count: int, xp: Any, device: Any) -> Any:
        return self.inner.random_words(rng, count, xp.of_values, device)


class Packed:
    """A jet, or a part of it, as a compiler's loop returns it: the jets themselves are no trees of JAX.

    A caller's `jax.tree.map` would change the parts of a jet by functions that know nothing of derivatives.
    """

    def __init__(self, kind: JetNamespace, parts: Iterable[Any]) -> None:
        self.kind, self.parts = kind, [*parts]

    @staticmethod
    def pack(value: Any) -> Any:
        return Packed(value.kind, map(Packed.pack, value.parts)) if isinstance(value, Jet) else value

    @staticmethod
    def unpack(value: Any) -> Any:
        return Jet(value.kind, map(Packed.unpack, value.parts)) if isinstance(value, Packed) else value


@cache
def _register(loops: Loops) -> None:
    loops.register(Packed, lambda packed: (packed.parts, packed.kind), Packed)


class OverLoops(Over):
    """Of a compiler's loops, which return the parts of jets."""

    def rolled(self, body: Callable[[Any], Any], numbers: Any, *, has_sums: bool = False) -> Any:
        if self.kind.level == 1:
            _register(self.inner)
        results = self.inner.rolled(lambda n: mapped(Packed.pack, body(n)), numbers, has_sums=has_sums)
        return mapped(Packed.unpack, results)


WRAPPERS: dict[str, type[Over]] = {
    "diagonals": Over,
    "loops": OverLoops,
    "autograd": OverAutograd,
    "generators": OverGenerators,
    "tangent_rules": OverRules,
}


class JetLibrary(Over):
    """The answers of the library of a kind of jets that are not those of the library they are over."""

    name, meshes = "jets", None
    keeps_buffers = has_ufuncs = has_free_shift = sets_elements = False

    @property
    def writes_in_place(self) -> bool:
        return self.kind.writes

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
        return Jet(self.kind, [self.kind.value(array), *self.kind.add(self.adopted(array), like).parts[1:]])

    def compiled(self, function: Callable[..., Any]) -> Callable[..., Any]:
        return function  # jets are no trees of JAX

    def bilinear(self, function: Callable[[Any, Any], Any], left: Any, right: Any) -> Any:
        return self.kind.bilinear(self.kind.unlifted(function), left, right)


def _parts_of(arrays: Iterable[Any], kind: JetNamespace) -> Iterator[Any]:
    """Return the values and derivatives of some arrays, of which some may be no jets of this kind."""
    for array in arrays:
        yield from (part for part in kind.parts(array) if part is not None)
