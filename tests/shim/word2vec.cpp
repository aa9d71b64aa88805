// The kernel of word2vec.cu, unmodified, for the CPU. Built by tests/cpu_kernels.py.
#include "cuda_shim.h"

#include "word2vec.cu"

KERNEL_TOGETHER(train_spans)
