// The kernels of convert.cu, unmodified, for the CPU. Built by tests/cpu_kernels.py.
#include "cuda_shim.h"

#include "convert.cu"

extern "C" long long cpu_gather_converted(unsigned int blocks, unsigned int threads, const void* move, int backwards) {
    return launch(gather_converted, blocks, threads, move, backwards);
}

extern "C" long long cpu_scatter_converted(unsigned int blocks, unsigned int threads, const void* move, int backwards) {
    return launch(scatter_converted, blocks, threads, move, backwards);
}
