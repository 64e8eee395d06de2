"""Calls that are cut into blocks, which many tasks or devices compute.

    blocks      which part of each array belongs to a block of the scores
    windows     a block as a call of its own, whose masks and biases count in the whole call
    tasks       what a task computes for a block of chunked arrays
    cutting     a call of chunked arrays: where it is cut, and which blocks have pairs that may attend
    graphs      the graph of its tasks, for Dask
    schedule    which device has which queries and keys, and which way the keys travel
    walks       around the ring: states merge, gradients travel with the keys (`sdpa_xp/_ring.py` starts it)

The library's file in `_libraries` says how tasks become an array, and how devices send arrays. Tasks hold no
array and no lock, so any worker can compute them. No array is larger than a chunk.
"""
