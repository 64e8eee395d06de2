"""A call of attention with specs instead of arrays: its options, its checks, and what its masks amount to.

    call           the call, and the table of its options
    arguments      the check of each argument
    operands       inputs and initializers in place of arrays
    mask_analysis  what the forms ask about masks and biases
    text           a call as JSON and back, for files and the command
    outputs        what a graph may return, by name; `AttentionStatistics` as outputs

Nothing here writes a node.
"""
