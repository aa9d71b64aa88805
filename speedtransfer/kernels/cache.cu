// Rows on their way through a cache of hot rows: from slots on the device and planes that may be across the bus together, and to
// them. One kernel finds the slots, another moves rows of all planes.

#include "move.cuh"
#include "lanes.cuh"
#include "slots.cuh"

namespace {

constexpr int kCounters = 256;             // that threads add to, so that few wait for each other

struct CachedPlane {
    char* plane;                   // (table_rows, width), stride_bytes apart
    char* rows;                    // (num_rows, width), contiguous, of the same type
    PlaneSlots slots;
    long long stride_bytes;
    long long lanes;               // of a row
    long long lane_bytes;
};

struct Cached {
    const long long* ids;          // (num_rows,): rows of the planes
    long long num_rows;
    long long table_rows;
    const long long* cached;       // (capacity,): the rows that have a slot, ascending
    const long long* slots;        // (capacity,): the slot of each
    long long capacity;
    long long* found;              // (num_rows,): the slot and, in the lowest bits, which planes have the row there; else a kNo
    const long long* places;       // (num_rows,): rows of the buffers; null: each in its place
    long long* seen;               // (num_rows,): the id of each row that exists, else the largest number; null: not wanted
    unsigned long long* counts;    // (kCounters, 4): hits, their bytes, misses, their bytes; null: not wanted
    long long counted;             // a bit for each plane: those that a hit has
    long long row_bytes;           // of these
    long long num_planes;
    CachedPlane planes[kMaxCached];
};

template <bool kGather, int kBytes>
__device__ inline void move_cached(const Cached& given, int p) {
    const CachedPlane& plane = given.planes[p];
    const long long total = given.num_rows * plane.lanes, step = all_threads(), width = plane.lanes * kBytes;
    for (long long first = this_thread(); first < total; first += kInFlight * step) {
        long long found[kInFlight], at[kInFlight] = {};
        char *stored[kInFlight] = {}, *slot[kInFlight] = {};
        Lane<kBytes> held[kInFlight];
#pragma unroll
        for (int k = 0; k < kInFlight; ++k) {
            const long long item = first + k * step, j = item / plane.lanes, column = item % plane.lanes * kBytes;
            found[k] = item < total ? given.found[j] : kNothing;
            if (found[k] == kNothing) continue;
            at[k] = (given.places == nullptr ? j : given.places[j]) * width + column;
            if (found[k] >= kNoSlot) stored[k] = plane.plane + given.ids[j] * plane.stride_bytes + column;
            if (found[k] >= 0) slot[k] = plane.slots.values + (found[k] >> kMaxCached) * width + column;
        }
#pragma unroll
        for (int k = 0; k < kInFlight; ++k) {
            held[k] = {};
            if (kGather && found[k] >= kNoSlot) held[k] = read_lane<kBytes>(has(found[k], p) ? slot[k] : stored[k]);
            if (!kGather && found[k] >= kNoSlot) held[k] = read_lane<kBytes>(plane.rows + at[k]);
        }
#pragma unroll
        for (int k = 0; k < kInFlight; ++k) {
            if (kGather && found[k] != kNothing) write_lane<kBytes>(plane.rows + at[k], held[k]);
            if (!kGather && found[k] == kNoSlot) write_lane<kBytes>(stored[k], held[k]);
            if (found[k] < 0 || (kGather && has(found[k], p))) continue;
            write_lane<kBytes>(slot[k], held[k]);
            if ((first + k * step) % plane.lanes != 0) continue;
            plane.slots.valid[found[k] >> kMaxCached] = true;
            if (!kGather) plane.slots.dirty[found[k] >> kMaxCached] = true;
        }
    }
}

template <bool kGather>
__device__ inline void move_all(const Cached& given) {
    for (int p = 0; p < given.num_planes; ++p) {
        switch (given.planes[p].lane_bytes) {
            case 16: move_cached<kGather, 16>(given, p); break;
            case 8: move_cached<kGather, 8>(given, p); break;
            case 4: move_cached<kGather, 4>(given, p); break;
            case 2: move_cached<kGather, 2>(given, p); break;
            default: move_cached<kGather, 1>(given, p); break;
        }
    }
}

}  // namespace

extern "C" __global__ void find_slots(const __grid_constant__ Cached given) {
    unsigned long long hits = 0, misses = 0;
    for (long long j = this_thread(); j < given.num_rows; j += all_threads()) {
        const long long id = given.ids[j];
        const bool exists = static_cast<unsigned long long>(id) < static_cast<unsigned long long>(given.table_rows);
        long long low = 0;
        for (long long high = given.capacity; exists && low < high;) {
            const long long middle = (low + high) / 2;
            if (given.cached[middle] < id) low = middle + 1;
            else high = middle;
        }
        long long found = exists ? kNoSlot : kNoRow;
        if (exists && low < given.capacity && given.cached[low] == id) {
            const long long slot = given.slots[low];
            found = slot << kMaxCached;
            for (int p = 0; p < given.num_planes; ++p) found |= static_cast<long long>(given.planes[p].slots.valid[slot]) << p;
        }
        given.found[j] = found;
        if (given.seen != nullptr) given.seen[j] = exists ? id : ~(1ll << 63);
        const bool hit = found >= 0 && (found & given.counted) == given.counted;
        hits += hit;
        misses += exists && !hit;
    }
    if (given.counts == nullptr) return;
    unsigned long long* counts = given.counts + 4 * (blockIdx.x % kCounters);
    if (hits != 0) {
        atomicAdd(counts, hits);
        atomicAdd(counts + 1, hits * given.row_bytes);
    }
    if (misses != 0) {
        atomicAdd(counts + 2, misses);
        atomicAdd(counts + 3, misses * given.row_bytes);
    }
}

// What a row lacks in its slot is read from its plane, and kept.
extern "C" __global__ void gather_cached(const __grid_constant__ Cached given) { move_all<true>(given); }

// A row that has a slot goes there, others to their planes.
extern "C" __global__ void scatter_cached(const __grid_constant__ Cached given) { move_all<false>(given); }
