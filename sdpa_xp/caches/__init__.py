"""Caches of keys and values: `KVCache`, and `PagedKVCache` in blocks of a pool."""
