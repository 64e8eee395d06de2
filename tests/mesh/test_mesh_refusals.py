"""What a ring refuses, before any work: a mesh of devices that there need not be is enough."""

from __future__ import annotations

import inspect
import re
from typing import Any

import numpy as np
import pytest

from sdpa_xp import masks, ring_attention

pytestmark = pytest.mark.needs("jax")

LENGTH = "a multiple of the devices along `axis_name`"
REFUSED: dict[str, tuple[dict[str, Any], type[Exception], str]] = {
    "no array of JAX": ({"query": np.ones((1, 8, 4), np.float32)}, TypeError, "`query` must be an array of JAX, which has meshes; got query=numpy.ndarray"),
    "two libraries": ({"key": np.ones((1, 8, 4), np.float32)}, TypeError, "`query` and `key` must"),
    "no mesh": ({"mesh": 4}, TypeError, "`mesh` must be a jax.sharding.Mesh; got mesh=4"),
    "another axis": ({"axis_name": "s"}, ValueError, "`axis_name` must be an axis of `mesh`; got axis_name='s', mesh.axis_names=('keys',)"),
    "no name": ({"axis_name": 0}, TypeError, "`axis_name` must be a string; got axis_name=0"),
    "queries": ({"query": 6}, ValueError, f"`query` must have a length (L) that is {LENGTH}; got L=6, mesh.shape['keys']=4. Pad the queries."),
    "keys": ({"key": 6, "value": 6}, ValueError, f"`key` must have a length (S) that is {LENGTH}; got S=6, mesh.shape['keys']=4. Pad the keys, and mask"),
    "no keys": ({"key": 0, "value": 0}, ValueError, f"`key` must have a length (S) that is {LENGTH}; got S=0"),
    "a kernel": ({"implementation": "native"}, ValueError, "`implementation` must be"),
    "dropout without a key": ({"dropout_p": 0.5}, ValueError, "`dropout_p` > 0 needs `rng`, a JAX key"),
    "a mask that does not fit": ({"attn_mask": masks.padding(9)}, ValueError, "`attn_mask.key_lengths` must be"),
}  # fmt: skip


def arguments(**changes: Any) -> dict[str, Any]:
    """Those of a call of four devices; an integer is a length."""
    import jax

    mesh = jax.sharding.AbstractMesh((4,), ("keys",))
    chosen = {"query": 8, "key": 8, "value": 8, "mesh": mesh, "axis_name": "keys"} | changes
    inputs = {n: chosen[n] for n in ("query", "key", "value")}
    return chosen | {n: jax.numpy.ones((1, x, 4)) for n, x in inputs.items() if isinstance(x, int)}


@pytest.mark.parametrize("name", REFUSED)
def test_refused(name: str) -> None:
    changes, error, text = REFUSED[name]
    with pytest.raises(error, match="^" + re.escape(f"ring_attention: {text}")):
        ring_attention(**arguments(**changes))


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
