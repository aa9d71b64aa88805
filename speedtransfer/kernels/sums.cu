// Sum the rows of each group: the gradients of a row that was looked up several times. The order of additions depends on the
// groups alone, so the sums are the same from run to run: nothing is added atomically.
//
// The grouped rows are cut into pieces of equal length, so that a row that everybody looks up takes no longer than others. A
// group within a piece is summed at once. Of one that reaches beyond it each piece keeps its part, which the second kernel
// adds: `tails` of the group that begins in a piece and goes on, `heads` of the one that began before it.

#include "move.cuh"
#include "bits.cuh"
#include "halves.cuh"

namespace {

struct Sums {
    const char* rows;          // (count, width), contiguous, of `type`
    char* sums;                // (groups, width), of `type`
    const long long* order;    // (count,): the rows group by group
    const long long* inverse;  // (count,): of each row its group
    const long long* starts;   // (groups + 1,): where in `order` each group begins; the last is `count`
    const long long* ids;      // (groups,)
    char* heads;               // (pieces, width), of the type of a sum: float64, or float32 for all others
    char* tails;
    long long count;
    long long width;
    long long piece;           // rows of a piece
    long long excluded;        // the group of this id has the sum zero, and so have
    long long table_rows;      // those of ids from here on
    long long type;            // 0: float64, else Type
    long long groups;          // the last may have no rows: their sums are zero
};

struct Float64 {
    using Stored = double;
    using Sum = double;
    __device__ static Sum read(Stored value) { return value; }
    __device__ static Stored write(Sum value) { return value; }
};

struct Float32 {
    using Stored = float;
    using Sum = float;
    __device__ static Sum read(Stored value) { return value; }
    __device__ static Stored write(Sum value) { return value; }
};

template <Type kType>
struct Half {
    using Stored = unsigned short;
    using Sum = float;
    __device__ static Sum read(Stored value) {
        return as_float(widen(value, kType));
    }
    __device__ static Stored write(Sum value) {
        return static_cast<Stored>(narrow(as_bits(value), kType));
    }
};

template <typename T>
__device__ inline void write_sum(const Sums& given, long long group, long long column, typename T::Sum sum) {
    if (group >= given.groups) return;
    const long long id = given.ids[group];
    if (id >= given.table_rows || id == given.excluded) sum = 0;
    reinterpret_cast<typename T::Stored*>(given.sums)[group * given.width + column] = T::write(sum);
}

// How many rows a thread has asked for before it adds the first.
constexpr int kAhead = 8;

// Groups without rows come last.
template <typename T>
__device__ inline void clear_rest(const Sums& given) {
    const long long used = given.inverse[given.order[given.count - 1]] + 1;
    for (long long item = used * given.width + this_thread(); item < given.groups * given.width; item += all_threads()) {
        reinterpret_cast<typename T::Stored*>(given.sums)[item] = T::write(0);
    }
}

// Each thread has a column of a piece: that of item `first`, and of others that are `step` apart.
template <typename T>
__device__ inline void sum_within(const Sums& given, long long first_item, long long step) {
    using Sum = typename T::Sum;
    const auto* rows = reinterpret_cast<const typename T::Stored*>(given.rows);
    const long long pieces = (given.count + given.piece - 1) / given.piece;
    for (long long item = first_item; item < pieces * given.width; item += step) {
        const long long piece = item / given.width, column = item % given.width;
        const long long first = piece * given.piece;
        const long long end = first + given.piece < given.count ? first + given.piece : given.count;
        const auto keep = [&](long long group, Sum sum) {
            if (given.starts[group] < first) reinterpret_cast<Sum*>(given.heads)[item] = sum;
            else if (given.starts[group + 1] > end) reinterpret_cast<Sum*>(given.tails)[item] = sum;
            else write_sum<T>(given, group, column, sum);
        };
        long long group = given.inverse[given.order[first]];
        Sum sum = 0;
        for (long long place = first; place < end; place += kAhead) {
            long long row[kAhead], group_of[kAhead];
            typename T::Stored value[kAhead];
#pragma unroll
            for (int k = 0; k < kAhead; ++k) row[k] = given.order[place + k < end ? place + k : end - 1];
#pragma unroll
            for (int k = 0; k < kAhead; ++k) {
                group_of[k] = given.inverse[row[k]];
                value[k] = rows[row[k] * given.width + column];
            }
#pragma unroll
            for (int k = 0; k < kAhead; ++k) {
                if (place + k >= end) break;
                if (group_of[k] != group) {
                    keep(group, sum);
                    group = group_of[k];
                    sum = 0;
                }
                sum += T::read(value[k]);
            }
        }
        keep(group, sum);
    }
}

template <typename T>
__device__ inline void add_parts(const Sums& given, long long first_item, long long step) {
    using Sum = typename T::Sum;
    const long long pieces = (given.count + given.piece - 1) / given.piece;
    for (long long item = first_item; item < (pieces - 1) * given.width; item += step) {
        const long long piece = item / given.width, column = item % given.width;
        const long long end = (piece + 1) * given.piece;
        const long long group = given.inverse[given.order[end - 1]];
        const long long last = given.starts[group + 1];
        if (given.starts[group] < piece * given.piece || last <= end) continue;
        Sum sum = reinterpret_cast<const Sum*>(given.tails)[item];
        const auto* heads = reinterpret_cast<const Sum*>(given.heads);
        const long long last_piece = (last - 1) / given.piece;
        for (long long next = piece + 1; next <= last_piece; next += kAhead) {
            Sum head[kAhead];
#pragma unroll
            for (int k = 0; k < kAhead; ++k) {
                head[k] = heads[(next + k < last_piece ? next + k : last_piece) * given.width + column];
            }
#pragma unroll
            for (int k = 0; k < kAhead; ++k) {
                if (next + k <= last_piece) sum += head[k];
            }
        }
        write_sum<T>(given, group, column, sum);
    }
}

template <typename T>
__device__ inline void sum_pieces_of(const Sums& given) {
    clear_rest<T>(given);
    sum_within<T>(given, this_thread(), all_threads());
}

// Each block has some columns of all pieces, so that it need not wait for others.
template <typename T>
__device__ inline void sum_columns(const Sums& given) {
    const long long columns = (given.width + gridDim.x - 1) / gridDim.x, teams = blockDim.x / columns;
    const long long team = threadIdx.x / columns, column = blockIdx.x * columns + threadIdx.x % columns;
    const bool works = team < teams && column < given.width;
    const long long first = works ? team * given.width + column : given.count * given.width;
    clear_rest<T>(given);
    sum_within<T>(given, first, teams * given.width);
    __syncthreads();
    add_parts<T>(given, first, teams * given.width);
}

}  // namespace

// Both of the others where there are few rows; a block has no fewer threads than columns.
extern "C" __global__ void sum_few(const __grid_constant__ Sums given) {
    switch (given.type) {
        case kFloat32: sum_columns<Float32>(given); break;
        case kFloat16: sum_columns<Half<kFloat16>>(given); break;
        case kBFloat16: sum_columns<Half<kBFloat16>>(given); break;
        default: sum_columns<Float64>(given); break;
    }
}

extern "C" __global__ void sum_pieces(const __grid_constant__ Sums given) {
    switch (given.type) {
        case kFloat32: sum_pieces_of<Float32>(given); break;
        case kFloat16: sum_pieces_of<Half<kFloat16>>(given); break;
        case kBFloat16: sum_pieces_of<Half<kBFloat16>>(given); break;
        default: sum_pieces_of<Float64>(given); break;
    }
}

extern "C" __global__ void add_pieces(const __grid_constant__ Sums given) {
    switch (given.type) {
        case kFloat32: add_parts<Float32>(given, this_thread(), all_threads()); break;
        case kFloat16: add_parts<Half<kFloat16>>(given, this_thread(), all_threads()); break;
        case kBFloat16: add_parts<Half<kBFloat16>>(given, this_thread(), all_threads()); break;
        default: add_parts<Float64>(given, this_thread(), all_threads()); break;
    }
}
