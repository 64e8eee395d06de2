"""Public objects of the exporter through pickle and copy, and as static arguments of JAX."""

from __future__ import annotations

import copy
import inspect
import pickle
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import sdpa_xp_export
from sdpa_xp import scaled_dot_product_attention as attention
from sdpa_xp.layers import Linear
from sdpa_xp_export import TensorSpec

LINEAR = Linear(np.ones((4, 4), np.float32))


def report() -> Any:
    spec = TensorSpec("float32", ("B", 2, 3, 8))
    return sdpa_xp_export.verify(sdpa_xp_export.export_attention(spec, spec, spec))


def layer_report() -> Any:
    model = sdpa_xp_export.to_onnx(LINEAR, TensorSpec("float32", ("B", 4)))
    return sdpa_xp_export.verify_layer(model, LINEAR)


EXAMPLES: dict[str, Callable[[], Any]] = {
    "Verdict": lambda: sdpa_xp_export.judge(attention, dtypes=["float32"]),
    "JittedLayer": lambda: sdpa_xp_export.jit(LINEAR),
    "TensorSpec": lambda: TensorSpec("float32", ("B", 2, 3, 8)),
    "Report": report,
    "LayerReport": layer_report,
}


def test_every_public_class_has_an_example() -> None:
    public = {name for name in sdpa_xp_export.__all__ if inspect.isclass(getattr(sdpa_xp_export, name))}
    assert public == {*EXAMPLES, "LargeModel"}  # which has at least 1.75 GiB: test_large_models saves it


@pytest.mark.parametrize("name", EXAMPLES)
def test_copies_say_the_same(name: str) -> None:
    value = EXAMPLES[name]()
    copies = copy.copy(value), copy.deepcopy(value), pickle.loads(pickle.dumps(value))
    for copied in copies:
        assert (type(copied), str(copied)) == (type(value), str(value))
    assert hash(copies[0]) == hash(value)  # JAX takes what can be hashed as a static argument
