// The kernels of bulk.cu for the CPU: unmodified but for the steps of the copy engine. Built by tests/cpu_kernels.py.
#include "bulk_shim.h"

#include "bulk.cu"

alignas(128) char shared_memory[kSharedMax];

extern "C" void set_engine(unsigned int bytes, int late_loads, int late_stores) {
    shared_bytes = bytes;
    loads_are_late = late_loads;
    stores_are_late = late_stores;
    std::memset(shared_memory, 0xee, kSharedMax);
}

extern "C" long long cpu_gather_bulk(unsigned int blocks, unsigned int threads, const void* move, int backwards) {
    return launch(gather_bulk, blocks, threads, move, backwards, thread_done);
}

extern "C" long long cpu_scatter_bulk(unsigned int blocks, unsigned int threads, const void* move, int backwards) {
    return launch(scatter_bulk, blocks, threads, move, backwards, thread_done);
}
