"""Relative positions in a graph: the library's bucket at every distance, in a graph of one size for all."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from graphs import check_forms, qkv, run
from internals import MOST_LISTED, Integers, RelativeTerm, first_distances, namespace

from sdpa_xp import biases
from sdpa_xp_export import TensorSpec, export_attention, to_onnx

LISTED = MOST_LISTED
QKV = TensorSpec("float32", ("B", 4, "L", 8))
RULES = [(32, 128), (32, 10**7), (16, 2**29), (8, 20), (4, 5), (1000, 10**7), (6, 9), (200, 120)]


def library(bias: Any, distances: np.ndarray) -> list[int]:
    """The bucket of each distance by the library, if the bias adds the number of the bucket."""
    moved = (replace(bias, offset=-distance) for distance in distances.tolist())
    return [int(biases.to_array(one, (1, 1, 1))[0, 0, 0]) for one in moved]


@pytest.mark.parametrize("bidirectional", [True, False])
@pytest.mark.parametrize(("count", "max_distance"), RULES)
def test_the_library_s_bucket(count: int, max_distance: int, bidirectional: bool) -> None:
    """Near each distance at which a bucket begins, in both directions, and in between."""
    numbers = np.arange(float(count))[:, None]
    bias: Any = biases.relative(numbers, bidirectional=bidirectional, max_distance=max_distance)
    begins = first_distances(count, max_distance, max_distance, bidirectional=bidirectional)
    places = [0, *begins, max_distance]
    near = {begin + by for begin in places[:: max(1, len(places) // 40)] for by in (-2, -1, 0, 1, 2)}
    near |= {*np.random.default_rng(7).integers(0, max_distance + 9, 60).tolist(), 2**29}
    distances = np.asarray(sorted({sign * n for n in near for sign in (1, -1) if n <= 2**29}))
    offset, ahead = Integers(0, 0, 0), count // 2 if bidirectional else 0
    term = RelativeTerm(numbers, 0, 0, offset, numbers, count, np.asarray(begins), ahead)
    model = to_onnx(lambda d: term._index(namespace(d), d), TensorSpec("int64", ("N",)))
    (buckets,) = run(model, {"d": distances}).values()
    np.testing.assert_array_equal(buckets, library(bias, distances))


@pytest.mark.sampled(5)
@pytest.mark.parametrize("max_distance", [LISTED, LISTED + 1, 10**7])
@pytest.mark.parametrize("bidirectional", [True, False])
@pytest.mark.parametrize("offset", [0, 900, -(10**6), "lower_right"])
def test_calls(rng: np.random.Generator, offset: Any, bidirectional: bool, max_distance: int) -> None:
    """In every form, on both sides of where a graph stops to list all distances."""

    def rules(table: Any) -> dict[str, Any]:
        bias = biases.relative(table, bidirectional=bidirectional, max_distance=max_distance, offset=offset)
        return {"bias": bias}

    table = rng.standard_normal((12, 4)).astype(np.float32)
    check_forms(qkv(rng), rules, {"table": table}, names={3: "B", 5: "L", 9: "S"})


@pytest.mark.parametrize("form", ["primitive", "tiled"])
def test_a_graph_is_no_larger_for_further_distances(form: str) -> None:
    """Neither by a list of distances nor by nodes."""
    sizes = {
        max_distance: export_attention(
            QKV,
            QKV,
            QKV,
            bias=biases.relative(TensorSpec("float32", (32, 4)), max_distance=max_distance),
            form=form,
        ).ByteSize()
        for max_distance in (LISTED, 10**4, 10**7, 2**29)
    }
    assert max(sizes.values()) <= sizes[LISTED]
    assert sizes[2**29] - sizes[10**4] < 64
