"""Timing every engine against the paper's algorithm written the obvious way: `python -m benchmarks`."""
