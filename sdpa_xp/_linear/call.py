"""A checked call of linear attention, computed forward and backward, some chunks at a time."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from .._checks.arrays import headed, swap_heads_and_length
from .._checks.linear import check_linear_arrays, check_linear_shapes
from .._libraries import accumulation_dtype, library_of
from .._libraries.protocols import Shape
from ..errors import ArgumentValueError
from .chunks import Tokens, attend
from .tape import Recorded, Tape, split, summed_to

ELEMENTS = 2**17
"""The elements of the largest array of the chunks that one pass computes. More leave the cache of a CPU."""


class LinearCall:
    """A call that has passed every check."""

    def __init__(self, function: str, inputs: Mapping[str, Any], **settings: Any) -> None:
        self.function = function
        self.xp, self.arrays = check_linear_arrays(function, inputs)
        self.dtype = accumulation_dtype(self.xp, self.arrays["query"].dtype)
        shapes = {name: tuple(array.shape) for name, array in self.arrays.items()}
        self.shapes = check_linear_shapes(function, shapes, self.dtype, **settings)
        self.sizes, self.axes = self.shapes.sizes, self.shapes.axes
        if not isinstance(self.sizes.queries, int):
            rule = "the length of `query` (L) must be a number, because its chunks are counted"
            raise ArgumentValueError(function, rule, {"L": self.sizes.queries})

    def forward(self) -> tuple[Any, Any, list[Any]]:
        """Return the output, the state, and the state before each part."""
        parts, size = self._parts()
        outputs, states, state = [], [], self._inner(self.arrays.get("state"))
        compute = library_of(self.arrays["query"]).compiled(attend)
        for part in parts:
            states.append(state)
            output, state = compute(self.xp, part, state, size)
            outputs.append(output)
        output = self._returned(outputs, self.shapes.output_shape, self.arrays["query"].dtype)
        return output, self.xp.reshape(state, self.shapes.state_shape), states

    def backward(self, states: Sequence[Any], cotangent: Any, of_state: Any) -> dict[str, Any]:
        """Return the gradients by name, from the states before each part and the cotangents of the result."""
        parts, size = self._parts(query=cotangent)
        cotangents, moved = [part.query for part in parts], self._inner(of_state)
        collected: dict[str, list[Any]] = {name: [] for name in self.arrays if name != "state"}
        compute = library_of(cotangent).compiled(_attend_backward)
        for part, state, of_output in [*zip(self._parts()[0], states, cotangents, strict=True)][::-1]:
            of_part, moved = compute(self.xp, part, state, of_output, moved, size)
            for name, gradients in collected.items():
                gradients.insert(0, getattr(of_part, name))
        collected["query"] = [gradient * self.shapes.scale for gradient in collected["query"]]
        xp, like = self.xp, self.arrays
        returned = {
            name: self._returned(x, like[name].shape, like[name].dtype) for name, x in collected.items()
        }
        if "state" in like:
            moved = xp.reshape(moved, self.shapes.state_shape)
            returned["state"] = xp.astype(moved, like["state"].dtype, copy=False)
        return returned

    def _parts(self, **instead: Any) -> tuple[list[Tokens], int]:
        """Return the inputs in parts, padded to whole chunks, and the size of a chunk, a power of 2."""
        if 0 in (*self.shapes.output_shape, *self.shapes.state_shape):
            return [], 1
        length, arrays = self.sizes.queries, self.arrays | instead
        size = 2 ** min(self.shapes.chunk_size.bit_length() - 1, (length - 1).bit_length())
        width = max(self.shapes.state_shape[-2:])
        of_a_chunk = math.prod((*self.sizes.batch, self.sizes.query_heads, size, width))
        full = length + -length % size
        step = max(ELEMENTS // of_a_chunk, 1) * size
        if library_of(self.arrays["query"]).loops is not None:
            step = full  # JAX compiles each product of a jit for 0.1 s and more, so that parts cost minutes
        steps = [min(step, full - start) for start in range(0, full, step)]
        tokens = (self._rows(arrays[name], full) if name in arrays else None for name in Tokens._fields)
        cut = ([None] * len(steps) if array is None else split(array, steps, -2) for array in tokens)
        parts = [Tokens(*part) for part in zip(*cut, strict=True)]
        scale = 1.0 if instead else self.shapes.scale
        return [part._replace(query=part.query * scale) for part in parts], size

    def _rows(self, array: Any, length: int) -> Any:
        """Return an array as (..., H, G, length, width), in the dtype of the state.

        The rows behind the tokens are zeros. They change no state, because the decay of 0 keeps it.
        """
        xp, first = self.xp, swap_heads_and_length(self.xp, array, self.shapes.layout)
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
        shape = (*self.axes, 1, 1, *self.shapes.state_shape[-2:])
        if state is None:
            return self._zeros(shape)
        return self.xp.reshape(self.xp.astype(state, self.dtype), shape)

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
        summed = summed_to(xp, whole, headed(tuple(shape), self.shapes.layout))
        turned = swap_heads_and_length(xp, summed, self.shapes.layout)
        return xp.astype(xp.reshape(turned, tuple(shape)), dtype, copy=False)


def _attend_backward(
    xp: Any, tokens: Tokens, state: Any, of_output: Any, of_state: Any, size: int
) -> tuple[Tokens, Any]:
    """Return the gradients of the tokens and of the state before them, from the cotangents of the results."""
    tape = Tape(xp)
    first = Recorded(tape, state)
    recorded = Tokens(*(None if array is None else Recorded(tape, array) for array in tokens))
    output, last = attend(tape, recorded, first, size)
    output.cotangent, last.cotangent = of_output, of_state
    tape.pull_back()
    return Tokens(*(None if array is None else array.cotangent for array in recorded)), first.cotangent
