// The kernels of unique.cu, unmodified, for the CPU. Built by tests/cpu_kernels.py.
#include "cuda_shim.h"

#include "unique.cu"

KERNEL_TOGETHER(find_few)
KERNEL(find_keys)
KERNEL(mark_groups)
KERNEL(write_groups)
