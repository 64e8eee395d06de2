"""The demo: a real encoder's attention, compared on every array library and in every form of a graph."""
