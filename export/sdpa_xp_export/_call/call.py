"""One call of attention with specs instead of arrays: the call that an exported graph computes."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal, TypeAlias, cast, get_origin, get_type_hints

from sdpa_xp import biases, masks
from sdpa_xp._checks.arrays import HLE, LAYOUTS, Sizes
from sdpa_xp._checks.keywords import check_flag
from sdpa_xp.biases import Bias
from sdpa_xp.masks import Mask

from .._dtypes.dtype import FLOATING
from ..spec import TensorSpec, names_in
from . import arguments as checked
from .arguments import Arguments
from .operands import OUTPUTS, SUMS_OF_QUERIES, GraphOperand, Initializer, kind_of

Layout: TypeAlias = Literal["...HLE", "...LHE"]
"""Heads before the length, or after it."""
OutputName: TypeAlias = Literal["output", "lse", "weights", "scores", "row_max", "entropy", "key_sums"]
"""What a graph can return."""
WideDtype: TypeAlias = Literal["float32", "float64"]
"""The dtypes in which scores can be computed."""
FormName: TypeAlias = Literal["attention", "multi_head", "grouped_query", "tiled", "primitive"]
"""A form of the exported graph."""
FormChoice: TypeAlias = Literal["auto", FormName]
"""A form of the exported graph, or "auto": the exporter chooses one."""
OptionKind: TypeAlias = Literal[
    "spec", "array", "number or array", "modifier", "number", "flag", "word", "names"
]
"""What an option is where it is text; a "modifier" is a mask, a bias or an array."""


@dataclass(frozen=True, slots=True)
class Option:
    """An argument of a call: what checks it, and how files and the command write it."""

    kind: OptionKind | None
    """None if it is never written."""
    help: str = ""
    """What the command says about its flag."""
    check: Callable[[Arguments, str], Any] | None = None
    """Return what the call holds of the argument of that name. None for the check of its kind."""
    default: object = None
    choices: tuple[str, ...] = ()
    """What a shell completes the flag with."""
    noun: str = ""
    """What a fused operator without the option lacks: "it has no sinks". "" if each form says what it takes."""


CHECKS: dict[OptionKind | None, Callable[[Arguments, str], Any]] = {
    "spec": lambda arguments, name: arguments.specs.get(name),
    "modifier": checked.mask_or_bias,
    "flag": lambda arguments, name: check_flag(arguments.function, name, arguments.passed[name]),
    None: checked.as_passed,
}
"""The checks of the kinds whose options are all checked alike."""
_QUERY = (
    "Required, here or in --config: dtype[length,...], such as float32[B,8,L,64]; a name is an open length."
)
_MASK = "An array, such as bool[B,1,1,S], or masks, such as causal() & padding(int64[B])."
_BIAS = "An array, such as float32[8,L,S], or biases, such as alibi(8)."
_SCALE = "A number, or dtype[length,...] for an input. Default: 1/sqrt(E)."
_SINKS = "One logit for each query head, dtype[Hq], such as float32[8]."
_SOFTMAX_DTYPE = "float64 computes float32 inputs more precisely."
_PAST_LENGTHS = "The number of tokens in a cache with free space, such as int64[B]."
_OUTPUTS = f"One or more of {', '.join(OUTPUTS)}, joined by commas. Default: output."
_PAST = Option("spec", "A cache, dtype[length,...], such as float32[B,2,P,64].")


@dataclass(frozen=True, slots=True, eq=False)  # equal numbers in two calls would be compared as arrays
class ExportCall:
    """A call that has passed every check, with the defaults filled in."""

    # This is the table of options: checks, the metadata of models, TOML files and the flags of the command are
    # read from it. An option is added here, to the signature of `export_attention`, and where it is computed.
    query: Annotated[TensorSpec, Option("spec", _QUERY)]
    key: Annotated[TensorSpec, Option("spec", "Default: the same as --query, which is self-attention.")]
    value: Annotated[TensorSpec, Option("spec", "Default: the same as --key.")]
    attn_mask: Annotated[Mask | GraphOperand | None, Option("modifier", _MASK)]
    bias: Annotated[Bias | GraphOperand | None, Option("modifier", _BIAS)]
    is_causal: Annotated[bool, Option("flag", "Query i attends to key j only if j <= i.", default=False)]
    scale: Annotated[float | GraphOperand, Option("number or array", _SCALE, checked.scale)]
    softcap: Annotated[
        float | None,
        Option("number", "A positive number; 0 turns it off.", checked.softcap, noun="a soft cap"),
    ]
    sinks: Annotated[GraphOperand | None, Option("array", _SINKS, checked.sinks, noun="sinks")]
    dropout_p: Annotated[float, Option(None, check=checked.no_dropout, default=0.0)]
    # Scores are in no half dtype.
    softmax_dtype: Annotated[
        WideDtype | None, Option("word", _SOFTMAX_DTYPE, checked.softmax_dtype, choices=FLOATING[2:])
    ]
    layout: Annotated[
        Layout, Option("word", "...HLE (default) or ...LHE.", checked.as_passed, default=HLE, choices=LAYOUTS)
    ]
    past_key: Annotated[TensorSpec | None, _PAST]
    past_value: Annotated[TensorSpec | None, _PAST]
    past_lengths: Annotated[TensorSpec | None, Option("spec", _PAST_LENGTHS)]
    outputs: Annotated[
        tuple[str, ...],
        Option("names", _OUTPUTS, checked.outputs, default=("output",), choices=OUTPUTS),
    ]
    cached: Annotated[bool, Option(None, check=checked.cached, default=False)]
    """Whether the queries are the last of more tokens: of `past_key` and `key`, or of `key` alone."""
    top_k: Annotated[int, Option(None, default=0)]
    """How many keys of each query `top_weights` and `top_indices` have."""
    block_size: Annotated[tuple[int, int] | None, Option(None)]
    """The queries and keys of a block in `block_sums`."""
    inputs: Mapping[str, TensorSpec]
    """The inputs of the graph, in their order."""
    initializers: Mapping[str, Initializer]
    sizes: Sizes = field(repr=False)
    """The lengths; the keys include those of the cache. A name may stand where the type says int."""

    @property
    def symbols(self) -> tuple[str, ...]:
        """The names of the lengths that are known only when the graph runs, in order of appearance."""
        return names_in(self.inputs.values())

    @property
    def length_axis(self) -> int:
        """The axis of a query, key or value that is its length, counted from the end."""
        return -2 if self.layout == HLE else -3

    @property
    def accumulation_dtype(self) -> WideDtype:
        """The dtype that scores and sums are held in."""
        return "float64" if "float64" in (self.query.dtype, self.softmax_dtype) else "float32"

    @property
    def sums_queries(self) -> bool:
        """Whether an output is a sum over the queries."""
        return not {*SUMS_OF_QUERIES}.isdisjoint(self.outputs)

    @property
    def masks(self) -> tuple[Mask, ...]:
        """The masks that must all allow a pair, `is_causal` among them; the lengths of a cache are not."""
        conjuncts: list[Mask] = [masks.causal()] if self.is_causal else []
        if isinstance(self.attn_mask, Mask):
            conjuncts += _parts(self.attn_mask, "&")
        elif self.attn_mask is not None and self.attn_mask.dtype == "bool":
            # An operand is an array to masks and biases, which look only at its dtype and shape.
            conjuncts.append(masks.from_array(cast(Any, self.attn_mask)))
        return tuple(conjuncts)

    @property
    def biases(self) -> tuple[Bias, ...]:
        """The biases that are added to the scores, in order; a floating mask is one."""
        terms: list[Bias | GraphOperand | None] = [self.bias]
        mask = self.attn_mask
        if mask is not None and not isinstance(mask, Mask) and mask.dtype != "bool":
            terms = [mask, self.bias]
        wrapped = (
            term if isinstance(term, Bias) else biases.from_array(cast(Any, term))
            for term in terms
            if term is not None
        )
        return tuple(addend for bias in wrapped for addend in _parts(bias, "+"))


# Annotations are text in this file: `get_type_hints` evaluates them, once for the process.
OPTIONS: dict[str, Option] = {
    name: hint.__metadata__[0]
    for name, hint in get_type_hints(ExportCall, include_extras=True).items()
    if get_origin(hint) is Annotated
}
"""Each argument of a call by its name, in the order of the public signature."""
OF_TRACED_CALLS = ("cached", "top_k", "block_size")
"""The arguments that the public signature has not: a traced call of the library passes them."""


def checked_call(
    function: str, query: object, key: object, value: object, *others: object, **options: object
) -> ExportCall:
    """Return the call, if the library takes it and a graph can state it.

    Args:
        function: The function that messages name.
        query: A TensorSpec, like key and value.
        key: Likewise.
        value: Likewise.
        others: Other arguments, as the caller passed them, in the order of `OPTIONS`.
        options: More of them, by their names.
    """
    arguments = query, key, value, *others
    named = dict(zip(OPTIONS, arguments, strict=False))
    assert len(named) == len(arguments), arguments
    assert not named.keys() & options.keys(), options
    options |= named
    assert options.keys() <= OPTIONS.keys(), options  # what a user may misspell is checked before
    checks = Arguments(function, {name: option.default for name, option in OPTIONS.items()} | options)
    values: dict[str, Any] = {
        name: (option.check or CHECKS[option.kind])(checks, name) for name, option in OPTIONS.items()
    }
    namer = checks.namer
    return ExportCall(**values, inputs=namer.inputs, initializers=namer.initializers, sizes=checks.sizes)


def _parts(value: Any, kind: str) -> list[Any]:
    """Return what an operator joined, also in the parts of a part; a value that it did not join is one part."""
    if kind_of(value) != kind:
        return [value]
    return [part for joined in value.parts for part in _parts(joined, kind)]
