"""Controls of the playground that follow from its models: the sentences, and the masks as pictures."""

from __future__ import annotations

import json
from base64 import b64encode
from html import escape
from pathlib import Path

import minilm
import numpy as np
from numpy.typing import NDArray
from playground import MASKS
from playground_encoder import PROJECTIONS, SENTENCES, Layer, Sentence, parameters, vectors

from sdpa_xp import attention_weights, masks
from sdpa_xp.masks import Mask

SHOWN = 8
"""Queries and keys of a mask's picture."""
MOST = 2**16 - 1
"""The weight 1, where the page has its first maps within."""
NAMES = {
    "none": "none",
    "causal": "causal",
    "window": "window, two before",
    "band": "window, two either side",
    "prefix": "causal, prefix of three",
    "chunks": "causal, chunks of four",
    "future": "only what follows",
}
"""What the page calls the masks."""


def form() -> str:
    """HTML of the playground."""
    page = Path(__file__).with_suffix(".html").read_text()
    return page.replace("{texts}", texts()).replace("{masks}", pictures())


def texts() -> str:
    """HTML of the choice of a text. A sentence has its tokens with it, and what is seen in it."""
    first, *others = SENTENCES
    sentences = _option(first, weights=opening(first)) + "".join(_option(sentence) for sentence in others)
    return (
        '<label class="playground-wide">Text<select name="text">'
        f'<optgroup label="A sentence in a real encoder">{sentences}</optgroup>'
        '<optgroup label="Your own">'
        '<option value="typed" data-head="1">Write your own sentence, in the real encoder</option>'
        '<option value="own">Write your own words, as random vectors</option></optgroup></select></label>'
    )


def opening(sentence: Sentence) -> str:
    """The maps of all heads, as base64 of 16-bit shares of 1: the page shows them before it reads any file."""
    shares = np.round(weights(sentence) * MOST).astype("<u2")
    return b64encode(shares.tobytes()).decode()


def weights(sentence: Sentence) -> NDArray[np.float64]:
    """The maps of all heads without a mask, (heads, L, L)."""
    wide = Layer({name: array.astype(np.float64) for name, array in parameters().items()}, None, 0)
    query, key, _ = (wide.heads(vectors(sentence.text).astype(np.float64), name) for name in PROJECTIONS)
    return attention_weights(query, key)


def _option(sentence: Sentence, **more: str) -> str:
    data = {
        "tokens": json.dumps(minilm.words([sentence.text])[0]),
        "head": str(sentence.head),
        "row": str(sentence.row),
        "note": sentence.note,
        **more,
    }
    attributes = "".join(f' data-{name}="{escape(value, quote=True)}"' for name, value in data.items())
    return f'<option value="{sentence.name}"{attributes}>{escape(sentence.text)}</option>'


def pictures() -> str:
    """HTML of the choice of a mask: a radio button each, whose label is its picture and its name."""
    choices = "".join(
        f'<label><input type="radio" name="mask" value="{name}"{" checked" * (name == "none")}>'
        f"{picture(mask)}<span>{NAMES[name]}</span></label>"
        for name, mask in MASKS.items()
    )
    return f'<fieldset class="playground-choice playground-wide"><legend>Mask</legend>{choices}</fieldset>'


def picture(mask: Mask | None) -> str:
    """A mask as an SVG: a row a query, a column a key, and a square for each pair that may attend."""
    shape = (SHOWN, SHOWN)
    allowed = np.ones(shape, bool) if mask is None else np.asarray(masks.to_array(mask, shape))
    squares = "".join(f"M{j} {i}h.9v.9h-.9z" for i, j in np.argwhere(allowed))
    return f'<svg viewBox="-.1 -.1 {SHOWN + 0.1} {SHOWN + 0.1}" aria-hidden="true"><path d="{squares}"/></svg>'
