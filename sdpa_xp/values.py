"""What masks and biases have in common: small immutable values, told apart by what they were made of."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, fields
from typing import ClassVar

from sdpa_xp import checks
from sdpa_xp._libraries import is_array


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class Value:
    """Made by a function with the arguments that its fields are."""

    name: ClassVar[str] = ""
    """The function that made it, such as "causal", or the operator that combined two, such as "&"."""
    __array_ufunc__: ClassVar[None] = None  # so that NumPy's `array & value` asks the value

    def arrays(self) -> Iterator[tuple[str, object]]:
        """The arrays that the value holds, by the names of its arguments."""
        for field in fields(self):
            held = getattr(self, field.name)
            if is_array(held):
                yield field.name, held
        for part in self.parts:
            yield from part.arrays()

    @property
    def parts(self) -> tuple[Value, ...]:
        """The values that an operator joined to this one."""
        return ()

    @property
    def arguments(self) -> dict[str, object]:
        """What that function was given, by name: with `name` all that a translator needs."""
        return {field.name: getattr(self, field.name) for field in fields(self) if field.repr}

    def __repr__(self) -> str:
        return checks.call_of(self, self.name)

    def __eq__(self, other: object) -> bool:
        """Whether both are made alike, of the same arrays."""
        return isinstance(other, Value) and self._key() == other._key()

    def __hash__(self) -> int:
        return hash(self._key())

    def _key(self) -> tuple[object, ...]:
        held = (getattr(self, field.name) for field in fields(self))
        return type(self), *(id(x) if is_array(x) else x for x in held)
