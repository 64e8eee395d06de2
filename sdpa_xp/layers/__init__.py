"""Attention with its projections: immutable layers, whose parameters are arrays of any library.

What `MultiHeadAttention` computes, with the shape of each array (in self-attention all inputs are the same):

    query (..., L, query_dim)     key (..., S, key_dim)         value (..., S, value_dim)
        |                             |                             |
     @ W_q + b_q                   @ W_k + b_k                   @ W_v + b_v        each W is stored transposed,
        |                             |                             |              (out, in), as files have it
     (..., L, Hq * E)              (..., S, H * E)               (..., S, H * Ev)
        |                             |                             |
      split                         split                         split             into heads
        |                             |                             |
     (..., Hq, L, E)               (..., H, S, E)                (..., H, S, Ev)    <- project()
        |                             |                             |
        +----- q k^T * scale ---------+                             |
                     |                                              |
               (..., Hq, L, S)  masks, biases, softmax              |               <- weights()
                     |                                              |
                     +---------------- weights @ v -----------------+
                                            |
                                     (..., Hq, L, Ev)                               <- state()
                                            |
                                          join                                      the heads, side by side
                                            |
                                     (..., L, Hq * Ev)
                                            |
                                       @ W_o + b_o                                  <- combine()
                                            |
                                     (..., L, out_dim)                              <- the call

The array of L x S exists only in the drawing: a layer calls `scaled_dot_product_attention` between `project`
and `combine`, and takes its keywords. `SingleHeadAttention` has one head, and no map at the end. For decoding,
`project_key_value` computes the right half of the drawing, for a `KVCache`, and `attend` computes the rest.

A layer never changes. `parameters` are its arrays by name, for an optimiser or a file. `with_parameters`
returns the layer with other arrays, also inside jax.grad. `to` copies the layer to another library. Derive
your own dataclass of layers and arrays from `Layer` to give it these methods.
"""

from sdpa_xp.layers.linear import Linear
from sdpa_xp.layers.multi_head import MultiHeadAttention
from sdpa_xp.layers.parameters import Layer
from sdpa_xp.layers.single_head import SingleHeadAttention

__all__ = ["Layer", "Linear", "MultiHeadAttention", "SingleHeadAttention"]
