"""From keyword arguments to a prepared call: options, validation, binding, and the only cache of calls.

    options        the options as passed, checked, and as one tree of arrays
    reproducible   what `reproducible=True` refuses
    tangents       the tangents of a call, for derivatives

Here a call is checked, and its options are bound to the grid of its scores; equal calls are checked once.
Nothing in this folder computes a score.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from functools import partial, wraps
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

from .._checks.arrays import (
    HLE,
    Sizes,
    check_appended,
    check_floating,
    check_one_device,
    check_one_dtype,
    check_one_library,
    check_shapes,
    explaining_missing_names,
    swap_heads_and_length,
)
from .._checks.keywords import Implementation, check_flag, check_layout
from .._libraries import (
    access_of,
    accumulation_dtype,
    astype_if_needed,
    checked,
    computing,
    from_host,
    is_unknown,
    library_of,
    namespace_of,
)
from .._libraries.protocols import AnyArray, Array, Dtype, Shape
from .._programs import BoundOptions, Scores
from .._tiles import ArraySource, tuning
from .._tiles.grid import FirstPosition, ScoreGrid
from .._tiles.modifier import ScoreModifier
from .._tiles.plan import Plan, asked_threads, plan_for, with_patches
from .options import (
    CallOptions,
    CheckedOptions,
    DrawnSeed,
    arrays_of,
    call_signature,
    check_implementation,
    check_options,
    check_softmax_dtype,
    with_arrays,
)

if TYPE_CHECKING:
    from .._programs.dropout import Dropout
    from .._tiles.on_device import Questions


MOST_CACHED = 1024
T = TypeVar("T")


def shared_by_equal_calls(compute: Callable[[PreparedCall], T]) -> Callable[[PreparedCall], T]:
    """Have a function of a call computed once for all equal calls, if these are kept: it reads no input.

    Calls with arrays in their options are not kept, so of these it may read the inputs. Two threads may compute
    it at once, and store equal results.
    """

    @wraps(compute)
    def known(call: PreparedCall) -> T:
        if known not in call.shared:
            call.shared[known] = compute(call)
        result: T = call.shared[known]
        return result

    return known


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
    implementation: Implementation | None
    result_dtype: Dtype
    call_options: CallOptions
    """The options before the checks, with arrays of the library that computes the call."""
    shared: dict[Callable[..., Any], Any]
    """Results of functions that depend only on shapes, dtypes and options: see `shared_by_equal_calls`."""
    converted_from: AnyArray | None = None
    """The caller's query, if the host library computes the call for its library."""

    def changed(self, **fields: Any) -> PreparedCall:
        """Return another call, which shares no results with this one."""
        return self._replace(shared={}, **fields)

    def computing(self) -> AbstractContextManager[object]:
        """Return the context in which the call is computed.

        It is without warnings and autocast, on the device of the query. If the call fails, `rng` gets back its
        state, and an error for a function that the library lacks says which call needs it.
        """
        context = self._context_maker()()
        return self.options.keeping_rng(self.grid.library, context) if self.options.dropout_p else context

    @shared_by_equal_calls
    def _context_maker(self) -> Callable[[], AbstractContextManager[object]]:
        query = self.arrays["query"]
        make = self.grid.library.context_maker(query)
        if not is_unknown(query) and not self.grid.access.is_traced:
            return make
        # A trace may have symbols as lengths, and a library without a file in `_libraries` may lack a function.
        return lambda: explaining_missing_names(self.grid.function, query, make())

    def attach_zero_gradient(self, result: Array, sole: Array | None = None) -> Array:
        """Connect a result that is constant where no pair may attend to all that may have a gradient.

        Where no pair may attend, it may follow from the array `sole`.
        """
        if (autograd := self.grid.library.autograd) is None:
            return result
        return autograd.attach_zero_gradient(
            result, lambda: [*self.arrays.values(), *self.options.arrays()], sole
        )

    def connected(self, results: dict[str, Array]) -> dict[str, Array]:
        """Return an output, and a column of log-sum-exps as (..., Hq, L), after `attach_zero_gradient`."""
        results["output"] = self.attach_zero_gradient(results["output"])
        if "lse" in results:  # in a row without keys it is the sink
            results["lse"] = self.attach_zero_gradient(results["lse"][..., 0], self.options.sinks)
        return results

    @property
    def is_empty(self) -> bool:
        """Whether there are no scores, or the output has no elements."""
        return 0 in (*self.grid.shape, self.arrays["value"].shape[-1])

    def heads_first(self, arrays: Mapping[str, Array]) -> Mapping[str, Array]:
        """Return arrays in the caller's layout as (..., heads, length, width)."""
        return arrays if self.is_default_layout else _to_heads_first(self.grid, arrays, self.layout)

    @shared_by_equal_calls
    def bound_options(self) -> BoundOptions:
        """Return the options bound to the grid of the whole call."""
        grid = self.grid.asking()
        bound, questions = self.bind(grid), grid.questions
        # Only arrays are asked about. Calls with arrays in their options are not kept, and nor are the answers.
        if questions is None or not questions.arrays:
            return bound
        scores = Scores(grid, self.arrays["query"], ArraySource(self.arrays["key"]), bound)
        finite_inputs = self._search_inputs(questions, scores)
        return self.bind(grid)._replace(finite_inputs=finite_inputs)

    def with_bound_options(self, bound: BoundOptions) -> PreparedCall:
        """Return the call with options that are bound to its grid already."""
        return self._replace(shared={**self.shared, PreparedCall.bound_options: bound})

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

    @shared_by_equal_calls
    def plan(self) -> Plan:
        """Return the tiles of the whole call."""
        widths = self.sizes.width + self.arrays["value"].shape[-1]
        plan = plan_for(self.arrays["key"].dtype, self.grid, self.sizes.group, widths)
        options = self.bound_options()
        # Other options may have arrays of pairs or of rows, which are cut into ranges; so are the sums of
        # reproducible calls.
        has_ranges = self.options.dropout_p or self.grid.is_reproducible or not options.is_plain
        patches = None if has_ranges else options.mask.patches(self.grid)
        if patches is None:
            return plan
        return with_patches(plan, patches, self.grid, self.scores().key_range, widths)

    def draw_scores(self) -> Scores:
        """Return the scores of the whole call. With dropout this draws from `rng`."""
        scores, dropout = self.scores(), self.draw_dropout()
        if dropout is None:
            return scores
        return scores._replace(options=scores.options._replace(dropout=dropout))

    def search_inputs(self, scores: Scores) -> Scores:
        """Return the scores with `finite_inputs`, for which a device is waited for; on the CPU, as they are."""
        options, questions = scores.options, self.grid.asking().questions
        if questions is None or options.finite_inputs is not None or not options.may_mask:
            return scores
        finite_inputs = self._search_inputs(questions, scores)
        return scores._replace(options=options._replace(finite_inputs=finite_inputs))

    def scores(self) -> Scores:
        """Return the scores of the whole call, without drawing from `rng`."""
        query, key = self.arrays["query"], ArraySource(self.arrays["key"])
        return Scores(self.grid, query, key, self.bound_options(), known_tiles=self._known_tiles())

    @shared_by_equal_calls
    def _known_tiles(self) -> dict[Any, Any] | None:
        """Return where the tiles of a small call are kept: equal calls fill it. None for other calls."""
        return None if self.grid.access.is_traced or math.prod(self.grid.shape) > tuning.MOST_KNOWN else {}

    def result(self, output: Array) -> Any:
        """Return an output (..., Hq, L, Ev) in the caller's dtype and layout; for 2-D inputs without heads."""
        if output.dtype != self.result_dtype:  # not `astype_if_needed`, which a tiny call would notice
            output = self.grid.xp.astype(output, self.result_dtype)
        if self.sizes.is_2d:
            output = output[0, ...]
        elif not self.is_default_layout:
            output = swap_heads_and_length(self.grid.xp, output, self.layout)
        return output if self.converted_from is None else self.as_caller(output, self.converted_from.dtype)

    def as_caller(self, array: Array, dtype: Dtype = None) -> Array:
        """Return an array as one of the caller's library and of a dtype, if the host computes the call."""
        if (query := self.converted_from) is None:
            return array
        result = from_host(array, query)
        return result if dtype is None else astype_if_needed(namespace_of(query), result, dtype)

    def checked(self, result: T, name: str = "output") -> T:
        """Return a result, unless the caller's library is set to refuse it for a NaN or inf."""
        query = self.converted_from
        return checked(
            self.grid.library if query is None else library_of(query), self.grid.function, result, name
        )

    def remove_head_axis(self, computed: Array) -> Array:
        """Return (..., Hq, L) or (..., Hq, L, S) as the caller gets it: for 2-D inputs without heads."""
        return self.as_caller(computed[0, ...] if self.sizes.is_2d else computed)

    def bind(self, grid: ScoreGrid) -> BoundOptions:
        """Return the options bound to a grid."""
        return self.options.bind(grid, self.sizes.width)

    def draw_dropout(self) -> Dropout | None:
        """Return the dropout of the call, or None; draws the seed from `rng`."""
        grid, p = self.grid, self.options.dropout_p
        if not p:
            return None
        from .._programs.dropout import Dropout  # few programs need it

        if isinstance(self.options.rng, DrawnSeed):
            return Dropout(p, self.options.rng.words)
        return Dropout(p, grid.library.generators.random_words(self.options.rng, 4, grid.xp, grid.device))


_CACHE: dict[object, PreparedCall] = {}
"""Calls by their signature, without their arrays. It needs no lock, also without the GIL: each access is one
operation of a dict, and two threads that prepare equal calls store equal values."""


def prepare(
    function: str,
    inputs: Mapping[str, Any],
    options: CallOptions,
    *,
    queries_at_end: bool = False,
    cache_shapes: tuple[Shape, Shape] | None = None,
    has_kernels: bool = False,
    has_entries: bool = False,
) -> PreparedCall:
    """Validate and prepare a call.

    Args:
        function: The public function, for messages.
        inputs: The query and the key, and the value if the function has one.
        options: The keyword arguments.
        queries_at_end: Whether the queries are the last tokens of a cache.
        cache_shapes: The shapes that the keys and values of a paged or quantised cache would have as arrays.
        has_kernels: Whether vendors have kernels for the function.
        has_entries: Whether batch entries have different lengths. Then the options are not bound here, but to
            the grid of each entry.
    """
    converted_from: AnyArray | None = None
    # `is not`, so that a wrong type is checked.
    if options.reproducible is not False and check_flag(function, "reproducible", options.reproducible):
        query = inputs["query"]
        from .reproducible import on_host  # few programs need it

        is_cache = queries_at_end or cache_shapes is not None
        inputs, options = on_host(function, inputs, options, has_one_dtype=not is_cache)
        converted_from = None if type(inputs["query"]) is type(query) else query
    signature = call_signature(function, inputs, options, (queries_at_end, cache_shapes))
    call = None if signature is None else _CACHE.get(signature)
    if call is not None:
        arrays = inputs if call.is_default_layout else _to_heads_first(call.grid, inputs, call.layout)
        # `arrays` is the second field. `_replace(arrays=arrays)` takes three times as long.
        prepared = PreparedCall(call[0], arrays, *call[2:])
        return prepared if converted_from is None else prepared._replace(converted_from=converted_from)
    with explaining_missing_names(function, inputs["query"], computing(inputs["query"])):
        call = _validated(function, inputs, options, queries_at_end, cache_shapes, has_kernels)
    if not has_entries:
        with call.computing():
            call.bound_options()  # checks them as well
    if signature is not None:
        if len(_CACHE) >= MOST_CACHED:
            _CACHE.clear()  # all at once: to drop the oldest, each call that is found would have to be moved up
        _CACHE[signature] = call._replace(arrays={})
    return call if converted_from is None else call._replace(converted_from=converted_from)


def _validated(
    function: str,
    inputs: Mapping[str, object],
    options: CallOptions,
    queries_at_end: bool,
    cache_shapes: tuple[Shape, Shape] | None,
    has_kernels: bool,
) -> PreparedCall:
    implementation = check_implementation(function, options.implementation, kernels=has_kernels)
    check_layout(function, options.layout)
    layout = str(options.layout)
    if (chunks := library_of(inputs["query"]).chunks) is not None:
        options = with_arrays(options, partial(chunks.as_lazy, like=inputs["query"]))
    if isinstance(options.bias, ScoreModifier) and options.bias.has_code_of_caller():
        from .._libraries.jet_library import in_jvp  # few calls need it

        inputs = {**inputs, "query": in_jvp(inputs["query"])}  # it may add what has derivatives
    xp, arrays = check_one_library(function, {**inputs, **dict(arrays_of(options))})
    tensors, library = {name: arrays[name] for name in inputs}, library_of(arrays["query"])
    # The keys and values of a cache have been checked, and those of a quantised one are integers.
    floating = tensors if cache_shapes is None else {"query": tensors["query"]}
    for name, array in floating.items():
        check_floating(function, name, array)
    if queries_at_end and cache_shapes is None:  # the cache has checked its query, whose dtype may be wider
        floating = {name: array for name, array in tensors.items() if name != "query"}
    check_one_dtype(function, floating)  # masks and biases may have others
    check_one_device(function, arrays)
    query = tensors["query"]
    other_shapes = [array.shape for name, array in tensors.items() if name != "query"]
    shapes = other_shapes if cache_shapes is None else cache_shapes
    sizes = check_shapes(function, query.shape, *shapes, layout=layout)
    is_causal = check_flag(function, "is_causal", options.is_causal)
    if queries_at_end and is_causal:
        check_appended(function, sizes.queries, sizes.keys)
    input_accumulation_dtype = accumulation_dtype(xp, query.dtype)
    device = library.device(query)
    dtype = check_softmax_dtype(function, options.softmax_dtype, input_accumulation_dtype, library, xp, device)
    position = sizes.keys - sizes.queries if queries_at_end else 0
    grid = ScoreGrid(
        function=function,
        library=library,
        xp=xp,
        device=device,
        dtype=dtype,
        input_dtype=query.dtype,
        access=access_of(arrays.values()),
        batch=sizes.batch,
        heads=sizes.query_heads,
        queries=sizes.queries,
        keys=sizes.keys,
        is_2d=sizes.is_2d,
        position=FirstPosition(position, position, position),
        needs_all_axes=library.has_settings and library.refuses_unlike_axes(),
        is_reproducible=bool(options.reproducible),
    ).with_symbols()
    if grid.access.uses_our_threads:
        asked_threads()  # small calls need no threads, but refuse a wrong value too
    least = len(sizes.batch) + 3 if grid.needs_all_axes else 3
    is_default_layout = layout == HLE and all(array.ndim >= least for array in tensors.values())
    return PreparedCall(
        grid=grid,
        arrays=tensors if is_default_layout else _to_heads_first(grid, tensors, layout),
        is_default_layout=is_default_layout,
        sizes=sizes,
        options=check_options(options, arrays, grid, is_causal=is_causal),
        layout=layout,
        implementation="xp" if options.reproducible else implementation,
        result_dtype=query.dtype,
        call_options=options,
        shared={},
    )


def _to_heads_first(grid: ScoreGrid, inputs: Mapping[str, Any], layout: str) -> Mapping[str, Array]:
    """Return the inputs as (..., heads, length, width); a 2-D input is one head."""
    xp = grid.xp
    with_heads = {
        name: xp.expand_dims(array, axis=0) if array.ndim == 2 else swap_heads_and_length(xp, array, layout)
        for name, array in inputs.items()
    }
    return {name: grid.in_all_axes(array) for name, array in with_heads.items()}
