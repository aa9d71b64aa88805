// The kernels of catch_up.cu, unmodified, for the CPU. Built by tests/cpu_kernels.py.
#include "cuda_shim.h"

#include <cmath>

inline float __fmul_rn(float a, float b) { return a * b; }
inline double __dmul_rn(double a, double b) { return a * b; }

#include "catch_up.cu"

KERNEL(take_missed)
KERNEL(replay_steps)
