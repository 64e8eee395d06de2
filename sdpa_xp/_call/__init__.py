"""From keyword arguments to a prepared call: options, validation, binding, and the only cache of calls."""
