"""The grid of scores of a call, and the tiles that it is cut into: what masks and biases are asked about."""
