"""The derivatives of a prepared call: `_gradients.py` gives them to a caller, `_torch` to torch."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple, cast

from ._call import PreparedCall
from ._call.tangents import lifted, refuse_chunks
from ._checks.arrays import swap_heads_and_length
from ._chunked import cut_call
from ._libraries import astype_if_needed
from ._libraries.jets import Jet
from ._libraries.protocols import Array
from ._programs.gradients import GradientProgram, gradient_targets, gradients, try_functions
from ._programs.output import attend
from ._tiles import ArraySource, Target

if TYPE_CHECKING:
    from ._many.graphs import GraphCall


class Derivable(NamedTuple):
    """The output of a call, and what its gradients are computed with."""

    output: Array
    """(..., Hq, L, Ev), in the accumulation dtype."""
    targets: Mapping[str, Target]
    gradients: Callable[[Array], dict[str, Array]]
    """Returns the gradient of each target from the cotangent of the output."""
    forward: GradientProgram | None = None
    """What the second derivatives are computed from; None for arrays in chunks, which have none."""

    def only(self, names: Collection[str]) -> Derivable:
        """Return what the gradients of some arrays are computed with, of a call without chunks."""
        forward = cast(GradientProgram, self.forward).only(names)
        return Derivable(self.output, forward.targets, partial(gradients, forward), forward)


def derive(call: PreparedCall, arrays: Mapping[str, Array], known: Sequence[Array] = ()) -> Derivable:
    """Compute the output of a prepared call, and return all that the derivatives of its `arrays` need.

    `arrays` are the `floating_arrays` of the call, in the caller's layout. `known` are its output, which is not
    computed again then, and its log-sum-exp as two numbers, (..., Hq, L, 2).
    """
    value = ArraySource(call.arrays["value"])
    if (cut := cut_call(call)) is not None:
        return _derive_chunks(call, cut, arrays)
    # Before the output, so that a call that has no gradients is refused at once, and not by its pullback.
    if call.options.biases and not (known or call.is_empty):
        try_functions(call.scores())
    scores = call.search_inputs(call.draw_scores())
    if not known:
        computed = attend(scores, value, call.plan(), call.grid.dtype, "output", "lse_parts")
        known = computed["output"], computed["lse_parts"]
    output, lse = known
    targets, bias_names = gradient_targets(scores, call.arrays["key"], value.array, arrays)
    forward = GradientProgram(scores, call.plan(), targets, value, output, lse, bias_names)
    return Derivable(output, targets, partial(gradients, forward), forward)


def _derive_chunks(call: PreparedCall, cut: GraphCall, arrays: Mapping[str, Array]) -> Derivable:
    if call.options.biases and not call.is_empty:
        try_functions(cut.readable_scores())
    targets, _ = gradient_targets(call.scores(), call.arrays["key"], call.arrays["value"], arrays)
    computed = cut.attend(call.grid.dtype, "output", "lse_parts")
    output, lse = computed["output"], computed["lse_parts"]
    return Derivable(output, targets, partial(cut.gradients, output, lse, targets, arrays))


def pull_back(
    call: PreparedCall, forward: Derivable, arrays: Mapping[str, Array], cotangent: Array
) -> dict[str, Array]:
    """Return the gradient of each target, in the shape, layout and dtype of the caller's array."""
    if call.is_empty:
        return {name: call.grid.xp.zeros_like(arrays[name]) for name in forward.targets}
    computed = forward.gradients(call.heads_first({"cotangent": cotangent})["cotangent"])
    return _in_caller_form(call, forward.targets, arrays, computed)


def second_order(
    call: PreparedCall,
    arrays: Mapping[str, Array],
    names: Collection[str],
    cotangent: Array,
    tangents: Mapping[str, Array],
    cotangent_tangent: Array | None,
) -> tuple[Array, dict[str, Array], dict[str, Array]]:
    """Return how the output moves, the gradients of the arrays of `names`, and how these move.

    The output has its heads first; the others have the caller's shapes and dtypes.

    `arrays` are the `floating_arrays` of the call, and the cotangents and tangents have passed their checks.
    """
    refuse_chunks(call.grid.function, call.grid.library)
    jets = lifted(call, [tangents], guards_all=True)
    kind: Any = jets.grid.xp
    cotangents: Any = Jet(kind, (cotangent, cotangent_tangent))
    forward = derive(jets, arrays).only(names)
    computed: Any = pull_back(jets, forward, arrays, cotangents)
    of_arrays, of_tangents = ({name: kind.part(x, n) for name, x in computed.items()} for n in range(2))
    return kind.part(forward.output, 1), of_arrays, of_tangents


def _in_caller_form(
    call: PreparedCall, targets: Mapping[str, Target], arrays: Mapping[str, Array], computed: dict[str, Array]
) -> dict[str, Array]:
    """Return the gradient of each target in the shape, layout and dtype of the caller's array."""
    xp = call.grid.xp
    for name, target in targets.items():
        gradient, array = computed[name], arrays[name]
        if name in call.arrays:
            is_2d = array.ndim == 2
            gradient = gradient[0, ...] if is_2d else swap_heads_and_length(xp, gradient, call.layout)
        elif target.heads_last:
            gradient = xp.permute_dims(gradient, (2, 1, 0))
        computed[name] = astype_if_needed(xp, xp.reshape(gradient, array.shape), array.dtype)
    return {name: computed[name] for name in arrays if name in targets}
