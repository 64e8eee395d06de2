"""An encoder and a decoder block in array-API code: on NumPy, torch and JAX, and as one graph of ONNX.

    encoder:  x + attention(norm(x))                   decoder:  x + attention(norm(x)), causal
              x + mlp(norm(x))                                   x + attention(norm(x), encoded)
                                                                 x + mlp(norm(x))

The norm comes first, as in Xiong et al., "On layer normalization in the Transformer architecture", arXiv
2002.04745, figure 1 (b). To decode, a `KVCache` holds the keys and values of the words
so far, and rotates the keys by their positions (Su et al., "RoFormer", arXiv 2104.09864). A second cache holds
those of the encoded words.

Run it: python examples/blocks.py
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, Self

import array_api_compat
import numpy as np

from sdpa_xp import KVCache, scaled_dot_product_attention
from sdpa_xp.layers import Layer, Linear, MultiHeadAttention
from sdpa_xp.positional import Rotary

WIDTH, HEADS = 32, 4
ROTARY = Rotary(WIDTH // HEADS)


@dataclass(frozen=True)
class LayerNorm(Layer):
    """Ba et al., "Layer normalization", arXiv 1607.06450, equation 4."""

    weight: Any
    bias: Any

    def __call__(self, x: Any) -> Any:
        """(..., width) -> (..., width)."""
        xp = array_api_compat.array_namespace(x)
        centred = x - xp.mean(x, axis=-1, keepdims=True)
        variance = xp.mean(centred * centred, axis=-1, keepdims=True)
        return centred / xp.sqrt(variance + 1e-5) * self.weight + self.bias

    @classmethod
    def init(cls, like: Any) -> Self:
        """Create a norm with weights 1 and biases 0, in the library, dtype and device of `like`."""
        xp = array_api_compat.array_namespace(like)
        kind = {"dtype": like.dtype, "device": array_api_compat.device(like)}
        return cls(xp.ones((WIDTH,), **kind), xp.zeros((WIDTH,), **kind))


@dataclass(frozen=True)
class MLP(Layer):
    """Vaswani et al., "Attention is all you need", arXiv 1706.03762, equation 2."""

    norm: LayerNorm
    inner: Linear
    outer: Linear

    def __call__(self, x: Any) -> Any:
        """(..., width) -> (..., width)."""
        hidden = self.inner(self.norm(x))
        xp = array_api_compat.array_namespace(x)
        return self.outer(xp.where(hidden > 0, hidden, xp.zeros_like(hidden)))

    @classmethod
    def init(cls, rng: Any, like: Any) -> Self:
        """Create an MLP whose hidden layer is four times as wide."""
        inner, outer = (
            Linear.init(rng, *widths, like=like) for widths in ((WIDTH, 4 * WIDTH), (4 * WIDTH, WIDTH))
        )
        return cls(LayerNorm.init(like), inner, outer)


@dataclass(frozen=True)
class EncoderBlock(Layer):
    """Self-attention and an MLP, each added to its input."""

    norm: LayerNorm
    attention: MultiHeadAttention
    mlp: MLP

    def __call__(self, x: Any, attn_mask: Any = None) -> Any:
        """(..., S, width) -> (..., S, width)."""
        x = x + self.attention(self.norm(x), attn_mask=attn_mask)
        return x + self.mlp(x)

    @classmethod
    def init(cls, rng: Any, like: Any) -> Self:
        """Draw the weights from `rng`, in the library, dtype and device of `like`."""
        attention = MultiHeadAttention.init(rng, WIDTH, num_heads=HEADS, like=like)
        return cls(LayerNorm.init(like), attention, MLP.init(rng, like))


class Step(NamedTuple):
    """The outputs of the graph of one step."""

    output: Any
    present_key: Any
    present_value: Any


@dataclass(frozen=True)
class DecoderBlock(Layer):
    """Causal self-attention, attention to the encoded words, and an MLP."""

    norm: LayerNorm
    attention: MultiHeadAttention
    cross_norm: LayerNorm
    cross: MultiHeadAttention
    mlp: MLP

    def __call__(self, x: Any, encoded: Any) -> Any:
        """Decode all words at once: (..., L, width), (..., S, width) -> (..., L, width)."""
        query, key, value = self.attention.project(self.norm(x))
        query, key = ROTARY.apply(query, 0), ROTARY.apply(key, 0)
        options = self.attention.attention_options
        heads = scaled_dot_product_attention(query, key, value, is_causal=True, **options)
        x = x + self.attention.combine(heads)
        x = x + self.cross(self.cross_norm(x), encoded)
        return x + self.mlp(x)

    def memory(self, encoded: Any) -> KVCache[Any]:
        """Project keys and values of the encoded words, once for all steps."""
        return KVCache(*self.cross.project_key_value(encoded))

    def step(self, x: Any, cache: KVCache[Any], memory: KVCache[Any]) -> tuple[Any, KVCache[Any]]:
        """Decode the next words, (..., L, width); return their output and the cache with them appended."""
        normed = self.norm(x)
        cache = cache.append(*self.attention.project_key_value(normed))
        x = x + self.attention.attend(normed, cache)
        x = x + self.cross.attend(self.cross_norm(x), memory, is_causal=False)
        return x + self.mlp(x), cache

    def graph(self, x: Any, past_key: Any, past_value: Any, memory_key: Any, memory_value: Any) -> Step:
        """Run `step` with the caches as plain arrays, since a graph takes and returns arrays."""
        past = KVCache(past_key, past_value, rotary=ROTARY, rotated=True)
        output, cache = self.step(x, past, KVCache(memory_key, memory_value))
        return Step(output, cache.key, cache.value)

    def empty(self, x: Any) -> KVCache[Any]:
        """Return the cache before the first word."""
        key, value = self.attention.project_key_value(x[..., :0, :])
        return KVCache(key, value, rotary=ROTARY)

    @classmethod
    def init(cls, rng: Any, like: Any) -> Self:
        """Draw the weights from `rng`, in the library, dtype and device of `like`."""
        attention, cross = (MultiHeadAttention.init(rng, WIDTH, num_heads=HEADS, like=like) for _ in range(2))
        return cls(LayerNorm.init(like), attention, LayerNorm.init(like), cross, MLP.init(rng, like))


def main(xp: Any = np) -> None:
    """Encode and decode with the arrays of `xp`, a module such as numpy, torch or jax.numpy."""
    rng = np.random.default_rng(0)
    source, target = (xp.asarray(rng.standard_normal((2, n, WIDTH), np.float32)) for n in (7, 5))
    encoder, decoder = EncoderBlock.init(rng, source), DecoderBlock.init(rng, source)

    encoded = encoder(source)
    expected = decoder(target, encoded)
    assert encoded.shape == source.shape
    assert expected.shape == target.shape

    memory, cache, steps = decoder.memory(encoded), decoder.empty(target), []
    for word in range(5):
        output, cache = decoder.step(target[:, word : word + 1, :], cache, memory)
        steps.append(np.asarray(output))
    assert len(cache) == 5
    assert_near(np.concatenate(steps, axis=1), expected)  # one by one as all at once

    # A prompt of three words, then two words at once.
    start, cache_of_start = decoder.step(target[:, :3, :], decoder.empty(target), memory)
    assert_near(start, expected[:, :3, :])
    assert_near(decoder.step(target[:, 3:, :], cache_of_start, memory)[0], expected[:, 3:, :])
    print(f"The encoder block reads {tuple(source.shape)} and returns {tuple(encoded.shape)}.")
    print("The decoder block attends to these and to its own earlier words:")
    print(f"  all {len(cache)} words at once, one by one with a cache, and 3 and then 2: the same output")
    print(f"  its cache is {cache}")
    print(f"  its {len(decoder.parameters)} arrays of weights export to one ONNX graph, see `export`")


def export(decoder: DecoderBlock, path: str | Path) -> Path:
    """Export a step of the decoder to an ONNX file, for any batch and lengths; the past may be empty."""
    from sdpa_xp_export import TensorSpec, save, to_onnx

    x = TensorSpec("float32", ("B", "L", WIDTH))
    past, memory = (TensorSpec("float32", ("B", HEADS, n, WIDTH // HEADS)) for n in ("P", "S"))
    return save(to_onnx(decoder.graph, x, past, past, memory, memory), path)


def assert_near(output: Any, expected: Any) -> None:
    """Check that the arrays are equal up to float32 rounding."""
    np.testing.assert_allclose(np.asarray(output), np.asarray(expected), rtol=0, atol=2e-5)


if __name__ == "__main__":
    main()
