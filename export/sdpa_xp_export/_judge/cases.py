"""The cases that attention is judged by: a file of data, from which each case draws its arrays.

Another language can read the file, too: its first lines say how numbers follow from a seed.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from .._dtypes.dtype import numpy_dtype

Arrays = dict[str, Any]
finfo: Any = ml_dtypes.finfo
FILE = Path(__file__).with_name("cases.json")
SALTS = {
    name: n
    for n, name in enumerate(("query", "key", "value", "mask", "bias", "sinks", "cotangent", "rows"), start=1)
}
"""Each array of a case has numbers of its own."""


@dataclass(frozen=True, kw_only=True, eq=False)
class HardCase:
    """One call of attention: the shapes, how the arrays are drawn, and the options.

    The fields are those of an entry of the file, which describes them.
    """

    name: str
    rules: tuple[str, ...]
    why: str = ""
    dtypes: tuple[str, ...] = ("float32",)
    batch: tuple[int, ...] = (2,)
    heads: tuple[int, ...] = (2, 2)
    lengths: tuple[int, int] = (5, 7)
    widths: tuple[int, int] = (8, 8)
    shared: tuple[str, ...] = ()
    """The arrays that have one batch entry, for all of the others."""
    seed: int = 0
    draw: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    mask: Mapping[str, Any] | None = None
    bias: Mapping[str, Any] | None = None
    options: Mapping[str, Any] = field(default_factory=dict)
    outputs: tuple[str, ...] = ("output",)
    needs: tuple[str, ...] = ()
    """The questions that have to be answered as in the contract: a NaN that leaks may reach anything."""
    equal: bool = False
    """Whether many terms of a sum are equal: their roundings may all have one sign."""

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """The shapes of query, key and value; no heads for arrays with two axes."""
        (queries, keys), (width, of_value) = self.lengths, self.widths
        heads = [self.heads[:1], self.heads[-1:], self.heads[-1:]]
        ends = (queries, width), (keys, width), (keys, of_value)
        names = ("query", "key", "value")
        batches = [(1,) * len(self.batch) if name in self.shared else self.batch for name in names]
        return {n: (*b, *h, *end) for n, b, h, end in zip(names, batches, heads, ends, strict=True)}

    @property
    def pairs(self) -> tuple[int, ...]:
        """The shape of the scores."""
        return (*self.batch, *self.heads[:1], *self.lengths)

    @property
    def size(self) -> int:
        """The number of all elements, by which cases are ordered."""
        return sum(map(math.prod, self.shapes.values()))

    @property
    def is_plain(self) -> bool:
        """Whether only its lengths, its batch and its heads differ from those of other plain cases."""
        special = self.mask, self.bias, self.options, self.shared, self.outputs != ("output",)
        same = len(self.batch) == 1 and len({*self.heads}) == len({*self.widths}) == 1 and self.widths[0] == 8
        return not (any(special) or "set" in str(self.draw)) and same and math.prod(self.pairs) > 0

    def __str__(self) -> str:
        return self.name

    def with_axes(self, axes: int) -> HardCase:
        """Return the case with arrays of so many axes, if its batch and its heads are no part of it."""
        of_heads = any(word in self.described() for word in ("sinks", "transposed", "expanded"))
        if axes > 3 or len(self.batch) != 1 or len({*self.heads}) > 1 or (axes == 2 and of_heads):
            return self
        return replace(self, batch=(), heads=self.heads if axes == 3 else ())

    def described(self) -> str:
        """Return the shapes and what is not plain about the call, in a line."""
        shapes = ", ".join(f"{name} {shape}" for name, shape in self.shapes.items())
        parts = {name: dict(rule) for name, rule in self.draw.items()}
        parts |= {n: dict(x) for n in ("mask", "bias") if (x := getattr(self, n)) is not None} | dict(
            self.options
        )
        return "; ".join([shapes, *(f"{name}={part}" for name, part in parts.items())])

    def arrays(self, dtype: str) -> Arrays:
        """Return query, key, value, mask, bias and sinks, None for what the case lacks; and any cotangent."""
        drawn: Arrays = {name: self._drawn(name, shape, dtype) for name, shape in self.shapes.items()}
        drawn["mask"] = None if self.mask is None else self._mask(self.mask)
        drawn["bias"] = None if self.bias is None else self._bias(self.bias, dtype)
        sinks = self.options.get("sinks")
        drawn["sinks"] = None if sinks is None else np.asarray([float(x) for x in sinks], numpy_dtype(dtype))
        if "gradients" in self.outputs:
            drawn["cotangent"] = self._drawn("cotangent", (*self.pairs[:-1], self.widths[1]), dtype)
        return drawn

    def _drawn(self, name: str, shape: tuple[int, ...], dtype: str) -> NDArray[Any]:
        """Return the array of this name; see `draw` in the file for the rules."""
        rule = self.draw.get(name, {})
        x = normal(self.seed, SALTS[name], shape)
        if "uneven" in rule:  # rows of unlike sizes
            x *= np.exp(rule["uneven"] * normal(self.seed, SALTS["rows"], (*shape[:-1], 1)))
        x = np.abs(x) if rule.get("positive") else x
        x = x * rule.get("times", 1.0) + rule.get("plus", 0.0)
        if "ramp" in rule:
            steps = np.arange(1, x.shape[-2] + 1)[:: rule["ramp"]] / max(x.shape[-2], 1)
            x = x * steps[:, None]
        if "repeat" in rule:  # one token, many times
            x[..., : rule["repeat"], :] = x[..., :1, :]
        x = x.astype(numpy_dtype(dtype))
        for index, number in rule.get("set", ()):
            if _fits(index, shape):
                x[_index(index)] = float(number)
        return _in_memory(x, rule.get("memory", ""))

    def _mask(self, rule: Mapping[str, Any]) -> NDArray[np.bool_]:
        """Return the mask, True where a pair may attend, with the axes that the rule names."""
        queries, keys = np.arange(self.lengths[0])[:, None], np.arange(self.lengths[1])
        allowed = np.ones(self.pairs, bool)
        entry = np.empty((*self.batch, *[1] * (len(self.pairs) - len(self.batch))))
        for name, value in rule.items():
            match name:
                case "random":
                    allowed &= uniform(self.seed, SALTS["mask"], self.pairs) < value
                case "lengths":  # of each batch entry
                    allowed &= keys < np.resize(value, entry.shape)
                case "first":  # padding on the left
                    allowed &= keys >= np.resize(value, entry.shape)
                case "window":
                    allowed &= (keys >= queries - value[0]) & (keys <= queries + value[1])
                case "documents":
                    allowed &= queries // value == keys // value
                case "only":  # the keys that may attend
                    allowed &= np.isin(keys, value)
                case "not":
                    allowed &= ~np.isin(keys, value)
                case "empty":  # queries without a key
                    allowed &= ~np.isin(queries, value)
                case "axes" | "memory":
                    pass
                case _:
                    raise ValueError(f"a mask of {FILE.name} has no rule {name!r}")
        return _in_memory(_along(allowed, rule.get("axes", "BHLS")), rule.get("memory", ""))

    def _bias(self, rule: Mapping[str, Any], dtype: str) -> NDArray[Any]:
        """Return the bias with the axes that the rule names, and `is` where `where` is False."""
        x = normal(self.seed, SALTS["bias"], self.pairs) * rule.get("times", 0.0) + rule.get("plus", 0.0)
        limits = {"-inf": -math.inf, "inf": math.inf, "min": float(finfo(numpy_dtype(dtype)).min)}
        if "where" in rule:
            chosen = ~np.broadcast_to(self._mask(rule["where"]), self.pairs)
            x = np.where(chosen, limits.get(rule["is"], rule["is"]), x)
        x = _along(x, rule.get("axes", "BHLS"))
        return _in_memory(x.astype(numpy_dtype(dtype)), rule.get("memory", ""))


def uniform(seed: int, salt: int, shape: Sequence[int]) -> NDArray[np.float64]:
    """Return numbers in [0, 1): splitmix64 (Steele, Lea and Flood, OOPSLA 2014) of each element's index."""
    with np.errstate(over="ignore"):  # modulo 2**64
        z = np.arange(1, math.prod(shape) + 1, dtype=np.uint64) + np.uint64((seed << 40) + (salt << 32))
        z *= np.uint64(0x9E3779B97F4A7C15)
        z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    z ^= z >> np.uint64(31)
    return np.asarray((z >> np.uint64(11)) * 2.0**-53, np.float64).reshape(shape)


def normal(seed: int, salt: int, shape: Sequence[int]) -> NDArray[np.float64]:
    """Return almost normal numbers: the sum of four uniform ones, with a mean of 0 and a variance of 1."""
    return np.asarray((uniform(seed, salt, (*shape, 4)).sum(axis=-1) - 2.0) * math.sqrt(3.0))


@cache
def data() -> dict[str, Any]:
    """Return the file."""
    contents: dict[str, Any] = json.loads(FILE.read_text("utf-8"))
    return contents


@cache
def questions() -> dict[str, HardCase]:
    """Return the case of each question, by the words of the question."""
    entries = [*data()["questions"], data()["dtype"]]
    return {
        x["question"]: read_case(x["case"] | {"name": x["question"], "rules": [x["rule"]]}) for x in entries
    }


def read_case(entry: Mapping[str, Any]) -> HardCase:
    """Return a case from an entry of the file."""
    values: dict[str, Any] = {name: tuple(x) if isinstance(x, list) else x for name, x in entry.items()}
    return HardCase(**values)


@cache
def all_cases() -> tuple[HardCase, ...]:
    """Return the cases of the file, in its order."""
    return tuple(map(read_case, data()["cases"]))


def _along(x: NDArray[Any], axes: str) -> NDArray[Any]:
    """Return the first elements along axes that are not named: by "BHLS", "B11S", "LS" or "S"."""
    named = axes[-x.ndim :]
    index = (slice(1) if axis == "1" else slice(None) for axis in named)
    return x[(*[0] * (x.ndim - len(named)), *index)]


def _in_memory(x: NDArray[Any], layout: str) -> NDArray[Any]:
    """Return the same numbers as a view: with gaps, other axes first, backwards; or the first, repeated."""
    if layout == "backwards":
        return np.ascontiguousarray(x[..., ::-1])[..., ::-1]
    if layout == "repeated":
        return np.lib.stride_tricks.as_strided(x, x.shape, (0,) * x.ndim)
    if layout == "expanded":
        return np.lib.stride_tricks.as_strided(x, x.shape, (*x.strides[:-3], 0, *x.strides[-2:]))
    if layout == "columns":
        return np.swapaxes(np.ascontiguousarray(np.swapaxes(x, -1, -2)), -1, -2)
    if layout == "transposed":
        return np.swapaxes(np.ascontiguousarray(np.swapaxes(x, -2, -3)), -2, -3)
    if not layout:
        return x
    wide = np.full((*x.shape[:-1], 2 * x.shape[-1]), 7, x.dtype)
    view = wide[..., ::2] if layout == "gaps" else wide[..., x.shape[-1] :]
    view[...] = x
    return view


def _index(index: Sequence[Any]) -> tuple[Any, ...]:
    """Return an index of NumPy: a list is a range, null is the whole axis; the last axes are named."""
    parts = (slice(None) if i is None else slice(*i) if isinstance(i, list) else i for i in index)
    return (..., *parts)


def _fits(index: Sequence[Any], shape: tuple[int, ...]) -> bool:
    """Return whether an array of this shape has the element: a smaller case may not."""
    named = zip(index, shape[len(shape) - len(index) :], strict=True)
    return all(-n <= i < n for i, n in named if isinstance(i, int))
