"""Each message of a layer, by what brings it up."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from sdpa_xp import KVCache
from sdpa_xp.layers import Linear, MultiHeadAttention, SingleHeadAttention

F = np.float32
W, B = np.ones((8, 8), F), np.ones(8, F)
MAPS = {"query": Linear(W), "key": Linear(W), "value": Linear(W)}
X = np.ones((2, 5, 8), F)
SELF = MultiHeadAttention(**MAPS, num_heads=4)
REFUSED: dict[str, tuple[Callable[[], Any], type[Exception], str]] = {
    "list": (lambda: Linear([[1.0]]), TypeError, "^Linear: `weight` must be a plain array"),
    "integers": (lambda: Linear(np.ones((2, 2), int)), TypeError, "`weight` must be one of float16"),
    "two dtypes": (lambda: Linear(W, B.astype(float)), TypeError, "`weight` and `bias` must have one dtype"),
    "three axes": (lambda: Linear(W[None]), ValueError, "`weight` must have 2 axes"),
    "long bias": (lambda: Linear(W, B[:3]), ValueError, r"`bias` must have a number for each row.*\(3,\)"),
    "widths": (lambda: MultiHeadAttention(32, 32, 32, num_heads=4), TypeError, r"^MultiHeadAttention: `query` must be a Linear; got query=32\. To create it from widths, call MultiHeadAttention\.init\(rng, query_dim, num_heads=\.\.\.\)\.$"),
    "widths of one head": (lambda: SingleHeadAttention(32, 8, 8), TypeError, r"got query=32\. .* SingleHeadAttention\.init\(rng, embedding_dim, attention_dim\)\.$"),
    "a width of out": (lambda: MultiHeadAttention(**MAPS, out=32, num_heads=4), TypeError, r"`out` must be a Linear; got out=32\. To create it from widths, call MultiHeadAttention\.init"),
    "weights": (lambda: MultiHeadAttention(W, W, W, num_heads=4), TypeError, r"got query=numpy\.ndarray\. Convert a weight \(out, in\): Linear\(query\)\.$"),
    "widths of a map": (lambda: Linear(32, 16), TypeError, r"^Linear: `weight` must be an array \(out, in\); got weight=32\. To create it from widths, call Linear\.init\(rng, in_dim, out_dim\)\.$"),
    "a width instead of a generator": (lambda: MultiHeadAttention.init(32, 32, num_heads=4), TypeError, r"got rng=32\. Pass it first: MultiHeadAttention\.init\(numpy\.random\.default_rng\(0\), "),
    "a cache with heads behind the length": (lambda: SELF.attend(X, KVCache(*SELF.project_key_value(X), layout="...LHE")), ValueError, r"^MultiHeadAttention.attend: `cache.layout` must be .*\.\.\.HLE.*; got cache.layout='...LHE'"),
    "no head": (lambda: MultiHeadAttention(**MAPS, num_heads=0), ValueError, "`num_heads` must be at least 1"),
    "groups": (lambda: MultiHeadAttention(**MAPS, num_heads=4, num_kv_heads=3), ValueError, "`num_heads` must be a multiple of `num_kv_heads`"),
    "out": (lambda: MultiHeadAttention(**MAPS, out=Linear(W[:, :4]), num_heads=4), ValueError, "the input width of `out` must be .* of `value` together; got input width of out=4, width of heads=8"),
    "scale": (lambda: MultiHeadAttention(**MAPS, num_heads=4, scale=B[:3]), ValueError, r"`scale` must be a number, or an array with one number for each head; got scale.shape=\(3,\)"),
    "scale of inf": (lambda: MultiHeadAttention(**MAPS, num_heads=4, scale=math.inf), ValueError, "`scale` must be finite"),
    "temperature": (lambda: SingleHeadAttention(**MAPS, temperature="hot"), TypeError, "`temperature` must be a real number"),
    "maps of two dtypes": (lambda: SingleHeadAttention(**MAPS | {"key": Linear(W.astype(float))}), TypeError, "^SingleHeadAttention: .*must have one dtype"),
    "width": (lambda: SELF(X[..., :7]), ValueError, r"^MultiHeadAttention: `query` must have the width \(axis -1\) that .*query.shape=\(2, 5, 7\), width=8"),
    "one axis": (lambda: SELF(B), ValueError, "`query` must have at least 2 axes"),
    "keyword": (lambda: SELF(X, causal=True), TypeError, "causal"),
    "width of x": (lambda: SELF.query(B[:3]), ValueError, "^Linear: `x` must have the width"),
    "name": (lambda: SELF.with_parameters({"query": W}), ValueError, "^MultiHeadAttention.with_parameters: `parameters` must have keys among query.weight.*got key='query'"),
    "mapping": (lambda: MultiHeadAttention.from_mapping({"a.query.weight": W}, num_heads=2), ValueError, "`mapping` must have 'query.weight'; got names=a.query.weight. `prefix` is"),
    "one matrix for three": (lambda: MultiHeadAttention.from_mapping({"qkv.weight": W}, num_heads=2), ValueError, "If one matrix has query, key and value, split it first"),
    "another module": (lambda: MultiHeadAttention.from_torch(SELF), TypeError, "`module` must be a torch.nn.MultiheadAttention; got module=sdpa_xp.layers"),
    "a list for a mapping": (lambda: Linear.from_mapping([X]), TypeError, "Linear.from_mapping: `mapping` must be a mapping of names; got mapping=a list of length 1"),
    "a number for a prefix": (lambda: Linear.from_mapping({}, 3), TypeError, "Linear.from_mapping: `prefix` must be a string; got prefix=3"),
    "like": (lambda: SELF.to("numpy"), TypeError, "^MultiHeadAttention.to: `like` must be a library of arrays"),
    "uneven heads": (lambda: MultiHeadAttention.init(np.random.default_rng(0), 8, num_heads=3), ValueError, "`query_dim` must be a multiple of `num_heads`.*`head_dim` sets"),
    "rng of a map": (lambda: Linear.init(3, 8, 4), TypeError, "^Linear.init: `rng` must be a numpy.random"),
    "None as a width of a map": (lambda: Linear.init(np.random.default_rng(0), 3, None), TypeError, r"^Linear.init: `out_dim` must be an integer; got out_dim=None"),
    "None as the first width": (lambda: MultiHeadAttention.init(np.random.default_rng(0), None, num_heads=2), TypeError, r"^MultiHeadAttention.init: `query_dim` must be an integer"),
    "two wrong widths, in the order of the signature": (lambda: SingleHeadAttention.init(np.random.default_rng(0), 4, 0, key_dim=0), ValueError, "^SingleHeadAttention.init: `attention_dim` must be at least 1"),
    "no width of a map": (lambda: Linear.init(np.random.default_rng(0), 8, 0), ValueError, "^Linear.init: `out_dim` must be at least 1"),
    "no width": (lambda: SingleHeadAttention.init(np.random.default_rng(0), 8, 0), ValueError, "^SingleHeadAttention.init: `attention_dim` must be at least 1"),
}  # fmt: skip


@pytest.mark.parametrize(("call", "error", "words"), REFUSED.values(), ids=REFUSED)
def test_refusals(call: Callable[[], Any], error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        call()


def test_only_what_a_layer_needs_is_read_of_a_mapping() -> None:
    """A file may read an array when it is asked for, and hold what no layer has."""

    class Recorded(dict[Any, Any]):
        def items(self) -> Any:
            raise AssertionError("all entries are read")

    mapping = Recorded({f"{role}.weight": W for role in ("query", "key", "value")} | {3: "no name"})
    assert MultiHeadAttention.from_mapping(mapping, num_heads=4).num_heads == 4
