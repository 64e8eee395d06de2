"""The forms in which a call can be written: one file a form, each with `write(graph, call, runtime)`."""
