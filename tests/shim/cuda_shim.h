// As much CUDA as a kernel without cross-lane operations needs to run on the CPU: launch() runs its threads one by one.
#pragma once

#include <atomic>
#include <cstdint>
#include <type_traits>

#define __global__
#define __device__
#define __grid_constant__

struct dim3 {
    unsigned int x = 1, y = 1, z = 1;
};
struct alignas(16) uint4 {
    unsigned int x, y, z, w;
};

inline thread_local dim3 threadIdx, blockIdx, blockDim, gridDim;

// A device faults on such a read; this machine does not, so count them.
inline std::atomic<long long> misaligned_reads{0};

template <typename T>
inline T __ldcg(const T* from) {
    if (reinterpret_cast<std::uintptr_t>(from) % sizeof(T) != 0) ++misaligned_reads;
    T value;
    __builtin_memcpy(&value, from, sizeof(T));
    return value;
}

template <typename Argument>
void launch(void (*kernel)(Argument), unsigned int blocks, unsigned int threads, const void* argument) {
    gridDim = {blocks, 1, 1};
    blockDim = {threads, 1, 1};
    for (blockIdx = {0, 0, 0}; blockIdx.x < blocks; ++blockIdx.x)
        for (threadIdx = {0, 0, 0}; threadIdx.x < threads; ++threadIdx.x) {
            // The argument by value, from memory of any alignment, as the driver takes it.
            std::remove_const_t<Argument> copy;
            __builtin_memcpy(&copy, argument, sizeof copy);
            kernel(copy);
        }
}
