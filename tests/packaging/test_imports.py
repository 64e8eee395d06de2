"""`import sdpa_xp` brings no array library along, and what it offers is what it says."""

from __future__ import annotations

import inspect
import json
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any, get_args

import pytest

import sdpa_xp
import sdpa_xp.layers
import sdpa_xp.plot
import sdpa_xp_export

ROOT = Path(__file__).parents[2]
HEAVY = ("torch", "jax", "cupy", "dask", "mlx", "onnx", "onnxruntime", "matplotlib", "typer", "sdpa_xp_export")


def python(code: str) -> str:
    """What a fresh interpreter prints."""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return done.stdout


def loaded_by(code: str) -> set[str]:
    """The modules that a fresh interpreter has loaded after `code`."""
    return set(json.loads(python(f"{code}; import sys, json; print(json.dumps(list(sys.modules)))")))


def parts(modules: set[str]) -> set[str]:
    """Of modules of the library, the files and folders that they are in."""
    return {name.split(".")[1] for name in modules if name.startswith("sdpa_xp.")}


def test_import_is_light() -> None:
    loaded = loaded_by("import sdpa_xp")
    assert not {*HEAVY, "numpy"} & loaded
    assert parts(loaded) == set()


def test_a_public_name_loads_what_it_needs() -> None:
    of_attention = parts(loaded_by("from sdpa_xp import scaled_dot_product_attention"))
    assert "_programs" in of_attention
    assert not {"_display", "_many", "gradients", "caches", "layers", "positional"} & of_attention
    assert {"_programs", "_many", "caches"} <= parts(loaded_by("from sdpa_xp import *"))


def test_a_call_imports_no_other_library() -> None:
    """A library is recognised from its array; the others stay where they are."""
    code = (
        "import numpy, sdpa_xp; x = numpy.ones((1, 8, 256, 64), 'float32'); before = numpy.exp(x @ x.mT) @ x;"
        "sdpa_xp.scaled_dot_product_attention(x, x, x, sdpa_xp.masks.causal())"
    )
    loaded = loaded_by(code)
    assert "_programs" in parts(loaded)
    assert not {*HEAVY, "_many"} & (loaded | parts(loaded))
    # NumPy's own namespace needs none of these, which NumPy imports when they are first named.
    assert not {"array_api_compat.numpy", "numpy.ma", "numpy.testing", "numpy.f2py"} & loaded


OTHERS = [pytest.param(name, marks=pytest.mark.needs(name)) for name in ("array_api_strict", "torch", "jax")]


@pytest.mark.parametrize("name", OTHERS)
def test_a_call_on_arrays_of_another_library_imports_no_third(name: str) -> None:
    module = "jax.numpy" if name == "jax" else name
    code = (
        f"import sys, json, {module} as xp; x = xp.ones((1, 8, 256, 64)); before = {{*sys.modules}};"
        "import sdpa_xp; sdpa_xp.scaled_dot_product_attention(x, x, x, sdpa_xp.masks.causal());"
        "print(json.dumps(sorted({*sys.modules} - before)))"
    )
    new = set(json.loads(python(code)))
    assert "_programs" in parts(new)
    assert not {*HEAVY} & new


def test_modules_are_loaded_when_they_are_named() -> None:
    """Those besides `__all__` too, which are not among the names that an editor completes."""
    modules = ("errors", "layers", "plot", "typing")
    code = f"import sdpa_xp; before = dir(sdpa_xp); [getattr(sdpa_xp, name).__all__ for name in {modules[1:]}]"
    code += "; sdpa_xp.errors.Message; assert dir(sdpa_xp) == before"
    assert set(modules) <= parts(loaded_by(code))
    assert not set(modules) & set(dir(sdpa_xp))


def test_the_types_of_public_signatures_can_be_imported() -> None:
    """Each name that an annotation of a public function has is public, or among the types."""
    functions = [f for value in PUBLIC.values() for f in functions_of(value)]
    annotated = {
        (f.__module__, name)
        for f in functions
        for text in f.__annotations__.values()
        for name in re.findall(r"\b[A-Z]\w+", str(text))
    }
    aliases = {name for module, name in annotated if is_alias(getattr(sys.modules[module], name, None))}
    names = sdpa_xp.typing.__all__
    assert names == sorted(names) == dir(sdpa_xp.typing)
    assert aliases - {"ThemeName"} - {*names} == set()  # whose module needs matplotlib
    assert {"Layout", "Rng", "IntegersLike", "Implementation"} <= aliases


def functions_of(value: Any) -> list[Any]:
    """A function itself, or the public methods of a class."""
    named = inspect.getmembers(value, inspect.isfunction) if isinstance(value, type) else [("", value)]
    return [function for name, function in named if not name.startswith("_") or name == "__init__"]


def is_alias(value: Any) -> bool:
    """Whether a name stands for a union, words or a function, and is none of Python's own."""
    return getattr(value, "__module__", "") in ("typing", "types", "collections.abc") and bool(get_args(value))


def test_a_wrong_name_is_an_error_that_names_the_right_one() -> None:
    command = [sys.executable, "-c", "import sdpa_xp; sdpa_xp.KVCach"]
    printed = subprocess.run(command, capture_output=True, text=True, check=False).stderr
    assert "module 'sdpa_xp' has no attribute 'KVCach'. Did you mean: 'KVCache'?" in printed
    assert set(sdpa_xp.__all__) <= set(dir(sdpa_xp))


@pytest.mark.parametrize("module", [sdpa_xp, sdpa_xp_export], ids=lambda module: module.__name__)
def test_all_is_what_there_is(module: ModuleType) -> None:
    names = module.__all__
    assert names == sorted(names) == dir(module)  # what an editor completes
    for name in names:
        assert hasattr(module, name)
    if module is sdpa_xp:
        public = {name for name, x in vars(sdpa_xp).items() if isinstance(x, type) or inspect.isfunction(x)}
        assert public <= {*names, "__getattr__", "__dir__"}
        for part in (sdpa_xp.masks, sdpa_xp.biases, sdpa_xp.layers, sdpa_xp.positional, sdpa_xp.plot):
            assert part.__all__ == sorted(part.__all__) == dir(part)
            assert all(hasattr(part, name) for name in part.__all__)


ELSEWHERE = {
    "it is in sdpa_xp.layers": ("MultiHeadAttention", "Linear", "Layer"),
    "it is in sdpa_xp.masks": ("causal", "sliding_window", "padding"),
    "it is in sdpa_xp.biases": ("alibi",),
    "it is in sdpa_xp.masks; it is in sdpa_xp.biases": ("from_function", "to_array"),
    "it is in sdpa_xp.positional": ("Rotary", "YaRNScaling"),
    "it is in sdpa_xp.errors": ("ArgumentTypeError",),
    "it is in sdpa_xp_export": tuple(sdpa_xp_export.__all__),
    "write scaled_dot_product_attention": ("attention", "attend", "flash_attention", "flash_attn_func", "sdpa"),
    "write scaled_dot_product_attention_vjp": ("gradients", "vjp", "grad"),
    "write varlen_attention": ("flash_attn_varlen_func", "varlen"),
    "write attention_weights": ("weights",),
    "write attention_statistics": ("statistics",),
    "write ring_attention": ("ring",),
    "write dot_product_attention": ("dot_product",),
}


@pytest.mark.parametrize(
    ("hint", "name"), [(hint, name) for hint, names in ELSEWHERE.items() for name in names]
)
def test_a_name_that_is_elsewhere(hint: str, name: str) -> None:
    """An attribute and an import say where; both are errors of the classes that Python raises."""
    with pytest.raises(
        AttributeError, match=rf"^module 'sdpa_xp' has no attribute '{name}'; {hint}$"
    ) as missing:
        getattr(sdpa_xp, name)
    assert (missing.value.name, missing.value.obj) == (name, sdpa_xp)
    assert not hasattr(sdpa_xp, name)
    with pytest.raises(ImportError, match=rf"^cannot import name '{name}' from 'sdpa_xp'; {hint}$") as failed:
        exec(f"from sdpa_xp import {name}")
    assert (failed.value.name, failed.value.path) == ("sdpa_xp", sdpa_xp.__file__)


@pytest.mark.parametrize("name", ["nonsense", "re", "linear", "_private", "__wrapped__"])
def test_a_name_that_is_nowhere(name: str) -> None:
    """Neither an import of a part nor its files count as names of it."""
    with pytest.raises(AttributeError, match=rf"^module 'sdpa_xp' has no attribute '{name}'$"):
        getattr(sdpa_xp, name)
    with pytest.raises(ImportError, match=rf"^cannot import name '{name}' from 'sdpa_xp' \("):
        exec(f"from sdpa_xp import {name}")


def test_modules_are_still_imported() -> None:
    printed = python("from sdpa_xp import caches, integrations; print(caches.__name__, integrations.__name__)")
    assert printed.split() == ["sdpa_xp.caches", "sdpa_xp.integrations"]


PUBLIC = {
    f"{module.__name__}.{name}": getattr(module, name)
    for module in (sdpa_xp, sdpa_xp.masks, sdpa_xp.biases, sdpa_xp.layers, sdpa_xp.positional, sdpa_xp.plot)
    for name in module.__all__
    if callable(getattr(module, name))
}


CONVERSIONS = (sdpa_xp.masks.from_array, sdpa_xp.masks.to_array)
"""Functions that compute no formula of a paper, and so cite none."""


@pytest.mark.parametrize("value", PUBLIC.values(), ids=PUBLIC)
def test_docstring_names_every_argument(value: Any) -> None:
    doc = inspect.getdoc(value) or ""
    assert len(doc) > 40
    refers = "arguments and errors are as in `" in " ".join(doc.split())
    if inspect.isfunction(value):
        for part in ("Args:", "Examples:"):
            assert part in doc
        assert "Returns:" in doc or doc.startswith(("Return ", "Convert "))
        assert "Raises:" in doc or "rrors are as in `" in " ".join(doc.split())
        assert ("References:" in doc) is (value not in CONVERSIONS)
    if ("Args:" in doc) and not refers:
        for argument in inspect.signature(value).parameters:
            assert f"\n    {argument}: " in doc


def test_porting_tables_name_what_there_is() -> None:
    """What stands to the right is ours: each name in it is a function, an argument or a method."""
    page = (ROOT / "docs/how-to/port.md").read_text()
    rows = [line for line in re.findall(r"(?m)^\| .*`.* \|$", page) if line.count(" | ") == 1]
    assert len(rows) > 75
    arguments = {name for f in PUBLIC.values() for name in inspect.signature(f).parameters}
    methods = {name for f in PUBLIC.values() if isinstance(f, type) for name in dir(f)}
    known = arguments | methods | {name.rpartition(".")[2] for name in PUBLIC}
    known |= {*inspect.signature(sdpa_xp.KVCache.append).parameters}
    others = {"axis", "max_seqlen"}  # of an array's method, and of flash-attention
    ours = r"(?:masks|biases|positional|layers|KVCache|PagedKVCache(?:\(\.\.\.\))?)\.([a-zA-Z_]+)"
    for row in rows:
        right = row.partition(" | ")[2]
        names = re.findall(rf"\b([a-z]\w*)=|{ours}|`([a-z]\w*_\w+)[`(]", right)
        named = {name for groups in names for name in groups if name}
        assert named <= known | others, (row, named - known)


def test_type_checkers_see_the_array_that_went_in(tmp_path: Path) -> None:
    """For a user with NumPy arrays the result is a NumPy array, and a list is an error.

    The settings are the project's, so that mypy has the packages in its cache.
    """
    code = (
        "import numpy as np\n"
        "from numpy.typing import NDArray\n"
        "from sdpa_xp import attention_state, merge_states, scaled_dot_product_attention\n"
        "x: NDArray[np.float32] = np.ones((2, 2), np.float32)\n"
        "mask: NDArray[np.bool_] = np.ones(2, np.bool_)\n"
        "y: NDArray[np.float32] = scaled_dot_product_attention(x, x, x, mask, scale=0.5)\n"
        "z: NDArray[np.float32] = merge_states([attention_state(x, x, x)]).output\n"
        "from typing import TypeVar\n"
        "import sdpa_xp\n"
        "from sdpa_xp.typing import Array, Layout\n"
        "A = TypeVar('A', bound=Array)\n"
        "def wrapped(query: A, key: Array, value: Array, layout: Layout = '...HLE') -> A:\n"
        "    return scaled_dot_product_attention(query, key, value, layout=layout)\n"
        "w: NDArray[np.float32] = wrapped(x, x, x)\n"
        "error: type[ValueError] = sdpa_xp.errors.ArgumentValueError\n"
    )
    options = "rng=np.random.default_rng(0), softmax_dtype=np.float64, implementation='xp'"
    code += f"scaled_dot_product_attention(x, x, x, {options})\n"
    wrong = {
        "scaled_dot_product_attention([[1.0]], x, x)\n": "list[list[float]]",
        "scaled_dot_product_attention(x, x, x, rng=0)\n": 'Argument "rng"',
        "scaled_dot_product_attention(x, x, x, implementation='fast')\n": "Literal['fast']",
        "scaled_dot_product_attention(x, x, x, layout='BHLE')\n": "Literal['BHLE']",
        "wrapped(x, x, x, 'BHLE')\n": "Literal['BHLE']",
    }
    program = tmp_path / "program.py"
    program.write_text(code + "".join(wrong))
    command = [sys.executable, "-m", "mypy", "--strict", str(program)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=ROOT)
    assert done.returncode == 1
    errors = re.findall(r"program\.py:(\d+): error: (.*)$", done.stdout, flags=re.MULTILINE)
    first = code.count("\n") + 1  # the lines before it are right
    assert {int(line) for line, _ in errors} == {*range(first, first + len(wrong))}, done.stdout
    for number, said in enumerate(wrong.values(), first):
        assert any(said in text for line, text in errors if int(line) == number), done.stdout
