// As rows.cu, where some planes have another type than their rows: the plane's own form crosses the bus. Apart, because
// it takes far longer to compile and more registers.

#include "move.cuh"
#include "lanes.cuh"
#include "halves.cuh"

namespace {

// The widths say which side is float32: the one twice as wide. Neither is where both are halves, of two kinds.
template <int kFrom, int kTo>
__device__ inline Lane<kTo> convert(const Lane<kFrom>& lane, Type from, Type to) {
    constexpr int kValues = (kFrom < kTo ? kFrom : kTo) / 2;
    Lane<kTo> result = {};
#pragma unroll
    for (int i = 0; i < kValues; ++i) {
        const int place = 16 * (i % 2);  // of a half in its word
        unsigned int bits;
        if constexpr (kFrom == 4 * kValues) {
            bits = lane.word[i];
        } else {
            bits = widen((lane.word[i / 2] >> place) & 0xffffu, from);
        }
        if constexpr (kTo == 4 * kValues) {
            result.word[i] = bits;
        } else {
            result.word[i / 2] |= narrow(bits, to) << place;
        }
    }
    return result;
}

template <bool kGather, int kStored, int kDense>
struct Converted {
    static constexpr int kStoredBytes = kStored, kDenseBytes = kDense;
    static constexpr int kRead = kGather ? kStored : kDense, kWritten = kGather ? kDense : kStored;
    Type stored, dense;
    __device__ Lane<kWritten> operator()(const Lane<kRead>& lane) const {
        return convert<kRead, kWritten>(lane, kGather ? stored : dense, kGather ? dense : stored);
    }
};

template <bool kGather, int kStored, int kDense>
__device__ inline void move_converted(const Move& move, const Plane& plane, long long first, long long end) {
    const Converted<kGather, kStored, kDense> change = {plane.stored_type, plane.dense_type};
    move_plane<kGather>(move, plane, change, first, end);
}

template <bool kGather>
__device__ inline void move_any(const Move& move, const Plane& plane, long long first, long long end) {
    if (plane.stored_type == plane.dense_type) {
        move_bits<kGather>(move, plane, first, end);
    } else if (plane.dense_type == kFloat32) {
        switch (plane.lane_bytes) {
            case 16: move_converted<kGather, 16, 32>(move, plane, first, end); break;
            case 8: move_converted<kGather, 8, 16>(move, plane, first, end); break;
            case 4: move_converted<kGather, 4, 8>(move, plane, first, end); break;
            default: move_converted<kGather, 2, 4>(move, plane, first, end); break;
        }
    } else if (plane.stored_type == kFloat32) {
        switch (plane.lane_bytes) {
            case 16: move_converted<kGather, 16, 8>(move, plane, first, end); break;
            case 8: move_converted<kGather, 8, 4>(move, plane, first, end); break;
            default: move_converted<kGather, 4, 2>(move, plane, first, end); break;
        }
    } else {
        switch (plane.lane_bytes) {
            case 16: move_converted<kGather, 16, 16>(move, plane, first, end); break;
            case 8: move_converted<kGather, 8, 8>(move, plane, first, end); break;
            case 4: move_converted<kGather, 4, 4>(move, plane, first, end); break;
            default: move_converted<kGather, 2, 2>(move, plane, first, end); break;
        }
    }
}

}  // namespace

extern "C" __global__ void gather_converted(const __grid_constant__ Move move) {
    report_faults(move);
    visit_tiles(move, [&](const Plane& plane, long long first, long long end) { move_any<true>(move, plane, first, end); });
}

extern "C" __global__ void scatter_converted(const __grid_constant__ Move move) {
    visit_tiles(move, [&](const Plane& plane, long long first, long long end) { move_any<false>(move, plane, first, end); });
}
