"""How a function that is judged is called: its library, its names of arguments, its layout, its gradients."""

from __future__ import annotations

import importlib
import inspect
import math
import os
import re
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from sdpa_xp._checks import nearest_hint
from sdpa_xp._checks.arrays import HLE, LHE
from sdpa_xp._checks.keywords import check_choice, check_layout
from sdpa_xp.errors import ArgumentTypeError, ArgumentValueError

from .._backends import LIBRARIES, Backend, find_backends
from .._runtime import session
from .._runtime.releases import PROVIDERS
from .cases import Arrays, HardCase, data
from .semantics import GRADIENTS, OF_OPTIONS

SHARED = {"bool": "bool", "float16": "float16", "float32": "float32", "float64": "float64", "bfloat16": "int16"}
"""The dtypes in which NumPy and torch can share memory, and as what."""


class LacksError(Exception):
    """The function has no argument for what a case needs."""


class WrongError(Exception):
    """The function is wrong beside numbers: it wrote to an input, or has no gradient of one."""


class RefusedError(Exception):
    """The function raised something. What the judge itself raises is not caught."""


@contextmanager
def _refusals() -> Iterator[None]:
    try:
        yield
    except (LacksError, WrongError):
        raise
    except Exception as error:  # a function may raise anything
        raise RefusedError(f"{type(error).__name__}: {str(error).partition(chr(10))[0]}") from error


@dataclass(frozen=True)
class JudgedFunction:
    """A function, and how the arrays and options of a case become its arguments."""

    function: Callable[..., Any]
    name: str
    backend: Backend
    names: Mapping[str, Any]
    """Its keyword by the name of the cases; a pair is a keyword and the value that asks for it."""
    layout: str = HLE
    needed: frozenset[str] = frozenset()
    """The options that it has no default for, of `mask` and `scale`."""
    is_model: bool = False

    def results(self, case: HardCase, dtype: str, answers: Mapping[str, str]) -> dict[str, NDArray[Any]]:
        """Return the outputs of the case by name.

        Raises:
            LacksError: It has no argument for an option of the case, or no gradients.
            WrongError: It wrote to an input, or has no gradient of one.
            RefusedError: It raised an error.
        """
        arrays = case.arrays(dtype)
        options = self._keywords(case, arrays, answers)
        keywords = {k: self._put(x) for k, x in options.items()}
        tokens = {name: self._put(self._laid_out(arrays[name])) for name in GRADIENTS}
        if "gradients" in case.outputs:
            return self._gradients(case, arrays, tokens, keywords)
        passed = tokens | {k: keywords[k] for k, x in options.items() if isinstance(x, np.ndarray)}
        with _refusals():
            result = self._unchanged(passed, lambda: self.function(*tokens.values(), **keywords))
            output, *lse = map(self.backend.get, _outputs(case, result))
            return {name: self._laid_out(output) if name == "output" else lse[0] for name in case.outputs}

    def _unchanged(self, passed: Arrays, call: Callable[[], Any]) -> Any:
        """Return what `call` returns, if it leaves the arrays as they are."""
        before = {k: np.array(self.backend.get(x)) for k, x in passed.items()}
        result = call()
        for name, old in before.items():
            if old.tobytes() != np.array(self.backend.get(passed[name])).tobytes():
                raise WrongError(f"it changes its {name}")
        return result

    def _keywords(self, case: HardCase, arrays: Arrays, answers: Mapping[str, str]) -> Arrays:
        """Return the keywords of a call, in NumPy."""
        options = dict(case.options)
        mask, bias = arrays["mask"], arrays["bias"]
        if mask is not None and answers.get("boolean") == "False may attend":
            mask = ~mask
        if bias is not None and "bias" not in self.names:  # a floating mask, which the boolean one joins
            if mask is not None:
                bias = np.where(mask, bias, np.asarray(-math.inf, bias.dtype))
            mask, bias = bias, None
        options |= {"mask": mask, "bias": bias, "sinks": arrays["sinks"]}
        if case.heads[:1] != case.heads[-1:] and "group heads" in self.names:
            options["group heads"] = True
        if "mask" in self.needed and mask is None:
            options["mask"] = np.ones((1,) * (len(case.pairs) - 2) + case.lengths, bool)
        if "scale" in self.needed:
            options.setdefault("scale", 1 / math.sqrt(case.widths[0]))
        keywords: Arrays = {}
        for name, value in options.items():
            if value is None:
                continue
            if name not in self.names:
                raise LacksError(f"it has no argument for {name}")
            word = self.names[name]
            if not isinstance(word, str) and not value:  # a value asks for the option: without it, nothing does
                continue
            keyword, passed = (word, value) if isinstance(word, str) else word
            if keyword in keywords:
                raise LacksError(f"its {keyword} takes one of two options")
            keywords[keyword] = passed
        return keywords

    def _put(self, x: Any) -> Any:
        if not isinstance(x, np.ndarray):
            return x
        is_view = not x.flags.c_contiguous and min(x.strides, default=0) >= 0
        if self.backend.name == "torch" and is_view and x.dtype.name in SHARED:
            torch = importlib.import_module("torch")
            shared = torch.from_numpy(x.view(SHARED[x.dtype.name]))  # with its strides
            return shared.view(getattr(torch, x.dtype.name))
        return self.backend.put(x)

    def _laid_out(self, x: NDArray[Any]) -> NDArray[Any]:
        """Return an array with its heads where the function has them; the same swap leads back."""
        return np.swapaxes(x, -2, -3) if self.layout == LHE and x.ndim > 2 else x

    def _gradients(
        self, case: HardCase, arrays: Arrays, tokens: Arrays, keywords: Arrays
    ) -> dict[str, NDArray[Any]]:
        cotangents, options = [self._put(self._laid_out(arrays["cotangent"]))], dict[str, Any]()
        cotangents += [self._put(arrays["cotangent"][..., 0])] if "lse" in case.outputs else []
        if OF_OPTIONS in case.outputs:
            present = (name for name in ("bias", "sinks") if arrays[name] is not None)
            words = {name: self.names.get(name) or self.names["mask"] for name in present}
            options = {name: keywords[word] for name, word in words.items()}
            if "bias" in options and options["bias"].shape != arrays["bias"].shape:
                raise LacksError("a mask of more axes joins its bias")
            keywords = {word: x for word, x in keywords.items() if word not in words.values()}
        leaves = tokens | options

        def outputs(*values: Any) -> list[Any]:
            more = {words[name]: x for name, x in zip(options, values[3:], strict=True)}
            return _outputs(case, self.function(*values[:3], **keywords, **more))

        if self.backend.name == "torch" and not self.is_model:
            for x in leaves.values():
                x.requires_grad_()
            backward = importlib.import_module("torch").autograd.backward
            passed = leaves | {"cotangent": cotangents[0]}
            with _refusals():
                self._unchanged(passed, lambda: backward(outputs(*leaves.values()), cotangents))
            if lacks := [name for name, x in leaves.items() if x.grad is None]:
                raise WrongError(f"it has no gradient of its {lacks[0]}")
            gradients = [x.grad for x in leaves.values()]
        elif self.backend.name == "jax":
            jax = importlib.import_module("jax")
            with _refusals():
                gradients = jax.vjp(outputs, *leaves.values())[1](cotangents)
        else:
            raise LacksError("gradients of torch and JAX are judged")
        got = {name: self.backend.get(x) for name, x in zip(leaves, gradients, strict=True)}
        return {f"d {name}": self._laid_out(x) if name in GRADIENTS else x for name, x in got.items()}


def _outputs(case: HardCase, result: Any) -> list[Any]:
    """Return the output of a call, and the log-sum-exp if the case asks for it."""
    first, *others = result if isinstance(result, tuple | list) else (result,)
    if "lse" not in case.outputs:
        return [first]
    states = [x for x in others if getattr(x, "shape", None) == case.pairs[:-1]]
    if not states:
        raise LacksError("it returns no log-sum-exp")
    return [first, states[0]]


def find_function(
    function: Callable[..., Any] | str | os.PathLike[str],
    *,
    library: str | None = None,
    names: Mapping[str, Any] | None = None,
    layout: str | None = None,
) -> JudgedFunction:
    """Return a function that is passed, named as `module:function`, or in an ONNX file, and how it is called.

    Raises:
        TypeError: `function` is neither.
        ValueError: There is none of that name, or `library`, a name or the layout is not known.
    """
    if not isinstance(names, Mapping | None):
        rule = "`names` must be a mapping from the names of the cases to keywords"
        raise ArgumentTypeError("judge", rule, {"names": repr(names)})
    target, shown, is_model = function, getattr(function, "__qualname__", repr(function)), False
    if isinstance(function, str | os.PathLike):
        shown = os.fspath(function)
        is_model = shown.endswith(".onnx")
        target = _of_model(Path(shown)) if is_model else _imported(shown)
    if not callable(target):
        rule = "`function` must be callable, or name one as `module:function`, or an ONNX file"
        raise ArgumentTypeError("judge", rule, {"function": type(target).__name__})
    module = (shown if isinstance(function, str) else str(getattr(target, "__module__", ""))).partition(":")[0]
    known: dict[str, Any] = data()["functions"].get(f"{module}:{shown.rpartition(':')[2]}", {})
    top = module.partition(".")[0]
    library = library or known.get("library") or (top if top in LIBRARIES else "numpy")
    layout = str(layout or known.get("layout", HLE))
    check_layout("judge", layout)
    names_here, needed, keywords = _names(target)
    words = {**names_here, **known.get("names", {}), **(names or {})}
    if unknown := [name for name in words if name not in data()["names"]]:
        rule = f"`names` must be for {', '.join(data()['names'])}"
        raise ArgumentValueError(
            "judge", rule, {"names": repr(unknown[0])}, nearest_hint(unknown[0], [*data()["names"]])
        )
    chosen = [word if isinstance(word, str) else word[0] for word in (names or {}).values()]
    if keywords and not {*chosen} <= keywords:
        rule = "`names` must lead to keywords of the function"
        got = {"names": repr(sorted({*chosen} - keywords)[0])}
        raise ArgumentValueError("judge", rule, got, f"It has {', '.join(sorted(keywords))}.")
    check_choice("judge", "library", library, LIBRARIES, hint=nearest_hint(library, LIBRARIES))
    return JudgedFunction(target, shown, find_backends([library])[0], words, layout, needed, is_model)


def _imported(text: str) -> Any:
    """Return the function of `module:function`; the module may lie in the working directory."""
    module, _, path = text.partition(":")
    if not module or not path:
        rule = "`function` must be written as `module:function`, or be an ONNX file"
        raise ArgumentValueError("judge", rule, {"function": repr(text)})
    if os.getcwd() not in sys.path:  # a console script has its own folder first
        sys.path.insert(0, os.getcwd())
    try:
        target = importlib.import_module(module)
        for name in path.split("."):
            target = getattr(target, name)
    except (ImportError, AttributeError) as error:
        rule = "`function` must name a function that can be imported"
        raise ArgumentValueError("judge", rule, {"function": repr(text), "error": str(error)}) from error
    return target


def _names(function: Callable[..., Any]) -> tuple[dict[str, str], frozenset[str], set[str]]:
    """Return the keyword of each option, the options that it must get, and all keywords, if they are known."""
    needed, keywords = set[str](), set[str]()
    try:
        parameters = inspect.signature(getattr(function, "forward", function)).parameters  # of a torch module
        words = {*parameters}
        needed = {name for name, x in parameters.items() if x.default is x.empty}
        if any(x.kind is x.VAR_KEYWORD for x in parameters.values()):  # it may pass on what most have
            words |= {"attn_mask", "is_causal", "scale"} if len(parameters) <= 4 else set()
        else:
            keywords = words
    except (TypeError, ValueError):  # compiled functions say it in their text
        text = (function.__doc__ or "").partition("->")[0]
        words = {*re.findall(r"\w+", text)}
        needed = {*re.findall(r"(\w+): float,", text)}
    chosen = {name: next((s for s in synonyms if s in words), "") for name, synonyms in data()["names"].items()}
    options = {n: word for n, word in chosen.items() if word}
    return options, frozenset(n for n, word in options.items() if word in needed), keywords


def _of_model(path: Path) -> Callable[..., Any]:
    """Return a model as a function of query, key and value, and of what else it has inputs for."""
    from .._files.loading import load  # onnx is loaded for a file alone

    model = load("judge", path)
    opened = session.open_session(model, PROVIDERS["cpu"], "judge")
    inputs = [entry.name for entry in model.graph.input]

    def run(query: Any, key: Any, value: Any, **more: Any) -> Any:
        feeds = {"query": query, "key": key, "value": value, **more}
        with session.errors_reworded("run", "judge"):
            return tuple(opened.run({name: np.asarray(x) for name, x in feeds.items()}).values())

    run.__signature__ = inspect.Signature(  # type: ignore[attr-defined]
        [inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY) for name in inputs]
    )
    return run
