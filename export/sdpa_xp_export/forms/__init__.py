"""The forms in which a call can be written: one file a form, each with `refusal(call, runtime)` and `write`."""
