"""A model, its weights, and files on the disk: written whole or not at all, and read with care."""
