// The kernels of rows.cu, unmodified, for the CPU. Built by tests/test_kernels.py.
#include "cuda_shim.h"

#include "rows.cu"

extern "C" long long size_of_move() { return sizeof(Move); }

// Each returns how many reads were not aligned to their lane.
extern "C" long long cpu_gather_rows(unsigned int blocks, unsigned int threads, const void* move) {
    misaligned_reads = 0;
    launch(gather_rows, blocks, threads, move);
    return misaligned_reads;
}

extern "C" long long cpu_scatter_rows(unsigned int blocks, unsigned int threads, const void* move) {
    misaligned_reads = 0;
    launch(scatter_rows, blocks, threads, move);
    return misaligned_reads;
}
