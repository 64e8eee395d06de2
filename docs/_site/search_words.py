"""Words by which people search for a place that does not contain them, or that other places use more often.

The index of the site gets three more fields, which mkdocs.yml weighs: `words` are those below, `name` is the
name of an object without its module or class, and `parts` are the parts of its path: KVCache is "kv" and
"cache" too. `search/queries.json` says which place a query has to find first.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

SDPA = "scaled_dot_product_attention"
WORDS = {
    "#install": "install installation setup pip quickstart",
    "explanation/empty-rows/": "nan",
    "explanation/how-it-works/": "flashattention",
    "how-to/add-a-backend/": "backend register registration dlpack",
    "how-to/backends/": "gpu cuda dtype bfloat16 float16 fp16 bf16 half",
    "how-to/deploy/": "deploy deployment iobinding io_binding",
    "how-to/deploy/#on-cuda": "onnxruntime-gpu",
    "how-to/export/": "export onnx",
    "how-to/export/#choose-the-runtime-not-the-form": "opset form",
    "how-to/export/#leave-lengths-open": "dynamic",
    "how-to/gradients/": "gradient gradients backward backprop autograd",
    "how-to/long-sequences/": "long oom",
    "how-to/masks/": "mask",
    "how-to/masks/#causal": "causal mask autoregressive triangular",
    "how-to/masks/#documents": "packing packed",
    "how-to/masks/#padding": "padding mask",
    "how-to/masks/#sliding-window": "sliding window swa local",
    "how-to/port/": "port migrate",
    "how-to/port/#flash-attention": "flash flash_attn",
    "how-to/port/#jaxnn": "jax flax",
    "how-to/port/#torch": "torch pytorch",
    "how-to/verify/": "verify",
    "how-to/verify/#if-a-model-disagrees": "verification troubleshoot troubleshooting disagrees fails",
    "how-to/verify/#where-each-node-ran": "fallback",
    "reference/attention/#sdpa_xp.attention_scores": "scores",
    "reference/attention/#sdpa_xp.attention_weights": "weights",
    "reference/attention/#dropout": "dropout dropout_p",
    "reference/attention/#grouped-query-attention": "gqa mqa grouped enable_gqa",
    "reference/attention/#sdpa_xp.ring_attention": "ring",
    f"reference/attention/#sdpa_xp.{SDPA}": f"{SDPA} sdpa softcap sinks",
    "reference/benchmarks/": "benchmark speed performance",
    "reference/biases/#sdpa_xp.biases.alibi": "alibi",
    "reference/biases/#sdpa_xp.biases.relative": "t5",
    "reference/caches/": "kv cache caching",
    "reference/caches/#sdpa_xp.PagedKVCache": "paged pagedattention",
    "reference/caches/#sdpa_xp.varlen_attention": "varlen ragged jagged cu_seqlens",
    "reference/layers/": "layer layers",
    "reference/layers/#sdpa_xp.layers.MultiHeadAttention": "mha multi multihead multiheadattention",
    "reference/masks/": "masks",
    "reference/plot/": "plot picture savefig matplotlib",
    "reference/positional/": "position encoding",
    "reference/positional/#sdpa_xp.positional.Rotary": "rope rotary",
    "tutorials/": "started beginner tutorial",
    "tutorials/first-attention-map/": "attention map heatmap visualize visualise self cross",
    "tutorials/formula-to-layer/#heads": "head heads",
    "tutorials/formula-to-layer/#the-formula": "formula sqrt sqrt(d_k) divide scaling query key value",
    "tutorials/train-in-numpy/": "train training",
}
"""By the address of a page or a section, in lower case. Each word outweighs any title."""

STOP = {"a", "from", "is", "of", "to"}
"""Parts of names that are words of a question."""
NAME = re.compile(r"#(?:sdpa_xp\.)?(?P<path>(?!.*\b_[a-z])\w+(?:\.\w+)*)$")
CAMEL = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+|\d+")


def write(site: Path) -> None:
    """Add the fields to the index of a built site, and the full name of each object as its title."""
    path = site / "search" / "search_index.json"
    index = json.loads(path.read_text())
    missing = WORDS.keys() - {entry["location"] for entry in index["docs"]}
    if missing:
        raise ValueError(f"search_words.py names places that the site does not have: {sorted(missing)}")
    index["docs"] = [entry | added(entry) for entry in index["docs"]]
    path.write_text(json.dumps(index, separators=(",", ":")))


def added(entry: dict[str, Any]) -> dict[str, str]:
    """Return the fields that an entry of the index gets."""
    fields = {}
    name = NAME.search(entry["location"]) if "#sdpa_xp" in entry["location"] else None
    if name:
        names = name["path"].split(".")
        pieces = [piece for word in names for piece in (word, *CAMEL.findall(word))]
        parts = dict.fromkeys(piece for piece in map(str.lower, pieces) if piece not in STOP)
        # A query's word finds each name that begins with it, and "is" in "what is a mask" means no name.
        known = "" if names[-1].startswith("is_") else names[-1]
        fields = {"title": name["path"], "name": known, "parts": " ".join(parts)}
    if entry["location"] in WORDS:
        fields["words"] = WORDS[entry["location"]]
    return fields
