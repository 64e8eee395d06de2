"""A right attention of torch with a backward pass of its own, and faults of that pass."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch

Step = Callable[..., Any]


def attention(
    query: Any,
    key: Any,
    value: Any,
    attn_mask: Any = None,
    *,
    bias: Any = None,
    is_causal: bool = False,
    scale: float | None = None,
    softcap: float | None = None,
    sinks: Any = None,
    plant: dict[str, Step] | None = None,
) -> Any:
    """Attention of torch; `plant` has, by the name of a step of the backward pass, what replaces its result."""
    plant = plant or {}
    cap = softcap or math.inf

    def step(name: str, result: Any, *more: Any) -> Any:
        return plant[name](result, *more) if name in plant else result

    class Attention(torch.autograd.Function):
        @staticmethod
        def forward(context: Any, q: Any, k: Any, v: Any, bias: Any, sinks: Any) -> Any:
            acc = torch.float64 if q.dtype == torch.float64 else torch.float32
            group = q.shape[-3] // k.shape[-3] if q.ndim > 2 else 1
            keys, values = (x.to(acc).repeat_interleave(group, -3) if group > 1 else x.to(acc) for x in (k, v))
            factor = q.shape[-1] ** -0.5 if scale is None else scale
            raw = q.to(acc) @ keys.mT * factor
            flat = torch.tanh(raw / cap) if softcap else torch.zeros_like(raw)
            scores = cap * flat if softcap else raw
            scores = scores if bias is None else scores + bias.to(acc)
            if attn_mask is not None:
                scores = scores.masked_fill(~attn_mask, -math.inf)
            if is_causal:
                scores = scores.masked_fill(~torch.ones(scores.shape[-2:], dtype=torch.bool).tril(), -math.inf)
            column = [] if sinks is None else [sinks.to(acc)[:, None, None].expand(*scores.shape[:-1], 1)]
            joined = torch.cat([scores, *column], -1)
            weights = torch.softmax(joined, -1).nan_to_num() if joined.shape[-1] else joined
            context.save_for_backward(q, keys, values, weights, flat)
            context.facts = group, factor, bias, sinks, k.dtype
            context.shapes = q.shape, k.shape, v.shape
            return (weights[..., : keys.shape[-2]] @ values).to(q.dtype)

        @staticmethod
        def backward(context: Any, cotangent: Any) -> Any:
            q, k, v, weights, flat = context.saved_tensors
            group, factor, bias, sinks, dtype = context.facts
            cotangent = step("cotangent", cotangent).to(k.dtype)
            p, of_sink = weights[..., : k.shape[-2]], weights[..., k.shape[-2] :]
            pulled = cotangent @ v.mT
            mean = step("mean", (p * pulled).sum(-1, keepdim=True), of_sink)
            of_biased = step("scores", p * (pulled - mean))
            of_scores = of_biased * step("slope", 1 - flat**2, flat) * step("factor", factor)
            of_key, of_value = of_scores.mT @ q.to(k.dtype), p.mT @ cotangent
            of_key = step("key", of_key)
            shared = (x.unflatten(-3, (-1, group)).sum(-3) if group > 1 else x for x in (of_key, of_value))
            of_query, (of_key, of_value) = step("query", of_scores @ k), shared
            of_value = step("value", of_value, dtype)
            of_bias = (
                None if bias is None else step("bias", of_biased, bias).sum_to_size(bias.shape).to(bias.dtype)
            )
            if sinks is not None:
                left = step("sinks", (-of_sink * mean).transpose(0, -3).flatten(1)) if mean.ndim > 2 else None
                sinks = None if left is None else left.sum(1).to(sinks.dtype)
            whole = zip((of_query, of_key, of_value), context.shapes, strict=True)
            summed = (step("sum", x, shape).sum_to_size(shape) for x, shape in whole)
            return *(x.to(dtype) for x in summed), of_bias, sinks

    return step("output", Attention.apply(query, key, value, bias, sinks))


FAULTS: dict[str, dict[str, Step]] = {
    "no gradient of a bias": {"bias": lambda x, bias: x * 0},
    "a bias of the first entry": {"bias": lambda x, bias: torch.cat([x[:1], x[1:] * 0])},
    "a bias of the last query": {
        "bias": lambda x, bias: x * (torch.arange(x.shape[-2]) == x.shape[-2] - 1)[:, None]
    },
    "no gradient of sinks": {"sinks": lambda x: x * 0},
    "sinks of the first entry": {"sinks": lambda x: x * (torch.arange(x.shape[1]) < x.shape[1] // 2)},
    "the mean without the sink": {"mean": lambda mean, sink: mean / (1 - sink) if sink.shape[-1] else mean},
    "no slope of the softcap": {"slope": lambda slope, flat: slope * 0 + 1},
    "the root of the slope": {"slope": lambda slope, flat: slope**0.5},
    "no gradient of values in halves": {"value": lambda x, dtype: x if dtype.itemsize > 2 else x * 0},
    "a cotangent has no strides": {
        "cotangent": lambda x: (
            x.as_strided(x.shape, torch.empty(x.shape).stride(), 0)
            if x.untyped_storage().nbytes() >= x.numel() * x.element_size()
            else x * 2
        )
    },
    "the size of the scale": {"factor": abs},
    "a bias of -inf times 0": {"bias": lambda x, bias: x + 0 * bias},
    "a scale of 0 is 1": {"factor": lambda factor: factor or 1.0},
    "the first of the entries that share a token": {
        "sum": lambda x, shape: x[:1] if x.ndim > 3 and shape[0] == 1 else x
    },
    "the mean of the entries that share a key": {
        "sum": lambda x, shape: x / max(x.shape[0] // shape[0], 1) if x.ndim > 3 else x
    },
    "later entries of width 256": {  # TransformerEngine 3216
        "sum": lambda x, _: torch.cat([x[:1], x[1:] * 0]) if x.ndim > 3 and x.shape[-1] == 256 else x
    },
    "columns beyond 64": {"key": lambda x: x * (torch.arange(x.shape[-1]) < 64)},
    "a cotangent is written to": {"cotangent": lambda x: (x.clone(), x.zero_())[0]},
    "values beyond the eighth": {"value": lambda x, dtype: x * (torch.arange(x.shape[-1]) < 8)},
    "the last tile of 32 queries": {
        "query": lambda x: x * (torch.arange(x.shape[-2]) < max(x.shape[-2] // 32 * 32, 32))[:, None]
    },
    "the last tile of 128 keys": {
        "key": lambda x: x * (torch.arange(x.shape[-2]) < max(x.shape[-2] // 128 * 128, 128))[:, None]
    },
}
