"""The operations of attention that a library differentiates: what they compute, and their derivatives.

Each operation says what its derivatives are, again as operations, and the library records them: attention, its
gradients, its tangent, and the second derivatives. So memory grows with L + S in each of them. The derivatives
of second derivatives are those of the plain array operations.

With x the inputs, O the output, c a cotangent, t a direction and g(x; c) the gradient of <c, O(x)>,

    d<u, g>/dx = H u, the derivative of g along u    d<u, g>/dc = O'(x; u)
    d<c, O'(x; t)>/dx = H t                          d<c, O'(x; t)>/dt = g(x; c)
"""

from __future__ import annotations

import math
import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

from ._call.options import CallOptions, floating_arrays
from ._call.prepared_call import Derived, PreparedCall
from ._checks.arrays import HLE
from ._derivatives import derive, pull_back, restore, second_order
from ._libraries import FLOATING, access_of, dtype_name
from ._libraries.capabilities import Autograd
from ._libraries.protocols import Access, Array
from ._programs.dropout import DrawnSeed
from ._programs.gradients import GradientProgram
from .forward_mode import derivatives

INPUTS = ("query", "key", "value")
Parts = Sequence[Array | None]


class RepeatedCall:
    """A call that is computed again from its arrays, and the names of these."""

    __slots__ = ()
    options: CallOptions
    names: tuple[str | None, ...]
    """The names of the arrays as their derivatives have them: inputs, then arrays of the options. None has no
    derivatives, such as an array of a mask or the seed of dropout."""

    @property
    def scores(self) -> int:
        """How many scores the call has."""
        return 0

    def with_arrays(self, arrays: Sequence[Array]) -> tuple[PreparedCall, dict[str, Array]]:
        """Return the call for arrays in the order of `names`, and those that have derivatives."""
        raise NotImplementedError

    def apply(self, operation: CallOperation, arrays: Sequence[Array]) -> Sequence[Array]:
        """Return the results of an operation of the call, which the library records."""
        raise NotImplementedError

    def by_name(self, items: Parts) -> dict[str, Array]:
        """Return the items that belong to arrays with derivatives and are there, by name."""
        pairs = zip(self.names, items, strict=True)
        return {name: item for name, item in pairs if name is not None and item is not None}

    def in_order(self, by_name: Mapping[str, Array]) -> list[Array | None]:
        """Return what belongs to each array of the call."""
        return [None if name is None else by_name.get(name) for name in self.names]


@dataclass(frozen=True, slots=True)
class RecordedCall(RepeatedCall):
    """A call, which is computed again from other arrays of the same shapes."""

    call: PreparedCall
    """Without its inputs, which the library keeps for the backward pass, and may move to another place."""
    options: CallOptions
    names: tuple[str | None, ...]
    has_seed: bool

    @property
    def scores(self) -> int:
        return math.prod(self.call.grid.shape)

    def apply(self, operation: CallOperation, arrays: Sequence[Array]) -> Sequence[Array]:
        return cast(Autograd, self.call.grid.library.autograd).differentiable(operation, arrays)

    def with_arrays(self, arrays: Sequence[Array]) -> tuple[PreparedCall, dict[str, Array]]:
        count, access = len(INPUTS), access_of(arrays)
        inputs, of_options = dict(zip(INPUTS, arrays, strict=False)), arrays[count:]
        call, options = self.call, self.call.options
        if self.has_seed:
            options = options._replace(rng=DrawnSeed(of_options[-1]))
            of_options = of_options[:-1]
        if any(map(operator.is_not, of_options, options.arrays())):
            options, derived = options.with_arrays(of_options), {}
        else:
            # What follows from shapes and options is found once for the output and all derivatives.
            unrecorded: dict[Access, dict[Derived, Any]] = call.cached("unrecorded", dict)
            derived = unrecorded.setdefault(access, {})
        grid = replace(call.grid, access=access)
        call = call._replace(grid=grid, arrays=inputs, options=options, derived=derived)
        floating = {name: array for name, array in zip(self.names, arrays, strict=True) if name is not None}
        return call, floating


def recorded(call: PreparedCall, options: CallOptions) -> RecordedCall:
    """Return what is kept of a prepared call; `options` are those that it was prepared with."""
    # Kept with a call that has arrays, it would keep these alive until the next collection of garbage.
    if call.options.arrays():
        return _recorded(call, options)
    return call.cached("recorded", lambda: _recorded(call, options))


def _recorded(call: PreparedCall, options: CallOptions) -> RecordedCall:
    """Return what is kept of a prepared call, for its arrays with the heads first."""
    has_seed = call.options.dropout_p > 0
    of_options = iter(floating_arrays({}, options))
    names = [next(of_options) if dtype_name(x.dtype) in FLOATING else None for x in call.options.arrays()]
    call = call._replace(
        arrays={},
        is_default_layout=True,
        layout=HLE,
        sizes=call.sizes._replace(is_2d=False),
        result_dtype=call.grid.dtype,
    )
    return RecordedCall(call, options, (*INPUTS, *names, *[None] * has_seed), has_seed)


class CallOperation:
    """An operation of a call: the arrays of the call come last."""

    returned: int
    """How many results have derivatives; the others are kept for them."""
    keeps_results = False

    def __init__(self, recorded: RepeatedCall) -> None:
        self.recorded = recorded

    @property
    def arguments(self) -> tuple[Any, ...]:
        """What the operation is made with, besides the call."""
        return ()

    @property
    def scores(self) -> int:
        return self.recorded.scores

    def run(self, arrays: Sequence[Array]) -> tuple[Array, ...]:
        raise NotImplementedError

    def pull(
        self, _arrays: Sequence[Array], _results: Sequence[Array], _cotangents: Parts, _needed: Sequence[bool]
    ) -> Parts | None:
        return None

    def push(self, _arrays: Sequence[Array], _results: Sequence[Array], _tangents: Parts) -> Parts | None:
        return None

    def split(self, arrays: Sequence[Any]) -> tuple[Sequence[Any], Sequence[Any]]:
        """Return what stands before the arrays of the call, and what belongs to these."""
        count = len(arrays) - len(self.recorded.names)
        return arrays[:count], arrays[count:]

    def _needed(self, needed: Sequence[bool]) -> tuple[str, ...]:
        """Return the names of the arrays of the call whose gradients are needed."""
        pairs = zip(self.recorded.names, self.split(needed)[1], strict=True)
        return tuple([name for name, is_needed in pairs if name is not None and is_needed])


class OutputOperation(CallOperation):
    """x -> O, and the log-sum-exp, which its gradients read."""

    returned = 1
    keeps_results = True

    def run(self, arrays: Sequence[Array]) -> tuple[Array, ...]:
        call, floating = self.recorded.with_arrays(arrays)
        with call.computing():
            derivable = derive(call, floating)
            return derivable.output, cast(GradientProgram, derivable.forward).lse

    def trusts_library(self, cotangent: Array) -> bool:
        """Return whether the first derivatives of a kernel are right: 0 * NaN of a masked pair is NaN."""
        call = cast(RecordedCall, self.recorded).call
        grid, options = call.grid, call.options
        if grid.waits or not (options.masks or options.biases):  # a device is not waited for to find that out
            return True
        return bool(grid.xp.isfinite(grid.xp.sum(cotangent)))

    def pull(
        self, arrays: Sequence[Array], results: Sequence[Array], cotangents: Parts, needed: Sequence[bool]
    ) -> Parts | None:
        cotangent, names = cotangents[0], self._needed(needed)
        if cotangent is None or not names:
            return [None] * len(arrays)
        operation = GradientsOperation(self.recorded, names, len(results))
        gradients = self.recorded.apply(operation, [cotangent, *results, *arrays])
        return self.recorded.in_order(dict(zip(names, gradients, strict=True)))

    def push(self, arrays: Sequence[Array], _results: Sequence[Array], tangents: Parts) -> Parts | None:
        named = self.recorded.by_name(tangents)
        return self.recorded.apply(TangentOperation(self.recorded, tuple(named)), [*named.values(), *arrays])


class GradientsOperation(CallOperation):
    """(c, kept, x) -> the gradients of <c, O(x)> with respect to the arrays of `names`."""

    def __init__(self, recorded: RepeatedCall, names: tuple[str, ...], kept: int) -> None:
        super().__init__(recorded)
        self.names, self.kept, self.returned = names, kept, len(names)

    @property
    def arguments(self) -> tuple[Any, ...]:
        return self.names, self.kept

    def run(self, arrays: Sequence[Array]) -> tuple[Array, ...]:
        (cotangent, *kept), of_call = self.split(arrays)
        call, floating = self.recorded.with_arrays(of_call)
        with call.computing():
            # What the call has kept, or computed anew.
            derivable = restore(call, floating, *kept) if kept else derive(call, floating)
            gradients = pull_back(call, derivable.only(self.names), floating, cotangent)
        return tuple([gradients[name] for name in self.names])

    def pull(
        self, arrays: Sequence[Array], _results: Sequence[Array], cotangents: Parts, needed: Sequence[bool]
    ) -> Parts | None:
        (cotangent, *kept), of_call = self.split(arrays)
        named = {n: u for n, u in zip(self.names, cotangents, strict=True) if u is not None}
        tangent, of_arrays, names = None, dict[str, Array](), self._needed(needed)
        if named and names:
            second = SecondOperation(self.recorded, tuple(named), names)
            computed = self.recorded.apply(second, [cotangent, *named.values(), *of_call])
            of_arrays = dict(zip(names, computed[len(names) :], strict=True))
        if named and needed[0]:
            first = TangentOperation(self.recorded, tuple(named))
            (tangent,) = self.recorded.apply(first, [*named.values(), *of_call])
        return [tangent, *[None] * len(kept), *self.recorded.in_order(of_arrays)]

    def push(self, arrays: Sequence[Array], _results: Sequence[Array], tangents: Parts) -> Parts | None:
        (cotangent, *_), of_call = self.split(arrays)
        (moved, *_), of_arrays = self.split(tangents)
        named = self.recorded.by_name(of_arrays)
        changes = [*named.values()] if moved is None else [*named.values(), moved]
        second = SecondOperation(self.recorded, tuple(named), self.names, moved is not None)
        return self.recorded.apply(second, [cotangent, *changes, *of_call])[self.returned :]


class TangentOperation(CallOperation):
    """(t, x) -> the derivative of O along t, which has a direction for each of `names`."""

    returned = 1

    def __init__(self, recorded: RepeatedCall, names: tuple[str, ...]) -> None:
        super().__init__(recorded)
        self.names = names

    @property
    def arguments(self) -> tuple[Any, ...]:
        return (self.names,)

    def run(self, arrays: Sequence[Array]) -> tuple[Array, ...]:
        tangents, of_call = self.split(arrays)
        call, _ = self.recorded.with_arrays(of_call)
        named = dict(zip(self.names, tangents, strict=True))
        return (derivatives(call, self.recorded.options, [named])[1],)

    def pull(
        self, arrays: Sequence[Array], _results: Sequence[Array], cotangents: Parts, needed: Sequence[bool]
    ) -> Parts | None:
        tangents, of_call = self.split(arrays)
        if cotangents[0] is None:
            return [None] * len(arrays)
        names = tuple(dict.fromkeys([*self.names, *self._needed(needed)]))
        second = SecondOperation(self.recorded, self.names, names)
        computed = self.recorded.apply(second, [cotangents[0], *tangents, *of_call])
        gradients, derivatives = (
            dict(zip(names, part, strict=True)) for part in (computed[: len(names)], computed[len(names) :])
        )
        return [*(gradients[name] for name in self.names), *self.recorded.in_order(derivatives)]


class SecondOperation(CallOperation):
    """(c, t, c', x) -> the gradients of <c, O(x)>, and their derivatives along t and c'.

    t has a direction for each of `directions`, and the gradients are those of `names`.
    """

    def __init__(
        self,
        recorded: RepeatedCall,
        directions: tuple[str, ...],
        names: tuple[str, ...],
        is_moved: bool = False,
    ) -> None:
        super().__init__(recorded)
        self.directions, self.names, self.is_moved = directions, names, is_moved
        self.returned = 2 * len(names)

    @property
    def arguments(self) -> tuple[Any, ...]:
        return self.directions, self.names, self.is_moved

    def run(self, arrays: Sequence[Array]) -> tuple[Array, ...]:
        (cotangent, *changes), of_call = self.split(arrays)
        call, floating = self.recorded.with_arrays(of_call)
        moved = changes[-1] if self.is_moved else None
        tangents = dict(zip(self.directions, changes, strict=False))
        with call.computing():
            computed = second_order(
                call, self.recorded.options, floating, self.names, cotangent, tangents, moved
            )
        return tuple([part[name] for part in computed for name in self.names])
