"""Kernels behind the model's functions: a reference for each, and the fast forms."""
