// The steps of finding the unique rows of an index that are not a sort or a prefix sum; those are torch's, and for a short
// index one kernel does all. No count comes to the host: there is room for as many unique rows as there can be, and what is
// left over names a row that does not exist.

#include "move.cuh"

namespace {

// As in tables/padded.py.
constexpr int kFewBits = 12, kFew = 1 << kFewBits;
constexpr int kFewThreads = 256;

struct Unique {
    const long long* index;  // (count,)
    long long count;
    long long table_rows;
    long long wide;          // keys and groups are int64, else int32, which hold table_rows and count
    char* keys;              // (count,): rows; sorted after the first kernel
    char* groups;            // (count,): whether a sorted key is the first of its kind, then sums of these
    const long long* order;  // (count,): where in `index` each of the sorted keys was
    long long room;          // unique rows there can be, and one more where all rows may be among them
    long long* ids;          // (room,)
    long long* starts;       // (room + 1,): where in `order` the places of each of `ids` begin
    long long* inverse;      // (count,)
    long long* num_unique;   // (1,): of the rows that exist
    long long* order_made;   // (count,): `order`, where find_few makes it
};

// Once, and not for each number, for which the compilers of CUDA 12.1 to 12.4 find no end.
template <typename Do>
__device__ inline void by_type(const Unique& given, Do call) {
    if (given.wide) call(reinterpret_cast<long long*>(given.keys), reinterpret_cast<long long*>(given.groups));
    else call(reinterpret_cast<int*>(given.keys), reinterpret_cast<int*>(given.groups));
}

}  // namespace

// All of it for a short index, by one block, which sorts keys of 64 - kFewBits bits together with their places.
extern "C" __global__ void find_few(const __grid_constant__ Unique given) {
    __shared__ unsigned long long sorted[kFew];
    __shared__ int firsts[kFewThreads + 1];  // of each thread, then of all before it
    const int count = static_cast<int>(given.count), threads = blockDim.x, thread = threadIdx.x;
    int size = 1;
    while (size < count) size *= 2;
    for (int i = thread; i < size; i += threads) {
        const unsigned long long rows = static_cast<unsigned long long>(given.table_rows);
        const unsigned long long row = i < count ? static_cast<unsigned long long>(given.index[i]) : rows;
        sorted[i] = i < count ? (row < rows ? row : rows) << kFewBits | i : ~0ull;
    }
    // Bitonic: runs of `run`, up and down in turns, are merged by exchanges over ever shorter distances.
    for (int run = 2; run <= size; run *= 2) {
        for (int apart = run / 2; apart > 0; apart /= 2) {
            __syncthreads();
            for (int pair = thread; pair < size / 2; pair += threads) {
                const int i = 2 * pair - (pair & (apart - 1)), j = i + apart;
                const unsigned long long low = sorted[i], high = sorted[j];
                if ((low > high) == ((i & run) == 0)) {
                    sorted[i] = high;
                    sorted[j] = low;
                }
            }
        }
    }
    __syncthreads();
    const auto key = [&](int i) { return static_cast<long long>(sorted[i] >> kFewBits); };
    const auto is_first = [&](int i) { return i == 0 || key(i) != key(i - 1); };
    const int share = (count + threads - 1) / threads, begin = thread * share;
    const int end = begin + share < count ? begin + share : count;
    int found = 0;
    for (int i = begin; i < end; ++i) found += is_first(i);
    firsts[thread + 1] = found;
    if (thread == 0) firsts[0] = 0;
    for (int apart = 1; apart < threads; apart *= 2) {
        __syncthreads();
        const int before = thread + 1 > apart ? firsts[thread + 1 - apart] : 0;
        __syncthreads();
        firsts[thread + 1] += before;
    }
    __syncthreads();
    const int num_groups = firsts[threads];
    for (int i = begin, group = firsts[thread] - 1; i < end; ++i) {
        const int place = static_cast<int>(sorted[i] & (kFew - 1));
        if (is_first(i)) {
            ++group;
            given.ids[group] = key(i);
            given.starts[group] = i;
        }
        given.inverse[place] = group;
        given.order_made[i] = place;
    }
    for (long long group = num_groups + thread; group <= given.room; group += threads) {
        if (group < given.room) given.ids[group] = given.table_rows;
        given.starts[group] = count;
    }
    if (thread == 0) *given.num_unique = key(count - 1) < given.table_rows ? num_groups : num_groups - 1;
}

// keys[i] = index[i], or table_rows where there is no such row
extern "C" __global__ void find_keys(const __grid_constant__ Unique given) {
    by_type(given, [&](auto* keys, auto*) {
        for (long long i = this_thread(); i < given.count; i += all_threads()) {
            const unsigned long long row = static_cast<unsigned long long>(given.index[i]);
            const unsigned long long rows = static_cast<unsigned long long>(given.table_rows);
            keys[i] = row < rows ? row : rows;
        }
    });
}

// groups[i] = whether keys[i], sorted by now, is the first of its kind
extern "C" __global__ void mark_groups(const __grid_constant__ Unique given) {
    by_type(given, [&](const auto* keys, auto* groups) {
        for (long long i = this_thread(); i < given.count; i += all_threads()) groups[i] = i == 0 || keys[i] != keys[i - 1];
    });
}

// The rest, once `groups` has been summed: each place then has the number of its group, counted from 1.
extern "C" __global__ void write_groups(const __grid_constant__ Unique given) {
    by_type(given, [&](const auto* keys, const auto* groups) {
        const long long num_groups = groups[given.count - 1];
        for (long long i = this_thread(); i < given.count; i += all_threads()) {
            const long long group = groups[i] - 1;
            given.inverse[given.order[i]] = group;
            if (i == 0 || group != groups[i - 1] - 1) {
                given.ids[group] = keys[i];
                given.starts[group] = i;
            }
        }
        for (long long group = num_groups + this_thread(); group <= given.room; group += all_threads()) {
            if (group < given.room) given.ids[group] = given.table_rows;
            given.starts[group] = given.count;
        }
        if (this_thread() == 0) {
            *given.num_unique = keys[given.count - 1] < given.table_rows ? num_groups : num_groups - 1;
        }
    });
}
