"""How programs are run: at once, in threads, or in loops of a compiler; and their memory.

    executors          run a program
    loops, threads     of a compiler; of this process, with BLAS held to one
    results            where programs put what they compute
    products           with keys and values, whose heads a group shares
    buffers, in_place  the memory of tiles, and operations in it

An executor knows no program.
"""
