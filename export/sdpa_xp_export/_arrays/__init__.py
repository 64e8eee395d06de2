"""The array API of the values of a graph: what `x.__array_namespace__()` returns while a function is traced.

Each function accepts values, and also arrays of any library, which become initializers. Without a value it
calls the function of the library of the arrays. The standard lacks `erf` and `is_masked`. Each file lists its
functions of the namespace.
"""

from __future__ import annotations

import math
import sys
from types import ModuleType
from typing import TYPE_CHECKING, NoReturn

from .. import _dtypes as _dtypes
from .._dtypes import *
from .arithmetic import *
from .creation import *
from .elementwise import *
from .indexing import *
from .indexing import item as item
from .manipulation import *
from .numpy_and_torch import attribute_error as attribute_error
from .numpy_and_torch import in_place_result as in_place_result
from .numpy_and_torch import missing_function
from .numpy_and_torch import numpy_error as numpy_error
from .numpy_and_torch import of_ufunc as of_ufunc
from .ordering import *
from .rearranging import *
from .reductions import *

e, inf, nan, newaxis, pi = math.e, math.inf, math.nan, None, math.pi

if not TYPE_CHECKING:  # a type checker reads the lists of the files, and `__getattr__` would allow any name
    # A file of a package is an attribute of it once it is imported.
    _FILES = [file for file in globals().values() if isinstance(file, ModuleType) and hasattr(file, "__all__")]
    __all__ = ["e", "inf", "nan", "newaxis", "pi", *(name for file in _FILES for name in file.__all__)]

    def __getattr__(name: str) -> NoReturn:
        """Say what the array API has instead of a function of another library."""
        is_special = name.startswith("__")
        raise AttributeError(name) if is_special else missing_function(name, sys.modules[__name__])
