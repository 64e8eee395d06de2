"""From keyword arguments to a prepared call: options, validation, binding, and the only cache of calls.

    options        the options as passed, checked, and as one tree of arrays
    prepared_call  a call is checked once, and is known again if an equal one comes
    reproducible   what `reproducible=True` refuses
    tangents       the tangents of a call, for derivatives

Nothing here computes a score.
"""
