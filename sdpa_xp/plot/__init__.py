"""Plots: each function returns a Matplotlib figure, and shows and saves nothing.

It needs Matplotlib. In the source folder of sdpa_xp, run `pip install '.[plot]'`.

    plot.attention(weights, key_tokens=words)     which keys each query attends to, one panel a head
    plot.mask(masks.causal(), (8, 8))             which pairs may attend
    plot.saturation(rng=rng)                      why scores are divided by sqrt(E)
    plot.memory()                                 why no L x S array is built

`theme` is "light" or "dark", for the page that shows the figure. `figure.savefig("map.png")` saves a figure on
a background of that theme; with `transparent=True` it has none, as in a notebook. Colours differ in lightness,
so that they stay distinct in print and without colour vision.
"""

from sdpa_xp.plot.attention_map import attention
from sdpa_xp.plot.mask_map import mask
from sdpa_xp.plot.memory_curve import memory
from sdpa_xp.plot.saturation_curve import saturation

__all__ = ["attention", "mask", "memory", "saturation"]
