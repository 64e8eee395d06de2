"""Attention over keys that are divided among the devices of a JAX mesh."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import TypeVar, Unpack

from ._call import PreparedCall, prepare
from ._call.options import CallOptions, DifferentiableOptions, takes_options
from ._checks import shown
from ._libraries import astype_if_needed, library_of
from ._libraries.meshes import DeviceRing
from ._libraries.protocols import TRACED, AnyArray, Array
from ._libraries.trees import with_arrays
from ._many import walks
from ._many.blocks import take_arrays
from ._many.cutting import readable_grid
from ._many.schedule import plan_ring, to_plain, to_zigzag
from ._many.walks import Operands, RingCall
from ._many.windows import merge_windows
from ._tiles import Tile
from .errors import ArgumentTypeError, ArgumentValueError
from .masks import Mask
from .masks.algebra import AllOf

A = TypeVar("A", bound=AnyArray)
FUNCTION = "ring_attention"


@takes_options(DifferentiableOptions)
def ring_attention(
    query: A,
    key: AnyArray,
    value: AnyArray,
    attn_mask: Mask | AnyArray | None = None,
    *,
    mesh: object,
    axis_name: str,
    **keywords: Unpack[DifferentiableOptions],
) -> A:
    r"""Compute `scaled_dot_product_attention` of sequences that are divided among the devices of a JAX mesh.

    Each of the n devices along `axis_name` holds L / n queries and S / n keys, in their order. Keys and values
    travel around the ring of devices; steps in which no device may attend are skipped. Causal work is balanced
    if L and S are multiples of 2 n. Call the function inside of `jax.jit`.

    Args:
        query: (..., Hq, L, E), a JAX array, divided along L among the devices along `axis_name`; other arrays
            are moved. Batch and heads may be divided along other axes of the mesh. L and S are multiples of n.
            All other arguments and errors are as in `scaled_dot_product_attention`.
        key: (..., H, S, E), divided along S.
        value: (..., H, S, Ev), divided along S.
        attn_mask: A mask of `sdpa_xp.masks`, or an array that broadcasts to (..., Hq, L, S), of which each
            device needs the rows of its queries. A mask lets the call skip steps, unless the arrays in it are
            inputs of the `jit`.
        mesh: A jax.sharding.Mesh.
        axis_name: The axis of `mesh` along which the keys are divided.
        bias: A bias, or an array likewise, divided as `attn_mask`.
        rng: A key of JAX. It drops the same weights as without a mesh.
        implementation: `"xp"` or None.

    Returns:
        (..., Hq, L, Ev), divided as `query`, with its dtype.

    Raises:
        TypeError: The arrays are not JAX arrays, or `mesh` is not a jax.sharding.Mesh.
        ValueError: `mesh` does not have the axis, or L or S is not a multiple of its length.

    Numerics:
        For jax.grad, keys and values go around the ring again. There is no forward mode (jax.jvp).

    Examples:
        >>> import jax
        >>> mesh = jax.make_mesh((1,), ("keys",))  # (8,) on eight devices
        >>> x = jax.numpy.ones((2, 4, 8))
        >>> ring_attention(x, x, x, is_causal=True, mesh=mesh, axis_name="keys").shape
        (2, 4, 8)

    References:
        Liu, Zaharia and Abbeel, "Ring Attention with Blockwise Transformers", arXiv 2310.01889, section 3.
        Dubey et al., "The Llama 3 Herd of Models", arXiv 2407.21783, section 3.3.2, for zig-zag order.
    """
    options = CallOptions.from_keywords(attn_mask, keywords)
    ring = _check_ring(query, mesh, axis_name)
    call = prepare(FUNCTION, {"query": query, "key": key, "value": value}, options)
    _check_divided({"query": call.sizes.queries, "key": call.sizes.keys}, axis_name, ring.size)
    with call.computing():
        output: A = call.result(_attend(call, ring))
    return call.checked(output)


def _check_ring(query: AnyArray, mesh: object, axis_name: object) -> DeviceRing:
    """Check an axis of a mesh of the library of `query`, and return its devices."""
    meshes = library_of(query).meshes
    if meshes is None:
        rule, hint = "`query` must be an array of JAX, which has meshes", "For other arrays see `merge_states`."
        raise ArgumentTypeError(FUNCTION, rule, {"query": shown(query)}, hint)
    if missing := meshes.missing():
        raise ValueError(f"{FUNCTION}: this call needs {missing}.")
    axes = meshes.axes(mesh)
    if axes is None:
        rule, hint = "`mesh` must be a jax.sharding.Mesh", 'jax.make_mesh((8,), ("keys",)) makes one.'
        raise ArgumentTypeError(FUNCTION, rule, {"mesh": shown(mesh)}, hint)
    if not isinstance(axis_name, str):
        raise ArgumentTypeError(FUNCTION, "`axis_name` must be a string", {"axis_name": repr(axis_name)})
    if axis_name not in axes:
        rule = "`axis_name` must be an axis of `mesh`"
        raise ArgumentValueError(FUNCTION, rule, {"axis_name": repr(axis_name), "mesh.axis_names": tuple(axes)})
    return DeviceRing(mesh, axis_name)


def _check_divided(lengths: Mapping[str, int], axis_name: str, devices: int) -> None:
    """Check that each device gets as many queries, and as many keys."""
    for name, length in lengths.items():
        if length % devices or not length:
            letter = "L" if name == "query" else "S"
            rule = f"`{name}` must have a length ({letter}) that is a multiple of the devices along `axis_name`"
            got = {letter: length, f"mesh.shape[{axis_name!r}]": devices}
            hint = "Pad the keys, and mask them with `masks.padding`." if name == "key" else "Pad the queries."
            raise ArgumentValueError(FUNCTION, rule, got, hint)


def _attend(call: PreparedCall, ring: DeviceRing) -> Array:
    """Return the output (..., Hq, L, Ev) of a call, computed by the devices of a ring."""
    grid = replace(call.grid, device=None, access=TRACED)  # one program: its arrays are on no certain device
    schedule = plan_ring(ring.size, grid.queries, grid.keys, _may_meet(call))
    bound = call.bind(replace(call.grid, device=None, access=call.grid.access._replace(waits=False)))
    # Sinks join the states at the end, once for each row.
    options, aligned = take_arrays(bound._replace(sinks=None, dropout=call.draw_dropout()))
    arrays, axes = [array.array for array in aligned], [array.axes for array in aligned]
    ring_call = RingCall(ring, schedule, grid, options, tuple(axes))
    inputs = [call.arrays[name] for name in ("query", "key", "value")]
    sinks = [] if bound.sinks is None else [bound.sinks]
    rows = [_row_axis(array, of_array) for array, of_array in zip(arrays, axes, strict=True)]

    def compute(*operands: Array) -> Array:
        return _output_of_device(ring_call, operands, rows, call.result_dtype, has_sinks=bool(sinks))

    output: Array = ring.run(
        compute, [*inputs, *arrays, *sinks], [-2, -2, -2, *rows, *[None] * len(sinks)], len(grid.shape)
    )
    return output


def _row_axis(array: Array, axes: Sequence[int | None]) -> int | None:
    """Return the axis of an array that lies along the queries, or None."""
    numbered = zip(range(-array.ndim, 0), axes, array.shape, strict=True)
    return next((number for number, axis, length in numbered if axis == -2 and length > 1), None)


def _output_of_device(
    call: RingCall, operands: Sequence[Array], rows: Sequence[int | None], dtype: object, *, has_sinks: bool
) -> Array:
    """Return the output of the queries of this device."""
    ring, xp = call.ring, call.grid.xp
    inputs, sinks = (operands[:-1], operands[-1]) if has_sinks else (operands, None)
    if call.schedule.is_zigzag:
        axes = [-2, -2, -2, *rows]
        inputs = [
            x if axis is None else to_zigzag(ring, xp, x, axis) for x, axis in zip(inputs, axes, strict=True)
        ]
    query, key, value, *arrays = inputs
    output, *_ = merge_windows([walks.attend(call, Operands(query, key, value, tuple(arrays)))], sinks)
    output = astype_if_needed(xp, output, dtype)
    return to_plain(ring, xp, output, -2) if call.schedule.is_zigzag else output


def _may_meet(call: PreparedCall) -> Callable[[range, range], bool]:
    """Return a function of some queries and some keys: whether the masks let any pair of them attend.

    A mask whose arrays are inputs of a jit lets all of them meet here, and decides on the devices.
    """
    grid, known_values = readable_grid(call), call.grid.library.known_values
    known = [
        with_arrays(mask, known_values)
        for mask in call.options.masks
        if all(known_values(array) is not array for _, array in mask.arrays())
    ]
    # A mask left out of an intersection allows more pairs, so no block is skipped that has one.
    pattern = AllOf(tuple(mask.bind(grid) for mask in known))
    return lambda rows, columns: pattern.uniform(Tile(rows, columns, grid)) is not False
