"""A call with arrays at hand, exported with specs in their place, run by onnxruntime alone, and by the library.

It uses nothing of `verify`: what a graph should give is asked of the functions of `sdpa_xp`.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, cast

import numpy as np
import onnx
import onnxruntime
from calls import draw_named
from internals import metadata_of
from short_runs import assert_right

from sdpa_xp import attention_scores, attention_state, attention_statistics, attention_weights, biases, masks
from sdpa_xp.biases import Bias
from sdpa_xp.masks import Mask
from sdpa_xp_export import TensorSpec, export_attention
from sdpa_xp_export.forms.choice import FORMS

Arrays = dict[str, np.ndarray]
Rules = Callable[..., dict[str, Any]]
"""Keywords of a call, of operands that are named as the inputs of the graph: arrays, or specs."""

BATCH = 3
LONGER, SHORTER = (5, 9), (9, 5)
"""L and S."""
EVERY_CALL = ["tiled", "primitive"]
"""The forms that state every call, but for outputs of L x S, which `tiled` refuses."""
CLOSE = {"float16": 2e-3, "float32": 4e-6, "float64": 1e-13}
"""What errors may be, over the largest number of an output: a few roundings of its dtype."""


def plain() -> dict[str, Any]:
    """The rules of a call without any."""
    return {}


RULES: dict[str, Rules] = {
    "plain": plain,
    "is_causal": lambda: {"is_causal": True},
    "masked": lambda offset, key_lengths, attn_mask: {
        "attn_mask": (masks.causal(offset) | masks.dilated(3)) & masks.padding(key_lengths) & attn_mask
    },
    "biased": lambda bias, table: {"bias": biases.from_array(bias) + biases.relative(table), "softcap": 2.0},
    "sinks": lambda sinks: {"sinks": sinks, "attn_mask": masks.causal(-1), "bias": biases.alibi(4)},
    "scale": lambda scale: {"scale": scale, "attn_mask": masks.sliding_window(1, 1)},
}
"""Calls of the kinds that forms write in their own ways."""


def moved(arrays: Arrays, layout: str) -> Arrays:
    """With the heads where `layout` has them; an array of two axes has none."""
    is_default = layout == "...HLE"
    return {name: x if is_default or x.ndim == 2 else x.swapaxes(-2, -3) for name, x in arrays.items()}


def qkv(
    rng: np.random.Generator,
    queries: int = 5,
    keys: int = 9,
    *,
    batch: tuple[int, ...] = (BATCH,),
    heads: tuple[int, int] = (4, 2),
    dtype: str = "float32",
) -> Arrays:
    """query, key and value of widths 16 and 12."""
    shapes = {
        "query": (*batch, heads[0], queries, 16),
        "key": (*batch, heads[1], keys, 16),
        "value": (*batch, heads[1], keys, 12),
    }
    return draw_named(rng, shapes, dtype)


def operand(name: str, rng: np.random.Generator, queries: int, keys: int, dtype: str = "float32") -> np.ndarray:
    """An array for the operand of that name, for a batch of 3 and 4 heads, edges first."""
    known: dict[str, Any] = {
        "offset": [0, -2, 3] if name == "offset" else [1, 0, -1],
        "key_lengths": [0, 4, keys],
        "query_lengths": [queries, 0, min(queries, 2)],
        "length": [0, 1, keys + 3],
        "query_ids": np.sort(rng.integers(0, 3, (BATCH, queries)), axis=-1),
        "key_ids": np.sort(rng.integers(0, 3, (BATCH, keys)), axis=-1),
        "attn_mask": rng.random((BATCH, 4, queries, keys)) < 0.6,
        "slopes": rng.random(4),
        "table": rng.standard_normal((12, 4)),
        "sinks": rng.standard_normal(4) * 2,
        "scale": rng.standard_normal((4, 1, 1)),
        "bias": np.where(rng.random((BATCH, 4, queries, keys)) < 0.8, rng.standard_normal(keys), -np.inf),
    }
    array = np.asarray(known[name.rstrip("_0123456789")])
    return array.astype(dtype) if array.dtype.kind == "f" else array


def operands(rules: Rules, rng: np.random.Generator, queries: int, keys: int, dtype: str = "float32") -> Arrays:
    """An array for each operand that `rules` takes."""
    return {name: operand(name, rng, queries, keys, dtype) for name in inspect.signature(rules).parameters}


def spec(array: np.ndarray, names: Mapping[int, str]) -> TensorSpec:
    """The spec of an array; a length that is in `names` is a symbol."""
    return TensorSpec(array.dtype.name, tuple(names.get(length, length) for length in array.shape))


def run(model: onnx.ModelProto, feeds: Arrays) -> Arrays:
    """The outputs of a model by their names, of onnxruntime on the CPU."""
    return run_in(session_of(model), feeds)


def session_of(model: onnx.ModelProto) -> onnxruntime.InferenceSession:
    """A session on the CPU, in one thread."""
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3
    options.intra_op_num_threads = 1
    return onnxruntime.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])


def run_in(session: onnxruntime.InferenceSession, feeds: Arrays) -> Arrays:
    """The outputs of a session by their names."""
    return dict(zip([out.name for out in session.get_outputs()], session.run(None, feeds), strict=True))


def library(arrays: Arrays, outputs: Sequence[str], **rules: Any) -> Arrays:
    """The same outputs from the functions of the library, in NumPy."""
    q, k, v = arrays["query"], arrays["key"], arrays["value"]
    results: Arrays = {}
    if {"output", "lse"} & set(outputs):
        state = attention_state(q, k, v, **rules)
        results |= {"output": state.output, "lse": state.lse}
    if "weights" in outputs:
        results["weights"] = attention_weights(q, k, **rules)
    if "scores" in outputs:
        results["scores"] = scores(arrays, **rules)
    if names := [name for name in outputs if name in ("row_max", "entropy", "key_sums")]:
        results |= attention_statistics(q, k, of=cast(Any, names), **rules)._asdict()
    return {name: results[name] for name in outputs}


def scores(arrays: Arrays, **rules: Any) -> np.ndarray:
    """Those of the library, which a sink is no part of."""
    result: np.ndarray = attention_scores(
        arrays["query"], arrays["key"], **{name: x for name, x in rules.items() if name != "sinks"}
    )
    return result


def assert_close(results: Arrays, expected_by_name: Arrays) -> None:
    """Each output within a few roundings of its largest number, and of its dtype and shape."""
    assert list(results) == list(expected_by_name)
    for name, result in results.items():
        expected = expected_by_name[name]
        assert (result.dtype, result.shape) == (expected.dtype, expected.shape), name
        bound = CLOSE[result.dtype.name] * max(1.0, np.abs(expected[np.isfinite(expected)]).max(initial=0.0))
        np.testing.assert_allclose(result, expected, rtol=0, atol=bound, err_msg=name)


def held_by(rules: Mapping[str, Any]) -> dict[str, Any]:
    """The masks and biases of a call as `verify` takes them."""
    return {name: x for name, x in rules.items() if isinstance(x, Mask | Bias)}


def check(
    arrays: Arrays,
    rules: Rules,
    operands: Arrays,
    *,
    names: Mapping[int, str],
    outputs: Sequence[str] = ("output",),
    **export: Any,
) -> onnx.ModelProto:
    """Export the call; `verify` agrees, and the graph gives what the library gives on these arrays.

    What no query attends by the scores of the library becomes NaN, and may not show.
    """
    (model,) = models(
        arrays, rules, operands, names=names, outputs=outputs, forms=[export.pop("form", "auto")], **export
    )
    return model


def models(
    arrays: Arrays,
    rules: Rules,
    operands: Arrays,
    *,
    names: Mapping[int, str],
    forms: Sequence[str],
    outputs: Sequence[str] = ("output",),
    **export: Any,
) -> Iterator[onnx.ModelProto]:
    """`check` in each of these forms."""
    rules_of_specs = rules(**{name: spec(array, names) for name, array in operands.items()})
    specs = [spec(arrays[name], names) for name in ("query", "key", "value")]
    bound = rules(**operands) | {name: export[name] for name in ("layout",) if name in export}
    expected, runs = library(arrays, outputs, **bound), [arrays | operands]
    one_batch = all(x.shape[0] == BATCH and x.ndim == 4 for x in arrays.values())
    if one_batch and not {"weights", "scores"} & set(outputs):
        runs.append(with_nan(arrays, bound) | operands)
    for model in in_each_form(*specs, **rules_of_specs, forms=forms, outputs=outputs, **export):
        assert sorted(graph_input.name for graph_input in model.graph.input) == sorted(runs[0])
        session = session_of(model)
        for feeds in runs:
            assert_close(run_in(session, feeds), expected)
        assert_right(model, session=session, **held_by(rules_of_specs))
        yield model


def in_each_form(*specs: TensorSpec, forms: Sequence[str] = FORMS, **call: Any) -> Iterator[onnx.ModelProto]:
    """The model of a call in each of these forms that takes it; one that takes every call may not refuse it."""
    for form in forms:
        try:
            yield export_attention(*specs, **call, form=form)
        except ValueError as error:
            if "`form` cannot be" not in str(error) or form in EVERY_CALL or len(forms) == 1:
                raise


def with_nan(arrays: Arrays, rules: dict[str, Any]) -> Arrays:
    """NaN in the keys and values that no query of their group attends."""
    heads = arrays["key"].shape[-3 if rules.get("layout") != "...LHE" else -2]
    masked = np.isneginf(scores(arrays, **rules))
    hidden = masked.reshape(BATCH, heads, -1, masked.shape[-1]).all(axis=2)
    poisoned = {name: arrays[name].copy() for name in ("key", "value")}
    for array in poisoned.values():
        (array if rules.get("layout") != "...LHE" else array.swapaxes(-2, -3))[hidden] = np.nan
    return arrays | poisoned


def check_forms(
    arrays: Arrays, rules: Rules, operands: Arrays, *, names: Mapping[int, str], **export: Any
) -> list[str]:
    """`check` in each form that takes the call; these forms, among them those that take every call."""
    exported = models(arrays, rules, operands, names=names, forms=[*FORMS], **export)
    forms = [metadata_of(model)["sdpa_xp.form"] for model in exported]
    assert forms[-2:] == EVERY_CALL
    return forms
