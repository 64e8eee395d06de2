"""Attention with the projections around it: immutable layers, whose parameters are arrays of any library.

What `MultiHeadAttention` computes, with the shape of each array; for self-attention the three inputs are one:

    query (..., L, query_dim)     key (..., S, key_dim)         value (..., S, value_dim)
        |                             |                             |
     @ W_q + b_q                   @ W_k + b_k                   @ W_v + b_v        each W is held transposed,
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

The array of L x S is in the drawing alone: `scaled_dot_product_attention` stands there, between `project` and
`combine`, and a layer takes its keywords. `SingleHeadAttention` has one head, and no map at the end. For
decoding, `project_key_value` is the right half of the drawing, for a `KVCache`, and `attend` the rest.

A layer never changes. `parameters` are its arrays by name, for an optimiser or a file; `with_parameters`
makes the layer that has others, also inside jax.grad; `to` moves it to another library. `Layer` gives the same
to a dataclass of your own, made of layers and arrays.
"""

from sdpa_xp.layers.linear import Linear
from sdpa_xp.layers.multi_head import MultiHeadAttention
from sdpa_xp.layers.parameters import Layer
from sdpa_xp.layers.single_head import SingleHeadAttention

__all__ = ["Layer", "Linear", "MultiHeadAttention", "SingleHeadAttention"]
