"""How values show themselves in a notebook: pictures of squares as SVG, and tables, as HTML.

A notebook calls `_repr_html_`. Nothing here needs matplotlib, and the colours suit a light page and a dark one.
"""

from sdpa_xp._display.samples import sampled_bias, sampled_mask
from sdpa_xp._display.squares import Squares, captioned
from sdpa_xp._display.tables import nested, table

__all__ = ["Squares", "captioned", "nested", "sampled_bias", "sampled_mask", "table"]
