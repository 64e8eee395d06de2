"""What is added to the scores: small values that combine with `+`.

`bias` takes any of them. A bias answers for one tile of the scores at a time, so no array of L x S is made.
"""

from sdpa_xp.biases.algebra import Bias
from sdpa_xp.biases.alibi import alibi
from sdpa_xp.biases.arrays import to_array
from sdpa_xp.biases.custom import from_array, from_function
from sdpa_xp.biases.relative import relative

__all__ = ["Bias", "alibi", "from_array", "from_function", "relative", "to_array"]
