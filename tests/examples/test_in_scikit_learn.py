"""scikit-learn's own checks of estimators, on the one of the example.

It skips that of arrays of other libraries, which it hands on only where SCIPY_ARRAY_API is set.
"""

from __future__ import annotations

from typing import Any

from in_scikit_learn import AttentionToLandmarks
from sklearn.utils.estimator_checks import parametrize_with_checks


@parametrize_with_checks([AttentionToLandmarks(random_state=0)])
def test_of_scikit_learn(estimator: Any, check: Any) -> None:
    check(estimator)
