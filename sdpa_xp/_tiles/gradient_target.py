"""An array whose gradient a call computes, and how its axes correspond to the grid of scores."""

from __future__ import annotations

from typing import Literal, NamedTuple, TypeAlias

from sdpa_xp._libraries.protocols import Array, Namespace, Shape
from sdpa_xp._tiles.tile import LeadingSlice

Axis: TypeAlias = Literal["rows", "columns"] | None


class GradientTarget(NamedTuple):
    """An array (..., heads, M, N) whose gradient is computed; an axis of 1 was broadcast."""

    shape: Shape
    axes: tuple[Axis, Axis] = (None, None)
    """Whether M and N are the queries ("rows"), the keys ("columns"), or neither (None)."""
    group: int = 1
    """The number of query heads that share one of its heads."""
    heads_last: bool = False
    """Whether the caller's array is (M, heads)."""

    def slices(self, leading: LeadingSlice | None) -> tuple[slice, ...]:
        """Return the index of the part that belongs to a slice of (..., Hq)."""
        lengths = self.shape[:-2]
        if leading is None:
            return (slice(None),) * len(lengths)
        *batch, heads = leading[len(leading) - len(lengths) :]
        ranges = (*batch, range(heads.start // self.group, heads.stop // self.group))
        return tuple(
            slice(None) if n == 1 else slice(r.start, r.stop) for r, n in zip(ranges, lengths, strict=True)
        )

    def slice_leading(self, leading: LeadingSlice | None) -> GradientTarget:
        """Return the part that belongs to a slice of (..., Hq)."""
        lengths = [len(range(n)[index]) for index, n in zip(self.slices(leading), self.shape, strict=False)]
        return self._replace(shape=(*lengths, *self.shape[-2:]))

    def in_caller_shape(self, xp: Namespace, gradient: Array, shape: Shape) -> Array:
        """Return the gradient with the `shape` of the caller's array."""
        return xp.reshape(xp.permute_dims(gradient, (2, 1, 0)) if self.heads_last else gradient, shape)

    def broadcast_axes(self, leading_shape: Shape) -> list[bool]:
        """Return for each of the axes (..., Hq) whether the array was broadcast along it."""
        missing = len(leading_shape) - len(self.shape[:-2])
        return [n == 1 for n in (*[1] * missing, *self.shape[:-2])]
