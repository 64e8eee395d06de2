"""A node of ONNX as calls of the exporter, with what to feed the graphs and what they have to give.

The call is the one that `onnx_calls` makes for the library, with a spec where an array stands: what differs
between the rules of ONNX and those of the library is said there. One more thing is to be said here, since a
cache goes in: the queries of a call with `past_key` are the last of its tokens, so that an offset counts from
there. ONNX lets a past have four axes where the new keys have three; the library has one layout for all.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from internals import ExportCall, checked_call, reference
from libraries import LIBRARIES
from numpy.typing import NDArray

from quality.conformance.onnx_calls import WEIGHTS, library_call, plain_call, until, with_layout
from quality.conformance.onnx_cases import Arrays, Case
from quality.conformance.onnx_numbers import check, dtype_of, exact_stage, in_numpy, plain_stage
from sdpa_xp_export import TensorSpec

WHOLE = 2  # the mode in which `qk_matmul_output` has all that `scores` has


@dataclass(frozen=True, slots=True, eq=False)
class Export:
    """A call of the exporter, and the inputs of its graph."""

    name: str
    case: Case
    call: ExportCall
    feeds: Arrays


def exports(case: Case) -> tuple[Export, ...]:
    """Y, the present and `qk_matmul_output` where the library's outputs are these.

    What the scores are before the masks is not an output beside Y: it is that of a call without masks.
    """
    mode = case.mode
    beside = {None: (), WEIGHTS: ("weights",), WHOLE: ("scores",)}
    if mode in beside:
        return (_export(case, ("output", *beside[mode])),)
    return _export(case, ("output",)), _export(case, ("scores",), mode)


def check_outputs(export: Export, outputs: Mapping[str, NDArray[Any]]) -> None:
    """Each output has the dtype that ONNX gives it and is as near as `check` wants it; the present is equal."""
    case = export.case
    call, library = plain_call(case), LIBRARIES["numpy"][1]()
    assert list(outputs) == [*export.call.outputs, *(f"present_{name}" for name in case.past)]
    for name, result in outputs.items():
        if name == "output":
            result = with_layout(case, result)
            theirs, plain, exact = case.output, in_numpy(call), reference.attention(**call)[0]
        elif name in ("scores", "weights"):
            assert case.mode is not None
            theirs = case.outputs["qk_matmul_output"]
            plain, exact = plain_stage(library, call, case.mode), exact_stage(call, case.mode)
        else:
            np.testing.assert_array_equal(with_layout(case, result), case.outputs[name], strict=True)
            continue
        assert dtype_of(result) == case.dtype
        check(result, plain, exact, theirs)


class _Specs:
    """Puts a spec where an array was, and tells afterwards which array belongs to which input of a graph."""

    def __init__(self) -> None:
        self.put_away: list[tuple[TensorSpec, NDArray[Any]]] = []

    def put(self, array: NDArray[Any]) -> TensorSpec:
        self.put_away.append((TensorSpec(array.dtype.name, array.shape), array))
        return self.put_away[-1][0]

    def feeds(self, call: ExportCall) -> Arrays:
        """By identity: a call keeps the specs that it was given, under names of its own."""
        return {
            name: next(array for kept_spec, array in self.put_away if kept_spec is spec)
            for name, spec in call.inputs.items()
        }


def _arguments(case: Case, specs: _Specs) -> dict[str, Any]:
    """The call of the library with specs in it, and the past apart from the new keys."""
    queries, tokens = case.query.shape[-2], case.arrays["key"].shape[-2]
    arguments = library_call(case, specs.put, first=tokens - queries if case.past else 0)
    for name in case.past:
        arguments |= {name: with_layout(case, case.new[name])}
        arguments |= {f"past_{name}": with_layout(case, case.past[name])}
    return {
        name: specs.put(argument) if isinstance(argument, np.ndarray) else argument
        for name, argument in arguments.items()
    }


def _export(case: Case, outputs: tuple[str, ...], mode: int = WHOLE) -> Export:
    specs = _Specs()
    arguments = until(_arguments(case, specs), mode)
    qkv = [arguments.pop(name) for name in ("query", "key", "value")]
    call = checked_call("export", *qkv, **arguments, outputs=outputs)
    name = case.name if "output" in outputs else f"{case.name}: {outputs[0]}"
    return Export(name, case, call, specs.feeds(call))
