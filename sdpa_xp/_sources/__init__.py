"""Where keys and values come from: arrays, blocks of a paged cache, or small integers."""
