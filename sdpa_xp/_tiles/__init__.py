"""The grid of scores of a call, and the tiles that it is cut into: what masks and biases are asked about.

score_grid     L queries x S keys for each query head, and what is known of them
plan           how the grid is cut; with `tuning`, the numbers that were measured
tile           a part of the grid, and its part of other arrays
modifier       what masks and biases have in common; with `trees`, the arrays in them
patches        lists of keys for blocks of queries
on_device, shape_grid   a grid on a device, and a grid without a call
"""
