"""A ring without devices: an odd object as each argument, a mesh of one device, and an older JAX."""

from __future__ import annotations

import inspect
from typing import Any

import numpy as np
import pytest

from sdpa_xp import ring_attention

pytestmark = pytest.mark.needs("jax")


def arguments(**changes: Any) -> dict[str, Any]:
    """Those of a call of four devices; an integer is a length."""
    import jax

    mesh = jax.sharding.AbstractMesh((4,), ("keys",))
    chosen = {"query": 8, "key": 8, "value": 8, "mesh": mesh, "axis_name": "keys"} | changes
    inputs = {n: chosen[n] for n in ("query", "key", "value")}
    return chosen | {n: jax.numpy.ones((1, x, 4)) for n, x in inputs.items() if isinstance(x, int)}


@pytest.mark.parametrize("name", inspect.signature(ring_attention).parameters)
def test_an_odd_object_is_refused_by_name(name: str) -> None:
    class Odd:
        def __repr__(self) -> str:
            return "Odd()"

    with pytest.raises((TypeError, ValueError), match=rf"^ring_attention: .*`([\w.]+\.)?{name}\b.*Odd"):
        ring_attention(**arguments(**{name: Odd()}))


def test_a_mesh_of_one_device() -> None:
    import jax

    x = jax.numpy.asarray(np.random.default_rng(0).standard_normal((2, 3, 4)))
    output = ring_attention(x, x, x, is_causal=True, mesh=jax.make_mesh((1,), ("keys",)), axis_name="keys")
    assert output.shape == x.shape
    np.testing.assert_allclose(output[:, 0], x[:, 0], atol=1e-6)


def test_an_older_jax(monkeypatch: pytest.MonkeyPatch) -> None:
    import jax

    monkeypatch.delattr(jax.sharding, "auto_axes")
    with pytest.raises(ValueError, match=r"^ring_attention: this call needs JAX 0\.7 or later; got jax"):
        ring_attention(**arguments())
