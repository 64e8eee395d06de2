"""A call of each public mask, for five queries and five keys: a new mask needs a line here."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from sdpa_xp import masks
from sdpa_xp.masks import Mask


def is_earlier(batch: Any, head: Any, query: Any, key: Any) -> Any:
    return key <= query + 0 * batch + 0 * head


CALLS: dict[Callable[..., Mask], dict[str, Any]] = {
    masks.blocks: {"table": [[True, False], [True, True]], "size": 3},
    masks.causal: {},
    masks.chunked: {"size": 2},
    masks.dilated: {"step": 2},
    masks.document: {"query_ids": [0, 0, 1, 1, 1], "key_ids": [0] * 5},
    masks.from_array: {"boolean": np.tril(np.ones((5, 5), bool))},
    masks.from_function: {"mask_mod": is_earlier},
    masks.keys: {"indices": np.asarray([[0, -1], [1, 0], [2, 2], [-1, -1], [4, 0]])},
    masks.neighbourhood: {"shape": (2, 2), "window": 2, "causal": (True, False), "prefix_tokens": 1},
    masks.padding: {"key_lengths": [3, 5]},
    masks.prefix: {"length": 3},
    masks.sliding_window: {"left": 2, "right": 0},
    masks.tree: {"parents": [-1, 0, 0, 1, -1]},
}
