"""The grid of scores of a call, and the tiles that it is cut into: what masks and biases are asked about.

    grid             what masks and biases ask of a grid
    score_grid       L queries x S keys for each query head, of a call or without one
    on_device        what a grid knows of a device
    plan, tuning     how the grid is cut, and the numbers that were measured
    tile             a part of the grid, and its part of other arrays
    modifier         what masks and biases have in common, and the arrays in them

Nothing here computes a score.
"""
