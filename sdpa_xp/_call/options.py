"""The options of a call: as passed, checked, and bound to the grid of its scores."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import TYPE_CHECKING, Any, NamedTuple, TypedDict, TypeVar, cast, get_args

from .._checks import shown
from .._checks.arrays import Layout, check_floating
from .._checks.keywords import (
    Implementation,
    check_number,
    check_probability,
    check_softcap,
    explains_keywords,
    refuse_missing_kernel,
    refuse_other_kind,
)
from .._checks.score_arrays import (
    ONE_A_ROW,
    check_added_dtype,
    check_broadcasts,
    check_mask_dtype,
    warn_if_zeros_and_ones,
)
from .._libraries import FLOATING, array_signatures, dtype_name, is_array, trees
from .._libraries.base import Library
from .._libraries.protocols import AnyArray, Array, Device, Dtype, Namespace, Rng
from .._libraries.trees import leaves
from .._programs import BoundOptions
from .._tiles.grid import ScoreGrid
from .._tiles.modifier import PLAIN_TYPES, ScoreModifier, signature_of
from ..errors import ArgumentTypeError, ArgumentValueError
from ..masks import Causal
from ..masks.algebra import AllOf, And, Mask, as_mask

if TYPE_CHECKING:  # few calls have a bias
    from ..biases.algebra import Bias

F = TypeVar("F", bound=Callable[..., Any])
MAY_HOLD_ARRAYS = ("attn_mask", "bias", "scale", "sinks")
"""The options that are arrays or hold them. `rng` is not among them, though a generator's key may be one."""
IMPLEMENTATIONS: tuple[Implementation, ...] = get_args(Implementation)
CAUSAL = Causal()
"""The mask of `is_causal`: one object, since masks never change."""


class CallOptions(NamedTuple):
    """Keyword arguments as passed, not validated yet."""

    attn_mask: object = None
    bias: object = None
    is_causal: object = False
    scale: object = None
    softcap: object = None
    sinks: object = None
    dropout_p: object = 0.0
    rng: object = None
    softmax_dtype: object = None
    layout: object = "...HLE"
    implementation: object = None
    reproducible: object = False

    @classmethod
    def from_keywords(cls, attn_mask: object, keywords: Mapping[str, Any], **others: object) -> CallOptions:
        """Return the options of a public function that `takes_options`, with other defaults."""
        return cls(attn_mask, **{**others, **keywords})


class ScoreKeywords(TypedDict, total=False):
    """The keywords that scores are computed from, as for `scaled_dot_product_attention`."""

    bias: Bias | AnyArray | None
    is_causal: bool
    scale: float | AnyArray | None
    softcap: float | None
    softmax_dtype: Dtype | None
    implementation: Implementation | None


class StatisticsKeywords(ScoreKeywords, total=False):
    """The keywords that a softmax without dropout is computed from."""

    sinks: AnyArray | None


class DifferentiableKeywords(StatisticsKeywords, total=False):
    """The keywords of a call that is differentiated."""

    dropout_p: float
    rng: Rng | None


class Keywords(DifferentiableKeywords, total=False):
    """The keywords of a call besides its inputs, `attn_mask` and `layout`."""

    reproducible: bool


class WithLayout(TypedDict, total=False):
    """The keyword of calls whose arrays may have another order of axes."""

    layout: Layout


class ScoreOptions(ScoreKeywords, WithLayout, total=False):
    """The keywords of scores and weights."""


class StatisticsOptions(StatisticsKeywords, WithLayout, total=False):
    """The keywords of statistics."""


class DifferentiableOptions(DifferentiableKeywords, WithLayout, total=False):
    """The keywords of derivatives."""


class AttentionOptions(Keywords, WithLayout, total=False):
    """The keywords of attention."""


def takes_options(kind: type, **defaults: object) -> Callable[[F], F]:
    """Make a function of `**keywords: Unpack[kind]` show these in its signature, and refuse others."""
    values = CallOptions._field_defaults | defaults
    annotations = {name: getattr(hint, "__forward_arg__", hint) for name, hint in kind.__annotations__.items()}

    def decorated(function: F) -> F:
        signature = inspect.signature(function)
        *others, last = signature.parameters.values()
        options = [
            last.replace(name=name, kind=last.KEYWORD_ONLY, default=values[name], annotation=annotations[name])
            for name in sorted(annotations, key=CallOptions._fields.index)
        ]
        cast(Any, function).__signature__ = signature.replace(parameters=[*others, *options])
        return explains_keywords(function)

    return decorated


class DrawnSeed(NamedTuple):
    """A seed of dropout in place of the generator that it was drawn from, for a call that is computed again."""

    words: Array


class CheckedOptions(NamedTuple):
    """The options of a call that have passed every check which needs no grid."""

    masks: tuple[Mask, ...]
    biases: tuple[Bias, ...]
    scale: float | Array | None
    softcap: float | None
    sinks: Array | None
    dropout_p: float
    rng: object

    @property
    def extras(self) -> list[str]:
        """The names of the options in use that no kernel takes unless it says so."""
        in_use = {"sinks": self.sinks, "softcap": self.softcap, "rng": self.dropout_p or None}
        return [name for name, value in in_use.items() if value is not None]

    def bind(self, grid: ScoreGrid, width: int) -> BoundOptions:
        """Return the options checked against a grid and converted to its library, for queries of `width`."""
        patterns = tuple(mask.bind(grid) for mask in self.masks)
        # One mask is asked directly; a call without masks has an empty AllOf (see `has_mask`).
        mask = patterns[0] if len(patterns) == 1 else AllOf(patterns)
        terms = tuple([term for bias in self.biases for term in bias.bind(grid)])
        scale, sinks = 1.0 / math.sqrt(width) if self.scale is None else self.scale, self.sinks
        if not isinstance(scale, float):
            for shape in grid.caller_shapes():
                check_broadcasts(grid.function, "scale", scale.shape, (*shape[:-1], 1), ONE_A_ROW)
            scale = grid.in_all_axes(grid.slice_entries(scale, 3))
        if sinks is not None:
            sinks = grid.xp.astype(grid.check_heads_shape("sinks", sinks), grid.dtype, copy=False)
        return BoundOptions(mask, terms, scale, self.softcap, sinks)

    @contextmanager
    def keeping_rng(self, library: Library, context: AbstractContextManager[object]) -> Iterator[None]:
        """Add to a context that `rng` gets back its state after an error, so that the call can be made again.

        Keys have no state, and the state of some generators cannot be read: these are not restored.
        """
        state = None if isinstance(self.rng, DrawnSeed) else library.generators.state(self.rng)
        try:
            with context:
                yield
        except BaseException:
            if state is not None:
                library.generators.set_state(self.rng, state)
            raise

    def arrays(self) -> list[Array]:
        """Return all arrays that may have a gradient."""
        return [leaf.array for leaf in leaves(self._replace(rng=None))]

    def with_arrays(self, arrays: Sequence[Array]) -> CheckedOptions:
        """Return the options with other arrays, in the order of `arrays()`."""
        remaining = iter(arrays)
        return trees.with_arrays(self._replace(rng=None), lambda _: next(remaining))._replace(rng=self.rng)


def check_options(
    options: CallOptions, arrays: Mapping[str, Array], grid: ScoreGrid, *, is_causal: bool
) -> CheckedOptions:
    """Check the options, whose `arrays` belong to the library of the grid.

    Masks and biases check their own arguments when they are bound, since these depend on the grid.
    """
    function, dtype = grid.function, grid.dtype
    masks, biases = _masks_and_biases(function, options, arrays, is_causal=is_causal)
    for name in ("scale", "sinks"):
        if name in arrays and arrays[name].ndim == 0:  # an array of one number may have any floating dtype
            check_floating(function, name, arrays[name])
        elif name in arrays:
            check_added_dtype(function, name, arrays[name], arrays["query"].dtype, dtype)
    scale: float | Array | None = arrays.get("scale")
    if scale is None and options.scale is not None:
        scale = check_number(function, "scale", options.scale, dtype)
    dropout_p = check_probability(function, "dropout_p", options.dropout_p)
    _check_rng(function, options.rng, grid.library, needed=dropout_p > 0)
    softcap = check_softcap(function, options.softcap, dtype)
    return CheckedOptions(masks, biases, scale, softcap, arrays.get("sinks"), dropout_p, options.rng)


def check_implementation(function: str, value: object, *, kernels: bool) -> Implementation | None:
    """Check for None, "xp", or the name of a kernel if vendors have `kernels` for the function."""
    if value is None:
        return None
    if isinstance(value, str) and value in IMPLEMENTATIONS:
        if value != "xp" and not kernels:
            refuse_missing_kernel(function, value, "no vendor has a kernel for this function")
        return value
    names = ["None", *(repr(name) for name in IMPLEMENTATIONS if kernels or name == "xp")]
    rule = f"`implementation` must be {', '.join(names[:-1])} or {names[-1]}"
    raise ArgumentValueError(function, rule, {"implementation": repr(value)})


def check_softmax_dtype(
    function: str, value: object, default: Dtype, library: Library, xp: Namespace, device: Device
) -> Dtype:
    """Return the dtype of the scores: `default`, or the wider dtype that the caller chose."""
    if value is None:
        return default
    chosen, least = dtype_name(value), dtype_name(default)
    if chosen not in ("float32", "float64") or chosen < least:  # their names compare like their widths
        rule = "`softmax_dtype` must be None, or float32 or float64 and no narrower than the scores"
        hint = "A narrower one would only lose digits."
        raise ArgumentValueError(function, rule, {"softmax_dtype": chosen, "scores": least}, hint)
    if not library.has_dtype(function, xp, device, chosen):
        rule = f"`softmax_dtype` must be one that {xp.__name__} has on this device"
        raise ArgumentValueError(function, rule, {"softmax_dtype": chosen, "device": device})
    return getattr(xp, chosen)


def _check_rng(function: str, value: object, library: Library, *, needed: bool) -> None:
    """Check a generator of `library`. It may be None if none is `needed`."""
    generators = library.generators
    if value is None and needed:
        hint = "Pass one, so that you can reproduce the result."
        raise ArgumentValueError(
            function, f"`dropout_p` > 0 needs `rng`, a {generators.name}", {"rng": None}, hint
        )
    if value is None or isinstance(value, DrawnSeed):
        return
    if not generators.owns(value):
        raise ArgumentTypeError(function, f"`rng` must be a {generators.name}", {"rng": shown(value)})
    if compiler := generators.refusing_compiler():
        rule = f"`rng` cannot be used inside {compiler}"
        hint = f"{compiler} does not support {generators.name}: call this outside of the compiled function."
        raise ArgumentTypeError(function, rule, {"rng": generators.name}, hint)


def _masks_and_biases(
    function: str, options: CallOptions, arrays: Mapping[str, Array], *, is_causal: bool
) -> tuple[tuple[Mask, ...], tuple[Bias, ...]]:
    """Return the masks and the biases of a call: a floating array as `attn_mask` is a bias."""
    masks: list[Mask] = [CAUSAL] if is_causal else []
    attn_mask = options.attn_mask
    if isinstance(attn_mask, Mask):  # `&` says what several masks say
        masks += attn_mask.parts if isinstance(attn_mask, And) else (attn_mask,)
        attn_mask = None
    elif "attn_mask" in arrays and check_mask_dtype(function, arrays["attn_mask"]):
        masks.append(as_mask(function, "attn_mask", attn_mask))
        attn_mask = None
    if attn_mask is None and options.bias is None:
        return tuple(masks), ()
    from ..biases.algebra import ArrayBias, Bias, as_bias  # few calls have a bias

    refuse_other_kind(function, "attn_mask", attn_mask, Bias, "A bias is passed as `bias`.")
    refuse_other_kind(function, "bias", options.bias, Mask, "A mask is passed as `attn_mask`.")
    biases: list[Bias] = []
    if attn_mask is not None:
        warn_if_zeros_and_ones(function, arrays["attn_mask"])
        biases.append(ArrayBias(arrays["attn_mask"], "attn_mask"))
    if options.bias is not None:
        biases.append(as_bias(function, options.bias))
    return tuple(masks), tuple(biases)


def arrays_of(options: CallOptions) -> Iterator[tuple[str, object]]:
    """Return the arrays of the options by name, including arrays inside masks and biases ("bias.slopes")."""
    for name in MAY_HOLD_ARRAYS:
        option = getattr(options, name)
        if isinstance(option, ScoreModifier):
            yield from named_arrays(name, option)
        elif option is not None and (name != "scale" or is_array(option)):  # others are no numbers
            yield name, option


def named_arrays(name: str, option: ScoreModifier) -> Iterator[tuple[str, object]]:
    """Return the arrays inside the mask or bias `name`; two of one argument are "bias.slopes" and a (2)."""
    count: dict[str, int] = {}
    for leaf in leaves(option):
        count[leaf.argument] = count.get(leaf.argument, 0) + 1
        number = f" ({count[leaf.argument]})" if count[leaf.argument] > 1 else ""
        yield f"{name}.{leaf.argument}{number}", leaf.array


def floating_arrays(inputs: Mapping[str, Any], options: CallOptions) -> dict[str, Array]:
    """Return the arrays of a call that may be differentiated, by name: the inputs and floating options."""
    of_options = {name: cast(Array, array) for name, array in arrays_of(options)}
    return {**inputs, **{name: x for name, x in of_options.items() if dtype_name(x.dtype) in FLOATING}}


def with_arrays(options: CallOptions, change: Callable[[Any], Any]) -> CallOptions:
    """Return the options with each array replaced by `change(array)`, also inside masks and biases."""
    changed = {name: trees.with_arrays(getattr(options, name), change) for name in MAY_HOLD_ARRAYS}
    return options._replace(**changed)


def call_signature(function: str, inputs: Mapping[str, Any], options: CallOptions, cache: object) -> object:
    """Return a key of all that the checks look at, or None if the call is not to be cached.

    Types are part of the key, because True == 1.
    """
    # At first, as a trace has none: a compiler that sees a mask note its signature traces its next call again.
    arrays = array_signatures(inputs.values())
    if arrays is None:
        return None
    types = tuple(map(type, options))
    key: tuple[object, ...] = options
    if not PLAIN_TYPES.issuperset(types):
        attn_mask, bias, *others = options
        attn_mask, bias = signature_of(attn_mask), signature_of(bias)
        if attn_mask is None or bias is None or not PLAIN_TYPES.issuperset(types[2:]):
            return None
        key = attn_mask, bias, *others
    return function, cache, types, key, arrays
