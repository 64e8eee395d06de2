"""The mathematics of attention, tile by tile, on the arrays of any library."""
