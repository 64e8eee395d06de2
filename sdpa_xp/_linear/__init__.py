"""Linear attention and the causal convolution: layers that keep a state instead of keys and values."""
