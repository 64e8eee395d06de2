"""A call of attention with specs instead of arrays: its options, its checks, and what its masks amount to.

    call           the call, and the table of its options
    arguments      the check of each argument
    operands       inputs and initializers in place of arrays, and outputs by name
    mask_analysis  what the forms ask about masks and biases
    text           a call as JSON and back, for files and the command

Nothing here writes a node.
"""
