"""A layer as the exporter uses it: its arguments and outputs by name, and copies of it with other arrays.

layer          arguments, outputs, parameters, errors
call_signature, open_lengths   what a call of `jit` passes, and which of its lengths may be open
results        what a layer returns, and the same structure of other arrays
state          all that a layer leads to; `contents` is what one object holds
held_arrays    copies of a layer with other arrays; `tensors` holds those of torch
"""
