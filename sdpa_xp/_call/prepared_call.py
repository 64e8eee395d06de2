"""A validated call, ready to be computed."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any, Literal, NamedTuple, TypeAlias, TypeVar

from sdpa_xp._call.options import CheckedOptions
from sdpa_xp._checks.arrays import Sizes, explain_missing_name, swap_heads_and_length
from sdpa_xp._core.products import ArraySource
from sdpa_xp._core.scores import BoundOptions, Dropout, Scores
from sdpa_xp._libraries import is_unknown, library_of
from sdpa_xp._libraries.base import Library, astype_if_needed
from sdpa_xp._libraries.protocols import Array, Dtype, Namespace
from sdpa_xp._tiles.on_device import Questions
from sdpa_xp._tiles.plan import Plan, plan_tiles
from sdpa_xp._tiles.score_grid import ScoreGrid


class MissingFunctions:
    """A context in which the error for a name that a namespace lacks also names the called function."""

    def __init__(self, function: str, xp: Namespace, context: AbstractContextManager[object]) -> None:
        self.function, self.xp, self.context = function, xp, context

    def __enter__(self) -> None:
        self.context.__enter__()

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, *rest: Any) -> None:
        self.context.__exit__(kind, error, *rest)
        if isinstance(error, AttributeError):
            explain_missing_name(self.function, self.xp, error)


class RngRollback:
    """A context in which an error gives a generator back its state, so that the call can be made again.

    Keys have no state, and the state of some generators cannot be read: these are not restored.
    """

    def __init__(self, rng: Any, library: Library, context: AbstractContextManager[object]) -> None:
        self.rng, self.library, self.context = rng, library, context

    def __enter__(self) -> None:
        self.state = self.library.generators.state(self.rng)
        self.context.__enter__()

    def __exit__(self, error: type[BaseException] | None, *rest: Any) -> None:
        self.context.__exit__(error, *rest)
        if error is not None and self.state is not None:
            self.library.generators.restore(self.rng, self.state)


MOST_KNOWN = 2**12
"""The scores of the largest call whose mask is asked once for all equal calls: its answer is an array."""
T = TypeVar("T")


Derived: TypeAlias = Literal[
    "bound_options", "context_maker", "has_arrays", "is_causal", "kernel", "needs_no_conversion", "one_tile",
    "plan", "real_keys", "tiles"
]  # fmt: skip
"""What is derived from a call once for all equal calls. A dict, since properties would be called each time."""


class PreparedCall(NamedTuple):
    """A call that has passed every check."""

    grid: ScoreGrid
    arrays: Mapping[str, Array]
    """The inputs by name, (..., heads, length, width)."""
    is_default_layout: bool
    """Whether the caller's arrays have these axes already."""
    sizes: Sizes
    options: CheckedOptions
    layout: str
    implementation: str | None
    result_dtype: Dtype
    derived: dict[Derived, Any]
    """Results that depend only on shapes, dtypes and options; equal calls share them, also in several threads,
    which may compute one twice and store equal results."""

    def cached(self, name: Derived, compute: Callable[[], T]) -> T:
        """Return `compute()`, computed once for all equal calls; `compute` must not read an input."""
        if name not in self.derived:
            self.derived[name] = compute()
        derived: T = self.derived[name]
        return derived

    def computing(self) -> AbstractContextManager[object]:
        """Return the context in which the call is computed.

        It is without warnings and autocast, on the device of the query. If the call fails, `rng` gets back its
        state, and an error for a function that the library lacks says which call needs it.
        """
        query = self.arrays["query"]
        context = self.cached("context_maker", lambda: self._context_maker(query))()
        return RngRollback(self.options.rng, library_of(query), context) if self.options.dropout_p else context

    def _context_maker(self, query: Array) -> Callable[[], AbstractContextManager[object]]:
        make, (function, xp) = library_of(query).context_maker(query), (self.grid.function, self.grid.xp)
        # Only a library without a file in `_libraries` may lack a function, and pays for the context.
        return (lambda: MissingFunctions(function, xp, make())) if is_unknown(query) else make

    def attach_zero_gradient(self, result: Array, sole: Array | None = None) -> Array:
        """Connect a result that is constant where no pair may attend to all that may have a gradient.

        Where no pair may attend, it may follow from the array `sole`.
        """
        return self.grid.library.attach_zero_gradient(result, self._learnable_arrays, sole)

    def connected_lse(self, column: Array) -> Array:
        """Return the log-sum-exp (..., Hq, L) of a column. In a row without keys it is the sink."""
        return self.attach_zero_gradient(column[..., 0], self.options.sinks)

    def _learnable_arrays(self) -> list[Array]:
        return [*self.arrays.values(), *self.options.arrays()]

    def bound_options(self) -> BoundOptions:
        """Return the options bound to the grid of the whole call."""
        return self.cached("bound_options", self._bind)

    def _bind(self) -> BoundOptions:
        if not self.grid.waits:
            return self.bind(self.grid)
        questions = Questions()
        grid = replace(self.grid, questions=questions)
        bound = self.bind(grid)
        # Only arrays are asked about. Calls with arrays in their options are not kept, and nor are the answers.
        if not questions.arrays:
            return bound
        scores = Scores(grid, self.arrays["query"], ArraySource(self.arrays["key"]), bound)
        finite_inputs = self._search_inputs(questions, scores)
        return self.bind(grid)._replace(finite_inputs=finite_inputs)

    def _search_inputs(self, questions: Questions, scores: Scores) -> frozenset[str]:
        """Return the names of the inputs without NaN and inf; all `questions` are answered.

        The query counts as scaled: a finite number times the scale may be inf.
        """
        arrays = self.arrays
        if not isinstance(scores.options.scale, float) or abs(scores.options.scale) > 1.0:
            arrays = {**arrays, "query": scores.scaled_query(range(self.grid.queries))}
        xp, dtype = self.grid.xp, self.grid.dtype
        # A sum of finite numbers that overflows only costs a guard that was not needed.
        sums = [xp.sum(astype_if_needed(xp, array, dtype)) for array in arrays.values()]
        questions.ask(lambda: xp.stack([xp.isfinite(total) for total in sums], axis=0))
        *_, flags = questions.read(self.grid.library, self.grid.xp)
        return frozenset(name for name, is_finite in zip(arrays, flags, strict=True) if is_finite)

    def plan(self) -> Plan:
        """Return the tiles of the whole call."""
        widths = self.sizes.width + self.arrays["value"].shape[-1]
        return self.cached("plan", lambda: plan_tiles(self.grid, self.sizes.group, widths))

    def scores(self) -> Scores:
        """Return the scores of the whole call. With dropout this draws from `rng`."""
        scores, dropout = self.scores_without_dropout(), self.draw_dropout()
        if dropout is None:
            return scores
        return scores._replace(options=scores.options._replace(dropout=dropout))

    def search_inputs(self, scores: Scores) -> Scores:
        """Return the scores with `finite_inputs`, for which a device is waited for; on the CPU, as they are."""
        if not self.grid.waits or scores.options.finite_inputs is not None or not scores.options.may_mask:
            return scores
        finite_inputs = self._search_inputs(Questions(), scores)
        return scores._replace(options=scores.options._replace(finite_inputs=finite_inputs))

    def scores_without_dropout(self) -> Scores:
        """Return the scores of the whole call, without drawing from `rng`."""
        key = ArraySource(self.arrays["key"])
        is_small = not self.grid.is_traced and math.prod(self.grid.shape) <= MOST_KNOWN
        tiles: dict[Any, Any] | None = self.cached("tiles", dict) if is_small else None
        return Scores(self.grid, self.arrays["query"], key, self.bound_options(), known_tiles=tiles)

    def result(self, output: Array) -> Any:
        """Return an output (..., Hq, L, Ev) in the caller's dtype and layout; for 2-D inputs without heads."""
        output = astype_if_needed(self.grid.xp, output, self.result_dtype)
        if self.sizes.is_2d:
            return output[0, ...]
        return output if self.is_default_layout else swap_heads_and_length(self.grid.xp, output, self.layout)

    def checked(self, result: T, name: str = "output") -> T:
        """Return a result, unless the library is set to look for NaN or inf, which `computing` has put off."""
        self.grid.library.find_nonfinite(self.grid.function, name, result)
        return result

    def remove_head_axis(self, computed: Array) -> Array:
        """Return (..., Hq, L) or (..., Hq, L, S) as the caller gets it: for 2-D inputs without heads."""
        return computed[0, ...] if self.sizes.is_2d else computed

    def bind(self, grid: ScoreGrid) -> BoundOptions:
        """Return the options bound to a grid."""
        return self.options.bind(grid, self.sizes.width)

    def draw_dropout(self) -> Dropout | None:
        """Return the dropout of the call, or None; draws the seed from `rng`."""
        return self.options.draw_dropout(self.grid)

    def of_entries(self, grid: ScoreGrid, arrays: Mapping[str, Array]) -> PreparedCall:
        """Return some batch entries as a separate call."""
        return self._replace(grid=grid, arrays=arrays, derived={})
