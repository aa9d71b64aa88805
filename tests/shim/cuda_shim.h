// As much CUDA as a kernel without cross-lane operations needs to run on the CPU: launch() runs its threads one by one, and
// launch_together() those of a block in turns, from one __syncthreads() to the next.
#pragma once

#include <atomic>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <functional>
#include <memory>
#include <type_traits>
#include <vector>

#include <ucontext.h>

#define __global__
#define __device__
#define __grid_constant__
// One for the threads of a block, which run on one of ours.
#define __shared__ static thread_local
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

// Rounded once, to nearest; flags of a build must not let the compiler fuse a product with a sum.
inline float __fadd_rn(float a, float b) { return a + b; }
inline float __fsub_rn(float a, float b) { return a - b; }
inline float __fmul_rn(float a, float b) { return a * b; }
inline float __fdiv_rn(float a, float b) { return a / b; }
inline float __fsqrt_rn(float a) { return std::sqrt(a); }
inline float __fmaf_rn(float a, float b, float c) { return std::fma(a, b, c); }
inline double __dadd_rn(double a, double b) { return a + b; }
inline double __dsub_rn(double a, double b) { return a - b; }
inline double __dmul_rn(double a, double b) { return a * b; }
inline double __ddiv_rn(double a, double b) { return a / b; }
inline double __dsqrt_rn(double a) { return std::sqrt(a); }

inline int atomicExch(int* at, int value) {
    const int before = *at;
    *at = value;
    return before;
}
inline unsigned long long atomicAdd(unsigned long long* at, unsigned long long value) {
    const unsigned long long before = *at;
    *at = before + value;
    return before;
}
inline unsigned long long atomicCAS(unsigned long long* at, unsigned long long expected, unsigned long long value) {
    const unsigned long long before = *at;
    if (before == expected) *at = value;
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

// Threads come in any order on a device: here in two.
template <typename Argument>
long long launch(
    void (*kernel)(Argument), unsigned int blocks, unsigned int threads, const void* argument, bool backwards
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
        }
    return mistakes;
}

// Threads of a block that wait for each other.
struct Together {
    std::function<void()> kernel;
    ucontext_t back;
    std::vector<ucontext_t> threads;
    std::vector<std::unique_ptr<char[]>> stacks;
    std::vector<bool> done;
};
inline Together* together = nullptr;

inline void __syncthreads() {
    expect(together != nullptr);
    if (together != nullptr) swapcontext(&together->threads[threadIdx.x], &together->back);
}

inline void run_together() {
    together->kernel();
    together->done[threadIdx.x] = true;
}

__attribute__((noinline)) inline void prepare(ucontext_t& thread, Together& block) {
    block.stacks.emplace_back(new char[1 << 16]);
    getcontext(&thread);
    thread.uc_stack.ss_sp = block.stacks.back().get();
    thread.uc_stack.ss_size = 1 << 16;
    thread.uc_link = &block.back;
    makecontext(&thread, run_together, 0);
}

template <typename Argument>
long long launch_together(
    void (*kernel)(Argument), unsigned int blocks, unsigned int threads, const void* argument, bool backwards
) {
    mistakes = 0;
    gridDim = {blocks, 1, 1};
    blockDim = {threads, 1, 1};
    std::remove_const_t<Argument> copy;
    std::memcpy(&copy, argument, sizeof copy);
    for (unsigned int b = 0; b < blocks; ++b) {
        blockIdx = {backwards ? blocks - 1 - b : b, 0, 0};
        Together block{[&] { kernel(copy); }, {}, std::vector<ucontext_t>(threads), {}, std::vector<bool>(threads)};
        together = &block;
        for (ucontext_t& thread : block.threads) prepare(thread, block);
        for (unsigned int left = threads; left > 0;) {
            const unsigned int before = left;
            for (unsigned int t = 0; t < threads; ++t) {
                threadIdx = {backwards ? threads - 1 - t : t, 0, 0};
                if (block.done[threadIdx.x]) continue;
                swapcontext(&block.back, &block.threads[threadIdx.x]);
                left -= block.done[threadIdx.x];
            }
            expect(left == 0 || left == before);  // all come to a __syncthreads(), or none
        }
        together = nullptr;
    }
    return mistakes;
}

// Make the kernel `name` a function of this library.
#define KERNEL(name)                                                                                             \
    extern "C" long long cpu_##name(                                                                             \
        unsigned int blocks, unsigned int threads, const void* argument, int backwards                           \
    ) {                                                                                                          \
        return launch(name, blocks, threads, argument, backwards);                                               \
    }

// The same for a kernel with __syncthreads().
#define KERNEL_TOGETHER(name)                                                                                    \
    extern "C" long long cpu_##name(                                                                             \
        unsigned int blocks, unsigned int threads, const void* argument, int backwards                           \
    ) {                                                                                                          \
        return launch_together(name, blocks, threads, argument, backwards);                                      \
    }
