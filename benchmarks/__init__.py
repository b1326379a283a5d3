"""Time every engine against a straightforward implementation of the paper: `python -m benchmarks`."""
