// The kernels of cache.cu, unmodified, for the CPU. Built by tests/cpu_kernels.py.
#include "cuda_shim.h"

#include "cache.cu"

KERNEL(find_slots)
KERNEL(gather_cached)
KERNEL(scatter_cached)
