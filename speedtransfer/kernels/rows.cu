// Move rows between planes and dense row buffers as they are, several planes in one launch. A plane may live in device
// memory or in page-locked host memory that the kernel reaches across the bus.

#include "move.cuh"
#include "lanes.cuh"

// rows[p][places[j]] = plane[p][index[j]]; zeros, and a fault, where there is no such row
extern "C" __global__ void gather_rows(const __grid_constant__ Move move) {
    report_faults(move);
    visit_tiles(move, [&](const Plane& plane, long long first, long long end) { move_bits<true>(move, plane, first, end); });
}

// plane[p][index[j]] = rows[p][places[j]]; index holds no row twice
extern "C" __global__ void scatter_rows(const __grid_constant__ Move move) {
    visit_tiles(move, [&](const Plane& plane, long long first, long long end) { move_bits<false>(move, plane, first, end); });
}
