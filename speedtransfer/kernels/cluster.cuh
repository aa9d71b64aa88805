// Blocks that run at the same time, each on a multiprocessor of its own, and write into the shared memory of each other: a
// cluster, of Hopper and later. Before it there is one block.
//
// What is sent is counted where it arrives: a block expects so many bytes, and its threads wait until these are there. PTX
// ISA, "st.async": each store ends in the mbarrier of its receiver, which releases it to those that wait.
//
// The tests have their own of these for the CPU, in tests/shim/cluster_shim.h.

#ifdef __CUDA_ARCH__

#if __CUDA_ARCH__ >= 900
#define CLUSTER_OF(blocks) __cluster_dims__(blocks, 1, 1)
#else
#define CLUSTER_OF(blocks)
#endif

extern __shared__ float4 shared_memory[];

namespace {

using Mail = unsigned long long;  // an mbarrier

__device__ inline float* shared_floats() { return reinterpret_cast<float*>(shared_memory); }

// Wait for the threads of this block.
__device__ inline void meet() { __syncthreads(); }

#if __CUDA_ARCH__ >= 900

__device__ inline unsigned int shared_address(const void* pointer) {
    return static_cast<unsigned int>(__cvta_generic_to_shared(pointer));
}

__device__ inline unsigned int address_at(const void* pointer, unsigned int block) {
    unsigned int there;
    // Volatile, or it keeps registers through all of a span.
    asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(there) : "r"(shared_address(pointer)), "r"(block));
    return there;
}

// By one thread, before all blocks meet.
__device__ inline void open_mail(Mail* mail) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;" ::"r"(shared_address(mail)) : "memory");
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}

// By one thread, once.
__device__ inline void expect_mail(Mail* mail, unsigned int bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(shared_address(mail)), "r"(bytes) : "memory");
}

// Write to the shared memory of a block, where this one has `to`, for those who wait for its `mail`.
__device__ inline void send(float* to, unsigned int block, float4 value, Mail* mail) {
    asm volatile(
        "st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.v4.f32 [%0], {%1, %2, %3, %4}, [%5];" ::"r"(
            address_at(to, block)),
        "f"(value.x), "f"(value.y), "f"(value.z), "f"(value.w), "r"(address_at(mail, block))
        : "memory");
}

// Wait for what is expected.
__device__ inline void wait_for_mail(Mail* mail) {
    unsigned int done = 0;
    while (!done) {  // a try gives up after a while
        asm volatile(
            "{\n"
            ".reg .pred complete;\n"
            "mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 complete, [%1], 0;\n"
            "selp.u32 %0, 1, 0, complete;\n"
            "}"
            : "=r"(done)
            : "r"(shared_address(mail))
            : "memory");
    }
}

// Wait for the threads of all blocks.
__device__ inline void meet_all() {
    asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory");
    asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory");
}

#else

__device__ inline void open_mail(Mail*) {}
__device__ inline void expect_mail(Mail*, unsigned int) {}
__device__ inline void send(float* to, unsigned int, float4 value, Mail*) { *reinterpret_cast<float4*>(to) = value; }
__device__ inline void wait_for_mail(Mail*) { __syncthreads(); }
__device__ inline void meet_all() { __syncthreads(); }

#endif

}  // namespace

#endif
