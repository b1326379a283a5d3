"""Experiments as data: the paper's tables of hyper-parameters as frozen experiments, and a user's own from TOML."""
