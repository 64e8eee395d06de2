"""Attention and its derivatives as one operation, of which torch gets the derivatives as operations again.

With x the arrays of a call, O its output, c a cotangent and g(x; c) the gradient of <c, O(x)>, both O and g are
gradients of one function, <c, O(x)>. So their derivatives along directions t of x and c' of c are all that is
needed: O'(x; t) and g'(x, c; t, c'), which jets compute in one pass.

    d<u, g>/dx = g'(x, c; u, 0)        d<u, g>/dc = O'(x; u)
    d<c, O'(x; t)>/dx = g'(x, c; t, 0)        d<c, O'(x; t)>/dt = g(x; c)

Memory grows with L + S in each of them. The derivatives of g' are those of the plain array operations.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, TypeAlias, cast

from .._call import PreparedCall, shared_by_equal_calls
from .._call.options import CallOptions, DrawnSeed, floating_arrays
from .._checks.arrays import HLE
from .._derivatives import derive, pull_back, second_order
from .._forward_mode import derivatives
from .._libraries import FLOATING, access_of, dtype_name
from .._libraries.protocols import Access, Array
from .._libraries.torch.function import Operation, apply
from .._programs.gradients import GradientProgram

INPUTS = ("query", "key", "value")
COTANGENT = "cotangent"
"""The name of the direction of the cotangent, besides those of the arrays."""
Parts: TypeAlias = Sequence[Array | None]


@dataclass(frozen=True, slots=True)
class RecordedCall:
    """A call, which is computed again from other arrays of the same shapes."""

    options: CallOptions
    names: tuple[str | None, ...]
    """The names of the arrays as their derivatives have them: inputs, then arrays of the options. None has no
    derivatives, such as an array of a mask or the seed of dropout."""
    with_arrays: Callable[[Sequence[Array]], PreparedCall]
    """Returns the prepared call for arrays in the order of `names`."""
    scores: int = 0
    """How many scores the call has, if a `vmap` asks for that."""
    apply: Callable[[AttentionOperation, Sequence[Array]], Sequence[Array]] = apply
    """Returns the results of an operation of the call, which torch records."""

    def by_name(self, items: Parts) -> dict[str, Array]:
        """Return the items that belong to arrays with derivatives and are there, by name."""
        pairs = zip(self.names, items, strict=True)
        return {name: item for name, item in pairs if name is not None and item is not None}

    def in_order(self, by_name: Mapping[str, Array]) -> list[Array | None]:
        """Return what belongs to each array of the call."""
        return [None if name is None else by_name.get(name) for name in self.names]


def recorded(call: PreparedCall) -> RecordedCall:
    """Return what is kept of a prepared call."""
    # Kept with a call that has arrays, it would keep these alive until the next collection of garbage.
    return _recorded(call) if call.options.arrays() else _kept(call)


def _recorded(call: PreparedCall) -> RecordedCall:
    """Return what is kept of a prepared call, for its arrays with the heads first."""
    of_options, has_seed = iter(floating_arrays({}, call.call_options)), call.options.dropout_p > 0
    names = [next(of_options) if dtype_name(x.dtype) in FLOATING else None for x in call.options.arrays()]
    names += [None] * has_seed
    # Without its inputs, which torch keeps for the backward pass, and may move to another place.
    call = call._replace(
        arrays={},
        is_default_layout=True,
        layout=HLE,
        sizes=call.sizes._replace(is_2d=False),
        result_dtype=call.grid.dtype,
    )
    scores = math.prod(call.grid.shape)
    return RecordedCall(call.call_options, (*INPUTS, *names), partial(_with_arrays, call), scores)


_kept = shared_by_equal_calls(_recorded)


@shared_by_equal_calls
def _shared_when_unrecorded(_call: PreparedCall) -> dict[Access, dict[Callable[..., Any], Any]]:
    """Return where is kept what the call without recorded arrays shares with equal ones."""
    return {}


def _with_arrays(call: PreparedCall, arrays: Sequence[Array]) -> PreparedCall:
    count, access, options = len(INPUTS), access_of(arrays), call.options
    inputs, of_options = dict(zip(INPUTS, arrays, strict=False)), arrays[count:]
    if options.dropout_p > 0:
        options = options._replace(rng=DrawnSeed(of_options[-1]))
        of_options = of_options[:-1]
    if any(map(operator.is_not, of_options, options.arrays())):
        options, shared = options.with_arrays(of_options), {}
    else:
        # What follows from shapes and options is found once for the output and all derivatives.
        shared = _shared_when_unrecorded(call).setdefault(access, {})
    grid = replace(call.grid, access=access)
    return call._replace(grid=grid, arrays=inputs, options=options, shared=shared)


class AttentionOperation(Operation):
    """The output of a call, or the gradients of `names`, or the derivatives of these along `directions`.

    It takes, one after the other: with `names` the cotangent; the directions; and the arrays of the call.

        (x) -> O, and the log-sum-exp, which the gradients read          (c, x) or (c, O, lse, x) -> g
        (t, x) -> O'                                                     (c, t, c', x) -> O', g, g'
    """

    def __init__(self, call: RecordedCall, names: Sequence[str] = (), directions: Sequence[str] = ()) -> None:
        self.call, self.names, self.directions = call, tuple(names), tuple(directions)
        self.scores, self.keeps_results = call.scores, not (names or directions)
        self.returned = 1 + 2 * len(names) if directions else max(1, len(names))

    def split(self, arrays: Sequence[Any]) -> tuple[Sequence[Any], Sequence[Any]]:
        """Return what stands before the arrays of the call, and what belongs to these."""
        count = len(arrays) - len(self.call.names)
        return arrays[:count], arrays[count:]

    def run(self, arrays: Sequence[Array]) -> tuple[Array, ...]:
        leading, of_call = self.split(arrays)
        call, floating = self.call.with_arrays(of_call), self.call.by_name(of_call)
        if self.directions and not self.names:
            along = dict(zip(self.directions, leading, strict=True))
            return (derivatives(call, [along])[1],)
        with call.computing():
            if not self.names:
                derivable = derive(call, floating)
                return derivable.output, cast(GradientProgram, derivable.forward).lse
            cotangent, *others = leading
            if self.directions:
                along = dict(zip(self.directions, others, strict=True))
                moved = along.pop(COTANGENT, None)
                of_all = second_order(call, floating, self.names, cotangent, along, moved)
                return of_all[0], *(part[name] for part in of_all[1:] for name in self.names)
            derivable = derive(call, floating, others).only(self.names)
            gradients = pull_back(call, derivable, floating, cotangent)
        return tuple([gradients[name] for name in self.names])

    def pull(
        self, arrays: Sequence[Array], results: Sequence[Array], cotangents: Parts, needed: Sequence[bool]
    ) -> Parts | None:
        leading, of_call = self.split(arrays)
        pairs = zip(self.call.names, self.split(needed)[1], strict=True)
        names = tuple([name for name, is_needed in pairs if name is not None and is_needed])
        if not self.names:
            return self._pull_output(leading, of_call, results, cotangents[0], names)
        if self.directions:
            return None
        along = {name: u for name, u in zip(self.names, cotangents, strict=True) if u is not None}
        of_cotangent, of_arrays = None, dict[str, Array]()
        if along and (names or needed[0]):
            inputs = [*leading[:1], *along.values(), *of_call] if names else [*along.values(), *of_call]
            of_cotangent, *computed = self._apply(names, along, inputs)
            of_arrays = dict(zip(names, computed[len(names) :], strict=True))
        return [of_cotangent, *[None] * (len(leading) - 1), *self.call.in_order(of_arrays)]

    def _pull_output(
        self,
        tangents: Sequence[Array],
        of_call: Sequence[Array],
        results: Sequence[Array],
        cotangent: Array | None,
        needed: Sequence[str],
    ) -> Parts:
        """Return the gradients of O(x), or of O'(x; t)."""
        names = tuple(dict.fromkeys([*self.directions, *needed]))
        if cotangent is None or not names:
            return [None] * (len(tangents) + len(of_call))
        kept = [] if self.directions else results
        computed = self._apply(names, self.directions, [cotangent, *tangents, *kept, *of_call])
        # Of O, the gradients are all that is computed; of O', they are the last, behind O' and g.
        first, last = dict(zip(names, computed[1:], strict=False)), computed[-len(names) :]
        of_tangents = [first[name] for name in self.directions]
        return [*of_tangents, *self.call.in_order(dict(zip(names, last, strict=True)))]

    def push(self, arrays: Sequence[Array], results: Sequence[Array], tangents: Parts) -> Parts | None:
        del results
        if self.directions:
            return None
        leading, of_call = self.split(arrays)
        of_leading, of_arrays = self.split(tangents)
        along = self.call.by_name(of_arrays)
        if self.names and of_leading[0] is not None:
            along[COTANGENT] = of_leading[0]
        computed = self._apply(self.names, along, [*leading[:1], *along.values(), *of_call])
        return computed[1 + len(self.names) :] if self.names else computed

    def _apply(
        self, names: Iterable[str], directions: Iterable[str], arrays: Sequence[Array]
    ) -> Sequence[Array]:
        return self.call.apply(AttentionOperation(self.call, (*names,), (*directions,)), arrays)
