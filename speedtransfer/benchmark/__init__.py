"""Benchmarks of row transfers and training steps, compared with PyTorch and a plain copy."""
