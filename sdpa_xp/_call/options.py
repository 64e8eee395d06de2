"""The keyword arguments of a call."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from sdpa_xp._checks.shapes import HLE
from sdpa_xp._libraries import is_array
from sdpa_xp._tiles import modifier
from sdpa_xp.biases.algebra import Bias
from sdpa_xp.masks.algebra import Mask


class CallOptions(NamedTuple):
    """Keyword arguments as passed, not validated yet."""

    attn_mask: object = None
    bias: object = None
    is_causal: object = False
    scale: object = None
    softcap: object = None
    sinks: object = None
    dropout_p: object = 0.0
    rng: object = None
    softmax_dtype: object = None
    layout: object = HLE
    implementation: object = None


def arrays_of(options: CallOptions) -> Iterator[tuple[str, object]]:
    """Return the arrays of the options by name, including arrays inside masks and biases ("bias.slopes")."""
    for name in ("attn_mask", "bias"):
        option = getattr(options, name)
        if isinstance(option, Mask | Bias):
            count: dict[str, int] = {}
            for argument, array in option.arrays():
                count[argument] = count.get(argument, 0) + 1
                number = f" ({count[argument]})" if count[argument] > 1 else ""
                yield f"{name}.{argument}{number}", array
        elif option is not None:
            yield name, option
    if is_array(options.scale):
        yield "scale", options.scale
    if options.sinks is not None:
        yield "sinks", options.sinks


def with_arrays(options: CallOptions, change: Callable[[Any], Any]) -> CallOptions:
    """Return the options with each array replaced by `change(array)`, also inside masks and biases."""
    changes: dict[str, Any] = {}
    for name in ("attn_mask", "bias", "scale", "sinks"):
        option = getattr(options, name)
        if isinstance(option, Mask | Bias):
            changes[name] = modifier.with_arrays(option, change)
        elif is_array(option):
            changes[name] = change(option)
    return options._replace(**changes)
