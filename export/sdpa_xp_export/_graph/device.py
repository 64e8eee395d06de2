"""The device of the values of a graph."""

from __future__ import annotations

from typing import NoReturn

from sdpa_xp.errors import ArgumentTypeError


class Device:
    """The one device of all values, which the session of a run decides. Any other comparison is refused."""

    def __repr__(self) -> str:
        return "the device of a graph"

    def __eq__(self, other: object) -> bool:
        if other is None or isinstance(other, Device):
            return other is not None
        return self._refuse()

    def __hash__(self) -> NoReturn:
        self._refuse()

    def _refuse(self) -> NoReturn:
        rule = "a value of a graph has no device to be compared, since a run chooses it"
        hint = "Write the graph for each device: `runtime` names the provider, as in 'onnxruntime>=1.28;cuda'."
        raise ArgumentTypeError("to_onnx", rule, {"x.device": self}, hint)


DEVICE = Device()
