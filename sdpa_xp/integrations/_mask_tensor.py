"""A mask of sdpa_xp in the form that eager attention of transformers has: a floating tensor (B, 1, L, S)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.utils._pytree import tree_map_only

from sdpa_xp import masks

DESCRIPTIONS = {
    *(getattr(torch.Tensor, name).__get__ for name in ("shape", "dtype", "device", "ndim", "requires_grad")),
    torch.Tensor.size,
    torch.Tensor.dim,
}
"""What may be asked without the elements."""


class MaskTensor(torch.Tensor):
    """A mask that passes for a tensor and takes no memory.

    Most models only pass their mask to their attention, and `generate` asks whether it is a tensor with 4 axes.
    A model that computes with its mask, slices it, or has its own attention gets the tensor of eager attention,
    which is added to the scores: 0, or the most negative number of its dtype where a pair is masked.
    """

    mask: masks.Mask

    @classmethod
    def from_mask(cls, mask: masks.Mask, shape: tuple[int, ...], dtype: Any, device: Any) -> MaskTensor:
        """Return a tensor of `shape` that holds `mask`."""
        element = torch.zeros((), dtype=dtype, device=device).expand(shape)
        tensor: MaskTensor = torch.Tensor._make_subclass(cls, element)
        tensor.mask = mask
        return tensor

    def to_tensor(self) -> Any:
        """Return the tensor with its elements."""
        plain = torch.zeros((), dtype=self.dtype, device=self.device)
        allowed = masks.to_array(self.mask, tuple(self.shape), like=plain)
        return torch.where(allowed, plain, torch.finfo(self.dtype).min)

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """Call `func` with tensors that have their elements."""
        del types
        if func in DESCRIPTIONS:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **(kwargs or {}))
        args, kwargs = tree_map_only(cls, cls.to_tensor, (args, kwargs or {}))
        return func(*args, **kwargs)
