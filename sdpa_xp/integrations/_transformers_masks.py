"""The masks of transformers as masks of sdpa_xp.

transformers describes a mask by a function of four indices. Those that its own code makes are recognised by
name, with the numbers that they captured; any other function is asked tile by tile.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import reduce
from operator import and_, or_
from typing import Any

import torch
from torch.utils._pytree import tree_map_only
from transformers import masking_utils  # its names below are those of 5.23; `register` refuses older releases
from transformers.utils.import_utils import is_tracing

from .. import masks

MaskFunction = Callable[[Any, Any, Any, Any], Any]
EVERY_PAIR = masks.sliding_window(None, None)
DESCRIPTIONS = {
    *(getattr(torch.Tensor, name).__get__ for name in ("shape", "dtype", "device", "ndim", "requires_grad")),
    torch.Tensor.size,
    torch.Tensor.dim,
}
"""What may be asked without the elements."""


def create_mask(*, allow_is_causal_skip: bool = True, **call: Any) -> Any:
    """Return the mask of a model's call: a MaskTensor, the tensor of eager attention, or None for every pair.

    It is the tensor if values cannot be read (torch.compile, torch.export), if a function of the user may not
    broadcast, and for the one query of a step with a static cache, whose mask may enter a compiled graph.

    Args:
        allow_is_causal_skip: False for a static cache.
        call: The keywords of `eager_mask` of transformers, which passes them all by name.
    """
    queries, keys, attention_mask = call["q_length"], call["kv_length"], call.get("attention_mask")
    q_offset, kv_offset = call.get("q_offset", 0), call.get("kv_offset", 0)
    is_compiled_step = queries == 1 and not allow_is_causal_skip
    if is_tracing(attention_mask) or is_tracing(q_offset) or call.get("use_vmap") or is_compiled_step:
        return masking_utils.eager_mask(**call)
    mask = _Place(queries, keys, int(q_offset), kv_offset).mask_of(call["mask_function"])
    # A static cache is longer than the mask of its tokens: this pads the mask as eager attention does.
    padding = masking_utils.prepare_padding_mask(attention_mask, keys, kv_offset)
    if padding is not None:
        is_real = padding[:, kv_offset : kv_offset + keys]
        if not bool(is_real.all()):
            real_keys = masks.from_array(is_real[:, None, None, :])
            mask = real_keys if mask is EVERY_PAIR else mask & real_keys
    if mask is EVERY_PAIR and call.get("allow_is_bidirectional_skip"):
        return None
    shape = (call["batch_size"], 1, queries, keys)
    return MaskTensor.from_mask(mask, shape, call.get("dtype", torch.float32), call.get("device", "cpu"))


class MaskTensor(torch.Tensor):
    """A mask in the form that eager attention of transformers has, (B, 1, L, S), which takes no memory.

    Most models only pass their mask to their attention, and `generate` asks whether it is a tensor with 4 axes.
    A model that computes with its mask, slices it, or has its own attention gets the tensor of eager attention,
    which is added to the scores: 0, or the most negative number of its dtype where a pair is masked.
    """

    mask: masks.Mask

    @classmethod
    def from_mask(cls, mask: masks.Mask, shape: tuple[int, ...], dtype: Any, device: Any) -> MaskTensor:
        """Return a tensor of `shape` that holds `mask`."""
        element = torch.zeros((), dtype=dtype, device=device).expand(shape)
        # Private, but torch's own way to make a subclass without a copy: torch.nn.Parameter uses it too.
        tensor: MaskTensor = torch.Tensor._make_subclass(cls, element)
        tensor.mask = mask
        return tensor

    def to_tensor(self) -> Any:
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
            with torch._C.DisableTorchFunctionSubclass():  # as torch's page on subclasses does
                return func(*args, **(kwargs or {}))
        args, kwargs = tree_map_only(cls, cls.to_tensor, (args, kwargs or {}))
        return func(*args, **kwargs)


class _Place:
    """The positions of a call's queries and keys in the sequence."""

    def __init__(self, queries: int, keys: int, q_offset: int, kv_offset: int) -> None:
        self.queries, self.keys = queries, keys
        self.q_offset, self.kv_offset = q_offset, kv_offset

    def mask_of(self, function: MaskFunction) -> masks.Mask:
        """Return the mask that a function of transformers describes."""
        left = right = math.inf
        parts: list[masks.Mask] = []
        for part in _conjuncts(function):
            name, captured = _origin(part)
            match name:
                case "causal_mask_function":
                    right = min(right, 0)
                case "bidirectional_mask_function":
                    pass
                case "sliding_window_overlay" if captured["sliding_window"] > 0:
                    left = min(left, captured["sliding_window"] - 1)  # its window counts the own key
                case "sliding_window_bidirectional_overlay":
                    left, right = (min(side, captured["sliding_window"]) for side in (left, right))
                case "packed_sequence_mask_function":
                    parts.append(self._document(captured["packed_sequence_mask"]))
                case "or_masks":
                    parts.append(self._either(captured["mask_functions"]))
                case _:
                    parts.append(self._from_function(part))
        parts = [part for part in (self._band(left, right), *parts) if part is not EVERY_PAIR]
        return reduce(and_, parts) if parts else EVERY_PAIR

    def _band(self, left: float, right: float) -> masks.Mask:
        """Return the mask of a window, without the sides that end beyond all keys."""
        offset = self.q_offset - self.kv_offset
        first = None if self.queries - 1 + offset <= left else int(left)
        last = None if self.keys - 1 <= offset + right else int(right)
        if first is None and last is None:
            return EVERY_PAIR
        is_causal = (first, last) == (None, 0)
        return masks.causal(offset) if is_causal else masks.sliding_window(first, last, offset=offset)

    def _document(self, ids: Any) -> masks.Mask:
        queries = ids[:, self.q_offset : self.q_offset + self.queries]
        return masks.document(queries, ids[:, self.kv_offset : self.kv_offset + self.keys])

    def _either(self, functions: Iterable[MaskFunction]) -> masks.Mask:
        parts = [self.mask_of(function) for function in functions]
        return EVERY_PAIR if any(part is EVERY_PAIR for part in parts) else reduce(or_, parts)

    def _from_function(self, function: MaskFunction) -> masks.Mask:
        return masks.from_function(lambda b, h, i, j: function(b, h, i + self.q_offset, j + self.kv_offset))


def _conjuncts(function: MaskFunction) -> Iterator[MaskFunction]:
    """Return the functions that all have to hold, one by one."""
    name, captured = _origin(function)
    if name != "and_masks":
        yield function
        return
    for part in captured["mask_functions"]:
        yield from _conjuncts(part)


def _origin(function: MaskFunction) -> tuple[str, Mapping[str, Any]]:
    """Return the function of transformers that made `function`, and the variables that it captured."""
    # A function of a user with the same name is none of transformers', and is asked tile by tile.
    if getattr(function, "__module__", None) != masking_utils.__name__:
        return "", {}
    cells = (cell.cell_contents for cell in function.__closure__ or ())
    return function.__qualname__.partition(".")[0], dict(zip(function.__code__.co_freevars, cells, strict=True))
