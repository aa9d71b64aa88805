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

__device__ inline long long number_at(const char* numbers, const Unique& given, long long i) {
    return given.wide ? reinterpret_cast<const long long*>(numbers)[i] : reinterpret_cast<const int*>(numbers)[i];
}

__device__ inline void set_number(char* numbers, const Unique& given, long long i, long long value) {
    if (given.wide) reinterpret_cast<long long*>(numbers)[i] = value;
    else reinterpret_cast<int*>(numbers)[i] = static_cast<int>(value);
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
    for (long long i = this_thread(); i < given.count; i += all_threads()) {
        const unsigned long long row = static_cast<unsigned long long>(given.index[i]);
        const unsigned long long rows = static_cast<unsigned long long>(given.table_rows);
        set_number(given.keys, given, i, static_cast<long long>(row < rows ? row : rows));
    }
}

// groups[i] = whether keys[i], sorted by now, is the first of its kind
extern "C" __global__ void mark_groups(const __grid_constant__ Unique given) {
    for (long long i = this_thread(); i < given.count; i += all_threads()) {
        const bool first = i == 0 || number_at(given.keys, given, i) != number_at(given.keys, given, i - 1);
        set_number(given.groups, given, i, first);
    }
}

// The rest, once `groups` has been summed: each place then has the number of its group, counted from 1.
extern "C" __global__ void write_groups(const __grid_constant__ Unique given) {
    const long long num_groups = number_at(given.groups, given, given.count - 1);
    for (long long i = this_thread(); i < given.count; i += all_threads()) {
        const long long group = number_at(given.groups, given, i) - 1;
        given.inverse[given.order[i]] = group;
        if (i == 0 || group != number_at(given.groups, given, i - 1) - 1) {
            given.ids[group] = number_at(given.keys, given, i);
            given.starts[group] = i;
        }
    }
    for (long long group = num_groups + this_thread(); group <= given.room; group += all_threads()) {
        if (group < given.room) given.ids[group] = given.table_rows;
        given.starts[group] = given.count;
    }
    if (this_thread() == 0) {
        const bool all_exist = number_at(given.keys, given, given.count - 1) < given.table_rows;
        *given.num_unique = all_exist ? num_groups : num_groups - 1;
    }
}
