// What every kernel here takes, as engines/mapped.py packs it, and what it does about a row that does not exist.

namespace {

constexpr int kMaxPlanes = 16;  // as in engines/mapped.py

enum Type : long long { kBits, kFloat32, kFloat16, kBFloat16 };

struct Plane {
    char* plane;             // (table_rows, lanes), stride_bytes apart
    char* rows;              // (num_rows, lanes), contiguous; the same values, perhaps of another type
    long long stride_bytes;
    long long lanes;         // of a row
    long long lane_bytes;    // in the plane: divides its address and stride, and lets `rows` move in whole words too
    Type stored_type;        // of the plane and of the rows; where they are the same, both are kBits
    Type dense_type;
};

// In page-locked host memory, so that the host can look without waiting for the device.
struct Fault {
    long long state;  // 1 once the rest is there
    long long position;
    long long value;
    long long table_rows;
};

struct Move {
    const long long* index;  // (num_rows,): rows of the planes
    long long num_rows;
    long long table_rows;
    long long num_planes;
    Fault* fault;            // null: do not report
    int* claimed;            // set to 1 by the thread that writes the fault; in device memory
    const long long* places; // (num_rows,): rows of the buffers; null: each in its place
    const long long* named;  // (num_named,): where faults are looked for, `index` itself or what its rows are from
    long long num_named;
    Plane planes[kMaxPlanes];
};

__device__ inline long long this_thread() { return static_cast<long long>(blockIdx.x) * blockDim.x + threadIdx.x; }
__device__ inline long long all_threads() { return static_cast<long long>(gridDim.x) * blockDim.x; }

// Whoever moves rows asks first: one that does not exist is gathered as zeros and scattered nowhere.
__device__ inline bool row_exists(const Move& move, long long row) {
    return static_cast<unsigned long long>(row) < static_cast<unsigned long long>(move.table_rows);
}

// Where in the buffers the row of index[j] is.
__device__ inline long long place_of(const Move& move, long long j) {
    return move.places == nullptr ? j : move.places[j];
}

// Report the row that does not exist and has the first place.
__device__ inline void report_faults(const Move& move) {
    if (move.fault == nullptr) return;
    for (long long j = this_thread(); j < move.num_named; j += all_threads()) {
        if (row_exists(move, move.named[j]) || atomicExch(move.claimed, 1) != 0) continue;
        // This need not be the first: threads come to their rows in any order. One of them looks, in no hurry any more.
        long long first = j;
        for (long long i = 0; i < (move.places == nullptr ? first : move.num_named); ++i) {
            if (!row_exists(move, move.named[i]) && place_of(move, i) < place_of(move, first)) first = i;
        }
        volatile Fault* fault = move.fault;
        fault->position = place_of(move, first);
        fault->value = move.named[first];
        fault->table_rows = move.table_rows;
        __threadfence_system();  // the host that sees the state sees the rest
        fault->state = 1;
    }
}

}  // namespace
