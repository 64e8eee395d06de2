"""A layer as the exporter uses it: its arguments and outputs by name, and copies of it with other arrays.

    layer            arguments, parameters, outputs, errors
    call_signature   what a call of `jit` passes
    open_lengths     which lengths of these arrays may be open
    state, contents  all that a layer leads to; what one object holds
    held_arrays      copies of a layer with other arrays, in the ways in which it can be called
    tensors          tensors of torch that compute with NumPy arrays

Nothing here writes a node.
"""
