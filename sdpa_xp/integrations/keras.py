"""Compute the attention of Keras' models, with the backends JAX, torch and NumPy."""

from __future__ import annotations

from importlib import import_module
from typing import TypeVar

__all__ = ["replace_attention"]

M = TypeVar("M")


def replace_attention(model: M) -> M:
    r"""Let sdpa_xp compute the attention of each MultiHeadAttention and GroupQueryAttention of a Keras model.

    The model, or the single layer, is changed and returned. Its weights and its other layers stay as they are:

        model = replace_attention(model)

    Keras computes a call itself if it trains with dropout, returns the attention scores, attends over several
    axes, or if `flash_attention` is set. With `use_causal_mask` or `sliding_window`, and no other mask, no
    L x S array is built. `attention_mask` may be a mask of `sdpa_xp.masks`.

    A copy of the model (saved and loaded, or from `clone_model`) has Keras' own attention: call
    `replace_attention` again.

    Args:
        model: A Keras model or layer.

    Returns:
        `model`.

    Raises:
        ValueError: Keras runs on another backend, or `model` has no such layer. Layers of derived classes are
            replaced only if they inherit `_compute_attention`.

    Numerics:
        As for `scaled_dot_product_attention`. If a mask that is an array leaves a query without keys, its row
        is what Keras returns: the mean of the values, or 0 in a layer with dropout.

    References:
        Keras, `keras.layers.MultiHeadAttention`, https://keras.io/api/layers/attention_layers.
    """
    import_module("sdpa_xp.integrations._keras_layers").replace(model)
    return model
