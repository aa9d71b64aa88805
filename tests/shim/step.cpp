// The kernel of step.cu, unmodified, for the CPU. Built by tests/cpu_kernels.py.
#include "cuda_shim.h"

#include "step.cu"

KERNEL(step_rows)
