"""CUDA sources, compiled by NVRTC on first use; `cuda.load_kernel` reads them."""
