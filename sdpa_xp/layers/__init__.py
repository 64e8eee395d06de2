"""Attention with its projections: immutable layers, whose parameters are arrays of any library.

What `MultiHeadAttention` computes, with the shape of each array (in self-attention all inputs are the same):

    query                key                value
    (..., L, query_dim)  (..., S, key_dim)  (..., S, value_dim)
        |                    |                  |
     @ W_q + b_q          @ W_k + b_k        @ W_v + b_v
        |                    |                  |
    (..., Hq, L, E)      (..., H, S, E)     (..., H, S, Ev)      project()
        |                    |                  |
        +-- q k^T * scale ---+                  |
                  |                             |
           (..., Hq, L, S)                      |                weights()
           masks, biases, softmax               |
                  |                             |
                  +-------- weights @ v --------+
                                |
                         (..., Hq, L, Ev)                        state()
                                |
                    join the heads, @ W_o + b_o                  combine()
                                |
                         (..., L, out_dim)                       the call

Each W is stored transposed, (out, in), as in files of torch. A layer calls `scaled_dot_product_attention`, so
no L x S array is built.

Create a layer with `init(rng, ...)`, `from_torch`, `from_mapping`, or from `Linear` projections. A layer never
changes: `with_parameters` returns one with other arrays, also inside jax.grad, and `to` a copy in another
library. In JAX a layer is a pytree of its arrays, so jit, grad, vmap and scan take it. Derive your own
dataclass of layers and arrays from `Layer` to give it these methods.
"""

from .layer import Layer
from .linear import Linear
from .multi_head import MultiHeadAttention
from .single_head import SingleHeadAttention

__all__ = ["Layer", "Linear", "MultiHeadAttention", "SingleHeadAttention"]


def __dir__() -> list[str]:
    """Complete public names, not the files that define them."""
    return __all__
