"""Engines for CUDA devices: graphs of the reference iteration, and kernels of their own."""
