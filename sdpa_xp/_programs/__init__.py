"""What is computed from the scores of a tile, on the arrays of any library.

    scores           of a tile, as `BoundOptions` ask for them
    softmax          one tile of keys after the other; `dropout`
    output, weights  programs
    statistics       a program; `top_keys`
    index_scores     a program: the largest scores, each of all heads
    gradients        a program
    one_tile         small calls, without the objects that cut a call
    patches          a call whose mask lists keys, as many short sequences
    reproducible     bits that depend on nothing beside a row; `fixed_blocks`
    differentiable   products that a library itself differentiates

A program says what a range of queries adds to each result; `_run` runs it.
"""
