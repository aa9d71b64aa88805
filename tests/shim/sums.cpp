// The kernels of sums.cu, unmodified, for the CPU. Built by tests/cpu_kernels.py.
#include "cuda_shim.h"

#include "sums.cu"

KERNEL_TOGETHER(sum_few)
KERNEL(sum_pieces)
KERNEL(add_pieces)
