"""A quantised KVCache in a graph: its steps store and compute what those of the library do."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from graphs import run

from sdpa_xp import KVCache, masks
from sdpa_xp.positional import Rotary
from sdpa_xp_export import TensorSpec, to_onnx

F = np.float32
KINDS = [("int8", "token"), ("int8", "channel"), ("int4", "token"), ("int4", "channel")]


def drawn(rng: np.random.Generator, tokens: int) -> list[np.ndarray]:
    return [rng.standard_normal((2, heads, tokens, 8)).astype(F) for heads in (4, 2, 2)]


@pytest.mark.parametrize(("kind", "per"), KINDS)
def test_steps_of_a_graph(rng: np.random.Generator, kind: Any, per: Any) -> None:
    """One graph for all steps takes the stored arrays, and returns them with those of the new tokens."""
    rules = {"attn_mask": masks.sliding_window(6, 0), "softcap": 4.0}

    def step(query: Any, new_key: Any, new_value: Any, stored: dict[str, Any]) -> dict[str, Any]:
        cache = KVCache.from_stored(stored, rotary=Rotary(8)).append(new_key, new_value)
        present = {f"present_{name}": array for name, array in cache.stored.items()}
        return {"output": cache.attend(query, **rules), **present}

    _, key, value = drawn(rng, 5)
    cache = KVCache(key, value, rotary=Rotary(8)).quantised(kind, per=per)
    specs = {
        name: TensorSpec(array.dtype.name, ("B", 2, 1 if name == "key_channels" else "P", array.shape[-1]))
        for name, array in cache.stored.items()
    }
    new = [TensorSpec("float32", ("B", heads, "L", 8)) for heads in (4, 2, 2)]
    model = to_onnx(step, *new, stored=specs)
    names = [inputs.name for inputs in model.graph.input]
    stored = cache.stored
    for count in (1, 3):
        tokens = drawn(rng, count)
        cache = cache.append(*tokens[1:])
        results = run(model, dict(zip(names, [*tokens, *stored.values()], strict=True)))
        output, *arrays = results.values()
        np.testing.assert_allclose(output, cache.attend(tokens[0], **rules), atol=2e-6)
        stored = dict(zip(stored, arrays, strict=True))
        for name, array in cache.stored.items():
            np.testing.assert_allclose(stored[name], array, rtol=1e-6, atol=1e-6)
            assert stored[name].dtype == array.dtype


@pytest.mark.parametrize(("kind", "per"), KINDS)
def test_a_prompt_is_quantised_in_a_graph(rng: np.random.Generator, kind: Any, per: Any) -> None:
    def prefill(query: Any, key: Any, value: Any) -> Any:
        return KVCache(key, value).quantised(kind, per=per).attend(query)

    model = to_onnx(prefill, *(TensorSpec("float32", (2, heads, "S", 8)) for heads in (4, 2, 2)))
    arrays = drawn(rng, 9)
    arrays[1][..., 2] *= 20
    names = [inputs.name for inputs in model.graph.input]
    (output,) = run(model, dict(zip(names, arrays, strict=True))).values()
    np.testing.assert_allclose(output, prefill(*arrays), atol=2e-6)
