"""Checks of arguments that several files need: arrays, shapes, numbers and keywords; and the words of messages.

Checks run before any work. `check_...` is named after what must hold, and `refuse_...` after what does not. It
raises an error that names the wrong argument, or returns the checked value. `function` is the public function
that was called, and `name` is the argument; messages begin with them. A check with one caller stands beside it.
"""
