"""How programs are run: at once, in threads, or in loops of a compiler; and their memory."""
