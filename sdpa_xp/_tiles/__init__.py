"""The grid of scores of a call, and the tiles that it is cut into: what masks and biases are asked about.

    score_grid       L queries x S keys for each query head, and what is known of them
    shape_grid       a grid without a call
    on_device        what a grid knows of a device
    plan, tuning     how the grid is cut, and the numbers that were measured
    tile             a part of the grid, and its part of other arrays
    modifier, trees  what masks and biases have in common, and the arrays in them
    patches          lists of keys for blocks of queries

Nothing here computes a score.
"""
