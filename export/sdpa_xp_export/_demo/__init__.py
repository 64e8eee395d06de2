"""The demo: the attention of a real sentence encoder on every array library that is installed."""
