// The slots of a cache of hot rows, as find_slots in cache.cu has found them for the rows of a call.

namespace {

constexpr int kMaxCached = 12;             // planes, as in engines/cache_kernels.py
constexpr long long kNoSlot = -1, kNoRow = -2, kNothing = -3;

// Whether the slot has the row, for plane p: `found` is the slot and, in its lowest bits, which planes have the row there.
__device__ inline bool has(long long found, int p) { return found >= 0 && (found >> p & 1) != 0; }

// The slots of one plane.
struct PlaneSlots {
    char* values;                  // (capacity, width), contiguous
    bool* valid;                   // (capacity,): whether the slot has the row
    bool* dirty;                   // (capacity,): whether the plane lacks it
};

}  // namespace
