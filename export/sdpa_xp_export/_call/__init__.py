"""A call of attention with specs instead of arrays: its options, its checks, and what its masks amount to."""
