"""sdpa_xp inside of other libraries: a file a library, which is imported when you register.

`sdpa_xp.integrations.transformers.register()` makes sdpa_xp an attention implementation of transformers.
"""
