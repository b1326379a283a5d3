"""Engines for CUDA devices: the reference iteration as a CUDA graph, and hand-written kernels."""
