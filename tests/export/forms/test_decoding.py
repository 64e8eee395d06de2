"""A tiny language model decodes greedily with a graph and with the library: the same tokens, the same caches.

The graph's caches go from one step to the next as values of onnxruntime, never through NumPy.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest

from sdpa_xp import KVCache, biases, masks
from sdpa_xp_export import TensorSpec, export_attention

HEADS, KEY_HEADS, WIDTH, WORDS = 4, 2, 16, 50
F = np.float32
RULES: dict[str, dict[str, Any]] = {
    "is_causal": {"is_causal": True},
    "window and alibi": {
        "attn_mask": masks.sliding_window(4, 0),
        "bias": biases.alibi(HEADS),
        "is_causal": True,
    },
    "softcap and sinks": {"softcap": 5.0, "sinks": np.asarray([0.5, -1, 2, 0], F), "is_causal": True},
}


class Model:
    """A word is a random vector; the next word is that whose vector is nearest to what attention gives."""

    def __init__(self) -> None:
        rng = np.random.default_rng(20180611)
        self.embedding = rng.standard_normal((WORDS, HEADS * WIDTH)).astype(F)
        self.projected = [
            self.embedding @ rng.standard_normal((HEADS * WIDTH, heads * WIDTH)).astype(F) / 4
            for heads in (HEADS, KEY_HEADS, KEY_HEADS)
        ]

    def qkv(self, words: np.ndarray) -> list[np.ndarray]:
        """words (B, L) -> query (B, Hq, L, E), key and value (B, H, L, E)."""
        return [
            np.ascontiguousarray(table[words].reshape(*words.shape, -1, WIDTH).swapaxes(1, 2))
            for table in self.projected
        ]

    def next_words(self, output: np.ndarray) -> np.ndarray:
        """output (B, Hq, L, E) -> the word behind the last one, (B, 1)."""
        last = output[:, :, -1].reshape(len(output), -1)
        return np.argmax(last @ self.embedding.T, axis=-1)[:, None]


def session_of(model: onnx.ModelProto) -> Any:
    return onnxruntime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])


def step(session: Any, arrays: list[np.ndarray], past: list[Any], lengths: np.ndarray | None) -> list[Any]:
    """The output and the new cache; `past` and what is returned are values of onnxruntime."""
    binding = session.io_binding()
    for name, array in zip(("query", "key", "value"), arrays, strict=True):
        binding.bind_cpu_input(name, array)
    if lengths is not None:
        binding.bind_cpu_input("past_lengths", lengths)
    for name, value in zip(("past_key", "past_value"), past, strict=True):
        binding.bind_ortvalue_input(name, value)
    for output in session.get_outputs():
        binding.bind_output(output.name)
    session.run_with_iobinding(binding)
    result: list[Any] = binding.get_outputs()
    return result


def by_library(model: Model, prompt: np.ndarray, steps: int, rules: dict[str, Any]) -> np.ndarray:
    """All words, (B, prompt + steps)."""
    query, key, value = model.qkv(prompt)
    cache, words = KVCache(key, value), prompt
    for _ in range(steps):
        words = np.concatenate([words, model.next_words(cache.attend(query, **rules))], axis=-1)
        query, key, value = model.qkv(words[:, -1:])
        cache = cache.append(key, value)
    return words


PROMPTS = np.asarray([[3, 1, 4, 1, 5, 9], [2, 7, 1, 8, 2, 8]])


def past_of(*shape: Any) -> TensorSpec:
    return TensorSpec("float32", shape)


QUERY = TensorSpec("float32", ("B", HEADS, "L", WIDTH))
NEW = TensorSpec("float32", ("B", KEY_HEADS, "L", WIDTH))


@pytest.mark.parametrize("form", ["auto", "tiled", "primitive"])
@pytest.mark.parametrize("rules", RULES.values(), ids=RULES)
def test_greedy(rules: dict[str, Any], form: str) -> None:
    """The first run has an empty cache, and one token follows in each of the others."""
    past = past_of("B", KEY_HEADS, "P", WIDTH)
    session = session_of(export_attention(QUERY, NEW, NEW, past_key=past, past_value=past, **rules, form=form))
    model, words, new = Model(), PROMPTS, PROMPTS
    cache = [onnxruntime.OrtValue.ortvalue_from_numpy(np.zeros((2, KEY_HEADS, 0, WIDTH), F)) for _ in range(2)]
    for count in range(12):
        output, *cache = step(session, model.qkv(new), cache, None)
        new = model.next_words(output.numpy())
        words = np.concatenate([words, new], axis=-1)
        assert cache[0].shape() == [2, KEY_HEADS, 6 + count, WIDTH]
    wanted = by_library(model, PROMPTS, 12, rules)
    assert len(np.unique(wanted)) > 8  # else a wrong model might say the same
    np.testing.assert_array_equal(words, wanted)
    np.testing.assert_array_equal(cache[0].numpy(), model.qkv(words[:, :-1])[1])


@pytest.mark.parametrize("form", ["auto", "tiled", "primitive"])
@pytest.mark.parametrize("rules", RULES.values(), ids=RULES)
def test_greedy_and_ragged(rules: dict[str, Any], form: str) -> None:
    """Prompts of 6 and 3 words in one cache of fixed length, with NaN where no token is yet."""
    room = past_of("B", KEY_HEADS, "R", WIDTH)
    lengths_of = TensorSpec("int64", ("B",))
    session = session_of(
        export_attention(
            QUERY, NEW, NEW, past_key=room, past_value=room, past_lengths=lengths_of, **rules, form=form
        )
    )
    model, real, steps = Model(), [6, 3], 9
    rows = [PROMPTS[entry : entry + 1, :count] for entry, count in enumerate(real)]
    buffers = [np.full((2, KEY_HEADS, 16, WIDTH), np.nan, F) for _ in range(2)]
    for entry, row in enumerate(rows):
        for buffer, new in zip(buffers, model.qkv(row[:, :-1])[1:], strict=True):
            buffer[entry, :, : row.shape[1] - 1] = new[0]
    cache = [onnxruntime.OrtValue.ortvalue_from_numpy(buffer) for buffer in buffers]
    words, lengths = np.asarray([row[:, -1] for row in rows]), np.asarray(real) - 1
    said = [words]
    for _ in range(steps):
        output, *cache = step(session, model.qkv(words), cache, lengths)
        words, lengths = model.next_words(output.numpy()), lengths + 1
        said.append(words)
    wanted = [by_library(model, row, steps, rules) for row in rows]
    for entry, row in enumerate(wanted):
        np.testing.assert_array_equal(np.concatenate(said, axis=-1)[entry], row[0, real[entry] - 1 :])
        key = cache[0].numpy()[entry]
        assert np.isnan(key[:, real[entry] + steps - 1 :]).all()
        np.testing.assert_array_equal(key[:, : real[entry] + steps - 1], model.qkv(row[:, :-1])[1][0])
