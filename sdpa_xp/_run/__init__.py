"""How programs are run: at once, in threads, or in loops of a compiler; and their memory.

    executors  run a program: at once, in threads or in loops, and again where a masked NaN got in
    bands      of queries, each a loop of a compiler
    threads    of this process, with BLAS held to one
    program    what a program says, and where it puts what it computes
    products   with keys and values, whose heads a group shares; rows without keys
    buffers    the memory of tiles, and operations in it

An executor knows no program.
"""
