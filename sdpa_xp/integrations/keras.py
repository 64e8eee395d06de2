"""Compute the attention of Keras' models, with the backends JAX, torch and NumPy.

Keras is imported by the functions, so that this file can be read without it, and after its backend is chosen.
"""

from __future__ import annotations

from functools import partial, reduce
from operator import and_
from typing import Any, TypeVar

from .. import masks
from ..errors import ArgumentValueError
from ._framework_call import as_array, attend, broadcasts, fits, scores_shape

__all__ = ["replace_attention"]

M = TypeVar("M")
BACKENDS = ("jax", "torch", "numpy")


def replace_attention(model: M) -> M:
    r"""Let sdpa_xp compute the attention of each MultiHeadAttention and GroupQueryAttention of a Keras model.

    The model, or the single layer, is changed and returned. Its weights and its other layers stay as they are:

        model = replace_attention(model)

    With `use_causal_mask` or `sliding_window`, and no other mask, no L x S array is built. `attention_mask` may
    be a mask of `sdpa_xp.masks`. A copy of the model (saved and loaded, or from `clone_model`) has Keras' own
    attention: call `replace_attention` again.

    Args:
        model: A Keras model or layer.

    Returns:
        `model`.

    Raises:
        ValueError: Keras runs on another backend, or `model` has no such layer. Layers of derived classes are
            replaced only if they inherit `_compute_attention`.

    Numerics:
        If a mask that is an array leaves a query without keys, its row is what Keras returns: the mean of the
        values, or 0 in a layer with dropout.

    References:
        Keras, `keras.layers.MultiHeadAttention`, https://keras.io/api/layers/attention_layers.
    """
    import keras

    backend = keras.config.backend()
    if backend not in BACKENDS:
        rule = "Keras must run on jax, torch or numpy"
        raise ArgumentValueError("replace_attention", rule, {"backend": backend})
    # Private: `model.layers` has no layers inside of layers. Without it, an AttributeError names it.
    parts = list(model._flatten_layers()) if isinstance(model, keras.Layer) else []
    layers = [layer for layer in parts if _has_attention_of_keras(layer)]
    if not layers:
        rule = "`model` must be a Keras model or layer with a MultiHeadAttention or a GroupQueryAttention"
        got = {"model": f"<{type(model).__qualname__}>"}
        hint = "Layers with an attention of their own are not replaced."
        raise ArgumentValueError("replace_attention", rule, got, hint)
    for layer in layers:  # methods of its own, and its class, so that what Keras saves is one of its own layers
        layer._compute_attention = partial(_compute_attention, layer)
        layer._compute_attention_mask = partial(_compute_attention_mask, layer)
    for part in parts:
        for name in ("train_function", "test_function", "predict_function"):
            if getattr(part, name, None) is not None:  # compiled with the attention of before
                setattr(part, name, None)
    return model


def _has_attention_of_keras(layer: Any) -> bool:
    """Return whether a layer computes the attention of one of Keras' own classes.

    The methods are private to Keras: without one of them, this fails with an AttributeError that names it.
    """
    import keras

    names = ("_compute_attention", "_compute_attention_mask")
    return any(
        all(getattr(type(layer), name, None) is getattr(original, name) for name in names)
        for original in (keras.layers.MultiHeadAttention, keras.layers.GroupQueryAttention)
    )


def _compute_attention(
    layer: Any,
    query: Any,
    key: Any,
    value: Any,
    attention_mask: Any = None,
    training: Any = None,
    return_attention_scores: bool = False,
    use_causal_mask: bool = False,
) -> Any:
    """Return the output, (B, L, H, Ev), and the attention scores or None, as the method of Keras does."""
    # MultiHeadAttention is told by a keyword to return scores, GroupQueryAttention by an attribute of its own.
    has_scores = return_attention_scores or getattr(layer, "_return_attention_scores", False)
    if not has_scores and not layer._flash_attention and _attends_over_first_axis(layer, query, rank=4):
        output = _attend(query, key, value, attention_mask, use_causal_mask, layer.dropout, training)
        if output is not None:
            return output, None
    options: dict[str, Any] = {"training": training, "use_causal_mask": use_causal_mask}
    if return_attention_scores:  # a keyword of MultiHeadAttention alone
        options["return_attention_scores"] = True
    mask = as_array(attention_mask, scores_shape(query, key), query)
    return type(layer)._compute_attention(layer, query, key, value, mask, **options)


def _attends_over_first_axis(layer: Any, query: Any, *, rank: int) -> bool:
    axes = getattr(layer, "_attention_axes", (1,))  # GroupQueryAttention has no other
    return len(query.shape) == rank and tuple(axes) == (1,)


def _compute_attention_mask(
    layer: Any, query: Any, value: Any, *, attention_mask: Any = None, use_causal_mask: bool, **arrays: Any
) -> Any:
    """Return the mask of a call: a mask of sdpa_xp if it is known without arrays, else Keras' array.

    `arrays` are the masks of the query, the value and the key, None for those that no layer before has made.
    """
    lightweight = [attention_mask] if isinstance(attention_mask, masks.Mask) else []
    is_plain = _attends_over_first_axis(layer, query, rank=3)
    if lightweight and not is_plain:
        rule = "`attention_mask` must be an array if a layer attends over several axes"
        raise ArgumentValueError(type(layer).__name__, rule, {"attention_mask": attention_mask})
    arrays["attention_mask"] = None if lightweight else attention_mask
    name = "_sliding_window" if hasattr(layer, "_sliding_window") else "sliding_window"
    window = getattr(layer, name)
    # More queries than keys: a window may leave the last queries without keys, for which Keras has its own row.
    has_keys = window is None or query.shape[1] <= value.shape[1]
    if is_plain and has_keys and all(array is None for array in arrays.values()):
        causal = [masks.causal()] if use_causal_mask else []
        around = [] if window is None else [masks.sliding_window(window - 1, window - 1)]
        return reduce(and_, [*lightweight, *causal, *around]) if lightweight or causal or around else None
    array = type(layer)._compute_attention_mask(layer, query, value, use_causal_mask=use_causal_mask, **arrays)
    if not lightweight:
        return array
    return lightweight[0] if array is None else lightweight[0] & masks.from_array(_with_heads(array))


def _attend(query: Any, key: Any, value: Any, mask: Any, is_causal: bool, dropout: float, training: Any) -> Any:
    """Return the output, or None if Keras has to compute or to refuse the call."""
    import keras
    from keras import ops

    if (dropout > 0 and training) or not fits(query, key, value):
        return None
    if mask is None or isinstance(mask, masks.Mask):
        return attend(ops, query, key, value, mask, is_causal=is_causal)
    if is_causal or not 2 <= len(mask.shape) <= 4:
        return None
    allowed = _with_heads(mask)
    if not broadcasts(allowed, scores_shape(query, key)):
        return None
    if dropout > 0 and keras.backend.standardize_dtype(allowed.dtype) != "bool":
        allowed = ops.greater(allowed, 0.5)  # as keras.layers.Softmax, which these layers use
    allowed = ops.cast(allowed, "bool")
    return attend(ops, query, key, value, allowed, has_means=not dropout)


def _with_heads(mask: Any) -> Any:
    """Return a mask (L, S) or (B, L, S) with the axes of the scores."""
    from keras import ops

    while len(mask.shape) < 4:
        mask = ops.expand_dims(mask, -3)
    return mask
