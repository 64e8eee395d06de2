"""A grid of scores without a call, for a mask or a bias that becomes an array or a picture."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from .._checks.arrays import check_one_device, check_one_library
from .._checks.keywords import check_integer
from .._libraries import access_of, library_of, numpy_array, refuses_unlike_axes, widest_dtype
from ..errors import ArgumentTypeError, ArgumentValueError
from .score_grid import ScoreGrid


def grid_of(
    function: str, name: str, shape: Sequence[int], arrays: Iterable[tuple[str, object]], like: object
) -> ScoreGrid:
    """Return a grid of `shape`, (L, S) or (..., Hq, L, S), without a call.

    The library is that of `like`, else of the first of `arrays`, else NumPy.
    """
    rule = "`shape` must be (L, S) or (..., Hq, L, S)"
    if not isinstance(shape, tuple | list):
        raise ArgumentTypeError(function, rule, {"shape": repr(shape)})
    sizes = tuple(check_integer(function, f"shape[{axis}]", n, least=0) for axis, n in enumerate(shape))
    if len(sizes) < 2:
        raise ArgumentValueError(function, rule, {"shape": shape})
    named = {} if like is None else {"like": like}
    named |= {f"{name}.{argument} ({n + 1})": array for n, (argument, array) in enumerate(arrays)}
    xp, checked = check_one_library(function, named or {"like": numpy_array()})
    check_one_device(function, checked)
    first = next(iter(checked.values()))
    library = library_of(first)
    return ScoreGrid(
        function=function,
        library=library,
        xp=xp,
        device=library.device(first),
        dtype=widest_dtype(function, first),
        input_dtype=None,
        access=access_of(checked.values()),
        batch=sizes[:-3],
        heads=sizes[-3] if len(sizes) > 2 else 1,
        queries=sizes[-2],
        keys=sizes[-1],
        is_2d=len(sizes) == 2,
        needs_all_axes=refuses_unlike_axes(library),
    )
