"""The lengths that a layer and its model are tried with."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence

import onnx

from sdpa_xp_export._model.large_model import Model
from sdpa_xp_export._verify.trial_lengths import Lengths, small_lengths
from sdpa_xp_export.spec import TensorSpec, addends

SMALL, THOROUGH_SMALL = 9, 17
"""Each name has each length up to this one in some trial."""
LONG, THOROUGH_LONG = (33, 130), (33, 130, 300, 1030)
"""Each name has the first of these lengths alone, and each pair of names has all of them."""


def first_lengths(specs: Mapping[str, TensorSpec]) -> list[Lengths]:
    """Return a few small lengths, which every layer has to take."""
    return list(small_lengths(length_names(specs)))


def more_lengths(specs: Mapping[str, TensorSpec], *, thorough: bool) -> Iterator[Lengths]:
    """Yield every small length of each name, long ones, and a past of 0. A layer may refuse some of them."""
    names = length_names(specs)
    most = THOROUGH_SMALL if thorough else SMALL
    for length in range(most if names else 0):
        yield {name: (length + 2 * number) % most + 1 for number, name in enumerate(names)}
    for name in _past_names(specs):
        yield dict.fromkeys(names, 2) | {name: 0}
    alone, *together = THOROUGH_LONG if thorough else LONG
    for name in names:
        yield _beside(names, {name: alone})
    for length in together:
        for pair in itertools.combinations(names, 2) if len(names) > 1 else [tuple(names)]:
            if pair:
                yield _beside(names, dict.fromkeys(pair, length))


def input_specs(model: Model, dtypes: Mapping[int, str]) -> dict[str, TensorSpec]:
    """Return the specs of the inputs of a model; `dtypes` maps the dtypes of ONNX to names."""
    specs = {}
    for value in model.graph.input:
        tensor = value.type.tensor_type
        specs[value.name] = TensorSpec(dtypes[tensor.elem_type], _shape(tensor.shape))
    return specs


def _shape(shape: onnx.TensorShapeProto) -> tuple[int | str, ...]:
    return tuple(dim.dim_param or dim.dim_value for dim in shape.dim)


def length_names(specs: Mapping[str, TensorSpec]) -> list[str]:
    """Return the names of lengths in the specs."""
    parts = [part for spec in specs.values() for length in spec.shape for part in addends(str(length))]
    return [name for name in dict.fromkeys(parts) if not name.isdecimal()]


def _past_names(specs: Mapping[str, TensorSpec]) -> list[str]:
    """Return the names that only inputs with "past" in their name have."""
    past = {name: spec for name, spec in specs.items() if "past" in name}
    others = {name: spec for name, spec in specs.items() if "past" not in name}
    return [name for name in length_names(past) if name not in length_names(others)]


def _beside(names: Sequence[str], long: Lengths) -> Lengths:
    """Return the long lengths with 2 and 3 in turn for the other names."""
    return dict(zip(names, itertools.cycle([2, 3]), strict=False)) | long
