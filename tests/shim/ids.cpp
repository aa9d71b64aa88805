// The kernels of ids.cu, unmodified, for the CPU. Built by tests/cpu_kernels.py.
#include "cuda_shim.h"

#include "ids.cu"

KERNEL(find_ids)
KERNEL(change_ids)
KERNEL(insert_ids)
KERNEL(fill_unseen)
