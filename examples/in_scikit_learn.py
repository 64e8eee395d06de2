"""Attention as a step of scikit-learn, on NumPy: the weights of rows over landmarks, some of the training rows.

    rows (n, d), landmarks (m, d) -- softmax of -|row - landmark|^2 / (2 temperature) --> features (n, m)

These are the weights of a kernel smoother (Nadaraya, "On estimating regression", 1964; Watson, "Smooth
regression analysis", 1964). Attention gives them: |row|^2 is the same for all landmarks and drops out of the
softmax, so the scores are row . landmark / temperature, with the bias -|landmark|^2 / (2 temperature). A linear
model behind them learns the values.

Run it: python examples/in_scikit_learn.py
"""

from __future__ import annotations

from numbers import Integral, Real
from typing import Any, Self

import numpy as np
from sklearn.base import BaseEstimator, ClassNamePrefixFeaturesOutMixin, TransformerMixin, clone
from sklearn.datasets import make_circles
from sklearn.linear_model import LogisticRegression
from sklearn.model_selection import GridSearchCV, train_test_split
from sklearn.pipeline import make_pipeline
from sklearn.utils import Tags, check_random_state, check_scalar
from sklearn.utils.validation import check_is_fitted, validate_data

from sdpa_xp import attention_weights

DTYPES = [np.float64, np.float32]


class AttentionToLandmarks(ClassNamePrefixFeaturesOutMixin, TransformerMixin, BaseEstimator):
    """The attention weights of each row over at most `n_landmarks` rows, which `fit` draws from its data."""

    def __init__(self, n_landmarks: int = 20, temperature: float = 1.0, random_state: Any = None) -> None:
        self.n_landmarks = n_landmarks
        self.temperature = temperature
        self.random_state = random_state

    def fit(self, X: Any, y: Any = None) -> Self:
        check_scalar(self.n_landmarks, "n_landmarks", Integral, min_val=1)
        check_scalar(self.temperature, "temperature", Real, min_val=0, include_boundaries="neither")
        X = validate_data(self, X, dtype=DTYPES)
        indices = check_random_state(self.random_state).permutation(len(X))[: self.n_landmarks]
        self.landmarks_ = X[indices]
        self._n_features_out = len(indices)
        return self

    def transform(self, X: Any) -> np.ndarray:
        check_is_fitted(self)
        X = validate_data(self, X, dtype=DTYPES, reset=False)
        landmarks = self.landmarks_.astype(X.dtype)
        bias = (landmarks**2).sum(axis=-1) / (-2 * self.temperature)
        return attention_weights(X, landmarks, bias=bias, scale=1 / self.temperature)

    def __sklearn_tags__(self) -> Tags:
        tags = super().__sklearn_tags__()
        tags.transformer_tags.preserves_dtype = ["float64", "float32"]
        return tags


def main() -> None:
    """Classify points of two rings: a linear classifier fails alone, and succeeds after attention."""
    X, y = make_circles(400, noise=0.1, factor=0.5, random_state=0)
    X, unseen, y, labels = train_test_split(X, y, random_state=0)
    alone = LogisticRegression().fit(X, y).score(unseen, labels)

    pipeline = make_pipeline(AttentionToLandmarks(random_state=0), LogisticRegression())
    grid = {
        "attentiontolandmarks__temperature": [0.01, 0.1, 1.0, 10.0],
        "attentiontolandmarks__n_landmarks": [5, 20],
    }
    search = GridSearchCV(clone(pipeline), grid).fit(X, y)
    with_attention = search.score(unseen, labels)
    print("The points lie on two rings, and no line separates them.")
    print(f"A linear classifier alone is right for {alone:.0%} of the unseen points.")
    print(f"With attention to landmarks before it, it is right for {with_attention:.0%}.")
    print(
        "The grid search chose", {name.partition("__")[2]: best for name, best in search.best_params_.items()}
    )
    assert alone < 0.6
    assert with_attention > 0.9

    attention = search.best_estimator_[0]
    weights = attention.transform(unseen)
    distances = ((unseen[:, None, :] - attention.landmarks_) ** 2).sum(axis=-1)
    smooth = np.exp(-distances / (2 * attention.temperature))
    np.testing.assert_allclose(weights, smooth / smooth.sum(axis=-1, keepdims=True), rtol=1e-9)


if __name__ == "__main__":
    main()
