"""Attention with its projections: immutable layers, whose parameters are arrays of any library.

What `MultiHeadAttention` computes, with the shape of each array (in self-attention all inputs are the same):

    query                key                value
    (..., L, query_dim)  (..., S, key_dim)  (..., S, value_dim)
        |                    |                  |
     @ W_q + b_q          @ W_k + b_k        @ W_v + b_v
        |                    |                  |
    (..., L, Hq * E)     (..., S, H * E)    (..., S, H * Ev)
        |                    |                  |
     split into heads     split              split             project()
        |                    |                  |
    (..., Hq, L, E)      (..., H, S, E)     (..., H, S, Ev)
        |                    |                  |
        +-- q k^T * scale ---+                  |
                  |                             |
           (..., Hq, L, S)                      |              weights()
           masks, biases, softmax               |
                  |                             |
                  +-------- weights @ v --------+
                                |
                         (..., Hq, L, Ev)                      state()
                                |
                          join the heads
                                |
                         (..., L, Hq * Ev)
                                |
                           @ W_o + b_o                         combine()
                                |
                         (..., L, out_dim)                     the call

Each W is stored transposed, (out, in), as in files of torch. Between `project` and `combine`, a layer calls
`scaled_dot_product_attention` and passes its keywords on, so no L x S array is built: it is only in the
drawing. `SingleHeadAttention` has one head, and no projection at the end. For decoding, `project_key_value`
computes the keys and values for a `KVCache`, and `attend` computes the rest.

Create a layer with `init(rng, ...)`, `from_torch`, `from_mapping`, or from `Linear` projections. A layer never
changes. `parameters` has its arrays by name, for an optimiser or a file. `with_parameters` returns the layer
with other arrays, also inside jax.grad. In JAX a layer is a pytree of its arrays, so jit, grad, vmap and scan
take it. `to` copies the layer to another library. Derive your own dataclass of layers and arrays from `Layer`
to give it these methods.
"""

from sdpa_xp.layers.layer import Layer
from sdpa_xp.layers.linear import Linear
from sdpa_xp.layers.multi_head import MultiHeadAttention
from sdpa_xp.layers.single_head import SingleHeadAttention

__all__ = ["Layer", "Linear", "MultiHeadAttention", "SingleHeadAttention"]


def __dir__() -> list[str]:
    """Complete public names, not the files that define them."""
    return __all__
