"""A checked call of linear attention, computed forward and backward, some chunks at a time."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, Literal, TypeAlias

from .._checks import arrays as checks
from .._checks.keywords import check_choice, check_integer, check_layout, check_number
from .._libraries import accumulation_dtype, dtype_name, library_of
from .._libraries.protocols import Shape
from ..errors import ArgumentTypeError, ArgumentValueError
from .chunks import Tokens, attend
from .tape import Recorded, Tape, split, summed_to

Rule: TypeAlias = Literal["linear", "gated", "delta", "gated_delta"]
RULES = {"linear": (), "gated": ("decay",), "delta": ("beta",), "gated_delta": ("decay", "beta")}
"""The arguments of each rule."""
ELEMENTS = 2**17
"""The elements of the largest array of the chunks that one pass computes. More leave the cache of a CPU."""


class LinearCall:
    """A call that has passed every check."""

    def __init__(
        self, function: str, inputs: Mapping[str, Any], *, rule: Any, scale: Any, chunk_size: Any, layout: str
    ) -> None:
        self.function, self.layout = function, layout
        check_layout(function, layout)
        self.chunk_size = check_integer(function, "chunk_size", chunk_size, least=1)
        if rule is not None:
            check_choice(function, "rule", rule, [*RULES], "None")
        given = {name: array for name, array in inputs.items() if array is not None}
        needs = RULES.get(rule, RULES["gated_delta"])
        for name in RULES["gated_delta"]:
            if rule is not None and (name in given) != (name in needs):
                stated = f"`rule={rule!r}` {'needs' if name in needs else 'takes no'} `{name}`"
                raise ArgumentValueError(function, stated, {"arguments": ", ".join(given)})
        self.arrays = self._checked_arrays(given)
        query, key, value = (self.arrays[name] for name in ("query", "key", "value"))
        self.sizes = sizes = checks.check_shapes(function, query.shape, key.shape, value.shape, layout=layout)
        if sizes.queries != sizes.keys:
            stated = "`query` and `key` must have the same tokens (L)"
            raise ArgumentValueError(function, stated, {"query.shape": query.shape, "key.shape": key.shape})
        if not isinstance(sizes.queries, int):
            stated = "the length of `query` (L) must be a number, because its chunks are counted"
            raise ArgumentValueError(function, stated, {"L": sizes.queries})
        self.scale = sizes.width**-0.5 if scale is None else check_number(function, "scale", scale, self.dtype)
        self.axes = (*sizes.batch, sizes.heads)
        self.state_shape: Shape = (*(() if sizes.is_2d else self.axes), sizes.width, value.shape[-1])
        whole = (*sizes.scores_shape[:-1], value.shape[-1])
        self.output_shape: Shape = whole if sizes.is_2d else checks.headed(whole, layout)
        self._check_shapes()

    def _checked_arrays(self, given: Mapping[str, Any]) -> dict[str, Any]:
        """Check the library, the dtypes and the device of arrays, and return them."""
        self.xp, arrays = checks.check_one_library(self.function, given)
        library = library_of(arrays["query"])
        if library.chunks is not None:
            rule = "`query` must not be in lazy chunks, because each token needs the state before it"
            hint = "Call the function in dask.array.map_blocks, for chunks of the batch."
            raise ArgumentTypeError(self.function, rule, {"query": f"an array of {library.name}"}, hint)
        checks.check_floating(self.function, "query", arrays["query"])
        self.dtype = accumulation_dtype(self.xp, arrays["query"].dtype)
        alike = {
            name: array
            for name, array in arrays.items()
            if name in ("query", "key", "value") or dtype_name(array.dtype) != dtype_name(self.dtype)
        }
        checks.check_one_dtype(self.function, alike)
        checks.check_one_device(self.function, arrays)
        return arrays

    def _check_shapes(self) -> None:
        """Check the shapes of the state, of the decay and of beta."""
        shapes = {name: tuple(array.shape) for name, array in self.arrays.items()}
        if shapes.get("state", self.state_shape) != self.state_shape:
            rule = f"`state` must have the shape {self.state_shape}, (..., H, E, Ev)"
            raise ArgumentValueError(self.function, rule, {"state.shape": shapes["state"]})
        whole = (*self.axes, self.sizes.queries, self.sizes.width)
        for name in shapes.keys() & {"decay", "beta"}:
            shape, widths = shapes[name], (1, self.sizes.width if name == "decay" else 1)
            fits = len(shape) > 1 and shape[-1] in widths
            if not fits or checks.broadcast(checks.headed(shape, self.layout), whole) != whole:
                rows = "(..., H, L" if self.layout == checks.HLE else "(..., L, H"
                rule = f"`{name}` must broadcast to {rows}, 1)" + f" or {rows}, E)" * (name == "decay")
                got = {f"{name}.shape": shape, "key.shape": shapes["key"]}
                raise ArgumentValueError(self.function, rule, got)

    def forward(self) -> tuple[Any, Any, list[Any]]:
        """Return the output, the state, and the state before each part."""
        parts, size = self._parts()
        outputs, states, state = [], [], self._inner(self.arrays.get("state"))
        for part in parts:
            states.append(state)
            output, state = attend(self.xp, part, state, size)
            outputs.append(output)
        output = self._returned(outputs, self.output_shape, self.arrays["query"].dtype)
        return output, self.xp.reshape(state, self.state_shape), states

    def backward(self, states: Sequence[Any], cotangent: Any, of_state: Any) -> dict[str, Any]:
        """Return the gradients by name, from the states before each part and the cotangents of the result."""
        parts, size = self._parts(query=cotangent)
        cotangents, moved = [part.query for part in parts], self._inner(of_state)
        found: dict[str, list[Any]] = {name: [] for name in self.arrays if name != "state"}
        for part, state, of_output in [*zip(self._parts()[0], states, cotangents, strict=True)][::-1]:
            tape = Tape(self.xp)
            first = Recorded(tape, state)
            recorded = Tokens(*(None if array is None else Recorded(tape, array) for array in part))
            output, last = attend(tape, recorded, first, size)
            output.cotangent, last.cotangent = of_output, moved
            tape.pull_back()
            moved = first.cotangent
            for name, gradients in found.items():
                gradients.insert(0, getattr(recorded, name).cotangent)
        found["query"] = [gradient * self.scale for gradient in found["query"]]
        like = self.arrays
        returned = {name: self._returned(x, like[name].shape, like[name].dtype) for name, x in found.items()}
        if "state" in like:
            returned["state"] = self.xp.astype(self.xp.reshape(moved, self.state_shape), like["state"].dtype)
        return returned

    def _parts(self, **instead: Any) -> tuple[list[Tokens], int]:
        """Return the inputs in parts, padded to whole chunks, and the size of a chunk, a power of 2."""
        if 0 in (*self.output_shape, *self.state_shape):
            return [], 1
        length, arrays = self.sizes.queries, self.arrays | instead
        size = 2 ** min(self.chunk_size.bit_length() - 1, (length - 1).bit_length())
        of_a_chunk = math.prod((*self.sizes.batch, self.sizes.query_heads, size, max(self.state_shape[-2:])))
        step = max(ELEMENTS // of_a_chunk, 1) * size
        full = length + -length % size
        steps = [min(step, full - start) for start in range(0, full, step)]
        tokens = (self._rows(arrays[name], full) if name in arrays else None for name in Tokens._fields)
        cut = ([None] * len(steps) if array is None else split(array, steps, -2) for array in tokens)
        parts = [Tokens(*part) for part in zip(*cut, strict=True)]
        scale = 1.0 if instead else self.scale
        return [part._replace(query=part.query * scale) for part in parts], size

    def _rows(self, array: Any, length: int) -> Any:
        """Return an array as (..., H, G, length, width), in the dtype of the state.

        The rows behind the tokens are zeros. They change no state, because the decay of 0 keeps it.
        """
        xp, first = self.xp, checks.swap_heads_and_length(self.xp, array, self.layout)
        heads = first.shape[-3] if first.ndim > 2 else 1
        group = self.sizes.group if heads == self.sizes.query_heads else 1
        rows = (self.sizes.queries, first.shape[-1])
        whole = xp.broadcast_to(first, (*self.axes[:-1], self.sizes.heads * group, *rows))
        whole = xp.astype(xp.reshape(whole, (*self.axes, group, *rows)), self.dtype, copy=False)
        if length == rows[0]:
            return whole
        return xp.concat([whole, self._zeros((*whole.shape[:-2], length - rows[0], rows[1]))], axis=-2)

    def _inner(self, state: Any) -> Any:
        """Return a copy of a state, or zeros, with the axes of G and of the chunks."""
        shape = (*self.axes, 1, 1, *self.state_shape[-2:])
        return (
            self._zeros(shape) if state is None else self.xp.reshape(self.xp.astype(state, self.dtype), shape)
        )

    def _zeros(self, shape: Shape) -> Any:
        query = self.arrays["query"]
        return self.xp.zeros(shape, dtype=self.dtype, device=library_of(query).device(query))

    def _returned(self, parts: Sequence[Any], shape: Shape, dtype: Any) -> Any:
        """Join parts (..., H, G, L, width), and return them in a shape that broadcasts to theirs."""
        xp = self.xp
        if not parts:
            return xp.astype(self._zeros(tuple(shape)), dtype)
        joined = xp.concat([*parts], axis=-2)[..., : self.sizes.queries, :]
        heads = joined.shape[-4] * joined.shape[-3]
        whole = xp.reshape(joined, (*self.sizes.batch, heads, *joined.shape[-2:]))
        summed = summed_to(xp, whole, checks.headed(tuple(shape), self.layout))
        turned = checks.swap_heads_and_length(xp, summed, self.layout)
        return xp.astype(xp.reshape(turned, tuple(shape)), dtype, copy=False)
