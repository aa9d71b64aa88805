// The steps of bulk.cuh for the CPU: an engine that copies as early, or as late, as the rules allow, so that a kernel that
// forgets to wait reads or loses the wrong bytes; and that counts what breaks a rule.
#pragma once

#include <algorithm>
#include <cstring>
#include <utility>
#include <vector>

#include "cuda_shim.h"

using Barrier = unsigned long long;  // kReady and the number of completed phases

// bulk.cu has the dynamic one only.
#undef __shared__
#define __shared__
extern char shared_memory[];

constexpr std::size_t kSharedMax = 1 << 20;
constexpr Barrier kReady = 1ull << 32;

struct Copy {
    char* to;
    const char* from;
    unsigned int bytes;
    long long group;
};

inline bool loads_are_late = false, stores_are_late = false;
inline std::size_t shared_bytes = 0;  // of a block

// Of the thread that runs.
inline bool published = false;
inline std::vector<std::pair<Barrier*, Copy>> loading;
inline std::vector<Copy> storing;
inline long long groups = 0;

// Threads of a block share the memory but not their places in it: whose each 8 bytes are, from 1.
inline std::vector<unsigned int> owner(kSharedMax / 8);
inline unsigned int threads_done = 0;  // of the block

inline void use(const void* place, std::size_t bytes) {
    const std::size_t start = static_cast<const char*>(place) - shared_memory;
    expect(start + bytes <= shared_bytes);
    for (std::size_t i = start / 8; i < (start + bytes + 7) / 8 && i < owner.size(); ++i) {
        expect(owner[i] == 0 || owner[i] == threadIdx.x + 1);
        owner[i] = threadIdx.x + 1;
    }
}

inline void copy(const Copy& copy) {
    if (copy.bytes) std::memcpy(copy.to, copy.from, copy.bytes);
}

inline void expect_bulk(const void* one, const void* other, unsigned int bytes) {
    expect((reinterpret_cast<std::uintptr_t>(one) | reinterpret_cast<std::uintptr_t>(other) | bytes) % 16 == 0);
    expect(bytes > 0);
}

inline void init_barrier(Barrier* barrier) {
    use(barrier, sizeof *barrier);
    expect_aligned(barrier);
    *barrier = kReady;
}

inline void publish_barriers() { published = true; }

inline void arrive(Barrier* barrier, const Copy& load) {
    expect(published && *barrier >= kReady);
    for (const auto& other : loading) expect(other.first != barrier);  // one arrival a phase
    loading.emplace_back(barrier, load);
}

inline void start_load(char* slot, const char* from, unsigned int bytes, Barrier* barrier) {
    use(slot, bytes);
    expect_bulk(slot, from, bytes);
    arrive(barrier, {slot, from, bytes, 0});
    if (!loads_are_late) copy(loading.back().second);
}

inline void finish_fill(Barrier* barrier) { arrive(barrier, {nullptr, nullptr, 0, 0}); }

inline void wait_for_load(Barrier* barrier, unsigned int parity) {
    for (std::size_t i = 0; i < loading.size(); ++i) {
        if (loading[i].first != barrier) continue;
        if (loads_are_late) copy(loading[i].second);
        ++*barrier;
        loading.erase(loading.begin() + static_cast<std::ptrdiff_t>(i));
        break;
    }
    expect((*barrier & 1) != parity);  // a device would wait for ever
}

inline void start_store(char* to, const char* slot, unsigned int bytes) {
    use(slot, bytes);
    expect_bulk(to, slot, bytes);
    storing.push_back({to, slot, bytes, groups});
    if (!stores_are_late) copy(storing.back());
}

inline void end_group() { ++groups; }

inline void finish_stores(long long pending_groups) {
    std::vector<Copy> rest;
    for (const Copy& store : storing) {
        if (store.group >= groups - pending_groups) {
            rest.push_back(store);
        } else if (stores_are_late) {
            copy(store);
        }
    }
    storing = rest;
}

inline void wait_for_slots_but_one() { finish_stores(1); }
inline void wait_for_stores() { finish_stores(0); }

inline void thread_done() {
    expect(loading.empty() && storing.empty());
    published = false;
    loading.clear();
    storing.clear();
    groups = 0;
    if (++threads_done < blockDim.x) return;
    threads_done = 0;
    std::fill_n(owner.begin(), shared_bytes / 8, 0);
    std::memset(shared_memory, 0xee, shared_bytes);
}
