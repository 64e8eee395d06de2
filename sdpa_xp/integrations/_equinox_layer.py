"""The attention layer of Equinox with attention computed by sdpa_xp."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp

from .. import masks
from ..errors import ArgumentValueError
from ._framework_call import as_array, attend, fits


class MultiheadAttention(eqx.nn.MultiheadAttention):
    """A layer with the fields of `equinox.nn.MultiheadAttention`."""

    def __call__(
        self,
        query: Any,
        key_: Any,
        value: Any,
        mask: Any = None,
        *,
        key: Any = None,
        inference: Any = None,
        deterministic: Any = None,
        process_heads: Any = None,
    ) -> Any:
        """Return (L, output_size), as Equinox does."""
        output = None
        if deterministic is None and not self._drops(inference):
            output = self._attend(query, key_, value, mask, process_heads)
        if output is not None:
            return output
        mask = as_array(mask, (self.num_heads, len(query), len(key_)), query)
        # Equinox warns of `deterministic`, which `inference` replaces, whenever it is passed.
        options = {} if deterministic is None else {"deterministic": deterministic}
        return super().__call__(
            query, key_, value, mask, key=key, inference=inference, process_heads=process_heads, **options
        )

    def _drops(self, inference: Any) -> bool:
        """Return whether dropout is active, as `equinox.nn.Dropout` decides."""
        p = self.dropout.p
        is_zero = isinstance(p, int | float) and p == 0
        return not (is_zero or (self.dropout.inference if inference is None else inference))

    def _attend(self, query: Any, key: Any, value: Any, mask: Any, process_heads: Any) -> Any:
        """Return the output, or None if Equinox has to compute or to refuse the call."""
        inputs = (query, key, value)
        if any(x.ndim != 2 for x in inputs) or len(key) != len(value) or not len(key):
            return None
        shape = (self.num_heads, len(query), len(key))
        is_array = mask is not None and not isinstance(mask, masks.Mask)
        if is_array and getattr(mask, "shape", None) not in (shape, shape[1:]):
            return None
        projections = (self.query_proj, self.key_proj, self.value_proj)
        heads = [self._heads(layer, x) for layer, x in zip(projections, inputs, strict=True)]
        if process_heads is not None:
            processed = process_heads(*heads)
            if [x.shape for x in processed] != [x.shape for x in heads]:
                raise ValueError("process_heads must not change the shape of the heads.")
            heads = processed
        dtype = jnp.result_type(*heads)
        heads = [x.astype(dtype) for x in heads]
        if not (jnp.issubdtype(dtype, jnp.floating) and fits(*heads)):
            return None
        output = attend(jnp, heads[0], heads[1], heads[2], jnp.asarray(mask) != 0 if is_array else mask)
        return jax.vmap(self.output_proj)(output.reshape(len(query), -1))

    def _heads(self, projection: Any, x: Any) -> Any:
        return jax.vmap(projection)(x).reshape(len(x), self.num_heads, -1)


def replace(model: Any) -> Any:
    """Return the model with layers of this file."""
    original, has_layer = eqx.nn.MultiheadAttention, False

    def replaced(node: Any) -> Any:
        nonlocal has_layer
        has_layer = has_layer or isinstance(node, MultiheadAttention)
        if type(node) is not original:
            return node
        has_layer = True
        layer = object.__new__(MultiheadAttention)  # the constructor would draw other weights
        for field in fields(node):
            object.__setattr__(layer, field.name, getattr(node, field.name))  # its classes are frozen
        return layer

    result = jax.tree_util.tree_map(replaced, model, is_leaf=lambda node: isinstance(node, original))
    if not has_layer:
        rule = "`model` must have a layer equinox.nn.MultiheadAttention"
        got = {"model": f"<{type(model).__qualname__}>"}
        raise ArgumentValueError("replace_attention", rule, got, "Derived classes are not replaced.")
    return result
