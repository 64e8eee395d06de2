"""Calls of sequences of unlike lengths, and of tokens that lie in pages or are quantised."""
