"""Keras' attention layers computed by sdpa_xp, beside the same layers of Keras, on each backend."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest


@pytest.mark.sampled(2)
@pytest.mark.slow
@pytest.mark.parametrize(
    "backend",
    [
        pytest.param("numpy", marks=pytest.mark.needs("keras")),
        pytest.param("jax", marks=pytest.mark.needs("keras", "jax")),
        pytest.param("torch", marks=pytest.mark.needs("keras", "torch")),
    ],
)
def test_the_layers(backend: str, request: pytest.FixtureRequest) -> None:
    """With `--thin`, all cases run on NumPy, and one of twelve on torch; pages of the docs have JAX."""
    is_sampled = request.config.getoption("--thin") and backend != "numpy"
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path), "TF_CPP_MIN_LOG_LEVEL": "3"}
    command = [sys.executable, "-m", "peers.keras_sweep", backend, "12" if is_sampled else "1"]
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr
    results = json.loads(done.stdout.splitlines()[-1])
    assert results["differences"] == []
    *no_layers, mask, other = results["refusals"]
    rule = "`model` must be a Keras model or layer with a MultiHeadAttention or a GroupQueryAttention"
    assert [text.partition(";")[0] for text in no_layers] == [f"replace_attention: {rule}"] * 3
    assert "`attention_mask` must be an array if a layer attends over several axes; got attention_mask=" in mask
    assert other == "replace_attention: Keras must run on jax, torch or numpy; got backend=x."
    assert results["function"] == {
        "is dot_product_attention of sdpa_xp": True,
        "a query without keys is the mean": True,
        "a NaN in a masked value shows": True,
        "takes fewer key heads": backend != "numpy",
    }
