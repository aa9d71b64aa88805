// The kernels of codecs.cu, unmodified, for the CPU. Built by tests/cpu_kernels.py.
#include "cuda_shim.h"

#include <cmath>

#include "codecs.cu"

KERNEL(encode_rows)
KERNEL(decode_blocks)
KERNEL(decode_split24)
