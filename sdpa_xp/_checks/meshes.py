"""Checks of a mesh of devices, and of lengths that its devices share."""

from __future__ import annotations

from collections.abc import Mapping

from sdpa_xp._checks.messages import shown
from sdpa_xp._libraries import Library
from sdpa_xp._libraries.programs import DeviceRing
from sdpa_xp._libraries.protocols import AnyArray
from sdpa_xp.errors import ArgumentTypeError, ArgumentValueError


def check_ring(function: str, library: Library, query: AnyArray, mesh: object, axis_name: object) -> DeviceRing:
    """Check an axis of a mesh of the library of `query`, and return its devices."""
    meshes = library.meshes
    if meshes is None:
        rule, hint = "`query` must be an array of JAX, which has meshes", "For other arrays see `merge_states`."
        raise ArgumentTypeError(function, rule, {"query": shown(query)}, hint)
    if missing := meshes.missing():
        raise ValueError(f"{function}: this call needs {missing}.")
    axes = meshes.axes(mesh)
    if axes is None:
        rule, hint = "`mesh` must be a jax.sharding.Mesh", 'jax.make_mesh((8,), ("keys",)) makes one.'
        raise ArgumentTypeError(function, rule, {"mesh": shown(mesh)}, hint)
    if not isinstance(axis_name, str):
        raise ArgumentTypeError(function, "`axis_name` must be a string", {"axis_name": repr(axis_name)})
    if axis_name not in axes:
        rule = "`axis_name` must be an axis of `mesh`"
        raise ArgumentValueError(function, rule, {"axis_name": repr(axis_name), "mesh.axis_names": tuple(axes)})
    return meshes.ring(mesh, axis_name)


def check_divided(function: str, lengths: Mapping[str, int], axis_name: str, devices: int) -> None:
    """Check that each device gets as many queries, and as many keys."""
    for name, length in lengths.items():
        if length % devices or not length:
            letter = "L" if name == "query" else "S"
            rule = f"`{name}` must have a length ({letter}) that is a multiple of the devices along `axis_name`"
            got = {letter: length, f"mesh.shape[{axis_name!r}]": devices}
            hint = "Pad the keys, and mask them with `masks.padding`." if name == "key" else "Pad the queries."
            raise ArgumentValueError(function, rule, got, hint)
