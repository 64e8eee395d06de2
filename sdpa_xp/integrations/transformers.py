"""Run the models of transformers on sdpa_xp."""

from __future__ import annotations

from importlib import import_module

from sdpa_xp import _checks as checks

__all__ = ["register"]

NAME = "xp_attention"
"""The name in transformers. transformers refuses some models by a name with "sdpa" in it."""


def register() -> str:
    r"""Register sdpa_xp as an attention implementation of transformers, and return its name.

    Pass the name as `attn_implementation`. Every model of transformers that lets you choose its attention can
    then run on `scaled_dot_product_attention`:

        model = AutoModel.from_pretrained(..., attn_implementation=register())

    Causal masks, sliding windows, chunks, packed sequences and padding become masks of `sdpa_xp.masks`, so no
    L x S array is built for them.

    Shapes:
        `B` batch, `L` queries, `S` keys, `Hq` query heads. A mask that you pass to the model yourself is
        (B, L), with 1 or True for real tokens, or (B, 1 or Hq, L, S): boolean with True = may attend, or
        floating and added to the scores.

    Returns:
        `"xp_attention"`. Calling `register` again changes nothing.

    Raises:
        ModuleNotFoundError: transformers or torch is not installed, or transformers is too old.
        ValueError: When the model runs: the model passes an argument that sdpa_xp does not support. The message
            names the argument.

    Numerics:
        As for `scaled_dot_product_attention`, so results differ from `attn_implementation="eager"` by rounding
        only. A token whose keys are all masked, such as padding on the left, gets output 0, where eager
        attention gives it the mean of all values. Results of real tokens do not depend on it. In training,
        weights are dropped with the model's `attention_dropout`, but with the same seed (`torch.manual_seed`)
        eager attention drops other weights.

    Examples:
        >>> from sdpa_xp.integrations.transformers import register
        >>> register()
        'xp_attention'

    References:
        transformers, "Attention Interface" and "Attention Mask Interface",
        https://huggingface.co/docs/transformers/attention_interface.
    """
    try:
        library = import_module("transformers")
        interfaces = library.AttentionInterface, library.AttentionMaskInterface
        attention = import_module("sdpa_xp.integrations._transformers_attention")
        mask_creation = import_module("sdpa_xp.integrations._transformers_masks")
    except (ImportError, AttributeError) as error:
        rule = "transformers 5.23 or later and torch must be installed"
        hint = checks.install_hint("transformers")
        raise ModuleNotFoundError(
            checks.message("register", rule, {"error": error}, hint), name="transformers"
        ) from None
    for interface, function in zip(interfaces, (attention.attend, mask_creation.create_mask), strict=True):
        interface.register(NAME, function)
    return NAME
