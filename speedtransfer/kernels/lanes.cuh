// A plane's rows moved in lanes: rows.cu and convert.cu say of which widths.
//
// A row is a string of bytes here, unless its type changes on the way. It moves in lanes of 16, 8, 4, 2 or 1 bytes,
// whichever divides every address, stride and width of the plane (the host picks it). A team of 1 to 32 neighbouring
// threads moves a row, so that its lanes are read and written together; narrow rows share a warp. A block moves the rows of a
// tile, of one plane after the other, then its next tile, so any launch size is right: rows that lie together in ascending
// order, or in one record, are asked for together, which what translates addresses for the bus needs where tables are large.
// Every offset is 64 bits wide: planes of more than 2^31 elements are the normal case.
//
// No thread looks at another, on purpose: the tests run this same source on the CPU.

namespace {

constexpr int kMaxTeam = 32;  // threads of a row
constexpr int kInFlight = 4;  // lanes that a thread reads before it writes the first: the bus is far, not narrow

// A lane as 32-bit words, so that its values can be taken apart.
template <int kBytes>
struct Lane {
    unsigned int word[(kBytes + 3) / 4];
};

// Past L1, which keeps lines that nobody needs again and does not see what the host has written.
template <int kBytes>
__device__ inline Lane<kBytes> read_lane(const char* from) {
    Lane<kBytes> lane;
    if constexpr (kBytes >= 16) {
#pragma unroll
        for (int i = 0; i < kBytes / 16; ++i) {
            const uint4 part = __ldcg(reinterpret_cast<const uint4*>(from) + i);
            lane.word[4 * i] = part.x;
            lane.word[4 * i + 1] = part.y;
            lane.word[4 * i + 2] = part.z;
            lane.word[4 * i + 3] = part.w;
        }
    } else if constexpr (kBytes == 8) {
        const uint2 part = __ldcg(reinterpret_cast<const uint2*>(from));
        lane.word[0] = part.x;
        lane.word[1] = part.y;
    } else if constexpr (kBytes == 4) {
        lane.word[0] = __ldcg(reinterpret_cast<const unsigned int*>(from));
    } else if constexpr (kBytes == 2) {
        lane.word[0] = __ldcg(reinterpret_cast<const unsigned short*>(from));
    } else {
        lane.word[0] = __ldcg(reinterpret_cast<const unsigned char*>(from));
    }
    return lane;
}

template <int kBytes>
__device__ inline void write_lane(char* to, const Lane<kBytes>& lane) {
    if constexpr (kBytes >= 16) {
#pragma unroll
        for (int i = 0; i < kBytes / 16; ++i) {
            const uint4 part = {lane.word[4 * i], lane.word[4 * i + 1], lane.word[4 * i + 2], lane.word[4 * i + 3]};
            __stcg(reinterpret_cast<uint4*>(to) + i, part);
        }
    } else if constexpr (kBytes == 8) {
        const uint2 part = {lane.word[0], lane.word[1]};
        __stcg(reinterpret_cast<uint2*>(to), part);
    } else if constexpr (kBytes == 4) {
        __stcg(reinterpret_cast<unsigned int*>(to), lane.word[0]);
    } else if constexpr (kBytes == 2) {
        __stcg(reinterpret_cast<unsigned short*>(to), static_cast<unsigned short>(lane.word[0]));
    } else {
        __stcg(reinterpret_cast<unsigned char*>(to), static_cast<unsigned char>(lane.word[0]));
    }
}

// A lane that arrives as it left. move_plane takes this, or what changes its type.
template <int kBytes>
struct Same {
    static constexpr int kStoredBytes = kBytes, kDenseBytes = kBytes;  // of a lane in the plane and in the rows
    __device__ Lane<kBytes> operator()(const Lane<kBytes>& lane) const { return lane; }
};

// How the threads of a block share the rows of a plane.
struct Teams {
    int log_team = 0;
    long long teams;
    // What a thread reads before it writes: lanes of one row, or, where a team has a thread for each lane, of several rows.
    bool several_rows;

    __device__ explicit Teams(long long lanes) {
        while ((1 << log_team) < kMaxTeam && (1 << log_team) < lanes && (2u << log_team) <= blockDim.x) ++log_team;
        teams = blockDim.x >> log_team;
        several_rows = lanes <= (1 << log_team);
    }
    __device__ long long rows_at_once() const { return several_rows ? kInFlight * teams : teams; }
};

// Calls visit(plane, first, end) for the rows of this block: of each tile one plane after the other.
template <typename Visit>
__device__ inline void visit_tiles(const Move& move, const Visit& visit) {
    long long tile = move.num_rows;  // as many rows as a block reads at once of the widest plane
    for (long long p = 0; p < move.num_planes; ++p) {
        const long long rows = Teams(move.planes[p].lanes).rows_at_once();
        if (rows < tile) tile = rows;
    }
    for (long long first = blockIdx.x * tile; first < move.num_rows; first += gridDim.x * tile) {
        const long long end = first + tile < move.num_rows ? first + tile : move.num_rows;
        for (long long p = 0; p < move.num_planes; ++p) visit(move.planes[p], first, end);
    }
}

template <bool kGather, typename Change>
__device__ inline void move_plane(
    const Move& move, const Plane& plane, const Change& change, long long first, long long end
) {
    constexpr int kStored = Change::kStoredBytes, kDense = Change::kDenseBytes;
    constexpr int kRead = kGather ? kStored : kDense, kWritten = kGather ? kDense : kStored;
    const long long lanes = plane.lanes;
    const Teams shared(lanes);
    const int team = 1 << shared.log_team;
    const long long member = threadIdx.x & (team - 1), teams = shared.teams;
    long long j = threadIdx.x >> shared.log_team;
    if (j >= teams) return;  // the block is no multiple of the team: the rest has no row
    j += first;
    const long long row_step = shared.several_rows ? teams : 0, lane_step = shared.several_rows ? 0 : team;
    const auto stored_at = [&](long long row, long long lane) {
        return plane.plane + row * plane.stride_bytes + lane * kStored;
    };
    const auto dense_at = [&](long long at, long long lane) {
        return plane.rows + (place_of(move, at) * lanes + lane) * kDense;
    };
    for (; j < end; j += shared.rows_at_once()) {
        for (long long lane = member; lane < lanes; lane += kInFlight * team) {
            long long row[kInFlight];
            Lane<kRead> held[kInFlight];
#pragma unroll
            for (int k = 0; k < kInFlight; ++k) {
                const bool mine = j + k * row_step < end && lane + k * lane_step < lanes;
                row[k] = mine ? move.index[j + k * row_step] : -1;
            }
#pragma unroll
            for (int k = 0; k < kInFlight; ++k) {
                const long long at = j + k * row_step, here = lane + k * lane_step;
                held[k] = {};
                if (row_exists(move, row[k])) {
                    held[k] = read_lane<kRead>(kGather ? stored_at(row[k], here) : dense_at(at, here));
                }
            }
#pragma unroll
            for (int k = 0; k < kInFlight; ++k) {
                const long long at = j + k * row_step, here = lane + k * lane_step;
                if (kGather ? at < end && here < lanes : row_exists(move, row[k])) {
                    write_lane<kWritten>(kGather ? dense_at(at, here) : stored_at(row[k], here), change(held[k]));
                }
            }
        }
    }
}

// Planes whose bytes arrive as they left.
template <bool kGather>
__device__ inline void move_bits(const Move& move, const Plane& plane, long long first, long long end) {
    switch (plane.lane_bytes) {
        case 16: move_plane<kGather>(move, plane, Same<16>(), first, end); break;
        case 8: move_plane<kGather>(move, plane, Same<8>(), first, end); break;
        case 4: move_plane<kGather>(move, plane, Same<4>(), first, end); break;
        case 2: move_plane<kGather>(move, plane, Same<2>(), first, end); break;
        default: move_plane<kGather>(move, plane, Same<1>(), first, end); break;
    }
}

}  // namespace
