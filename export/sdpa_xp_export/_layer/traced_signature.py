"""What `jit` keeps for all calls that are alike: the graph, its session, and how its outputs are returned."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from .._files.model import Model
from ..spec import SymbolicShape
from .call_signature import LayerCall, Structure
from .open_lengths import fits
from .state import State


@dataclass(frozen=True, slots=True, eq=False)
class TracedSignature:
    """The session of all calls that are alike but for their numbers and open lengths."""

    structure: Structure
    dtypes: Sequence[str]
    shapes: Sequence[SymbolicShape]
    model: Model
    session: Any
    outputs: Callable[[Sequence[Any]], Any]
    """Returns arrays as the layer returns them."""
    may_be_empty: frozenset[str]
    """The names of lengths that may be 0."""
    state: State
    """What the layer held when the graph was written."""

    def __str__(self) -> str:
        pairs = zip(self.dtypes, self.shapes, strict=True)
        return ", ".join(f"{dtype}[{','.join(map(str, shape))}]" for dtype, shape in pairs)

    def waits_beside(self, call: LayerCall) -> bool:
        """Return whether the graph is to be compared with that of a later call, which is unlike this one."""
        return self.state.was_changed and not self.takes(call)

    def takes(self, call: LayerCall) -> bool:
        """Return whether the session computes a call."""
        is_alike = call.structure == self.structure and call.dtypes == self.dtypes
        return is_alike and fits(self.shapes, call.lengths, self.may_be_empty)
