"""Pictures. matplotlib figures are returned; nothing is shown or saved. Needs `pip install 'sdpa_xp[plot]'`.

    plot.attention(weights, key_tokens=words)     which keys each query looks at, a panel a head
    plot.mask(masks.causal(), (8, 8))             which pairs may attend
    plot.saturation(rng=rng)                      why scores are divided by sqrt(E)
    plot.memory()                                 why no array of L x S is made

Their ground is transparent: `theme` says whether the page is "light" or "dark". Colours differ in lightness,
so that they are told apart without colour vision and in print.
"""

from sdpa_xp.plot.allowed import mask
from sdpa_xp.plot.footprint import memory
from sdpa_xp.plot.maps import attention
from sdpa_xp.plot.spread import saturation

__all__ = ["attention", "mask", "memory", "saturation"]
