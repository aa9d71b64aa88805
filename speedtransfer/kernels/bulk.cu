// As rows.cu, for rows whose address, stride and width are multiples of 16 bytes, by the bulk copy engine of Hopper and
// later: it asks for a row in one piece where a kernel asks in loads of a warp.
//
// A thread owns kSlots slots of shared memory and a barrier for each. Its rows, of all planes, are one sequence of pieces no
// larger than a slot; each goes through the next slot in turn. All slots but one are being filled while a piece leaves.
//
// No thread looks at another, on purpose: the tests run this same source on the CPU.

#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ < 900

// No such engine here; mapped.py does not ask for it.
extern "C" __global__ void gather_bulk() { __trap(); }
extern "C" __global__ void scatter_bulk() { __trap(); }

#else

#include "move.cuh"
#include "bulk.cuh"

extern __shared__ __align__(128) char shared_memory[];  // the barriers of all threads, then their slots

namespace {

constexpr int kSlots = 4;  // of a thread; as in engines/mapped.py

// Where a thread is in its sequence: every row, of it every plane, of it every piece.
struct Cursor {
    long long j, plane = 0, offset = 0;

    __device__ bool valid(const Move& move) const { return j < move.num_rows && move.num_planes > 0; }

    __device__ unsigned int bytes(const Move& move) const {
        const long long left = move.planes[plane].lanes * 16 - offset;
        return static_cast<unsigned int>(left < move.slot_bytes ? left : move.slot_bytes);
    }

    __device__ char* dense(const Move& move) const {
        const Plane& here = move.planes[plane];
        return here.rows + place_of(move, j) * here.lanes * 16 + offset;
    }

    // Null where there is no such row.
    __device__ char* stored(const Move& move) const {
        const Plane& here = move.planes[plane];
        const long long row = move.index[j];
        return row_exists(move, row) ? here.plane + row * here.stride_bytes + offset : nullptr;
    }

    __device__ void advance(const Move& move) {
        offset += bytes(move);
        if (offset < move.planes[plane].lanes * 16) return;
        offset = 0;
        if (++plane < move.num_planes) return;
        plane = 0;
        j += all_threads();
    }
};

template <bool kGather>
__device__ inline void load_piece(const Move& move, const Cursor& at, char* slot, Barrier* barrier) {
    const char* from = kGather ? at.stored(move) : at.dense(move);
    const unsigned int bytes = at.bytes(move);
    if (from != nullptr) {
        start_load(slot, from, bytes, barrier);
        return;
    }
    for (unsigned int i = 0; i < bytes; i += 16) *reinterpret_cast<uint4*>(slot + i) = uint4{0, 0, 0, 0};
    finish_fill(barrier);
}

template <bool kGather>
__device__ inline void store_piece(const Move& move, const Cursor& at, const char* slot) {
    char* to = kGather ? at.dense(move) : at.stored(move);
    if (to != nullptr) start_store(to, slot, at.bytes(move));
    end_group();  // also an empty one, so that groups count pieces
}

template <bool kGather>
__device__ inline void move_pieces(const Move& move) {
    Barrier* barriers = reinterpret_cast<Barrier*>(shared_memory) + threadIdx.x * kSlots;
    char* slots = shared_memory + blockDim.x * kSlots * sizeof(Barrier) + threadIdx.x * kSlots * move.slot_bytes;
    for (int s = 0; s < kSlots; ++s) init_barrier(barriers + s);
    publish_barriers();

    Cursor loads{this_thread()}, stores{this_thread()};
    for (int s = 0; s < kSlots && loads.valid(move); ++s, loads.advance(move)) {
        load_piece<kGather>(move, loads, slots + s * move.slot_bytes, barriers + s);
    }
    for (long long piece = 0; stores.valid(move); ++piece, stores.advance(move)) {
        const int slot = static_cast<int>(piece % kSlots), last = static_cast<int>((piece + kSlots - 1) % kSlots);
        wait_for_load(barriers + slot, static_cast<unsigned int>(piece / kSlots % 2));
        store_piece<kGather>(move, stores, slots + slot * move.slot_bytes);
        if (piece == 0 || !loads.valid(move)) continue;
        wait_for_slots_but_one();  // the piece before this one has left its slot
        load_piece<kGather>(move, loads, slots + last * move.slot_bytes, barriers + last);
        loads.advance(move);
    }
    wait_for_stores();
}

}  // namespace

extern "C" __global__ void gather_bulk(const __grid_constant__ Move move) {
    report_faults(move);
    move_pieces<true>(move);
}

extern "C" __global__ void scatter_bulk(const __grid_constant__ Move move) { move_pieces<false>(move); }

#endif
