"""What a model is tried with: inputs for its call, what each output should be, and how far one is off."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import array_api_compat.numpy as numpy_namespace
import numpy as np
from numpy.typing import NDArray

from sdpa_xp.checks import HLE, LHE
from sdpa_xp_export._call.call import ExportCall
from sdpa_xp_export._verify import reference
from sdpa_xp_export._verify.agreement import judge_together
from sdpa_xp_export._verify.random_inputs import LARGE, poison, random_inputs
from sdpa_xp_export._verify.reference_inputs import Arrays, expected_cache, reference_inputs
from sdpa_xp_export._verify.textbook import stages
from sdpa_xp_export._verify.trial_lengths import beyond_constants, blocks_of_queries, several_lengths
from sdpa_xp_export.report import Agreement


@dataclass(frozen=True, slots=True)
class Trial:
    """Inputs of one run, and what each output should be: exactly, and by the textbook."""

    shown: str
    inputs: Arrays
    expected: Mapping[str, tuple[NDArray[np.float64], NDArray[Any]]]
    size: float


def verification_inputs(call: ExportCall, rng: np.random.Generator, rows: int | None = None) -> Iterator[Trial]:
    """Runs of several lengths, some beyond the numbers in masks, some beyond `rows`, the queries of a block."""
    settings = [(lengths, 1.0) for lengths in several_lengths(call)]
    if lengths := beyond_constants(call):
        settings.append((lengths, 1.0))
    if rows is not None and (lengths := blocks_of_queries(call, rows)):
        settings.append((lengths, 1.0))
    if "scores" not in call.outputs:  # the reference has them from the weights, which are 0 there
        settings += [(lengths, LARGE) for lengths in several_lengths(call)]
    for lengths, size in settings:
        arrays = random_inputs(call, lengths, rng, size)
        shown = " ".join(f"{name}={length}" for name, length in lengths.items()) or "fixed"
        shown += ", large scores" if size == LARGE else ""
        yield Trial(shown, poison(call, arrays), expected_outputs(call, arrays), size)


def expected_outputs(call: ExportCall, arrays: Arrays) -> dict[str, tuple[NDArray[np.float64], NDArray[Any]]]:
    """For each output of a call on `arrays`: the reference, and the textbook formula in the call's dtype."""
    given = reference_inputs(call, arrays)
    with np.errstate(all="ignore"):
        output, lse, weights = reference.attention(**given)
        scores = np.where(weights > 0, np.log(weights), -np.inf) + np.where(np.isinf(lse), 0, lse)[..., None]
        exact = {"output": output, "lse": lse, "weights": weights, "scores": scores}
        own = stages(numpy_namespace, **given)
    made = {
        name: (as_returned(call, name, exact[name]), as_returned(call, name, own[name]))
        for name in call.outputs
    }
    if call.cached:
        made |= {name: (array.astype(np.float64), array) for name, array in expected_cache(call, given).items()}
    return made


def as_returned(call: ExportCall, name: str, array: NDArray[Any]) -> NDArray[Any]:
    """An output with heads before the length -> in the layout of the call."""
    swapped = name == "output" and call.layout == LHE and array.ndim > 2
    return array.swapaxes(-2, -3) if swapped else array


def judge_output(
    call: ExportCall, name: str, results: list[tuple[Trial, NDArray[Any]]], size: float
) -> list[Agreement]:
    """How far the output `name` of each trial is off, by one bound for all; their scores are of `size`."""
    dtype = call.accumulation_dtype if name == "lse" else call.query.dtype
    triples = []
    for trial, result in results:
        exact, own = trial.expected[name]
        result = _real(call, name, trial.inputs, result)
        as_stated = result.shape == exact.shape and result.dtype.name == dtype
        triples.append((result if as_stated else np.full(exact.shape, np.nan), exact, own))
    return judge_together(triples, dtype, size if name in call.outputs else 0.0)  # a cache is copied


def _real(call: ExportCall, name: str, inputs: Arrays, result: NDArray[Any]) -> NDArray[Any]:
    """Of a padded cache only what is real counts: 0 elsewhere."""
    if not name.startswith("present") or call.past_lengths is None:
        return result
    result = result.copy()
    rows = result if call.layout == HLE else result.swapaxes(-2, -3)
    new = inputs["key"].shape[-2 if call.layout == HLE else -3]
    for entry, past in enumerate(inputs["past_lengths"].tolist()):
        rows[entry, :, past + new :] = 0
    return result
