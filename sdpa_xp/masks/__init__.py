"""Which pairs of queries and keys may attend: small values that combine with `&`, `|` and `~`.

`attn_mask` takes any of them. A mask answers for one tile of the scores at a time: tiles that no pair may
attend are skipped, tiles where all may are not masked, and no array of L x S is made.

    masks.causal("lower_right") & masks.sliding_window(255, 0)      a window over a cache
    masks.causal() & masks.padding(key_lengths=[3, 7])              a ragged batch
    masks.causal() | masks.prefix(10)                               a prefix LM
    masks.causal() & masks.document([0, 0, 1, 1, 1])                packed sequences

Inside torch.compile, `~mask` and `mask & tensor` cannot be traced: make the mask outside, or write
`mask & masks.from_array(tensor)`. array-api-strict wants the mask on the left of an array.
"""

from sdpa_xp.masks.algebra import Mask
from sdpa_xp.masks.arrays import to_array
from sdpa_xp.masks.bands import causal, sliding_window
from sdpa_xp.masks.custom import from_array, from_function
from sdpa_xp.masks.documents import document
from sdpa_xp.masks.lengths import padding, prefix
from sdpa_xp.masks.patterns import chunked, dilated

__all__ = [
    "Mask",
    "causal",
    "chunked",
    "dilated",
    "document",
    "from_array",
    "from_function",
    "padding",
    "prefix",
    "sliding_window",
    "to_array",
]
