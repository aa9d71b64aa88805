// The bulk copy engine of Hopper and later, in the handful of steps that bulk.cu takes. PTX ISA, "Asynchronous copy": each
// of these copies runs in the async proxy. A load ends in an mbarrier in shared memory, whose transaction count is the bytes
// to come; a store ends in a bulk group of the thread that asked for it.
//
// Fences between the proxies: the end of a bulk copy, once it has been waited for, is followed by one that the engine makes
// itself ("Async proxy"), so load -> store and store -> load through one slot need none of ours. Ours are for what the
// thread writes to shared memory by itself: the mbarriers, and the zeros of a row that does not exist.
//
// The tests have their own of these for the CPU, in tests/shim/bulk_shim.h.

#ifdef __CUDA_ARCH__

namespace {

using Barrier = unsigned long long;

__device__ inline unsigned int shared_address(const void* pointer) {
    return static_cast<unsigned int>(__cvta_generic_to_shared(pointer));
}

// One arrival, by the thread that asks for the copy, completes a phase together with the bytes.
__device__ inline void init_barrier(Barrier* barrier) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;" ::"r"(shared_address(barrier)) : "memory");
}

// To be called between init_barrier and the first load.
__device__ inline void publish_barriers() {
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}

// Queue a copy into a slot of shared memory; addresses and bytes are multiples of 16.
__device__ inline void start_load(char* slot, const char* from, unsigned int bytes, Barrier* barrier) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(shared_address(barrier)), "r"(bytes)
                 : "memory");
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(
                     shared_address(slot)),
                 "l"(__cvta_generic_to_global(from)), "r"(bytes), "r"(shared_address(barrier))
                 : "memory");
}

// Instead of a load: the thread has filled the slot by itself.
__device__ inline void finish_fill(Barrier* barrier) {
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(shared_address(barrier)) : "memory");
}

// Wait for a load; `parity` is 0 for the first of a barrier, 1 for the second, 0 for the third ...
__device__ inline void wait_for_load(Barrier* barrier, unsigned int parity) {
    unsigned int done = 0;
    while (!done) {  // a try gives up after a while
        asm volatile(
            "{\n"
            ".reg .pred complete;\n"
            "mbarrier.try_wait.parity.shared::cta.b64 complete, [%1], %2;\n"
            "selp.u32 %0, 1, 0, complete;\n"
            "}"
            : "=r"(done)
            : "r"(shared_address(barrier)), "r"(parity)
            : "memory");
    }
}

// Queue a copy out of a slot, as a group of its own.
__device__ inline void start_store(char* to, const char* slot, unsigned int bytes) {
    asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;" ::"l"(__cvta_generic_to_global(to)),
                 "r"(shared_address(slot)), "r"(bytes)
                 : "memory");
}

__device__ inline void end_group() { asm volatile("cp.async.bulk.commit_group;" ::: "memory"); }

// Wait until all groups but the last have been read out of their slots: these may be filled again.
__device__ inline void wait_for_slots_but_one() { asm volatile("cp.async.bulk.wait_group.read 1;" ::: "memory"); }

// Wait until all groups are where they belong.
__device__ inline void wait_for_stores() { asm volatile("cp.async.bulk.wait_group 0;" ::: "memory"); }

}  // namespace

#endif
