// Blocks that run at the same time, each on a multiprocessor of its own, and write into the shared memory of each other: a
// cluster, of Hopper and later. Before it there is one block. PTX ISA, "barrier.cluster": what a thread has written before it
// arrives is read by all that have waited.
//
// The tests have their own of these for the CPU, in tests/shim/cluster_shim.h.

#ifdef __CUDA_ARCH__

// Of a kernel. By these bounds the compiler spills no registers.
#if __CUDA_ARCH__ >= 900
#define CLUSTER_OF(blocks, threads) __cluster_dims__(blocks, 1, 1) __launch_bounds__(threads)
#else
#define CLUSTER_OF(blocks, threads) __launch_bounds__(threads, 1)
#endif

extern __shared__ float4 shared_memory[];

namespace {

__device__ inline float* shared_floats() { return reinterpret_cast<float*>(shared_memory); }

// Wait for the threads of this block.
__device__ inline void meet() { __syncthreads(); }

#if __CUDA_ARCH__ >= 900

// Write to the shared memory of a block, where this one has `to`.
__device__ inline void send(float* to, unsigned int block, float value) {
    unsigned int there;
    asm("mapa.shared::cluster.u32 %0, %1, %2;"
        : "=r"(there)
        : "r"(static_cast<unsigned int>(__cvta_generic_to_shared(to))), "r"(block));
    asm volatile("st.shared::cluster.f32 [%0], %1;" ::"r"(there), "f"(value) : "memory");
}

// Wait for the threads of all blocks: every thread calls the first, then the second.
__device__ inline void arrive_at_all() { asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory"); }
__device__ inline void wait_for_all() { asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory"); }

#else

__device__ inline void send(float* to, unsigned int, float value) { *to = value; }
__device__ inline void arrive_at_all() {}
__device__ inline void wait_for_all() { __syncthreads(); }

#endif

}  // namespace

#endif
