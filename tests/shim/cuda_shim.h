// As much CUDA as a kernel without cross-lane operations needs to run on the CPU: launch() runs its threads one by one.
#pragma once

#include <atomic>
#include <cstdint>
#include <cstring>
#include <type_traits>

#define __global__
#define __device__
#define __grid_constant__
#define __shared__
#define __align__(bytes) __attribute__((aligned(bytes)))

struct dim3 {
    unsigned int x = 1, y = 1, z = 1;
};
struct alignas(16) uint4 {
    unsigned int x, y, z, w;
};
struct alignas(8) uint2 {
    unsigned int x, y;
};

inline thread_local dim3 threadIdx, blockIdx, blockDim, gridDim;

// What a device would have answered with a fault or a hang, and this machine does not: counted, and returned by a launch.
inline std::atomic<long long> mistakes{0};

// Lanes read in a launch: each once, or the bus carries some twice.
inline std::atomic<long long> lanes_read{0};

inline void expect(bool right) {
    if (!right) ++mistakes;
}

template <typename T>
inline void expect_aligned(const T* pointer) {
    expect(reinterpret_cast<std::uintptr_t>(pointer) % sizeof(T) == 0);
}

template <typename T>
inline T __ldcg(const T* from) {
    expect_aligned(from);
    ++lanes_read;
    T value;
    std::memcpy(&value, from, sizeof(T));
    return value;
}

template <typename T>
inline void __stcg(T* to, T value) {
    expect_aligned(to);
    std::memcpy(to, &value, sizeof(T));
}

inline int __clz(int value) { return value == 0 ? 32 : __builtin_clz(static_cast<unsigned int>(value)); }

inline int atomicExch(int* at, int value) {
    const int before = *at;
    *at = value;
    return before;
}

// The record of a fault is the only thing that is fenced: its state must still be 0 then.
inline const volatile long long* fenced_state = nullptr;
inline void __threadfence_system() { expect(fenced_state != nullptr && *fenced_state == 0); }

// Where an argument has the record of a fault, its state.
template <typename Argument>
auto state_of(const Argument& argument, int) -> decltype(&argument.fault->state) {
    return argument.fault == nullptr ? nullptr : &argument.fault->state;
}
template <typename Argument>
long long* state_of(const Argument&, long) {
    return nullptr;
}

// `done` is called after each thread. Threads come in any order on a device: here in two.
template <typename Argument>
long long launch(
    void (*kernel)(Argument), unsigned int blocks, unsigned int threads, const void* argument, bool backwards,
    void (*done)() = nullptr
) {
    mistakes = lanes_read = 0;
    gridDim = {blocks, 1, 1};
    blockDim = {threads, 1, 1};
    // The argument by value, from memory of any alignment, as the driver takes it.
    std::remove_const_t<Argument> copy;
    std::memcpy(&copy, argument, sizeof copy);
    fenced_state = state_of(copy, 0);
    for (unsigned int b = 0; b < blocks; ++b)
        for (unsigned int t = 0; t < threads; ++t) {
            blockIdx = {backwards ? blocks - 1 - b : b, 0, 0};
            threadIdx = {backwards ? threads - 1 - t : t, 0, 0};
            kernel(copy);
            if (done != nullptr) done();
        }
    return mistakes;
}

// Make the kernel `name` a function of this library. What emulates a device has a prefix of its own.
#ifndef KERNEL_PREFIX
#define KERNEL_PREFIX cpu_
#endif
#define JOINED_(prefix, name) prefix##name
#define JOINED(prefix, name) JOINED_(prefix, name)
#define KERNEL(name)                                                                                             \
    extern "C" long long JOINED(KERNEL_PREFIX, name)(                                                            \
        unsigned int blocks, unsigned int threads, const void* argument, int backwards                           \
    ) {                                                                                                          \
        return launch(name, blocks, threads, argument, backwards);                                               \
    }
