"""How programs are run: at once, in threads, or in loops of a compiler; and their memory.

executors      run a program; `loops` are those of a compiler, `threads` those of BLAS
results        where programs put what they compute
products       products with keys and values, whose heads a group shares
buffers, in_place   the memory of tiles, and operations in it
"""
