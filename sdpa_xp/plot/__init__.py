"""Plots: each function returns a Matplotlib figure. It does not show or save the figure.

Plots need Matplotlib: in the source folder of sdpa_xp, run `pip install '.[plot]'`.

    plot.attention(weights, key_tokens=words)     which keys each query attends to; one panel for each head
    plot.mask(masks.causal(), (8, 8))             which pairs may attend
    plot.saturation(rng=rng)                      why scores are divided by sqrt(E)
    plot.memory()                                 why no L x S array is built

`theme` is "light" or "dark", for the page that shows the figure. `figure.savefig("map.png")` saves the figure
on the background of its theme, or without one with `transparent=True`.
"""

from .curves import memory, saturation
from .maps import attention, mask

__all__ = ["attention", "mask", "memory", "saturation"]


def __dir__() -> list[str]:
    """Complete public names, not the files that define them."""
    return __all__
