"""Run the models of transformers on sdpa_xp. transformers is imported when a function is called."""

from __future__ import annotations

from typing import Any

from .._checks import install_hint
from ..errors import Message

__all__ = ["register", "uses_sdpa_xp"]


def register() -> str:
    """Register sdpa_xp as an attention implementation of transformers, and return its name.

    Every model of transformers that lets you choose its attention can then run on
    `scaled_dot_product_attention`:

        model = AutoModel.from_pretrained(..., attn_implementation=register())

    Shapes:
        A mask that you pass to the model yourself is (B, L), with 1 or True for real tokens, or (B, 1 or Hq, L,
        S): boolean with True = may attend, or floating and added to the scores.

    Returns:
        `"xp_attention"`. Calling `register` again changes nothing.

    Raises:
        ModuleNotFoundError: transformers or torch is not installed, or transformers is too old.
        ValueError: When the model is created: its code has classes of its own for attention, which the message
            names. When it runs: it passes an argument that sdpa_xp does not support.

    Examples:
        >>> from sdpa_xp.integrations.transformers import register
        >>> register()
        'xp_attention'

    References:
        transformers, "Attention Interface" and "Attention Mask Interface",
        https://huggingface.co/docs/transformers/attention_interface.
    """
    try:
        from . import _transformers
    except (ImportError, AttributeError) as error:
        rule = "transformers 5.23 or later and torch must be installed"
        hint = install_hint("transformers")
        raise ModuleNotFoundError(
            Message("register", rule, {"error": error}, hint), name="transformers"
        ) from None
    _transformers.register()
    return _transformers.NAME


def uses_sdpa_xp(model: Any) -> bool:
    """Return whether at least one layer of a model of transformers computes attention with sdpa_xp.

    This function looks at the code of each layer: `model.config` may have the name although it is never used.

    Args:
        model: A model of transformers, or a torch module that contains one.

    Returns:
        A bool.

    Raises:
        TypeError: `model` is not a torch module.
        ModuleNotFoundError: transformers or torch is not installed.

    Examples:
        >>> import transformers
        >>> from sdpa_xp.integrations.transformers import register, uses_sdpa_xp
        >>> config = transformers.BertConfig(num_hidden_layers=1, hidden_size=12)
        >>> model = transformers.BertModel(config)
        >>> uses_sdpa_xp(model)
        False
        >>> model.set_attn_implementation(register())
        >>> uses_sdpa_xp(model)
        True

    References:
        transformers, "Attention Interface", https://huggingface.co/docs/transformers/attention_interface.
    """
    register()
    from . import _transformers

    return _transformers.uses_sdpa_xp(model)
