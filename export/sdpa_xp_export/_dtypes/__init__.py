"""Dtypes by their names: what they promote to, which kernels there are, and what other libraries call them."""
