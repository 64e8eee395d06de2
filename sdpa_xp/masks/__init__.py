"""Masks: which query may attend to which key. They combine with `&`, `|` and `~`, also with boolean arrays.

Pass any of them as `attn_mask`, for any `L` queries and `S` keys. No L x S array is built, and fully masked
tiles are skipped. Lengths, offsets and ids are checked when a call uses the mask.

    masks.sliding_window(255, 0, offset="lower_right")  # the last queries of S keys; a cache needs no offset
    masks.causal() & masks.padding(key_lengths=[3, 7])  # a ragged batch
    masks.causal() | masks.prefix(10)  # a prefix LM
    masks.causal() & masks.document([0, 0, 1, 1, 1])  # packed sequences

With array-api-strict, put the mask on the left of an array.
"""

from typing import TYPE_CHECKING

from .._tiles.modifier import loaded
from .algebra import Mask
from .bands import causal, chunked, dilated, sliding_window

if TYPE_CHECKING:
    from .block_masks import blocks
    from .custom import from_array, from_function, to_array
    from .documents import document
    from .lengths import padding, prefix
    from .listed_keys import keys
    from .neighbourhoods import neighbourhood
    from .trees import tree

__all__ = [
    "Mask",
    "blocks",
    "causal",
    "chunked",
    "dilated",
    "document",
    "from_array",
    "from_function",
    "keys",
    "neighbourhood",
    "padding",
    "prefix",
    "sliding_window",
    "to_array",
    "tree",
]

_FILES = {
    "block_masks": "blocks",
    "custom": "from_array from_function to_array",
    "documents": "document",
    "lengths": "padding prefix",
    "listed_keys": "keys",
    "neighbourhoods": "neighbourhood",
    "trees": "tree",
}
"""The files that are loaded when one of their names is first used."""

if not TYPE_CHECKING:  # with this function, type checkers would accept every name

    def __getattr__(name: str) -> object:
        return loaded(__name__, name, _FILES)


def __dir__() -> list[str]:
    """Complete public names, not the files that define them."""
    return __all__
