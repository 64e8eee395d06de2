"""The cases that a layer is tried with, and their inputs.

A mask that adds -1e4 instead of -inf works as long as scores are ordinary. So some tokens are multiplied by a
number so large that their scores are far beyond 1e4. If a mask hides them, other tokens must not change.
"""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Literal, TypeAlias

import numpy as np
from numpy.typing import NDArray

from .._call.mask_analysis import CallNumbers
from .._dtypes.dtype import INTEGERS, numpy_dtype
from .._files.model import Model
from .._graph import moved_inputs
from .._runtime.releases import EngineName
from ..spec import TensorSpec
from .case_lengths import LayerLengths, Lengths, shown_lengths
from .cases import Case
from .expected import Arrays
from .inputs import LENGTHS, MOST, OPERANDS, OperandChoice, TokenCounts, clipped, draw_each, drawn_integers
from .layer import LARGE_TOKENS, BothLayers, words_of

IntegerChoice: TypeAlias = OperandChoice | Literal["negative integers", "large integers"]
"""What integer inputs hold: random values that fit their use, or values far from these."""
Draw: TypeAlias = Callable[..., NDArray[Any]]
"""A function that returns an input: it takes a generator, a shape and, optionally, the lengths of the run."""
FACTORS = {
    "float16": (2.0**13, 2.0**10, 2.0**6),
    "bfloat16": (2.0**30, 2.0**20, 2.0**10, 2.0**6),
    "float32": (2.0**30, 2.0**20, 2.0**10, 2.0**6),
    "float64": (2.0**30, 2.0**20, 2.0**10, 2.0**6),
}
"""Tokens are multiplied by the first factor; if a layer overflows, the next one is tried. If scores are far
larger than 1e7, a rounding error of float32 almost never decides which of two keys gets all the weight."""
PART = 0.25
"""The fraction of tokens that become large."""

BEYOND = 33
"""Special integers are tried with the first lengths, and with some around this one."""
REPEATED = 12
"""The first cases, which have small lengths, are computed twice more: a layer has to return the same."""


class CaseList:
    """Draws the inputs of each case, and computes what the layer returns; `left_out` has what was not tried."""

    def __init__(self, both: BothLayers, inputs: LayerInputs, chosen: LayerLengths, seed: int) -> None:
        self.both, self.inputs, self.chosen, self.seed = both, inputs, chosen, seed
        # Two generators: how often the layer is called does not change what is drawn later.
        self.rng, self.roundings = np.random.default_rng(seed), np.random.default_rng(seed)
        self.cases: list[Case] = []
        self.left_out: list[str] = []

    def fill(self) -> None:
        """Make all cases; the layer must accept the first lengths, and may refuse the others."""
        first, more = self.chosen.first(), self.chosen.more()
        with self.inputs.hint_for_errors():
            self.both.choose_copies(self.inputs.drawn(first[-1], np.random.default_rng(self.seed)))
            self.cases = [self._ordinary(lengths) for lengths in first]
        self._try_all(more)
        self.both.check_repeats(self.cases[:REPEATED])
        accepted = [case.lengths for case in self.cases]
        self._try_all([*self.chosen.at_random(accepted, np.random.default_rng([self.seed, 1]))])
        tried = [case.lengths for case in self.cases]
        self.left_out += self.chosen.left_out([*tried, *more])
        self.cases = self.both.judged_as_own(self.cases, self.roundings)
        self._try_integers([*first[:2], *(lengths for lengths in more if max(lengths.values()) >= BEYOND)][:3])
        self._try_large([lengths for lengths in [*first[:2], *self.chosen.longest()] if lengths in tried])

    def _drawn(self, lengths: Lengths, extreme: str = "", choice: IntegerChoice = "drawn", *names: str) -> Case:
        """Return a case with its inputs; the integer inputs in `names` hold what `choice` says."""
        return Case(lengths, extreme=extreme, inputs=self.inputs.drawn(lengths, self.rng, choice, names))

    def _ordinary(self, lengths: Lengths) -> Case:
        return self.both.ordinary_case(self._drawn(lengths), self.roundings)

    def _try(self, what: str, cases: Iterable[Case]) -> bool:
        """Add all cases; if making one raises an error, add none, and list what was not tried."""
        try:
            self.cases += [*cases]
        except Exception as error:  # the layer and `draw` are anyone's functions, and raise what they like
            self.left_out.append(f"{what}: {words_of(error)}")
            return False
        return True

    def _try_all(self, many: Iterable[Lengths]) -> None:
        for lengths in many:
            self._try(shown_lengths(lengths), map(self._ordinary, [lengths]))

    def _try_integers(self, many: Sequence[Lengths]) -> None:
        """Try special integers in all inputs together; if the layer refuses them, in one input at a time."""
        self.left_out += self.inputs.left_out()
        for choice, names in self.inputs.choices():
            is_accepted = self._try_integers_in(many, choice, names)
            if not is_accepted and len(names) > 1:  # one of them alone may be the cause
                del self.left_out[-1]
                for name in names:
                    self._try_integers_in(many, choice, [name])

    def _try_integers_in(self, many: Sequence[Lengths], choice: IntegerChoice, names: Sequence[str]) -> bool:
        cases = (self._drawn(lengths, choice, choice, *names) for lengths in many)
        computed = (self.both.integer_case(case, self.roundings) for case in cases)
        return self._try(f"{choice} in {', '.join(names)}", computed)

    def _try_large(self, many: Sequence[Lengths]) -> None:
        most = len(self.cases) + len(many)
        is_accepted = self._try(LARGE_TOKENS, filter(None, map(self._large, many)))
        if is_accepted and len(self.cases) < most:
            self.left_out.append(
                f"{LARGE_TOKENS}: the outputs overflow, or no floating input has tokens to draw"
            )

    def _large(self, lengths: Lengths) -> Case | None:
        case = self._drawn(lengths, LARGE_TOKENS)
        larger = with_large_tokens(case.inputs, [*self.inputs.draws], self.rng)
        return self.both.large_case(case, larger, self.rng)


class LayerInputs:
    """Draws an array for each input: what the caller's function returns for it, or what its dtype asks for.

    Floats are normal, and three of four booleans are True. Integers that the attention calls use are drawn as
    `verify` draws them for a call. Integers that are row numbers of a table are any of its rows. Other integers
    are between 0 and the longest length, or negative, or large.
    """

    def __init__(
        self,
        model: Model,
        specs: Mapping[str, TensorSpec],
        draws: Mapping[str, Draw],
        calls: Sequence[CallNumbers],
        engine: EngineName,
    ) -> None:
        self.specs, self.draws, self.rows = specs, draws, table_rows(model)
        self.is_narrow = engine == "openvino"
        """Whether integers are computed in 32 bits, whose products soon overflow."""
        # A file may state anything.
        uses = [(name, (call, use)) for call in calls for name, use in call.operands if use in OPERANDS]
        integers = [name for name, spec in specs.items() if spec.dtype in INTEGERS]
        self.uses = {name: [use for used, use in uses if used == name] for name in integers}

    def drawn(
        self,
        lengths: Lengths,
        rng: np.random.Generator,
        choice: IntegerChoice = "drawn",
        special: Sequence[str] = (),
    ) -> Arrays:
        """Return an array for each input; the integer inputs in `special` hold what `choice` says."""

        def draw(name: str, spec: TensorSpec, shape: tuple[int, ...]) -> Any:
            if name in self.draws:
                return _called(self.draws[name], rng, shape, lengths)
            if spec.dtype in INTEGERS:
                return self._integers(name, shape or (1,), lengths, rng, choice if name in special else "drawn")
            return rng.random(shape) < 0.75 if spec.dtype == "bool" else rng.standard_normal(shape)

        return draw_each(self.specs, lengths, draw)

    @contextmanager
    def hint_for_errors(self) -> Iterator[None]:
        """Add to an error how other inputs are passed, unless the caller's functions drew them all."""
        try:
            yield
        except Exception as error:  # the layer is anyone's function, and raises what it likes
            names = [name for name in self.specs if name not in self.draws]
            names = [name for name in names if name in self.uses] or names
            if isinstance(error, TypeError | AttributeError | NameError | ImportError):  # no values mend these
                error.add_note("verify_layer called the layer with NumPy arrays, of the dtypes of the inputs.")
            elif names:
                draw = ", ".join(f"{json.dumps(name)}: ..." for name in names)
                error.add_note(
                    "The inputs were drawn by verify_layer. "
                    f"Pass draw={{{draw}}} with values that the layer accepts."
                )
            raise

    def choices(self) -> Iterator[tuple[IntegerChoice, list[str]]]:
        """Yield what integers are tried with beside random ones, and the inputs that it concerns."""
        drawn_here = self._drawn_here
        if bounded := [name for name in drawn_here if self.uses[name]]:
            yield from (("least integers", bounded), ("most integers", bounded))
        free = [name for name in drawn_here if not self.uses[name]]
        if signed := [name for name in free if not self.specs[name].dtype.startswith("u")]:
            yield "negative integers", signed
        if free and not self.is_narrow:
            yield "large integers", free

    def left_out(self) -> Iterator[str]:
        """Yield a line for each integer input that has no negative and no large values."""
        for name, rows in self.rows.items():
            if name in self.uses and name not in self.draws:
                yield f"negative and large integers in {name}: it numbers the {rows} rows of a table"
        for name in self._drawn_here:
            if self.is_narrow and not self.uses[name]:
                yield f"large integers in {name}: OpenVINO computes integers in 32 bits"

    @property
    def _drawn_here(self) -> list[str]:
        """The integer inputs that are neither drawn by the caller nor row numbers."""
        return [name for name in self.uses if name not in self.draws and name not in self.rows]

    def _integers(
        self,
        name: str,
        shape: tuple[int, ...],
        lengths: Lengths,
        rng: np.random.Generator,
        choice: IntegerChoice,
    ) -> NDArray[Any]:
        dtype, uses = numpy_dtype(self.specs[name].dtype), self.uses[name]
        if choice == "negative integers" or choice == "large integers":
            return far_integers(shape, dtype, max(lengths.values(), default=1), rng, choice)
        drawn = []
        for call, operand in [use for use in uses if use[1] in LENGTHS] or uses[:1]:
            queries, keys = (min(size, MOST) for size in call.sizes(lengths)[-2:])
            counts = TokenCounts(queries, keys, block=call.block)
            drawn.append(drawn_integers(operand, shape, dtype, counts, rng, choice))
        most = self.rows[name] - 1 if name in self.rows else max(lengths.values(), default=1)
        if not drawn:
            return rng.integers(0, min(most, np.iinfo(dtype).max) + 1, shape)
        # One input may be the lengths of several calls; the smallest fit all of them.
        smallest: NDArray[Any] = np.minimum.reduce(drawn)
        return np.clip(smallest, 0, most) if name in self.rows else smallest


def table_rows(model: Model) -> dict[str, int]:
    """Return, for each input that numbers the rows of an initializer, how many rows that has."""
    tables = {tensor.name: list(tensor.dims) for tensor in model.graph.initializer}
    sources = moved_inputs(model.graph.node, [value.name for value in model.graph.input])
    rows: dict[str, int] = {}
    for node in model.graph.node:
        if node.op_type == "Gather" and node.input[0] in tables and node.input[1] in sources:
            axis = next((attribute.i for attribute in node.attribute if attribute.name == "axis"), 0)
            source = sources[node.input[1]]
            # An input may number the rows of several tables.
            rows[source] = min(rows.get(source, 2**62), tables[node.input[0]][axis])
    return rows


def _called(draw: Draw, rng: np.random.Generator, shape: tuple[int, ...], lengths: Lengths) -> NDArray[Any]:
    """Call the caller's function, with the lengths if it has an argument for them."""
    try:
        parameters = inspect.signature(draw).parameters
    except (TypeError, ValueError):  # a function in C may have none
        return draw(rng, shape)
    if "lengths" in parameters:
        return draw(rng, shape, lengths=dict(lengths))
    places = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    needed = [p for p in parameters.values() if p.kind in places and p.default is p.empty]
    return draw(rng, shape, dict(lengths)) if len(needed) > 2 else draw(rng, shape)


def far_integers(
    shape: tuple[int, ...], dtype: np.dtype[Any], longest: int, rng: np.random.Generator, choice: str
) -> NDArray[Any]:
    """Return random integers of which nothing is known: from -longest to longest, or of any size up to 2**62.

    The two ends of a dtype are left out: to divide by -1 or to negate may end the process there.
    """
    ends = np.iinfo(dtype)
    signed = ends.min < 0
    if choice == "negative integers":
        return clipped(rng.integers(-max(longest, 2), longest + 1, shape), dtype)
    bits = rng.integers(1, ends.bits - 1, shape)
    bits.flat[0] = bits.flat[-1] = ends.bits - 2  # the first is large, and so is the last
    sizes = rng.integers(2**61, 2**62, shape) >> (62 - bits)
    signs = np.where(signed & (rng.random(shape) < 0.5), -1, 1)
    signs.flat[-1] = -1 if signed else 1
    return clipped(sizes * signs, dtype)


def with_large_tokens(arrays: Arrays, drawn: Sequence[str], rng: np.random.Generator) -> Iterator[Arrays]:
    """Yield the inputs with some tokens multiplied by each factor, the largest first; `drawn` inputs stay."""
    enlarged = {
        name: x for name, x in arrays.items() if x.dtype.name in FACTORS and x.ndim > 1 and name not in drawn
    }
    # Of several dtypes, the narrowest has the smallest factors.
    for factor in min((FACTORS[x.dtype.name] for x in enlarged.values()), default=()):
        large = {}
        for name, x in enlarged.items():
            chosen = rng.random((*x.shape[:-1], 1)) < PART
            large[name] = np.where(chosen, x * np.asarray(factor, x.dtype), x).astype(x.dtype)
        yield arrays | large
