// The steps of cluster.cuh for the CPU: all threads of all blocks, each with a stack of its own. A block runs as far as it may
// before the next one does, and what is sent to a block is there at once, or as late as it may be.
#pragma once

#undef _FORTIFY_SOURCE  // longjmp between stacks is what this is for
#include <algorithm>
#include <csetjmp>
#include <memory>
#include <utility>

#include "cuda_shim.h"

struct alignas(16) float4 {
    float x, y, z, w;
};

#define __forceinline__ inline
#define __launch_bounds__(...)
#define CLUSTER_OF(blocks)

// An mbarrier: bytes that are yet to come, and kPending more while nobody has said how many.
struct Mail {
    static constexpr int kPending = 1 << 28;
    int left;
};

// Of a cluster that runs.
struct Cluster {
    enum State { kRuns, kMeets, kMeetsAll, kWaits, kDone };
    struct Sent {
        float* to;
        float4 value;
        Mail* mail;
    };
    static constexpr std::size_t kStack = 1 << 15, kBeyond = 1 << 10;  // bytes that a block must leave alone

    std::function<void()> kernel;
    unsigned int first, blocks, threads, now = 0;  // blocks of the launch, from the first of this cluster on
    bool late;
    std::size_t shared;  // bytes that a block may use
    // Kept, as they take a while to get, and not filled: most of it is never touched.
    static inline std::unique_ptr<char[]> stacks;
    static inline unsigned int num_stacks = 0;
    std::vector<float4> memory;
    std::vector<State> states;
    std::vector<const Mail*> waits;  // for what a thread waits
    std::vector<Sent> sent;
    std::unique_ptr<jmp_buf[]> places;
    std::vector<ucontext_t> starts;
    jmp_buf back;
    ucontext_t main;

    float* of_block(unsigned int block) { return &memory[block * room()].x; }
    std::size_t room() const { return (shared + kBeyond) / sizeof(float4); }
    unsigned int block() const { return now / threads; }

    void stop(State state) {
        states[now] = state;
        if (_setjmp(places[now]) == 0) _longjmp(back, 1);
    }
    void go_on(unsigned int thread, bool is_new) {
        now = thread;
        states[thread] = kRuns;
        blockIdx = {first + thread / threads, 0, 0};
        threadIdx = {thread % threads, 0, 0};
        if (_setjmp(back) != 0) return;
        if (is_new) setcontext(&starts[thread]);
        _longjmp(places[thread], 1);
    }
    bool may_go_on(unsigned int thread) const {
        return states[thread] == kRuns || (states[thread] == kWaits && waits[thread]->left == 0);
    }
    // Let threads go on if all of these are there.
    bool release(unsigned int from, unsigned int to, State state) {
        for (unsigned int i = from; i < to; ++i)
            if (states[i] != state) return false;
        std::fill(&states[from], &states[0] + to, kRuns);
        return true;
    }
    void deliver(const Sent& one) {
        std::memcpy(one.to, &one.value, sizeof one.value);
        one.mail->left -= sizeof one.value;
    }
    void run(bool backwards);
};
inline Cluster* cluster = nullptr;
inline std::size_t shared_bytes = 0;

inline float* shared_floats() { return cluster->of_block(cluster->block()); }

inline void meet() { cluster->stop(Cluster::kMeets); }
inline void meet_all() { cluster->stop(Cluster::kMeetsAll); }

inline void open_mail(Mail* mail) { *mail = {Mail::kPending}; }

inline void expect_mail(Mail* mail, unsigned int bytes) {
    expect(mail->left > Mail::kPending / 2);  // once
    mail->left -= Mail::kPending - static_cast<int>(bytes);
}

inline void send(float* to, unsigned int block, float4 value, Mail* mail) {
    const std::ptrdiff_t place = to - shared_floats(), mail_place = reinterpret_cast<float*>(mail) - shared_floats();
    expect(block < cluster->blocks && place >= 0 && (place + 4) * sizeof(float) <= cluster->shared && place % 4 == 0);
    float* there = cluster->of_block(block);
    cluster->sent.push_back({there + place, value, reinterpret_cast<Mail*>(there + mail_place)});
    if (cluster->late) return;
    cluster->deliver(cluster->sent.back());
    cluster->sent.pop_back();
}

inline void wait_for_mail(Mail* mail) {
    cluster->waits[cluster->now] = mail;
    if (mail->left != 0) cluster->stop(Cluster::kWaits);
    expect(mail->left == 0);
}

inline void run_in_cluster() {
    cluster->kernel();
    cluster->stop(Cluster::kDone);
}

inline void Cluster::run(bool backwards) {
    const unsigned int count = blocks * threads;
    if (std::exchange(num_stacks, std::max(num_stacks, count)) < count) stacks.reset(new char[count * kStack]);
    memory.resize(blocks * room());
    std::memset(memory.data(), 0xff, memory.size() * sizeof(float4));  // not a number
    states.assign(count, kRuns);
    waits.resize(count);
    places.reset(new jmp_buf[count]);
    starts.resize(count);
    std::vector<char> is_new(count, true);
    for (unsigned int i = 0; i < count; ++i) {
        getcontext(&starts[i]);
        starts[i].uc_stack.ss_sp = &stacks[i * kStack];
        starts[i].uc_stack.ss_size = kStack;
        starts[i].uc_link = &main;
        makecontext(&starts[i], run_in_cluster, 0);
    }
    unsigned int done = 0;
    for (bool moves = true; done < count;) {
        if (!moves && sent.empty()) {  // a device would wait for ever
            expect(false);
            return;
        }
        // What is late comes when nobody can do anything else.
        if (!moves)
            for (const Sent& one : sent) deliver(one);
        if (!moves) sent.clear();
        moves = false;
        for (unsigned int b = 0; b < blocks; ++b) {
            const unsigned int block = backwards ? blocks - 1 - b : b, from = block * threads, to = from + threads;
            for (bool goes_on = true; goes_on;) {
                goes_on = false;
                for (unsigned int t = 0; t < threads; ++t) {
                    const unsigned int thread = backwards ? to - 1 - t : from + t;
                    if (!may_go_on(thread)) continue;
                    go_on(thread, is_new[thread]);
                    is_new[thread] = false;
                    done += states[thread] == kDone;
                    goes_on = moves = true;
                }
                if (release(from, to, kMeets)) goes_on = true;
            }
        }
        if (release(0, count, kMeetsAll)) {
            expect(sent.empty());
            moves = true;
        }
    }
    for (unsigned int block = 0; block < blocks; ++block) {
        const char *start = reinterpret_cast<const char*>(of_block(block)), *end = start + shared + kBeyond;
        for (start += shared; start < end; ++start) expect(*start == '\xff');
    }
}

template <typename Argument>
long long launch_clusters(
    void (*kernel)(Argument), unsigned int size, unsigned int blocks, unsigned int threads, const void* argument,
    bool backwards
) {
    mistakes = 0;
    gridDim = {blocks, 1, 1};
    threads = std::min(threads, 128u);  // more take minutes, and change no result
    blockDim = {threads, 1, 1};
    std::remove_const_t<Argument> copy;
    std::memcpy(&copy, argument, sizeof copy);
    for (unsigned int first = 0; first < blocks; first += size) {
        Cluster all{};
        all.kernel = [&] { kernel(copy); };
        all.first = first;
        all.blocks = size;
        all.threads = threads;
        all.late = backwards;
        all.shared = shared_bytes;
        cluster = &all;
        all.run(backwards);
    }
    cluster = nullptr;
    return mistakes;
}

// Make a kernel whose blocks run in clusters of `size` a function of this library.
#define KERNEL_CLUSTERS(name, size)                                                                              \
    extern "C" long long cpu_##name(                                                                             \
        unsigned int blocks, unsigned int threads, const void* argument, int backwards                           \
    ) {                                                                                                          \
        return launch_clusters(name, size, blocks, threads, argument, backwards);                                \
    }
