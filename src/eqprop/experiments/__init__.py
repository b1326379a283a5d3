"""Experiments as data: the paper's tables of hyper-parameters as frozen records, and a user's own from TOML."""
