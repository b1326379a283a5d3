"""Experiments as data: the paper's tables of hyper-parameters, and custom experiments from TOML."""
