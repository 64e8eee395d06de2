"""The trials of a model: inputs for its call, the expected outputs, and the error of an output."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import array_api_compat.numpy as numpy_namespace
import numpy as np
from numpy.typing import NDArray

from sdpa_xp_export._call.call import ExportCall
from sdpa_xp_export._verify import reference
from sdpa_xp_export._verify.agreement import judge_together
from sdpa_xp_export._verify.random_inputs import LARGE, poison, random_inputs
from sdpa_xp_export._verify.reference_inputs import Arrays, expected_cache, heads_first, reference_inputs
from sdpa_xp_export._verify.textbook import stages
from sdpa_xp_export._verify.trial_lengths import (
    beyond_constants,
    blocks_of_queries,
    several_lengths,
    shown_lengths,
)
from sdpa_xp_export.report import Agreement


@dataclass(frozen=True, slots=True)
class Trial:
    """Inputs of one run, and its expected outputs: by the reference and by the textbook formula."""

    shown: str
    inputs: Arrays
    expected: Mapping[str, tuple[NDArray[np.float64], NDArray[Any]]]
    size: float


def verification_inputs(call: ExportCall, rng: np.random.Generator, rows: int | None = None) -> Iterator[Trial]:
    """Yield trials of several lengths, some beyond the numbers in masks, some beyond a block of `rows`."""
    settings = [(lengths, 1.0) for lengths in several_lengths(call)]
    if lengths := beyond_constants(call):
        settings.append((lengths, 1.0))
    if rows is not None and (lengths := blocks_of_queries(call, rows)):
        settings.append((lengths, 1.0))
    # The reference computes scores from the weights, and large scores have weights of 0.
    if "scores" not in call.outputs:
        settings += [(lengths, LARGE) for lengths in several_lengths(call)]
    for lengths, size in settings:
        arrays = random_inputs(call, lengths, rng, size)
        shown = shown_lengths(lengths) + (", large scores" if size == LARGE else "")
        yield Trial(shown, poison(call, arrays), expected_outputs(call, arrays), size)


def expected_outputs(call: ExportCall, arrays: Arrays) -> dict[str, tuple[NDArray[np.float64], NDArray[Any]]]:
    """Return for each output the reference, and the textbook formula in the dtype of the call."""
    arguments = reference_inputs(call, arrays)
    with np.errstate(all="ignore"):
        output, lse, weights = reference.attention(**arguments)
        scores = np.where(weights > 0, np.log(weights), -np.inf) + np.where(np.isinf(lse), 0, lse)[..., None]
        exact = {"output": output, "lse": lse, "weights": weights, "scores": scores}
        textbook = stages(numpy_namespace, **arguments)
    expected = {
        name: (as_returned(call, name, exact[name]), as_returned(call, name, textbook[name]))
        for name in call.outputs
    }
    if call.cached:
        cache = expected_cache(call, arguments)
        expected |= {name: (array.astype(np.float64), array) for name, array in cache.items()}
    return expected


def as_returned(call: ExportCall, name: str, array: NDArray[Any]) -> NDArray[Any]:
    """Return an output, which has heads before the length, in the layout of the call."""
    return heads_first(call, array) if name == "output" else array


def judge_output(
    call: ExportCall, name: str, results: list[tuple[Trial, NDArray[Any]]], size: float
) -> list[Agreement]:
    """Compare the output `name` of each trial, by one bound for all; their scores are of `size`."""
    dtype = call.accumulation_dtype if name == "lse" else call.query.dtype
    triples = []
    for trial, result in results:
        reference, textbook = trial.expected[name]
        result = _real_tokens(call, name, trial.inputs, result)
        as_stated = result.shape == reference.shape and result.dtype.name == dtype
        triples.append((result if as_stated else np.full(reference.shape, np.nan), reference, textbook))
    return judge_together(triples, dtype, size if name in call.outputs else 0.0)  # a cache is only copied


def _real_tokens(call: ExportCall, name: str, inputs: Arrays, result: NDArray[Any]) -> NDArray[Any]:
    """Return a padded cache with 0 where no real token is, and any other output unchanged."""
    if not name.startswith("present") or call.past_lengths is None:
        return result
    result = result.copy()
    rows = heads_first(call, result)
    new = inputs["key"].shape[call.length_axis]
    for entry, past in enumerate(inputs["past_lengths"].tolist()):
        rows[entry, :, past + new :] = 0
    return result
