"""How programs are run: at once, in threads, or in loops of a compiler; and their memory.

    program    what a program is, and where it puts what it computes
    executors  run a program: at once, or in threads; again if results are wrong
    loops      run it in loops of a compiler
    threads    of this process, with BLAS held to one
    products   with keys and values, whose heads a group shares; rows without keys
    buffers    the memory of tiles, and operations in it

An executor knows no program.
"""
