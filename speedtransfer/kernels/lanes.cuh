// A plane's rows moved in lanes: rows.cu and convert.cu say of which widths.
//
// A row is a string of bytes here, unless its type changes on the way. It moves in lanes of 16, 8, 4, 2 or 1 bytes,
// whichever divides every address, stride and width of the plane (the host picks it). A team of 1 to 32 neighbouring
// threads moves a row, so that its lanes are read and written together; narrow rows share a warp. Teams stride over the
// rows, so any launch size is right. Every offset is 64 bits wide: planes of more than 2^31 elements are the normal case.
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

template <bool kGather, typename Change>
__device__ inline void move_plane(const Move& move, const Plane& plane, const Change& change) {
    constexpr int kStored = Change::kStoredBytes, kDense = Change::kDenseBytes;
    constexpr int kRead = kGather ? kStored : kDense, kWritten = kGather ? kDense : kStored;
    const long long lanes = plane.lanes, num_rows = move.num_rows;
    int log_team = 0;  // a team is no larger than the launch
    while ((1 << log_team) < kMaxTeam && (1 << log_team) < lanes && (2 << log_team) <= all_threads()) ++log_team;
    const int team = 1 << log_team;
    const long long member = this_thread() & (team - 1), teams = all_threads() >> log_team;
    long long j = this_thread() >> log_team;
    if (j >= teams) return;  // the launch is no multiple of the team: the rest has no row

    // What a thread reads before it writes: lanes of one row, or, where a team has a thread for each lane, of several rows.
    const bool several_rows = lanes <= team;
    const long long row_step = several_rows ? teams : 0, lane_step = several_rows ? 0 : team;
    const auto stored_at = [&](long long row, long long lane) {
        return plane.plane + row * plane.stride_bytes + lane * kStored;
    };
    const auto dense_at = [&](long long at, long long lane) {
        return plane.rows + (place_of(move, at) * lanes + lane) * kDense;
    };
    for (; j < num_rows; j += several_rows ? kInFlight * teams : teams) {
        for (long long lane = member; lane < lanes; lane += kInFlight * team) {
            long long row[kInFlight];
            Lane<kRead> held[kInFlight];
#pragma unroll
            for (int k = 0; k < kInFlight; ++k) {
                const bool mine = j + k * row_step < num_rows && lane + k * lane_step < lanes;
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
                if (kGather ? at < num_rows && here < lanes : row_exists(move, row[k])) {
                    write_lane<kWritten>(kGather ? dense_at(at, here) : stored_at(row[k], here), change(held[k]));
                }
            }
        }
    }
}

// Planes whose bytes arrive as they left.
template <bool kGather>
__device__ inline void move_bits(const Move& move, const Plane& plane) {
    switch (plane.lane_bytes) {
        case 16: move_plane<kGather>(move, plane, Same<16>()); break;
        case 8: move_plane<kGather>(move, plane, Same<8>()); break;
        case 4: move_plane<kGather>(move, plane, Same<4>()); break;
        case 2: move_plane<kGather>(move, plane, Same<2>()); break;
        default: move_plane<kGather>(move, plane, Same<1>()); break;
    }
}

}  // namespace
