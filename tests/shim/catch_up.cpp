// The kernels of catch_up.cu, unmodified, for the CPU. Built by tests/cpu_kernels.py.
#include "cuda_shim.h"

#include "catch_up.cu"

KERNEL(take_missed)
KERNEL(replay_steps)
