"""Benchmarks: their protocol is in `README.md`, what they measured in `results/`."""
