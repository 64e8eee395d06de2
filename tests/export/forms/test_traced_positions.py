"""A KVCache of values of a graph whose tokens have positions of their own: windows that roll, drafts."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from short_runs import agreed

from sdpa_xp import KVCache, biases, masks
from sdpa_xp.positional import Rotary, RotaryTables
from sdpa_xp_export import TensorSpec, to_onnx, verify_layer

pytestmark = pytest.mark.usefixtures("short_verify")

F = np.float32
WIDTH = 8
QUERY, NEW, PAST = (
    TensorSpec("float32", ("B", heads, length, WIDTH)) for heads, length in ((4, "L"), (2, "L"), (2, "P"))
)
TABLE = TensorSpec("float32", (8, 4))
ROTARY = Rotary(WIDTH)
JOINED = masks.sliding_window(4, 0) & ~masks.prefix(2) | masks.chunked(3)
COUNTED = masks.from_function(lambda b, h, i, j: (i + 2 * j) % 3 > 0)


def integers(rng: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray:
    return rng.integers(-4, 30, shape)


def each_entry(query: Any, key: Any, value: Any, past_key: Any, past_value: Any, places: Any) -> Any:
    """The end of a sequence, of which each entry says where it begins."""
    past = KVCache(past_key, past_value, rotary=ROTARY, rotated=True, first_position=places)
    cache = past.append(key, value)
    return cache.attend(query, JOINED, bias=biases.alibi(4)), cache.key, cache.positions


def drafts(query: Any, key: Any, value: Any, past_key: Any, past_value: Any, places: Any, table: Any) -> Any:
    """New tokens at positions of their own."""
    cache = KVCache(past_key, past_value, rotary=ROTARY, rotated=True).append(key, value, positions=places)
    return cache.attend(query, JOINED, bias=biases.relative(table, max_distance=16)), cache.positions


def elsewhere(query: Any, key: Any, value: Any, past_key: Any, past_value: Any, places: Any) -> Any:
    """Queries that are no tokens of the cache."""
    past = KVCache(past_key, past_value, rotary=ROTARY, rotated=True, first_position=-3)
    cache = past.append(key, value)
    bias = biases.from_function(lambda s, b, h, i, j: s + (i + j) % 4 * 0.25)
    return cache.attend(query, COUNTED, bias=bias, positions=places, is_causal=False)


def put_away(query: Any, key: Any, value: Any, past_key: Any, past_value: Any, places: Any) -> Any:
    """A past of which tokens were evicted; what is returned is a part of the cache."""
    past = KVCache(past_key, past_value, rotary=ROTARY, rotated=True, positions=places)
    cache = past.append(key, value)
    output = cache.attend(query, masks.sliding_window(6, 0))
    rest, beams = cache.drop_first(1), cache.take_entries([0, 0])
    return output, rest.key, rest.positions, cache.drop_last(1).value, beams.key, beams.positions


def by_tables(query: Any, key: Any, value: Any, past_key: Any, past_value: Any, cos: Any, sin: Any) -> Any:
    """Rotated by tables that are inputs of the graph."""
    rotary = RotaryTables(cos, sin, interleaved=True)
    cache = KVCache(past_key, past_value, rotary=rotary, rotated=True).append(key, value)
    return cache.attend(query), cache.key, rotary.inverse(cache.key, 0)


STEP = (QUERY, NEW, NEW, PAST, PAST)
LAYERS: dict[str, tuple[Any, tuple[TensorSpec, ...], tuple[int | str, ...] | None, str]] = {
    "a start for each entry": (each_entry, STEP, ("B",), "auto"),
    "one start": (each_entry, STEP, (), "tiled"),
    "drafts of each entry": (drafts, STEP, ("B", "L"), "attention"),
    "drafts": (drafts, STEP, ("L",), "primitive"),
    "queries of other positions": (elsewhere, STEP, ("B", "L"), "auto"),
    "positions of a past": (put_away, STEP, ("B", "P"), "tiled"),
}


@pytest.mark.parametrize("name", LAYERS)
def test_positions_that_are_inputs(name: str) -> None:
    layer, specs, shape, form = LAYERS[name]
    table = (TABLE,) if layer is drafts else ()
    model = to_onnx(layer, *specs, TensorSpec("int64", shape), *table, form=form)
    agreed(verify_layer(model, layer, draw={"places": integers}))


def test_tables_of_a_rotation_that_are_inputs_or_constants() -> None:
    tables = TensorSpec("float32", (1000, WIDTH // 2))
    model = to_onnx(by_tables, *STEP, tables, tables)

    def angles(rng: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray:
        return rng.uniform(0.5, 1.5, shape).astype(F)

    agreed(verify_layer(model, by_tables, draw={"cos": angles, "sin": angles}))
    known = RotaryTables(*(x.astype(F) for x in Rotary(WIDTH, base=50.0).cos_sin(range(2000))))

    def constant(query: Any, key: Any, value: Any, past_key: Any, past_value: Any, places: Any) -> Any:
        past = KVCache(past_key, past_value, rotary=known, rotated=True, first_position=places)
        return past.append(key, value).attend(query)

    model = to_onnx(constant, *STEP, TensorSpec("int64", ("B",)))
    agreed(verify_layer(model, constant, draw={"places": lambda rng, shape: rng.integers(0, 50, shape)}))
