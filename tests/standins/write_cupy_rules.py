"""Write cupy/rules.json from the CuPy that is installed, which imports on a machine without a GPU.

Run it with a Python that has CuPy. It asks about the functions that the file names: to add one, add its name
there first.
"""

from __future__ import annotations

import inspect
import json
import operator
import re
import sys
from collections import defaultdict
from pathlib import Path
from typing import Any

import numpy as np

FOLDER = Path(__file__).parent
sys.path.remove(str(FOLDER))  # the stand-in would be found there

import cupy  # noqa: E402
from cupy._sorting.search import _where_ufunc  # noqa: E402  # the loops of `where`, which its signature hides


def main() -> None:
    """Write the file anew."""
    path = FOLDER / "cupy/rules.json"
    owners = {"ndarray": cupy.ndarray, "Generator": cupy.random.Generator}
    signatures = {}
    for name in sorted(json.loads(path.read_text())["signatures"]):
        owner, _, method = name.rpartition(".")
        signatures[name] = _signature(operator.attrgetter(method)(owners.get(owner, cupy)))
    rules = {
        "version": cupy.__version__,
        "signatures": signatures,
        "ufuncs": _ufuncs(),
        "names": " ".join(sorted(name for name in dir(cupy) if not name.startswith("_"))),
        "attributes": " ".join(sorted(dir(cupy.ndarray))),
    }
    path.write_text(json.dumps(rules, indent=1) + "\n")


def _signature(function: Any) -> str:
    """Return the parameters without types, and with None for each default."""
    try:
        parameters = inspect.signature(function).parameters.values()
    except ValueError:  # compiled: its docstring begins with the signature
        text = re.search(r"\((.*?)\)(?: ->.*)?$", function.__doc__.splitlines()[0])
        assert text is not None, function
        entries = [entry.partition("=") for entry in text[1].split(", ")]
        return f"({', '.join(name.split()[-1] + '=None' * bool(default) for name, default, _ in entries)})"
    plain = [
        p.replace(annotation=p.empty, default=p.empty if p.default is p.empty else None) for p in parameters
    ]
    return str(inspect.Signature(plain))


def _ufuncs() -> dict[str, str]:
    """Return the names of the ufuncs by their type loops, which many of them share."""
    names = defaultdict(list)
    for name in sorted(dir(cupy)):
        function = getattr(cupy, name)
        if isinstance(function, cupy.ufunc) and function.nout == 1 and hasattr(np, name):
            names[" ".join(function.types)].append(name)
    names[" ".join(_where_ufunc.types)].append("where")
    return {loops: " ".join(group) for loops, group in names.items()}


if __name__ == "__main__":
    main()
