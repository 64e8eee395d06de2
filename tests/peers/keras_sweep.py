"""Layers of Keras computed by sdpa_xp, beside the same layers of Keras: `python -m peers.keras_sweep jax 1`.

Keras chooses its backend when it is imported, so each backend has a process. The second argument is n: one of n
cases runs. Prints what differed as JSON.
"""

from __future__ import annotations

import inspect
import json
import os
import sys
import tempfile
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np

BACKEND, EVERY = sys.argv[1], int(sys.argv[2])
os.environ["KERAS_BACKEND"] = BACKEND

import keras  # noqa: E402
from internals import framework_call  # noqa: E402
from peers.same_layers import ROUNDINGS, count_calls  # noqa: E402

from sdpa_xp import dot_product_attention, masks  # noqa: E402
from sdpa_xp.integrations.keras import replace_attention  # noqa: E402

BATCH, LENGTH, KEYS, EMBED = 2, 5, 7, 12
WORDS, OTHER = (np.random.default_rng(n).standard_normal((BATCH, n, EMBED), "float32") for n in (LENGTH, KEYS))
GRID = np.random.default_rng(3).standard_normal((BATCH, 3, 2, EMBED), "float32")
SIZES = {
    "MultiHeadAttention": {"num_heads": 4, "key_dim": 3},
    "GroupQueryAttention": {"head_dim": 3, "num_query_heads": 4, "num_key_value_heads": 2},
}


def allowed(*shape: int, dtype: str = "float32") -> Any:
    """Numbers other than 0 and 1 as well, and a query without a key."""
    numbers = np.random.default_rng(len(shape)).choice([0, 1, 3], shape)
    numbers[..., 0] = 1
    numbers[..., 1, :] = 0
    return numbers.astype(dtype) * (np.float32(0.25) if dtype == "float32" else 1)


REAL, REAL_KEYS = np.arange(LENGTH) < [[3], [5]], np.arange(KEYS) < [[7], [2]]
# (constructor, call, whether sdpa_xp computes it)
COMMON: dict[str, tuple[dict[str, Any], dict[str, Any], bool]] = {
    "plain": ({}, {}, True),
    "key": ({}, {"key": OTHER + 1}, True),
    "causal": ({}, {"use_causal_mask": True}, True),
    "window": ({"sliding_window": 2}, {}, True),
    "causal window": ({"sliding_window": 2}, {"use_causal_mask": True}, True),
    "window of fewer keys": ({"sliding_window": 2}, {"value": OTHER[:, :2]}, True),
    "masks of the inputs": ({}, {"query_mask": REAL, "value_mask": REAL_KEYS, "key_mask": REAL_KEYS}, True),
    "all masks": (
        {"sliding_window": 3},
        {"value_mask": REAL_KEYS, "attention_mask": allowed(LENGTH, KEYS), "use_causal_mask": True},
        True,
    ),
    **{
        f"{dtype} mask {shape}": ({}, {"attention_mask": allowed(*shape, dtype=dtype)}, True)
        for shape in ((LENGTH, KEYS), (1, LENGTH, KEYS), (BATCH, LENGTH, KEYS), (BATCH, 4, LENGTH, KEYS))
        for dtype in ("bool", "int32", "float32")
    },
    "scores": ({}, {"return_attention_scores": True, "use_causal_mask": True}, False),
    "dropout": ({"dropout": 0.5, "seed": 3}, {"training": True, "use_causal_mask": True}, False),
    "no dropout": ({"dropout": 0.5}, {"training": False, "use_causal_mask": True}, True),
    "no dropout, mask": ({"dropout": 0.5}, {"attention_mask": allowed(BATCH, LENGTH, KEYS)}, True),
    "flash": ({"flash_attention": True}, {}, False),
    "gate": ({"use_gate": True, "use_bias": False}, {"use_causal_mask": True}, True),
    "half precision": ({"dtype": "bfloat16"}, {"attention_mask": allowed(LENGTH, KEYS)}, True),
    "mixed precision": ({"dtype": "mixed_float16"}, {"use_causal_mask": True}, True),
    "weights": (
        {
            f"{name}_{kind}": None
            for name in ("kernel", "bias")
            for kind in ("regularizer", "constraint")
        }
        | {"kernel_initializer": "ones", "bias_initializer": "ones", "activity_regularizer": None},
        {},
        True,
    ),
}  # fmt: skip
OF_MULTI_HEAD: dict[str, tuple[dict[str, Any], dict[str, Any], bool]] = {
    "sizes": ({"value_dim": 5, "output_shape": (2, 3)}, {}, True),
    "first axis": ({"attention_axes": 1}, {"use_causal_mask": True}, True),
    "last axis of a grid": ({"attention_axes": (2,)}, {"query": GRID, "value": GRID}, False),
    "last axis, mask": (
        {"attention_axes": -2},
        {"query": GRID, "value": GRID, "attention_mask": allowed(BATCH, 3, 2, 2)},
        False,
    ),
    "both axes of a grid": ({"attention_axes": (1, 2)}, {"query": GRID, "value": GRID}, False),
    "both axes by default": ({}, {"query": GRID, "value": GRID, "return_attention_scores": True}, False),
}


def pair(name: str, options: dict[str, Any], shapes: list[Any]) -> tuple[Any, Any]:
    theirs, ours = (getattr(keras.layers, name)(**SIZES[name], **options) for _ in range(2))
    for layer in (theirs, ours):
        layer.build(*shapes)
    draw = np.random.default_rng(0)
    theirs.set_weights([draw.standard_normal(x.shape) / 2 for x in theirs.get_weights()])
    ours.set_weights(theirs.get_weights())
    return theirs, replace_attention(ours)


def run(layer: Any, call: dict[str, Any]) -> Any:
    """Return the outputs as NumPy arrays in float64 with their dtypes, or the type of what was raised."""
    try:
        outputs = layer(**call)
    except (ValueError, RuntimeError, NotImplementedError) as error:
        return type(error).__name__
    outputs = outputs if isinstance(outputs, tuple) else (outputs,)
    return [
        (np.asarray(keras.ops.convert_to_numpy(x), "float64"), keras.backend.standardize_dtype(x.dtype))
        for x in outputs
    ]


def different(ours: Any, theirs: Any) -> str:
    if isinstance(theirs, str) or isinstance(ours, str):
        return "" if ours is theirs or ours == theirs else f"{ours} and not {theirs}"
    for (x, dtype), (y, expected) in zip(ours, theirs, strict=True):
        if dtype != expected or x.shape != y.shape:
            return f"{dtype} {x.shape} and not {expected} {y.shape}"
        epsilon = {"float32": 2**-23, "bfloat16": 2**-7, "float16": 2**-10}[dtype]
        if (error := float(np.max(np.abs(x - y)))) > ROUNDINGS * epsilon * np.max(np.abs(y)):
            return f"{error} off"
    return ""


def sweep(calls: list[int]) -> Iterator[str]:
    for name in SIZES:
        original = getattr(keras.layers, name)
        cases = COMMON | (OF_MULTI_HEAD if name == "MultiHeadAttention" else {})
        named = {word for options, call, _ in cases.values() for word in (*options, *call)}
        for function in (original.__init__, original.call):
            ours = {"self", "kwargs", "query", "value", *SIZES[name]}
            arguments = set(inspect.signature(function).parameters) - ours
            if unnamed := arguments - named:
                yield f"{name}: no case names {sorted(unnamed)}"
        for title, (options, call, by_us) in list(cases.items())[::EVERY]:
            call = {"query": WORDS, "value": OTHER} | call
            theirs, ours = pair(name, options, [call[x].shape for x in ("query", "value", "key") if x in call])
            calls[0] = 0
            if title == "sizes" and BACKEND == "jax":  # which Keras takes only if it returns the scores too
                expected = run(theirs, call | {"return_attention_scores": True})[:1]
            else:
                expected = run(theirs, call)
            if calls[0]:
                yield f"{name}, {title}: Keras' own layer called sdpa_xp"
            if text := different(run(ours, call), expected):
                yield f"{name}, {title}: {text}"
            if calls[0] != by_us:
                yield f"{name}, {title}: {calls[0]} calls of sdpa_xp"
        for p in (0.0, 0.5):
            theirs, ours = pair(name, {"dropout": p, "seed": 3}, [WORDS.shape, WORDS.shape])
            words = {"query": WORDS, "value": WORDS, "training": True}
            expected = run(theirs, words | {"use_causal_mask": True, "value_mask": REAL})
            output = run(ours, words | {"attention_mask": masks.causal(), "value_mask": REAL})
            if text := different(output, expected):
                yield f"{name}, a mask of sdpa_xp with dropout {p}: {text}"


def models(calls: list[int]) -> Iterator[str]:
    """A model with masks from its inputs: trained (Keras trains with JAX and torch), saved and loaded."""

    def model() -> Any:
        tokens = keras.Input((LENGTH,))
        words = keras.layers.Embedding(9, EMBED, mask_zero=True)(tokens)
        words = keras.layers.MultiHeadAttention(4, 3, name="attention")(words, words, use_causal_mask=True)
        words = keras.layers.GroupQueryAttention(3, 4, 2)(words, words)
        return keras.Model(tokens, keras.layers.Dense(1)(words))

    keras.utils.set_random_seed(0)
    theirs, ours = model(), model()
    ours.set_weights(theirs.get_weights())
    tokens = np.array([[1, 2, 3, 4, 5], [6, 7, 0, 0, 0]])
    ours.predict(tokens, verbose=0)  # JAX compiles the model, for this shape and this dtype
    replace_attention(replace_attention(ours))
    calls[0] = 0
    ours.predict(tokens, verbose=0)
    if calls[0] != 2:
        yield f"model that was compiled before: {calls[0]} calls of sdpa_xp"
    if BACKEND != "numpy":
        for subject in (theirs, ours):
            subject.compile(keras.optimizers.SGD(0.1), "mse")
            subject.fit(tokens, np.ones((BATCH, LENGTH, 1)), epochs=2, verbose=0)
    calls[0] = 0
    expected, output = (subject.predict(tokens, verbose=0) for subject in (theirs, ours))
    if calls[0] != 2:
        yield f"model: {calls[0]} calls of sdpa_xp"
    if not np.allclose(output, expected, rtol=0, atol=1e-5 * np.abs(expected).max()):
        yield f"model: {np.abs(output - expected).max()} off"
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "model.keras"
        ours.save(path)
        loaded = keras.models.load_model(path)
    if type(loaded.get_layer("attention")) is not keras.layers.MultiHeadAttention:
        yield "model: the file does not hold a layer of Keras"


def refusals() -> Iterator[str]:
    """What is said about each call that is refused."""

    class Own(keras.layers.MultiHeadAttention):
        def _compute_attention(self, *args: Any, **keywords: Any) -> Any:
            return super()._compute_attention(*args, **keywords)

    _, grid = pair("MultiHeadAttention", {}, [GRID.shape, GRID.shape])
    layer = keras.layers.MultiHeadAttention(2, 3)
    attempts = [partial(replace_attention, x) for x in (3, keras.layers.Dense(2), Own(2, 3))]
    attempts += [partial(grid, GRID, GRID, attention_mask=masks.causal())]
    attempts += [
        mock.patch.object(keras.config, "backend", return_value="x")(lambda _: replace_attention(layer))
    ]
    for attempt in attempts:
        try:
            yield f"not refused: {attempt()}"
        except ValueError as error:
            yield str(error)


def function() -> dict[str, bool]:
    """What the site says about `keras.ops.dot_product_attention`, which has (B, L, H, E)."""
    query, key, value = np.random.default_rng(0).standard_normal((3, 1, 4, 4, 8), "float32")
    allowed = np.tri(4, dtype=bool)
    allowed[1] = False
    attended = [
        np.asarray(
            keras.ops.convert_to_numpy(keras.ops.dot_product_attention(query, key, x, mask=allowed[None, None]))
        )
        for x in (value, np.where(np.arange(4)[:, None, None] == 3, np.float32(np.nan), value))
    ]
    causal = np.tri(4, dtype=bool)[None, None]
    theirs = keras.ops.convert_to_numpy(keras.ops.dot_product_attention(query, key, value, mask=causal))
    try:
        keras.ops.dot_product_attention(query, key[:, :, :2], value[:, :, :2])
        takes_fewer_heads = True
    except ValueError:
        takes_fewer_heads = False
    ours = dot_product_attention(query, key, value, mask=causal)
    return {
        "is dot_product_attention of sdpa_xp": np.allclose(ours, theirs, atol=2e-6),
        "a query without keys is the mean": np.allclose(attended[0][:, 1], value.mean(1), atol=1e-6),
        "a NaN in a masked value shows": bool(np.isnan(attended[1][:, 0]).any()),
        "takes fewer key heads": takes_fewer_heads,
    }


if __name__ == "__main__":
    counter = count_calls(framework_call)
    differences = [*sweep(counter), *(models(counter) if EVERY == 1 else ())]
    print(json.dumps({"differences": differences, "refusals": [*refusals()], "function": function()}))
