"""Choosing hyper-parameters: the paper's recipe, and a wider search with Optuna. The test set is never looked at."""
