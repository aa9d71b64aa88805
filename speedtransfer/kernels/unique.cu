// The steps of finding the unique rows of an index that are not a sort or a prefix sum; those are torch's. No count comes to
// the host: there is room for as many unique rows as there can be, and what is left over names a row that does not exist.

#include "move.cuh"

namespace {

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
};

__device__ inline long long number_at(const char* numbers, const Unique& given, long long i) {
    return given.wide ? reinterpret_cast<const long long*>(numbers)[i] : reinterpret_cast<const int*>(numbers)[i];
}

__device__ inline void set_number(char* numbers, const Unique& given, long long i, long long value) {
    if (given.wide) reinterpret_cast<long long*>(numbers)[i] = value;
    else reinterpret_cast<int*>(numbers)[i] = static_cast<int>(value);
}

}  // namespace

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
