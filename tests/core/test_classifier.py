"""scikit-learn's own checks of `EqPropClassifier`, and what it learns."""

import numpy as np
import pytest

import eqprop

sklearn = pytest.importorskip("sklearn")

from sklearn.datasets import load_digits, make_moons  # noqa: E402
from sklearn.model_selection import GridSearchCV, train_test_split  # noqa: E402
from sklearn.pipeline import make_pipeline  # noqa: E402
from sklearn.preprocessing import MinMaxScaler  # noqa: E402
from sklearn.utils.estimator_checks import check_estimator  # noqa: E402

SMALL = {
    "hidden": (16,),
    "estimator": eqprop.EP(T=12, K=5, beta=0.5),
    "epochs": 8,
    "learning_rate": 0.01,
    "random_state": 0,
}


def test_passes_the_checks_of_scikit_learn() -> None:
    check_estimator(eqprop.EqPropClassifier(**SMALL))


@pytest.mark.parametrize("estimator", [None, eqprop.BPTT(T=15, K=10)], ids=["ep", "bptt"])
def test_learns_what_a_line_cannot_separate(estimator: eqprop.Estimator | None) -> None:
    X, y = make_moons(400, noise=0.1, random_state=0)
    classifier = eqprop.EqPropClassifier((32,), estimator=estimator, epochs=20, learning_rate=0.02, random_state=0)
    assert classifier.fit(X[:300], y[:300]).score(X[300:], y[300:]) > 0.9
    assert classifier.losses_[-1] < 0.6 * classifier.losses_[0]
    assert classifier.residual_ < 0.05
    shuffled = np.random.default_rng(0).permutation(y[:300])
    assert classifier.fit(X[:300], shuffled).score(X[300:], y[300:]) < 0.75


def test_works_in_pipelines_and_searches() -> None:
    X, y = load_digits(return_X_y=True)
    X, X_test, y, y_test = train_test_split(X[:600], y[:600], random_state=0)
    names = np.array([f"digit {n}" for n in range(10)])
    pipeline = make_pipeline(MinMaxScaler(), eqprop.EqPropClassifier((32,), epochs=8, random_state=0))
    search = GridSearchCV(pipeline, {"eqpropclassifier__learning_rate": [1e-6, 0.005]}, cv=2)
    search.fit(X, names[y])
    assert search.best_params_ == {"eqpropclassifier__learning_rate": 0.005}
    assert search.score(X_test, names[y_test]) > 0.85


def test_one_class_is_refused() -> None:
    with pytest.raises(ValueError, match="one class"):
        eqprop.EqPropClassifier().fit(np.zeros((4, 2)), [1, 1, 1, 1])
