// The kernels of rows.cu, unmodified, for the CPU. Built by tests/cpu_kernels.py.
#include "cuda_shim.h"

#include "rows.cu"

extern "C" long long size_of_move() { return sizeof(Move); }
extern "C" long long lanes_read_by_rows() { return lanes_read; }

extern "C" long long cpu_gather_rows(unsigned int blocks, unsigned int threads, const void* move, int backwards) {
    return launch(gather_rows, blocks, threads, move, backwards);
}

extern "C" long long cpu_scatter_rows(unsigned int blocks, unsigned int threads, const void* move, int backwards) {
    return launch(scatter_rows, blocks, threads, move, backwards);
}
