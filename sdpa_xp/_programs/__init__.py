"""What is computed from the scores of a tile, on the arrays of any library. A program knows no executor."""
