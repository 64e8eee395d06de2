"""Compute the attention of Equinox's models. Equinox is imported when a model is replaced."""

from __future__ import annotations

from typing import TypeVar

__all__ = ["replace_attention"]

M = TypeVar("M")


def replace_attention(model: M) -> M:
    """Return the model with attention computed by sdpa_xp in each of its `equinox.nn.MultiheadAttention`.

    Parameters and other layers do not change, and the new layers are instances of
    `equinox.nn.MultiheadAttention` too:

        model = replace_attention(model)

    The mask of a call may be an array of any dtype, of shape (L, S) or (H, L, S), or a mask of `sdpa_xp.masks`.

    Args:
        model: Any pytree, also a single layer. It is not changed.

    Returns:
        A copy that shares all arrays with `model`.

    Raises:
        ValueError: `model` has no such layer. Layers of derived classes have code of their own, so they are not
            replaced.

    References:
        Equinox, `equinox.nn.MultiheadAttention`, https://docs.kidger.site/equinox/api/nn/attention.
    """
    from . import _equinox_layer

    replaced: M = _equinox_layer.replace(model)
    return replaced
