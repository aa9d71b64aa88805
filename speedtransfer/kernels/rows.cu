// Move rows between planes and dense row buffers, several planes in one launch. A plane may live in device memory or in
// page-locked host memory that the kernel reaches across the bus.
//
// A row is a string of bytes here; the dtype does not matter. It moves in lanes of 16, 8, 4, 2 or 1 bytes, whichever
// divides every address, stride and width of the plane (the host picks it). A team of 1 to 32 neighbouring threads moves
// a row, so that its lanes are read and written together; narrow rows share a warp. Teams stride over the rows, so any
// launch size is right. Every offset is 64 bits wide: planes of more than 2^31 elements are the normal case.
//
// No thread looks at another, on purpose: the tests run this same source on the CPU.

namespace {

constexpr int kMaxPlanes = 16;  // as in engines/mapped.py
constexpr int kMaxTeam = 32;    // threads of a row
constexpr int kInFlight = 4;    // lanes that a thread reads before it writes: the bus is far, not narrow

struct Plane {
    char* plane;             // (any number of rows, stride_bytes apart)
    char* rows;              // (num_rows, row_bytes), contiguous
    long long stride_bytes;
    long long row_bytes;
    long long lane_bytes;    // divides the four above
};

struct Move {
    const long long* index;  // (num_rows,): the rows of the planes
    long long num_rows;
    long long num_planes;
    Plane planes[kMaxPlanes];
};

// Reads go past L1, which keeps lines that nobody needs again and does not see what the host has written.
template <typename Lane>
__device__ inline void copy_row(Lane* to, const Lane* from, long long lanes, int member, int team) {
    for (long long start = member; start < lanes; start += static_cast<long long>(team) * kInFlight) {
        Lane held[kInFlight];
#pragma unroll
        for (int k = 0; k < kInFlight; ++k) {
            const long long lane = start + static_cast<long long>(k) * team;
            if (lane < lanes) held[k] = __ldcg(from + lane);
        }
#pragma unroll
        for (int k = 0; k < kInFlight; ++k) {
            const long long lane = start + static_cast<long long>(k) * team;
            if (lane < lanes) to[lane] = held[k];
        }
    }
}

template <typename Lane, bool kGather>
__device__ inline void move_plane(const long long* index, long long num_rows, const Plane& plane) {
    const long long lanes = plane.row_bytes / static_cast<long long>(sizeof(Lane));
    const long long thread = static_cast<long long>(blockIdx.x) * blockDim.x + threadIdx.x;
    const long long threads = static_cast<long long>(gridDim.x) * blockDim.x;
    int team = 1;  // a power of two, no larger than the launch
    while (team < kMaxTeam && team < lanes && 2 * team <= threads) team *= 2;
    const int member = static_cast<int>(thread % team);
    const long long teams = threads / team;
    if (thread >= teams * team) return;  // the launch is no multiple of the team: the rest has no row
    for (long long row = thread / team; row < num_rows; row += teams) {
        char* stored = plane.plane + index[row] * plane.stride_bytes;
        char* dense = plane.rows + row * plane.row_bytes;
        if (kGather) {
            copy_row(reinterpret_cast<Lane*>(dense), reinterpret_cast<const Lane*>(stored), lanes, member, team);
        } else {
            copy_row(reinterpret_cast<Lane*>(stored), reinterpret_cast<const Lane*>(dense), lanes, member, team);
        }
    }
}

template <bool kGather>
__device__ inline void move_planes(const Move& move) {
    for (long long p = 0; p < move.num_planes; ++p) {
        const Plane& plane = move.planes[p];
        switch (plane.lane_bytes) {
            case 16: move_plane<uint4, kGather>(move.index, move.num_rows, plane); break;
            case 8: move_plane<unsigned long long, kGather>(move.index, move.num_rows, plane); break;
            case 4: move_plane<unsigned int, kGather>(move.index, move.num_rows, plane); break;
            case 2: move_plane<unsigned short, kGather>(move.index, move.num_rows, plane); break;
            default: move_plane<unsigned char, kGather>(move.index, move.num_rows, plane); break;
        }
    }
}

}  // namespace

// rows[p][j] = plane[p][index[j]]
extern "C" __global__ void gather_rows(const __grid_constant__ Move move) { move_planes<true>(move); }

// plane[p][index[j]] = rows[p][j]; index holds no value twice
extern "C" __global__ void scatter_rows(const __grid_constant__ Move move) { move_planes<false>(move); }
