"""What a layer and its model are tried with: lengths for their names, and inputs."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeAlias

import numpy as np
import onnx
from numpy.typing import NDArray

from sdpa_xp_export._dtypes.conversion import numpy_dtype
from sdpa_xp_export._dtypes.promotion import INTEGERS
from sdpa_xp_export._model.large_model import Model
from sdpa_xp_export._verify.pair_terms import Arrays
from sdpa_xp_export._verify.trial_lengths import Lengths, small_lengths
from sdpa_xp_export.spec import TensorSpec, addends, evaluated

Draw: TypeAlias = Callable[[np.random.Generator, tuple[int, ...]], NDArray[Any]]
"""A function that makes an input: it takes a generator and a shape, and returns an array."""

SMALL, THOROUGH_SMALL = 9, 17
"""Each name has each length up to this one in some trial."""
LONG, THOROUGH_LONG = (33, 130), (33, 130, 300, 1030)
"""Each name has the first of these lengths alone, and each pair of names has all of them."""

_MOVING = ("Cast", "Identity", "Reshape", "Squeeze", "Unsqueeze", "Transpose", "Expand")
"""Operators that change no integer but its dtype."""


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


def drawn_inputs(
    specs: Mapping[str, TensorSpec],
    lengths: Lengths,
    draws: Mapping[str, Draw],
    rows: Mapping[str, int],
    rng: np.random.Generator,
) -> Arrays:
    """Return an array for each input: what `draws` returns for it, or what its dtype asks for.

    Floats are normal, and three of four booleans are True. Integers that are row numbers of a table are any of
    its `rows`; others go from 0 to the longest length.
    """
    arrays = {}
    for name, spec in specs.items():
        shape = tuple(evaluated(length, lengths) for length in spec.shape)
        if name in draws:
            drawn = draws[name](rng, shape)
        elif spec.dtype in INTEGERS:
            most = rows[name] - 1 if name in rows else max(lengths.values(), default=1)
            drawn = rng.integers(0, min(most, np.iinfo(spec.dtype).max) + 1, shape)
        elif spec.dtype == "bool":
            drawn = rng.random(shape) < 0.75
        else:
            drawn = rng.standard_normal(shape)
        arrays[name] = np.asarray(drawn, numpy_dtype(spec.dtype)).reshape(shape)
    return arrays


def table_rows(model: Model) -> dict[str, int]:
    """Return, for each input that numbers the rows of an initializer, how many rows that has."""
    tables = {tensor.name: list(tensor.dims) for tensor in model.graph.initializer}
    sources = {value.name: value.name for value in model.graph.input}
    rows: dict[str, int] = {}
    for node in model.graph.node:
        if node.op_type in _MOVING and node.input[0] in sources:
            sources[node.output[0]] = sources[node.input[0]]
        if node.op_type == "Gather" and node.input[0] in tables and node.input[1] in sources:
            axis = next((attribute.i for attribute in node.attribute if attribute.name == "axis"), 0)
            source = sources[node.input[1]]
            rows[source] = min(rows.get(source, 2**62), tables[node.input[0]][axis])
    return rows


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
