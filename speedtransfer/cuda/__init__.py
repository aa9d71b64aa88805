"""CUDA as this package sees it; the only folder that imports cupy, and only inside functions."""
