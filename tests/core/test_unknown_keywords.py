"""Names of arguments: what Python itself says of a missing one, and that no name has two meanings."""

from __future__ import annotations

import inspect

import numpy as np
import pytest
from internals import names_elsewhere

import sdpa_xp
from sdpa_xp import KVCache, masks, scaled_dot_product_attention

X = np.ones((2, 4, 8))


def test_what_is_missing_is_said_of_the_class_that_the_caller_knows() -> None:
    pool = np.zeros((2, 1, 4, 8))
    for cache in (KVCache(X, X), sdpa_xp.PagedKVCache(pool, pool, [[0]], [2])):
        name = f"{type(cache).__name__}.quantised"
        rule = rf"^{name}\(\) missing 1 required positional argument: 'dtype'; write {name}\(dtype\)$"
        with pytest.raises(TypeError, match=rule):
            cache.quantised()  # type: ignore[call-arg]


def test_an_error_of_the_call_itself_stays_as_it_is() -> None:
    mask = masks.from_function(lambda b, h, i, j: len(1, 2))  # type: ignore[call-arg]
    with pytest.raises(TypeError, match="len"):
        scaled_dot_product_attention(X, X, X, mask)
    with pytest.raises(TypeError, match=r"'value'; write scaled_dot_product_attention\(query, key, value\)$"):
        scaled_dot_product_attention(X, X)  # type: ignore[call-arg]


def test_no_argument_of_a_function_is_called_another_name() -> None:
    """A name of one thing has at most one argument of a function, and no argument needs a replacement."""
    synonyms, instead = names_elsewhere()
    for name in sdpa_xp.__all__:
        parameters = (
            inspect.signature(function).parameters if callable(function := getattr(sdpa_xp, name)) else ()
        )
        for names in synonyms:
            assert len(names.intersection(parameters)) <= 1, (name, names)
    parameters = inspect.signature(scaled_dot_product_attention).parameters
    assert instead.keys() & parameters.keys() == {"reproducible"}  # which others do not have
