"""The arguments of a call: refused with a message, or turned into what the implementation computes with."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, NamedTuple, TypeVar

from sdpa_xp import checks
from sdpa_xp._libraries import (
    accumulation_dtype,
    array_signature,
    astype_if_needed,
    device_of,
    execution_kind,
    is_array,
    library_of,
)
from sdpa_xp._libraries.protocols import Array, Dtype, Namespace, Shape
from sdpa_xp.biases.algebra import Bias, as_bias
from sdpa_xp.biases.algebra import FromArray as BiasFromArray
from sdpa_xp.dropout import Dropout
from sdpa_xp.environment import asked_threads
from sdpa_xp.generators import Undrawn
from sdpa_xp.masks.algebra import AllOf, Mask, Pattern, as_mask
from sdpa_xp.masks.bands import Causal
from sdpa_xp.pairs import Pairs
from sdpa_xp.scores import Scores
from sdpa_xp.sources import Source, Whole, swapped

T = TypeVar("T")
PLAIN = frozenset({type(None), bool, int, float, str})
"""Types whose values are told apart by `==` once the types are."""
MOST_PASSED = 1024
_PASSED: dict[object, Call] = {}


class Rules(NamedTuple):
    """What a caller passed besides query, key and value, as it came."""

    attn_mask: object = None
    bias: object = None
    is_causal: object = False
    scale: object = None
    softcap: object = None
    sinks: object = None
    dropout_p: object = 0.0
    rng: object = None
    softmax_dtype: object = None
    layout: object = checks.HLE
    implementation: object = None


class Part(NamedTuple):
    """What is computed at once: all of a call, or one entry of its batch."""

    pairs: Pairs
    query: Array
    """(..., Hq, L, E)."""
    key: Source


class Call(NamedTuple):
    """A call that has passed every check but those which ask what its pairs are."""

    pairs: Pairs
    arrays: Mapping[str, Array]
    """Those of the inputs, (..., heads, length, width)."""
    as_given: bool
    """Whether they have these axes as they come."""
    sizes: checks.Sizes
    masks: tuple[Mask, ...]
    biases: tuple[Bias, ...]
    scale: float | Array | None
    softcap: float | None
    sinks: Array | None
    dropout_p: float
    rng: object
    layout: str
    implementation: str | None
    dtype: Dtype
    """Of the result."""
    found: dict[str, Any]
    """What was found out of calls that are alike but for the numbers in their arrays."""

    @property
    def whole(self) -> Part:
        """All of the call."""
        return Part(self.pairs, self.arrays["query"], Whole(self.arrays["key"]))

    def quiet(self) -> AbstractContextManager[object]:
        """Compute without warnings and autocast; if the call fails, its generator has the state that it had."""
        quiet = self.once("quiet", lambda: library_of(self.arrays["query"]).quiet(self.arrays["query"]))()
        return Undrawn(self.rng, library_of(self.arrays["query"]), quiet) if self.dropout_p else quiet

    def once(self, name: str, find: Callable[[], T]) -> T:
        """What `find` returns, which follows from all of the call but the numbers in its arrays."""
        if name not in self.found:
            self.found[name] = find()
        found: T = self.found[name]
        return found

    def bind(self, parts: Sequence[Part]) -> list[Scores]:
        """The scores of each part; nothing is drawn from `rng` before all of them fit."""
        bound = [self.without_dropout(part) for part in parts]
        if not self.dropout_p:
            return bound
        query = self.arrays["query"]
        dropout = Dropout(self.dropout_p, library_of(query).random_words(self.rng, 4, query))
        return [scores._replace(dropout=dropout) for scores in bound]

    def without_dropout(self, part: Part) -> Scores:
        """The scores of a part, for what asks nothing of `rng`."""
        pairs = part.pairs
        return Scores(
            pairs=pairs,
            query=part.query,
            key=part.key,
            mask=self.once("mask", lambda: self._mask(pairs)) if pairs is self.pairs else self._mask(pairs),
            biases=tuple([term for bias in self.biases for term in bias.bind(pairs)]),
            scale=self._scale(pairs),
            softcap=self.softcap,
            sinks=self._sinks(pairs),
        )

    def _mask(self, pairs: Pairs) -> Pattern:
        patterns = tuple(mask.bind(pairs) for mask in self.masks)
        return patterns[0] if len(patterns) == 1 else AllOf(patterns)

    def _scale(self, pairs: Pairs) -> float | Array:
        if self.scale is None or isinstance(self.scale, float):
            return 1.0 / math.sqrt(self.sizes.width) if self.scale is None else self.scale
        one_a_row = (*pairs.shape[:-1], 1)
        checks.broadcasts(pairs.function, "scale", self.scale.shape, one_a_row, checks.ONE_A_ROW)
        return pairs.cut(self.scale, 3)

    def _sinks(self, pairs: Pairs) -> Array | None:
        if self.sinks is None:
            return None
        checks.broadcasts(pairs.function, "sinks", self.sinks.shape, pairs.with_heads, "(..., Hq)")
        sinks = pairs.xp.astype(pairs.cut(self.sinks, 1), pairs.dtype, copy=False)
        return pairs.xp.reshape(sinks, (*sinks.shape, 1, 1))

    def result(self, output: Array) -> Array:
        """An output (..., Hq, L, Ev) in the caller's dtype and layout; 2-D inputs get no head axis."""
        output = astype_if_needed(self.pairs.xp, output, self.dtype)
        return output[0, ...] if self.sizes.flat else swapped(self.pairs.xp, output, self.layout)

    def without_heads(self, computed: Array) -> Array:
        """`computed`, (..., Hq, L) or (..., Hq, L, S), as the caller is to get it."""
        return computed[0, ...] if self.sizes.flat else computed


def check(
    function: str,
    inputs: Mapping[str, Any],
    rules: Rules,
    *,
    cached: tuple[Shape, Shape] | bool = False,
    kernels: bool = False,
) -> Call:
    """Refuse what does not fit; a call that is alike one that has passed is not looked at again.

    `inputs` are query and key, and value where the call has one. With `cached` the queries are the last of
    the tokens; it is what shapes to take keys and values for, where their arrays are a pool of blocks.
    With `kernels` vendors have some for the function.
    """
    signature = _signature(function, inputs, rules, cached)
    passed = None if signature is None else _PASSED.get(signature)
    if passed is not None:
        as_given = passed.as_given
        return passed._replace(arrays=inputs if as_given else _laid_out(passed.pairs.xp, inputs, passed.layout))
    call = _checked(function, inputs, rules, cached, kernels)
    if signature is not None:
        if len(_PASSED) >= MOST_PASSED:
            _PASSED.clear()
        _PASSED[signature] = call._replace(arrays={})
    return call


def _signature(function: str, inputs: Mapping[str, Any], rules: Rules, cached: object) -> object:
    """All that the checks look at; None where that cannot be looked up, as of a mask."""
    types = tuple(map(type, rules))
    if not PLAIN.issuperset(types):
        return None
    arrays = tuple(map(array_signature, inputs.values()))
    return None if None in arrays else (function, cached, types, rules, arrays)


def _checked(
    function: str, inputs: Mapping[str, object], rules: Rules, cached: tuple[Shape, Shape] | bool, kernels: bool
) -> Call:
    implementation = checks.implementation(function, rules.implementation, kernels=kernels)
    checks.named(function, "layout", rules.layout, checks.LAYOUTS)
    layout = str(rules.layout)
    xp, arrays = checks.one_library(function, {**inputs, **dict(arrays_of(rules))})
    tensors = {name: arrays[name] for name in inputs}
    for name, array in tensors.items():
        checks.floating(function, name, array)
    checks.one_dtype(function, tensors)
    checks.one_device(function, arrays)
    query = tensors["query"]
    own = [array.shape for name, array in tensors.items() if name != "query"]
    seen = cached if isinstance(cached, tuple) else own
    sizes = checks.shapes(function, query.shape, *seen, layout=layout)
    if cached and checks.flag(function, "is_causal", rules.is_causal):
        checks.appended(function, sizes.queries, sizes.keys)
    device = device_of(query)
    held = accumulation_dtype(xp, query.dtype)
    dtype = checks.softmax_dtype(function, rules.softmax_dtype, held, query)
    pairs = Pairs(
        function=function,
        library=library_of(query),
        xp=xp,
        device=device,
        dtype=dtype,
        input_dtype=query.dtype,
        execution_kind=execution_kind(arrays.values()),
        batch=sizes.batch,
        heads=sizes.query_heads,
        queries=sizes.queries,
        keys=sizes.keys,
        flat=sizes.flat,
        position=sizes.keys - sizes.queries if cached else 0,
    )
    if pairs.execution_kind == "blas_threaded":
        asked_threads()  # a wrong value is refused by small calls too, which need no threads
    masks, biases = _masks_and_biases(function, rules, arrays)
    for name in ("scale", "sinks"):
        if name in arrays and arrays[name].ndim == 0:  # a number that the library holds, of any floating dtype
            checks.floating(function, name, arrays[name])
        elif name in arrays:
            checks.added_dtype(function, name, arrays[name], query.dtype, dtype)
    dropout_p = checks.probability(function, "dropout_p", rules.dropout_p)
    checks.rng(function, rules.rng, query, needed=dropout_p > 0)
    return Call(
        pairs=pairs,
        arrays=_laid_out(xp, tensors, layout),
        as_given=layout == checks.HLE and all(array.ndim > 2 for array in tensors.values()),
        sizes=sizes,
        masks=masks,
        biases=biases,
        scale=arrays["scale"] if "scale" in arrays else checks.scale(function, rules.scale, dtype),
        softcap=checks.softcap(function, rules.softcap, dtype),
        sinks=arrays.get("sinks"),
        dropout_p=dropout_p,
        rng=rules.rng,
        layout=layout,
        implementation=implementation,
        dtype=query.dtype,
        found={},
    )


def arrays_of(rules: Rules) -> Iterator[tuple[str, object]]:
    """The arrays among the keywords, also those that masks and biases hold."""
    for name in ("attn_mask", "bias"):
        value = getattr(rules, name)
        if isinstance(value, Mask | Bias):
            count: dict[str, int] = {}
            for argument, array in value.arrays():
                count[argument] = count.get(argument, 0) + 1
                number = f" ({count[argument]})" if count[argument] > 1 else ""
                yield f"{name}.{argument}{number}", array
        elif value is not None:
            yield name, value
    if is_array(rules.scale):
        yield "scale", rules.scale
    if rules.sinks is not None:
        yield "sinks", rules.sinks


def _masks_and_biases(
    function: str, rules: Rules, arrays: Mapping[str, Array]
) -> tuple[tuple[Mask, ...], tuple[Bias, ...]]:
    """A boolean attn_mask masks; a floating one is a bias."""
    masks: list[Mask] = [Causal()] if checks.flag(function, "is_causal", rules.is_causal) else []
    biases: list[Bias] = []
    checks.mask_or_bias(function, "attn_mask", rules.attn_mask, Bias, "A bias is passed as `bias`.")
    checks.mask_or_bias(function, "bias", rules.bias, Mask, "A mask is passed as `attn_mask`.")
    if isinstance(rules.attn_mask, Mask):
        masks.append(rules.attn_mask)
    elif "attn_mask" in arrays and checks.mask_dtype(function, arrays["attn_mask"]):
        masks.append(as_mask(function, "attn_mask", rules.attn_mask))
    elif "attn_mask" in arrays:
        biases.append(BiasFromArray(arrays["attn_mask"], "attn_mask"))
    if rules.bias is not None:
        biases.append(as_bias(function, "bias", rules.bias))
    return tuple(masks), tuple(biases)


def _laid_out(xp: Namespace, inputs: Mapping[str, Any], layout: str) -> Mapping[str, Array]:
    """(..., heads, length, width); 2-D is one head."""
    return {
        name: xp.expand_dims(array, axis=0) if array.ndim == 2 else swapped(xp, array, layout)
        for name, array in inputs.items()
    }
