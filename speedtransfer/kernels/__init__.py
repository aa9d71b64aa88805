"""CUDA sources, compiled by NVRTC on first use; `device.load_kernel` reads them."""
