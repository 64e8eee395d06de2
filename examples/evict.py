"""A cache of 40 tokens for a text of 100: it keeps the last tokens, and those with the largest sums of weights.

No one knows in advance which tokens matter, but the sums of the weights that each token has received so far
tell it (Zhang et al., "H2O", arXiv 2306.14048). `attention_statistics` returns them without an array of all
weights. The tokens that stay keep their positions, so the rotations of later queries are right.

Run it: python examples/evict.py
"""

from __future__ import annotations

from types import ModuleType
from typing import Any

import numpy as np

from sdpa_xp import KVCache, attention_statistics, masks, positional, scaled_dot_product_attention

HEADS, WIDTH, PROMPT, LENGTH, MOST, LAST = 2, 16, 60, 100, 40, 10
NEEDLES = [3, 31]  # tokens whose keys are like all queries


def to_numpy(array: Any) -> np.ndarray:
    return np.asarray(array)


def kept(sums: np.ndarray, most: int) -> list[int]:
    """Return the slots of the last tokens and of those with the largest sums, in their order."""
    older = len(sums) - LAST
    largest = np.argsort(-sums[:older], kind="stable")[: most - LAST]
    return [*sorted(largest.tolist()), *range(older, len(sums))]


def main(xp: ModuleType = np) -> None:
    """Decode with the small cache, and compare each step with all tokens, of which the evicted are masked."""
    rng = np.random.default_rng(0)
    query, key, value = (rng.standard_normal((HEADS, LENGTH, WIDTH), dtype=np.float32) for _ in range(3))
    query += 1.5
    key[:, NEEDLES] += 1.5
    rotary = positional.Rotary(WIDTH, base=1e6)

    prompt = slice(0, PROMPT)
    cache = KVCache(*(xp.asarray(x[:, prompt]) for x in (key, value)), rotary=rotary)
    positions = np.arange(PROMPT)  # of the tokens in the cache
    rotated = rotary.apply(xp.asarray(query[:, prompt]), 0)
    received = attention_statistics(rotated, cache.key, of="key_sums", is_causal=True).key_sums
    sums = to_numpy(received).sum(axis=0)  # over the heads

    worst = 0.0
    for step in range(PROMPT, LENGTH):
        slots = kept(sums, MOST - 1) if len(sums) >= MOST else [*range(len(sums))]
        cache, sums, positions = cache.take_tokens(slots), sums[slots], positions[slots]
        token = slice(step, step + 1)
        cache = cache.append(xp.asarray(key[:, token]), xp.asarray(value[:, token]))
        positions = np.append(positions, step)
        output = to_numpy(cache.attend(xp.asarray(query[:, token])))

        rotated = rotary.apply(xp.asarray(query[:, token]), step)
        received = attention_statistics(rotated, cache.key, of="key_sums").key_sums
        sums = np.append(sums, 0) + to_numpy(received).sum(axis=0)

        stays = np.isin(np.arange(step + 1), positions)
        expected = scaled_dot_product_attention(
            rotary.apply(query[:, token], step),
            rotary.apply(key[:, : step + 1], 0),
            value[:, : step + 1],
            masks.from_array(stays),
        )
        worst = max(worst, float(np.abs(output - expected).max()))

    print(f"Of a text of {LENGTH} tokens, the cache has kept {len(cache)}, which received the largest weights.")
    print(f"Its outputs equal those of a call that masks the other tokens: at most {worst:.0e} apart.")
    print(f"Tokens {NEEDLES}, whose keys are like all queries, are among those that stay.")
    assert len(cache) == MOST
    assert worst < 1e-5
    assert set(NEEDLES) <= set(positions.tolist())


if __name__ == "__main__":
    main()
