"""The calls that every array library and every form is held against the reference on."""
