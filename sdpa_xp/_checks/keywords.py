"""Keywords: flags, words, numbers and functions; and keywords that a function does not have."""

from __future__ import annotations

import functools
import inspect
import math
import numbers
from collections.abc import Callable, Iterable, Mapping, Sequence
from difflib import get_close_matches
from traceback import walk_tb
from types import FunctionType, MappingProxyType
from typing import Any, Literal, NoReturn, TypeAlias, TypeVar, cast

from .._libraries import LARGEST, dtype_name, is_array
from .._libraries.base import is_compiling
from .._libraries.protocols import Dtype
from ..errors import ArgumentTypeError, ArgumentValueError
from . import has_values, shown, type_name
from .arrays import LAYOUTS

Implementation: TypeAlias = Literal["xp", "native", "torch"]
"""The portable implementation in array-API calls, a kernel of the library, or torch's for NumPy."""
F = TypeVar("F", bound=Callable[..., Any])
LARGEST_INTEGER = 2**29
"""The largest integer that is accepted. Indices are int32, which every library has, and sums of an index, an
offset and a width must fit."""


def check_flag(function: str, name: str, value: object) -> bool:
    """Check a bool of Python or NumPy, and return it as a bool."""
    if type(value).__name__ == "bool":  # NumPy's has that name too, and is no bool of Python
        return bool(value)
    raise ArgumentTypeError(function, f"`{name}` must be True or False", {name: repr(value)})


def refuse_missing_kernel(function: str, implementation: str, reason: str) -> NoReturn:
    """Refuse an implementation that is a kernel, if that does not compute the call."""
    rule = f"`implementation` must be None or 'xp', because {reason}"
    raise ArgumentValueError(function, rule, {"implementation": repr(implementation)})


def check_choice(
    function: str, name: str, value: object, choices: Sequence[str], otherwise: str = "", hint: str = ""
) -> None:
    """Check that `value` is one of the names in `choices`; `otherwise` says what else is allowed."""
    if not (isinstance(value, str) and value in choices):
        rule = f"`{name}` must be " + " or ".join(
            [repr(choice) for choice in choices] + [otherwise] * bool(otherwise)
        )
        raise ArgumentValueError(function, rule, {name: repr(value)}, hint)


def check_instance(function: str, name: str, value: object, kind: type, word: str = "", hint: str = "") -> None:
    """Check that `value` is an instance of `kind`, called `word` in the message, or None."""
    if value is not None and not isinstance(value, kind):
        rule = f"`{name}` must be a {word or kind.__name__} or None"
        raise ArgumentTypeError(function, rule, {name: shown(value)}, hint)


def refuse_other_kind(function: str, name: str, value: object, refused: type, hint: str) -> None:
    """Check that a bias is not passed as a mask, or a mask as a bias; `refused` is the wrong type."""
    if isinstance(value, refused):
        rule = f"`{name}` must not be a {refused.__name__.lower()}"
        raise ArgumentTypeError(function, rule, {name: value}, hint)


def check_layout(function: str, value: object) -> None:
    """Check the name of a layout; those of other libraries, such as "bshd", get their name here."""
    if not (isinstance(value, str) and value in LAYOUTS):
        letters = value.lower() if isinstance(value, str) else ""
        # The length is L, S (flash-attention, ONNX) or T (jax.nn).
        length = max(map(letters.find, "lst"))
        # N is the heads of "bnsh" (ONNX), and the length of "nhd" (FlashInfer).
        heads = letters.find("n" if length >= 0 and "n" in letters else "h")
        length = letters.find("n") if length < 0 else length
        hint = f"That is {LAYOUTS[heads > length]!r} here." if min(heads, length) >= 0 else ""
        rule = f"`layout` must be {' or '.join(map(repr, LAYOUTS))}"
        raise ArgumentValueError(function, rule, {"layout": repr(value)}, hint)


def check_lse_base(function: str, value: object) -> float | None:
    """Check the base of the logarithm, None for e or 2, and return it."""
    if value is None or (
        not isinstance(value, bool) and isinstance(value, numbers.Real) and value in (2, math.e)
    ):
        return None if value in (None, math.e) else 2.0
    raise ArgumentValueError(function, "`lse_base` must be None (e) or 2", {"lse_base": repr(value)})


def check_function(public_function: str, name: str, value: object, arguments: Sequence[str]) -> None:
    """Check that `value` is a function of these arguments, if its signature can be read.

    `public_function` is named in messages.
    """
    if not callable(value):
        raise ArgumentTypeError(public_function, f"`{name}` must be a function", {name: shown(value)})
    if is_compiling():  # torch.compile cannot trace `inspect`
        return
    try:
        # A wrapper is called with the arguments that it takes itself, whatever it wraps.
        signature = inspect.signature(value, follow_wrapped=False)
    except (TypeError, ValueError):  # a builtin has no signature
        return
    try:
        signature.bind(*arguments)
    except TypeError:
        rule = f"`{name}` must be a function of {len(arguments)} arguments ({', '.join(arguments)})"
        written = getattr(value, "__name__", type_name(value))
        raise ArgumentTypeError(public_function, rule, {name: f"{written}{signature}"}) from None


def check_number(function: str, name: str, value: object, dtype: Dtype = "float64") -> float:
    """Check a real number that is finite in `dtype` and does not underflow there, and return it as a float."""
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        rule = f"`{name}` must be a real number"
        raise ArgumentTypeError(function, rule, {name: f"{value!r} ({type_name(value)})"})
    try:
        result = float(value)
    except OverflowError:
        result = math.inf
    largest = LARGEST[dtype_name(dtype)]
    if not abs(result) <= largest:  # and not `>`, which is False for NaN
        rule = f"`{name}` must be finite" + (f" in {dtype_name(dtype)}" if math.isfinite(result) else "")
        raise ArgumentValueError(function, rule, {name: result})
    if 0 < abs(result) < 1 / largest:  # it would lose its digits, or become 0
        rule = f"`{name}` must be 0 or at least {1 / largest:.1e} in size"
        raise ArgumentValueError(function, rule, {name: result})
    return result


def check_softcap(function: str, value: object, dtype: Dtype = "float64") -> float | None:
    """Check a positive number, and return it, or None if `value` is None or 0: the softcap is off."""
    cap = 0.0 if value is None else check_number(function, "softcap", value, dtype)
    if cap < 0:
        rule = "`softcap` must be positive, or None or 0 for off"
        raise ArgumentValueError(function, rule, {"softcap": value})
    return cap or None


def check_probability(function: str, name: str, value: object) -> float:
    """Check a number from 0 to 1, and return it."""
    result = check_number(function, name, value)
    if not 0 <= result <= 1:
        raise ArgumentValueError(function, f"`{name}` must be between 0 and 1", {name: value})
    return result


def check_integer(
    function: str,
    name: str,
    value: object,
    least: int = -LARGEST_INTEGER,
    most: float = LARGEST_INTEGER,
    hint: str = "",
) -> int:
    """Check an integer of Python or NumPy from `least` to `most`, and return it as an int.

    `hint` says what to pass if it is less or more.
    """
    if isinstance(value, bool) or not isinstance(value, numbers.Integral):  # True is an Integral
        rule = f"`{name}` must be an integer"
        how = ""
        if is_array(value) and not hasattr(value, "__getitem__"):  # a spec of the exporter has no elements
            how = "An exported graph holds it as a number, so it cannot be an input."
        elif is_array(value):
            how = "Convert it with `int`." if has_values(value) else "Inside a jit it has to be static."
        raise ArgumentTypeError(function, rule, {name: _shown(value)}, how)
    number = int(value)
    if not least <= number <= most:
        rule = f"`{name}` must be " + (f"at least {least}" if number < least else f"at most {most}")
        raise ArgumentValueError(function, rule, {name: number}, hint)
    return number


def check_block_size(function: str, value: object, name: str = "block_size") -> tuple[int, int]:
    """Check the queries and keys of a block, one number for both or two, and return both."""
    if not isinstance(value, Sequence):
        size = check_integer(function, name, value, least=1)
        return size, size
    if isinstance(value, str) or len(value) != 2:
        rule = f"`{name}` must be one number, or (queries, keys)"
        raise ArgumentValueError(function, rule, {name: shown(value)})
    queries, keys = (check_integer(function, f"{name}[{n}]", size, least=1) for n, size in enumerate(value))
    return queries, keys


def _shown(value: object) -> str:
    return type_name(value) if is_array(value) else f"{value!r} ({type_name(value)})"


@functools.cache
def names_elsewhere() -> tuple[list[set[str]], dict[str, str]]:
    """Return sets of names of one thing, and what to do about names that no argument replaces."""
    # Data and its reader, which take 10 ms to import: only a wrong keyword needs them.
    import tomllib
    from pathlib import Path

    names = tomllib.loads(Path(__file__).with_name("names_elsewhere.toml").read_text("utf-8"))
    instead = {name: advice for advice, listed in names["instead"].items() for name in listed.split()}
    return [{*listed.split()} for listed in names["synonyms"]], instead


def explains_keywords(function: F) -> F:
    """Have a public function, or all public methods of a class, say what to write instead of unknown names."""
    if isinstance(function, type):
        for name, member in [*vars(function).items()]:
            is_public = name in ("__init__", "__call__") or not name.startswith("_")
            if is_public and isinstance(member, FunctionType) and "__signature__" not in vars(member):
                setattr(function, name, explains_keywords(member))
            elif is_public and isinstance(member, classmethod):
                setattr(function, name, classmethod(explains_keywords(member.__func__)))
        return function

    body = inspect.unwrap(function).__code__
    # Python checks the names itself, but not those of an `Unpack`, which stand in the signature alone.
    stated = "__signature__" in vars(function)
    names = frozenset(inspect.signature(function).parameters) if stated else None

    @functools.wraps(function)
    def call(*arguments: Any, **keywords: Any) -> Any:
        try:
            if names is not None and not names >= keywords.keys():
                raise TypeError
            return function(*arguments, **keywords)
        except TypeError as error:
            # Python's own refusal of the arguments comes before the first line of the function.
            if any(frame.f_code is body for frame, _ in walk_tb(error.__traceback__)):
                raise
            name, needed = _refuse_arguments(function, arguments, keywords)
            # Python names the class that defines a method, which may be a base that no caller knows.
            text = str(error).replace(function.__qualname__, name)
            error.args = (f"{text}; write {name}({', '.join(needed)})",)
            raise

    return cast(F, call)


def refuse_unknown_keywords(function: str, keywords: Mapping[str, object], names: Iterable[str]) -> None:
    """Refuse keywords that are not among the names."""
    for keyword in keywords:
        if keyword not in names:
            rule, got = f"there is no argument `{keyword}`", {keyword: shown(keywords[keyword])}
            raise ArgumentTypeError(function, rule, got, hint_for_keyword(keyword, names)) from None


def check_keys(
    function: str,
    argument: str,
    value: object,
    names: Sequence[str],
    needed: Sequence[str] = (),
    others: Mapping[str, str] = MappingProxyType({}),
) -> None:
    """Check that an argument is a mapping whose keys are among the `names`, with each that is `needed`.

    `others` are keys that are no slip, each with the hint for it.
    """
    if not isinstance(value, Mapping):
        rule = f"`{argument}` must be a mapping with keys among {', '.join(names)}"
        raise ArgumentTypeError(function, rule, {argument: shown(value)})
    for key in value:
        if key not in names:
            name = _name_like(key, names)
            rule, hint = f"`{argument}` must have keys among {', '.join(names)}", f"Write {name!r} instead."
            hint = others.get(key, hint if name else "")
            raise ArgumentValueError(function, rule, {"key": shown(key)}, hint)
    for name in needed:
        if name not in value:
            rule = f"`{argument}` must have the key {name!r}"
            raise ArgumentValueError(function, rule, {"keys": ", ".join(value) or "none"})


def _refuse_arguments(
    function: Callable[..., Any], arguments: tuple[object, ...], keywords: Mapping[str, object]
) -> tuple[str, list[str]]:
    """Refuse names or a number of arguments that a function does not have.

    Returns the name of the function, of the class, or of the method of the class that the caller knows, and the
    arguments that it needs.
    """
    parameters, name = inspect.signature(function).parameters, function.__name__
    owner = next(iter(parameters), "")
    is_method = owner in ("self", "cls")
    if is_method:
        kind = cast(type, arguments[0]) if owner == "cls" else type(arguments[0])
        name = kind.__name__ if name in ("__init__", "__call__") else f"{kind.__name__}.{name}"
    refuse_unknown_keywords(name, keywords, parameters)
    places = [key for key, parameter in parameters.items() if parameter.kind is parameter.POSITIONAL_OR_KEYWORD]
    if len(arguments) > len(places):
        *words, last = [f"`{place}`" for place in places[is_method:]]
        listed = f"{', '.join(words)} and {last}" if words else last
        others = [key for key in parameters if key not in places]
        hint = f"Name the others: {', '.join(f'{key}=...' for key in others[:3])}." if others else ""
        rule = f"only {listed} may be passed without a name"
        raise ArgumentTypeError(name, rule, {"arguments": len(arguments) - is_method}, hint) from None
    empty = inspect.Parameter.empty  # also the default of `*arrays` and `**keywords`, which may be left out
    needed = [(key, parameter.kind.name) for key, parameter in parameters.items() if parameter.default is empty]
    shown_as = {"KEYWORD_ONLY": "{}=...", "VAR_POSITIONAL": "", "VAR_KEYWORD": ""}
    return name, [*filter(None, (shown_as.get(kind, "{}").format(key) for key, kind in needed[is_method:]))]


def hint_for_keyword(keyword: str, parameters: Iterable[str]) -> str:
    """Return what to write instead of an unknown keyword; "" if no parameter is like it."""
    name = _name_like(keyword, parameters)
    return names_elsewhere()[1].get(keyword) or (f"Write {name}=... instead." if name else "")


def _name_like(word: object, names: Iterable[str]) -> str:
    """Return the one of `names` that is meant by a word of another library or a slip; "" if none is."""
    synonyms = (name for one in names_elsewhere()[0] if word in one for name in one.intersection(names))
    return next(synonyms, "") or "".join(get_close_matches(str(word), [*names], n=1))
