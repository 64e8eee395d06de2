"""Models and other files on the disk, written whole or not at all, and read with care."""
