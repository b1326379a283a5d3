"""`EqPropClassifier`: a layered net trained by any estimator, with scikit-learn's `fit`, `predict` and `score`."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from eqprop.cost import SquaredError
from eqprop.data import one_hot
from eqprop.estimators import EP, Estimator
from eqprop.models import Layered
from eqprop.relax import Phase, relax

try:
    from sklearn.base import BaseEstimator, ClassifierMixin
    from sklearn.utils import check_random_state
    from sklearn.utils.multiclass import check_classification_targets
    from sklearn.utils.validation import check_is_fitted, validate_data
except ImportError as error:
    raise ImportError("EqPropClassifier needs scikit-learn. Install it: pip install 'eqprop[sklearn]'.") from error

Array = np.ndarray[Any, Any]


class EqPropClassifier(ClassifierMixin, BaseEstimator):
    """A prototypical layered net (see `eqprop.models.Layered`) that learns classes from rows of numbers.

    hidden          sizes of the hidden layers, from the input to the output
    activation      by name, such as "tanh" or "sigmoid"
    estimator       of the gradient: EP, BPTT, RBP, ...; None: EP(T=30, K=10, beta=0.5, nudging="symmetric")
    learning_rate   of Adam
    epochs, batch   passes over the samples, and samples per mini-batch
    standardise     shift and scale every feature to mean 0 and deviation 1 of the training samples
    random_state    seed of weights and mini-batches, or a numpy RandomState

    After `fit`: `model_` (the net, in float64, whose predictions do not depend on how samples are batched), `classes_`,
    `n_features_in_`, `losses_` (mean loss of the free phases per epoch) and `residual_` (median over the samples of the
    last epoch of what a further step would have changed: where it is not small, raise T or lower the learning rate).
    """

    def __init__(
        self,
        hidden: Sequence[int] = (64,),
        activation: str = "tanh",
        estimator: Estimator | None = None,
        learning_rate: float = 0.005,
        epochs: int = 20,
        batch: int = 20,
        standardise: bool = True,
        random_state: Any = None,
    ) -> None:
        self.hidden = hidden
        self.activation = activation
        self.estimator = estimator
        self.learning_rate = learning_rate
        self.epochs = epochs
        self.batch = batch
        self.standardise = standardise
        self.random_state = random_state

    def fit(self, X: Any, y: Any) -> EqPropClassifier:
        """Train a new net on the rows of X, (n, features), and their classes y, (n,). Return self."""
        X, y = validate_data(self, X, y, dtype=np.float64)
        check_classification_targets(y)
        self.classes_, labels = np.unique(y, return_inverse=True)
        if len(self.classes_) < 2:
            raise ValueError(f"Got samples of one class only, {self.classes_[0]!r}; expected at least two classes.")
        self.mean_ = X.mean(0) if self.standardise else np.zeros(X.shape[1])
        deviation = X.std(0) if self.standardise else np.ones(X.shape[1])
        self.scale_ = np.where(deviation > 0, deviation, 1.0)
        seed = int(check_random_state(self.random_state).randint(2**31))
        sizes = (len(self.classes_), *reversed(self.hidden), X.shape[1])
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "Layered got sizes")  # more classes than features is no mistake here
            self.model_ = Layered(sizes, activation=self.activation, seed=seed, dtype=torch.float64)
        self._train(self._inputs(X), one_hot(torch.as_tensor(labels), len(self.classes_)).double(), seed)
        return self

    def _train(self, x: torch.Tensor, y: torch.Tensor, seed: int) -> None:
        estimator = self._estimator()
        optimizer = torch.optim.Adam(self.model_.parameters(), lr=self.learning_rate)
        order, cost = torch.Generator().manual_seed(seed), SquaredError()
        self.losses_: list[float] = []
        for _ in range(self.epochs):
            loss, residuals = 0.0, []
            for rows in torch.randperm(len(x), generator=order).split(self.batch):
                optimizer.zero_grad()
                free = estimator.backward(self.model_, cost, x[rows], y[rows])
                optimizer.step()
                loss += float(cost(free.state, y[rows]).sum())
                residuals.append(free.residual)
            self.losses_.append(loss / len(x))
            self.residual_ = float(torch.cat(residuals).median())

    def _estimator(self) -> Estimator:
        return EP(T=30, K=10, beta=0.5, nudging="symmetric") if self.estimator is None else self.estimator

    def _inputs(self, X: Array) -> torch.Tensor:
        return torch.as_tensor((X - self.mean_) / self.scale_)

    def _outputs(self, X: Any) -> Array:
        """The net's outputs after the free phase, (n, classes)."""
        check_is_fitted(self, "model_")
        X = validate_data(self, X, dtype=np.float64, reset=False)
        phase = Phase(getattr(self._estimator(), "T", 30), stop="settled")
        found: Array = relax(self.model_, self._inputs(X), phase).state[0].numpy()
        return found

    def decision_function(self, X: Any) -> Array:
        """Return the outputs, (n, classes); with two classes the second one's minus the first one's, (n,)."""
        outputs = self._outputs(X)
        return outputs[:, 1] - outputs[:, 0] if len(self.classes_) == 2 else outputs

    def predict(self, X: Any) -> Array:
        """Return the class of each row of X, (n,): that of the largest output."""
        best = self._outputs(X).argmax(-1)
        found: Array = self.classes_[best]
        return found
