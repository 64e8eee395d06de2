"""A layer as the exporter uses it: its arguments and outputs by name, and copies of it with other arrays.

    layer            arguments, outputs, parameters, errors
    call_signature   what a call of `jit` passes
    open_lengths     which lengths of these arrays may be open
    results          what a layer returns, and the same structure of other arrays
    state, contents  all that a layer leads to; what one object holds
    held_arrays      copies of a layer with other arrays
    tensors          tensors of torch that compute with NumPy arrays

Nothing here writes a node.
"""
