"""Every mask of the library as nodes of a graph, held against the library on the same arrays."""

from __future__ import annotations

from typing import Any

import graphs
import numpy as np
import pytest

from sdpa_xp import masks
from sdpa_xp_export import TensorSpec, export_attention

pytestmark = pytest.mark.usefixtures("small_blocks")


def mask(value: Any) -> dict[str, Any]:
    return {"attn_mask": value}


MASKS: dict[str, graphs.Rules] = {
    "none": graphs.plain,
    "is_causal": lambda: {"is_causal": True},
    "causal": lambda: mask(masks.causal()),
    "causal, ahead": lambda: mask(masks.causal(2)),
    "causal, behind": lambda: mask(masks.causal(-3)),
    "causal, lower right": lambda: mask(masks.causal("lower_right")),
    "causal, by entry": lambda offset: mask(masks.causal(offset)),
    "window": lambda: mask(masks.sliding_window(1, 2)),
    "window, open right": lambda: mask(masks.sliding_window(1, None)),
    "window, open left": lambda: mask(masks.sliding_window(None, 2)),
    "window, open": lambda: mask(masks.sliding_window(None, None)),
    "window, lower right": lambda: mask(masks.sliding_window(2, 0, offset="lower_right")),
    "window, by entry": lambda offset: mask(masks.sliding_window(2, 0, offset=offset)),
    "padding": lambda key_lengths: mask(masks.padding(key_lengths)),
    "padding, both": lambda key_lengths, query_lengths: mask(masks.padding(key_lengths, query_lengths)),
    "padding, queries": lambda query_lengths: mask(masks.padding(None, query_lengths)),
    "padding, numbers": lambda: mask(masks.padding(3, 2)),
    "prefix": lambda: mask(masks.prefix(3)),
    "prefix LM": lambda length: mask(masks.causal() | masks.prefix(length)),
    "document": lambda query_ids, key_ids: mask(masks.document(query_ids, key_ids)),
    "chunked": lambda: mask(masks.chunked(3)),
    "dilated": lambda: mask(masks.dilated(2)),
    "dilated, every": lambda: mask(masks.dilated(1)),
    "array": lambda attn_mask: mask(attn_mask),
    "array & causal": lambda attn_mask: mask(masks.from_array(attn_mask) & masks.causal()),
    "causal | array": lambda attn_mask: mask(masks.causal() | attn_mask),
    "array, is_causal": lambda attn_mask: {"attn_mask": attn_mask, "is_causal": True},
    "two arrays": lambda attn_mask, attn_mask_2: mask(~masks.from_array(attn_mask) | attn_mask_2),
    "~causal": lambda: mask(~masks.causal()),
    "~open": lambda: mask(~masks.sliding_window(None, None)),
    "causal | open": lambda: mask(masks.causal() | masks.sliding_window(None, None)),
    "causal | ~open": lambda: mask(masks.causal() | ~masks.sliding_window(None, None)),
    "~open | causal": lambda: mask(~masks.sliding_window(None, None) | masks.causal()),
    "nested": lambda offset, key_lengths: mask(
        ~(masks.causal(offset) | masks.dilated(2)) & masks.padding(key_lengths)
    ),
    "two offsets": lambda offset, offset_2: mask(
        masks.causal(offset) & masks.sliding_window(1, None, offset=offset_2)
    ),
    "packed": lambda query_ids, key_ids: mask(masks.causal() & masks.document(query_ids, key_ids)),
    "dilated window": lambda: mask(masks.sliding_window(4, 4) & masks.dilated(2)),
}
LISTS: dict[str, graphs.Rules] = {
    "causal": lambda: mask(masks.causal([1, -2, 4])),
    "window": lambda: mask(masks.sliding_window(2, 0, offset=[0, 1, -2])),
    "padding": lambda: mask(masks.padding([0, 3, 5], [2, 5, 1])),
    "prefix LM": lambda: mask(masks.causal() | masks.prefix([0, 2, 99])),
    "document": lambda: mask(masks.document([0, 0, 1, 1, 1], [0, 1, 1, 1, 1, 2, 2, 2, 2])),
    "arrays": lambda: mask(masks.causal(np.asarray([1, -2, 4])) & np.asarray([[[[True] * 8 + [False]]]])),
}


@pytest.mark.sampled(3)
@pytest.mark.parametrize(("queries", "keys"), [graphs.LONGER, graphs.SHORTER])
@pytest.mark.parametrize("rules", MASKS.values(), ids=MASKS)
def test_forms(rng: np.random.Generator, rules: graphs.Rules, queries: int, keys: int) -> None:
    """Of lengths that are known when the graph runs."""
    arguments = graphs.operands(rules, rng, queries, keys)
    graphs.check_forms(
        graphs.qkv(rng, queries, keys), rules, arguments, names={graphs.BATCH: "B", queries: "L", keys: "S"}
    )


OPSETS = [("primitive", 17), ("tiled", 17), ("attention", 23), ("attention", 24), ("primitive", 18)]
OPSETS += [("primitive", 21), ("tiled", 24), ("primitive", 24)]


@pytest.mark.sampled(3)
@pytest.mark.parametrize(("form", "opset"), OPSETS)
@pytest.mark.parametrize("rules", MASKS.values(), ids=MASKS)
def test_opsets(rng: np.random.Generator, rules: graphs.Rules, form: str, opset: int) -> None:
    """Of fixed lengths; one head of keys for all."""
    arrays = graphs.qkv(rng, heads=(4, 1))
    model = graphs.check(
        arrays, rules, graphs.operands(rules, rng, *graphs.LONGER), names={}, form=form, opset=opset
    )
    assert model.opset_import[0].version == opset


@pytest.mark.parametrize("rules", LISTS.values(), ids=LISTS)
def test_numbers_by_entry(rng: np.random.Generator, rules: graphs.Rules) -> None:
    """Lists and NumPy arrays, which become numbers of the graph; the batch is fixed."""
    graphs.check_forms(graphs.qkv(rng), rules, {}, names={} if rules is LISTS["document"] else {5: "L"})


def test_ids_of_queries_are_those_of_keys(rng: np.random.Generator) -> None:
    def rules(query_ids: Any) -> dict[str, Any]:
        return mask(masks.document(query_ids) & masks.causal())

    graphs.check_forms(
        graphs.qkv(rng, 5, 5), rules, graphs.operands(rules, rng, 5, 5), names={graphs.BATCH: "B", 5: "L"}
    )


@pytest.mark.parametrize(
    "shape",
    [(), (1,), (9,), (5, 1), (1, 9), (5, 9), (4, 1, 1), (4, 5, 9), (3, 1, 1, 9), (3, 4, 1, 1), (3, 1, 5, 9)],
)
@pytest.mark.parametrize("alone", [True, False])
def test_arrays_of_every_shape(rng: np.random.Generator, shape: tuple[int, ...], alone: bool) -> None:
    def rules(attn_mask: Any) -> dict[str, Any]:
        return mask(attn_mask if alone else ~masks.dilated(2) | masks.from_array(attn_mask))

    arguments = {"attn_mask": np.asarray(rng.random(shape) < 0.6)}
    graphs.check_forms(graphs.qkv(rng), rules, arguments, names={graphs.BATCH: "B", 5: "L", 9: "S"})


@pytest.mark.parametrize(
    ("rules", "outputs"),
    [
        (lambda rule: {"attn_mask": rule, "softcap": 2.0}, ("output",)),
        (lambda rule: {"attn_mask": rule}, ("output", "lse")),
        (lambda rule: {"attn_mask": rule, "sinks": np.zeros(1, np.float32)}, ("output",)),
        (lambda rule: {"attn_mask": rule & masks.causal(), "softcap": 2.0}, ("output", "lse")),
    ],
    ids=["softcap", "lse", "sinks", "causal"],
)
def test_masked_keys_add_nothing_to_queries_that_are_inf_or_nan(rules: Any, outputs: Any) -> None:
    """inf * 0 is NaN, so keys that are blanked must be masked by a Where if the row can hold numbers."""
    query, key = np.full((4, 1, 4, 2), -np.inf, np.float32), np.ones((4, 1, 6, 2), np.float32)
    query[2:] = np.asarray([np.nan, 1.0]).reshape(2, 1, 1, 1)
    feeds = {"query": query, "key": key, "value": key}
    lengths = np.asarray([3, 0, 0, 6])  # the last entry keeps keys that the first one does not attend
    specs = [TensorSpec("float32", x.shape) for x in feeds.values()]
    rule = masks.padding(TensorSpec("int64", (4,)))
    model = export_attention(*specs, **rules(rule), outputs=outputs, form="tiled")
    with np.errstate(all="ignore"):
        expected = graphs.library(feeds, outputs, **rules(masks.padding(lengths)))
    assert all(not np.isnan(x).any() for x in expected.values())
    graphs.assert_close(graphs.run(model, {**feeds, "key_lengths": lengths}), expected)
