// Train the rows of a block of words, copies of those of the tables, as word2vec/compiled.py does: round after round, whose
// spans, a cluster each, find the same rows, and all scores of a span are of these. How far they move them is added up after
// the round.
//
// What follows from indices alone is found before, for all spans at once: the plans. Then the blocks of a cluster share out the
// columns: what a span does to a column depends on other columns through the scores alone. So each block has a part of every
// score, sends it to the block that sums it, and gets what that makes of it: all else is a block's own. It keeps what its span
// needs in shared memory, four columns of a row at once. Each number is the work of one thread, in a fixed order: results are
// the same each time.

#include "cluster.cuh"

namespace {

constexpr unsigned int kSpan = 16;      // words of a span, at most; as in word2vec/places.py
constexpr unsigned int kThreads = 512;  // of a block, at most; as in word2vec/spans.py
constexpr unsigned int kBlocks = 8;     // of a cluster; as there
constexpr unsigned int kMail = 4;       // numbers of 4 bytes in place of which there are two mails
constexpr unsigned int kParts = 4;      // threads that share a sum of the rows of all targets
static_assert(kThreads % 32 == 0 && kBlocks <= 8, "whole warps; no device has to run larger clusters");

struct Train {
    long long first;            // span of the round that is trained
    long long spans;            // of it
    float* center_rows;         // (any, dim)
    float* context_rows;        // (any, dim)
    const long long* bag_rows;  // rows of `center_rows`
    const long long* starts;    // (count + 1,): where the bag of each word begins among them
    const long long* contexts;  // (count,): rows of `context_rows`
    const long long* before;    // (count,): the windows
    const long long* after;
    const long long* draws;     // (spans, num_draws): rows of `context_rows`
    const long long* rounds;    // (num_rounds + 1,): the span that each begins with
    int* plans;                 // (spans, plan_size)
    int* links;                 // (spans, rows of a span): as those of a plan, in the round
    float* moves;               // (spans of a round, rows of a span, dim): how far they move them
    float* room;                // (spans of a round, blocks, room_size) to work in, or null: shared memory holds it
    double* loss;               // (spans of a round, blocks, threads), or null
    long long count;
    long long dim;
    long long span;
    long long reach;            // the widest window to a side
    long long num_draws;
    long long num_bag_rows;     // of the bags that a span reads, at most, and for words that a block has not a row each
    long long single;           // every bag has one row
    long long cbow;
    long long window;           // pairs count with the probability that a window of 1 to this reaches so far; 0: each once
    long long plan_size;
    long long room_size;
    long long blocks;           // of a cluster
    long long num_rounds;
    double negative;
    double rate;
};

// How many there are of what a span has. A target of a word is a place in its window, of which that in the middle is the only
// one that CBOW predicts and that skip-gram does not, or a draw. Rows of a span: of bags, of words near it, of draws.
struct Counts {
    unsigned int side, places, targets, bag_rows, near, rows, bags;

    __device__ explicit Counts(const Train& given) {
        const unsigned int reach = static_cast<unsigned int>(given.reach), draws = static_cast<unsigned int>(given.num_draws);
        side = given.cbow ? 0 : reach;
        places = 2 * side + 1;
        targets = places + draws;
        bag_rows = static_cast<unsigned int>(given.num_bag_rows);
        near = kSpan + 2 * side;
        rows = bag_rows + near + draws;
        bags = kSpan + (given.cbow ? 2 * reach : 0);
    }

    // Which of the rows is a target of a word.
    __device__ unsigned int row_of(unsigned int word, unsigned int target) const {
        return bag_rows + (target < places ? word + target : near + target - places);
    }
};

// What a span needs to know, of numbers of 32 bits.
struct Plan {
    int* rows;      // (rows,): of the tables, or -1
    int* links;     // (rows,): twice the next one that is the same row, or the number of rows; one more for the first of these
    int* bag_of;    // (bag_rows,)
    int* bags;      // (bags + 1,): where each begins among these
    int* movers;    // (bags,): bit by bit, the words whose moves its rows make
    int* before;    // (kSpan,)
    int* after;     // (kSpan,)
    float* weights;  // (kSpan,): what a draw counts

    __device__ Plan(const Counts& counts, int* at) {
        rows = at;
        links = rows + counts.rows;
        bag_of = links + counts.rows;
        bags = bag_of + counts.bag_rows;
        movers = bags + counts.bags + 1;
        before = movers + counts.bags;
        after = before + kSpan;
        weights = reinterpret_cast<float*>(after + kSpan);
    }
};

__device__ inline bool in_window(const Train& given, long long i, long long near) {
    return near != i && near >= i - given.before[i] && near <= i + given.after[i];
}

// What the pairs count that a word has up to a distance of `reached`.
__device__ inline double side_weight(long long window, long long reached) {
    const double sum = static_cast<double>(reached);
    return window ? sum * static_cast<double>(2 * window + 1 - reached) / static_cast<double>(2 * window) : sum;
}

__device__ inline void plan_span(const Train& given, const Counts& counts, const Plan& plan, long long number) {
    const long long start = number * given.span, left = given.count - start;
    const long long words = left < given.span ? left : given.span, stop = start + words;
    const long long first = given.cbow ? start - given.reach : start, last = given.cbow ? stop + given.reach : stop;
    const long long low = first > 0 ? first : 0, high = last < given.count ? last : given.count;
    const long long bags = given.starts[low], bags_end = given.starts[high];
    const long long base = bags - (low - first);  // a word that the block has not takes the place of one row
    const long long *drawn = given.draws + number * given.num_draws;
    for (unsigned int row = threadIdx.x; row < counts.rows; row += blockDim.x) {
        long long found = -1;
        if (row < counts.bag_rows) {
            const long long bag = base + row;
            if (bag >= bags && bag < bags_end) found = given.bag_rows[bag];
        } else if (row < counts.bag_rows + counts.near) {
            const long long near = start - counts.side + row - counts.bag_rows;
            if (near >= 0 && near < given.count && near < stop + counts.side) found = given.contexts[near];
        } else {
            found = drawn[row - counts.bag_rows - counts.near];
        }
        plan.rows[row] = static_cast<int>(found);
    }
    for (unsigned int bag = threadIdx.x; bag <= counts.bags; bag += blockDim.x) {
        const long long near = first + bag, inside = near < low ? low : near < high ? near : high;
        plan.bags[bag] = static_cast<int>(given.starts[inside] - base);
        if (bag == counts.bags) continue;
        int movers = 0;
        if (near >= low && near < high)
            for (int word = 0; word < words; ++word)
                movers |= (given.cbow ? in_window(given, start + word, near) : start + word == near) << word;
        plan.movers[bag] = movers;
        if (near >= low && near < high)
            for (long long at = given.starts[near]; at < given.starts[near + 1]; ++at)
                plan.bag_of[at - base] = static_cast<int>(bag);
    }
    for (unsigned int word = threadIdx.x; word < kSpan; word += blockDim.x) {
        const long long before = word < words ? given.before[start + word] : 0;
        const long long after = word < words ? given.after[start + word] : 0;
        const double served = given.cbow ? before + after > 0 : side_weight(given.window, before) + side_weight(given.window, after);
        plan.before[word] = static_cast<int>(before);
        plan.after[word] = static_cast<int>(after);
        plan.weights[word] = static_cast<float>(given.negative * served / static_cast<double>(given.num_draws));
    }
    meet();
    for (unsigned int row = threadIdx.x; row < counts.rows; row += blockDim.x) {
        const unsigned int from = row < counts.bag_rows ? 0 : counts.bag_rows;
        const unsigned int to = row < counts.bag_rows ? counts.bag_rows : counts.rows;
        const int same = plan.rows[row];
        unsigned int next = row + 1;
        bool is_first = same >= 0;
        for (unsigned int other = from; other < row; ++other) is_first &= plan.rows[other] != same;
        while (next < to && plan.rows[next] != same) ++next;
        plan.links[row] = static_cast<int>((next < to ? next : counts.rows) * 2 + is_first);
    }
    meet();
}

// Find the rows of a span, each the first there, in the others of its round.
__device__ inline void link_span(const Train& given, const Counts& counts, long long number) {
    long long round = 0;
    for (long long beyond = given.num_rounds; beyond - round > 1;) {
        const long long middle = (round + beyond) / 2;
        (given.rounds[middle] <= number ? round : beyond) = middle;
    }
    const unsigned int span = static_cast<unsigned int>(number - given.rounds[round]);
    const unsigned int spans = static_cast<unsigned int>(given.rounds[round + 1] - given.rounds[round]);
    const unsigned int end = spans * counts.rows;
    const auto plan_of = [&](unsigned int other) { return Plan(counts, given.plans + (number - span + other) * given.plan_size); };
    const Plan plan = plan_of(span);
    for (unsigned int row = threadIdx.x; row < counts.rows; row += blockDim.x) {
        if (!(plan.links[row] & 1)) {
            given.links[number * counts.rows + row] = 0;
            continue;
        }
        const unsigned int from = row < counts.bag_rows ? 0 : counts.bag_rows;
        const unsigned int to = row < counts.bag_rows ? counts.bag_rows : counts.rows;
        const auto find = [&](unsigned int first, unsigned int last) {
            for (unsigned int other = first; other < last; ++other) {
                const int* rows = plan_of(other).rows;
                for (unsigned int at = from; at < to; ++at)
                    if (rows[at] == plan.rows[row]) return other * counts.rows + at;
            }
            return end;
        };
        const bool is_first = find(0, span) == end;
        given.links[number * counts.rows + row] = static_cast<int>(find(span + 1, spans) * 2 + is_first);
    }
}

__device__ inline float4 get(const float* from) { return *reinterpret_cast<const float4*>(from); }
__device__ inline void put(float* to, float4 value) { *reinterpret_cast<float4*>(to) = value; }
__device__ inline void add(float4& sum, float4 value) {
    sum.x += value.x;
    sum.y += value.y;
    sum.z += value.z;
    sum.w += value.w;
}
__device__ inline void add_product(float4& sum, float factor, float4 value) {
    sum.x += factor * value.x;
    sum.y += factor * value.y;
    sum.z += factor * value.z;
    sum.w += factor * value.w;
}
__device__ inline void add_dot(float& sum, float4 a, float4 b) {
    sum += a.x * b.x;
    sum += a.y * b.y;
    sum += a.z * b.z;
    sum += a.w * b.w;
}
__device__ inline float4 zeros() { return {0.0f, 0.0f, 0.0f, 0.0f}; }

__device__ inline float softplus(float score) { return fmaxf(score, 0.0f) + log1pf(expf(-fabsf(score))); }

// A block of a cluster at its columns: chunks of four, with zeros beyond the last column. Some threads share a row, its
// chunks among them: a power of two, `lanes`.
struct Columns {
    const Train& given;
    const Counts counts;
    Mail *parts_mail, *slopes_mail;            // shared memory
    float *parts, *slopes, *weights;           // too: (blocks, slots), (targets, kSpan), (slots,)
    float *rows, *words, *vectors, *moves;     // (any, stride); moves (sum_parts, kSpan, stride)
    Plan plan;
    unsigned int blocks, block, quads, slots, sum_parts, first, chunks, stride, log_lanes;
    bool wide;  // rows of tables begin at multiples of 16 bytes

    __device__ Columns(const Train& given_, float* shared, float* memory)
        : given(given_), counts(given_), plan(counts, reinterpret_cast<int*>(memory)) {
        blocks = static_cast<unsigned int>(given.blocks);
        block = blockIdx.x % blocks;
        const unsigned int all = static_cast<unsigned int>(given.dim + 3) / 4, most = (all + blocks - 1) / blocks;
        first = block * all / blocks;
        chunks = (block + 1) * all / blocks - first;
        first *= 4;
        stride = 4 * (most | 1);  // an odd number of chunks: those of eight rows that follow one another are in all banks
        for (log_lanes = 0; log_lanes < 5 && 1u << log_lanes < most;) ++log_lanes;
        wide = given.dim % 4 == 0 && is_aligned(given.center_rows) && is_aligned(given.context_rows);
        quads = counts.targets * kSpan / 4;
        slots = slots_of(counts, blocks);
        sum_parts = blocks > 1 && !given.cbow ? kParts : 1;
        parts_mail = reinterpret_cast<Mail*>(shared);
        slopes_mail = parts_mail + 1;
        parts = shared + kMail;
        slopes = parts + blocks * slots;
        weights = slopes + counts.targets * kSpan;
        rows = memory + given.plan_size;
        words = given.single ? rows : rows + counts.rows * stride;
        vectors = given.cbow ? words + (given.single ? counts.rows : counts.bags) * stride : words;
        moves = given.cbow ? vectors + kSpan * stride : given.single ? rows + counts.rows * stride : words + counts.bags * stride;
    }

    // Scores that a block sums.
    __device__ static unsigned int slots_of(const Counts& counts, unsigned int blocks) {
        return (counts.targets * kSpan / 4 + blocks - 1) / blocks * 4;
    }
    // What shared memory holds beside what may be elsewhere.
    __device__ static unsigned int exchanged(const Counts& counts, unsigned int blocks) {
        return kMail + (blocks + 1) * slots_of(counts, blocks) + counts.targets * kSpan;
    }

    __device__ static bool is_aligned(const void* pointer) { return reinterpret_cast<unsigned long long>(pointer) % 16 == 0; }

    __device__ const float* table_row(unsigned int row) const {
        const float* table = row < counts.bag_rows ? given.center_rows : given.context_rows;
        return table + plan.rows[row] * given.dim + first;
    }
    __device__ float* moves_of(unsigned int row) const {
        return given.moves + (blockIdx.x / blocks * static_cast<long long>(counts.rows) + row) * given.dim + first;
    }
    __device__ float4 read(const float* row, unsigned int chunk) const {
        const float* from = row + 4 * chunk;
        if (wide) return get(from);
        const unsigned int left = static_cast<unsigned int>(given.dim) - first - 4 * chunk;
        return {from[0], left > 1 ? from[1] : 0.0f, left > 2 ? from[2] : 0.0f, left > 3 ? from[3] : 0.0f};
    }
    __device__ void write(float* row, unsigned int chunk, float4 value) const {
        float* to = row + 4 * chunk;
        if (wide) return put(to, value);
        const unsigned int left = static_cast<unsigned int>(given.dim) - first - 4 * chunk;
        to[0] = value.x;
        if (left > 1) to[1] = value.y;
        if (left > 2) to[2] = value.z;
        if (left > 3) to[3] = value.w;
    }

    __device__ unsigned int lane(unsigned int item) const { return item & ((1u << log_lanes) - 1); }
    __device__ unsigned int lanes() const { return 1u << log_lanes; }

    __device__ void read_plan(const int* from) const {
        for (unsigned int at = threadIdx.x; at < static_cast<unsigned int>(given.plan_size) / 4; at += blockDim.x)
            reinterpret_cast<uint4*>(plan.rows)[at] = reinterpret_cast<const uint4*>(from)[at];
    }
    __device__ void read_rows() const {
        for (unsigned int item = threadIdx.x; item < counts.rows << log_lanes; item += blockDim.x) {
            const unsigned int row = item >> log_lanes;
            const bool is_there = plan.rows[row] >= 0;
            const float* from = table_row(row);
#pragma unroll 1
            for (unsigned int chunk = lane(item); chunk < chunks; chunk += lanes())
                put(rows + row * stride + 4 * chunk, is_there ? read(from, chunk) : zeros());
        }
    }

    // The vectors of words are means of bags, and those that predict in CBOW are means of these.
    __device__ void find_words() const {
        for (unsigned int item = threadIdx.x; item < counts.bags << log_lanes; item += blockDim.x) {
            const unsigned int bag = item >> log_lanes, begin = plan.bags[bag], end = plan.bags[bag + 1];
            const float size = static_cast<float>(end > begin ? end - begin : 1);
#pragma unroll 1
            for (unsigned int chunk = lane(item); chunk < chunks; chunk += lanes()) {
                float4 sum = zeros();
#pragma unroll 2
                for (unsigned int row = begin; row < end; ++row) add(sum, get(rows + row * stride + 4 * chunk));
                put(words + bag * stride + 4 * chunk, {sum.x / size, sum.y / size, sum.z / size, sum.w / size});
            }
        }
    }
    __device__ void find_vectors() const {
        for (unsigned int item = threadIdx.x; item < kSpan << log_lanes; item += blockDim.x) {
            const unsigned int word = item >> log_lanes, here = word + static_cast<unsigned int>(given.reach);
            const unsigned int before = plan.before[word], after = plan.after[word];
            const float size = static_cast<float>(before + after > 0 ? before + after : 1);
#pragma unroll 1
            for (unsigned int chunk = lane(item); chunk < chunks; chunk += lanes()) {
                float4 sum = zeros();
#pragma unroll 2
                for (unsigned int near = here - before; near <= here + after; ++near)
                    if (near != here) add(sum, get(words + near * stride + 4 * chunk));
                put(vectors + word * stride + 4 * chunk, {sum.x / size, sum.y / size, sum.z / size, sum.w / size});
            }
        }
    }

    // Scores come in fours: four words and a target of each; of all words a target, then the next. Blocks have as many fours
    // each.
    __device__ unsigned int own_quads() const {
        const unsigned int most = slots / 4, before = block * most;
        return before >= quads ? 0 : quads - before < most ? quads - before : most;
    }

    // By one thread, before anything is sent.
    __device__ void expect() const {
        open_mail(parts_mail);
        open_mail(slopes_mail);
        expect_mail(parts_mail, own_quads() * blocks * 16);
        expect_mail(slopes_mail, quads * 16);
    }

    __device__ void send_parts() const {
        for (unsigned int quad = threadIdx.x; quad < quads; quad += blockDim.x) {
            const unsigned int word = quad * 4 % kSpan, target = quad * 4 / kSpan, to = quad / (slots / 4);
            const unsigned int step = target < counts.places ? stride : 0;  // a draw is one for all words
            const float *vector = vectors + word * stride, *row = rows + counts.row_of(word, target) * stride;
            float4 sums = zeros();
#pragma unroll 1
            for (unsigned int chunk = 0; chunk < chunks; ++chunk, vector += 4, row += 4) {
                add_dot(sums.x, get(vector), get(row));
                add_dot(sums.y, get(vector + stride), get(row + step));
                add_dot(sums.z, get(vector + 2 * stride), get(row + 2 * step));
                add_dot(sums.w, get(vector + 3 * stride), get(row + 3 * step));
            }
            send(parts + block * slots + (quad * 4 - to * slots), to, sums, parts_mail);
        }
    }

    // Find what the scores count that this block sums. Its last threads do, which have no row to read.
    __device__ void find_weights() const {
        for (unsigned int slot = blockDim.x - 1 - threadIdx.x; slot < own_quads() * 4; slot += blockDim.x)
            weights[slot] = weight_of(block * slots + slot);
    }
    __device__ float weight_of(unsigned int item) const {
        const unsigned int word = item % kSpan, target = item / kSpan;
        if (target >= counts.places) return plan.weights[word];
        if (given.cbow) return plan.before[word] + plan.after[word] > 0 ? 1.0f : 0.0f;
        const int to = static_cast<int>(target) - static_cast<int>(counts.side), distance = to < 0 ? -to : to;
        if (to == 0 || to < -plan.before[word] || to > plan.after[word]) return 0.0f;
        const int window = static_cast<int>(given.window);
        return window ? static_cast<float>(window + 1 - distance) / static_cast<float>(window) : 1.0f;
    }

    __device__ float slope_of(float score, float weight, bool is_noise, double& loss) const {
        if (weight == 0.0f) return 0.0f;
        if (is_noise) score = -score;
        if (given.loss != nullptr) loss += static_cast<double>(weight * softplus(-score));
        const float slope = static_cast<float>(given.rate) * weight / (1.0f + expf(score));
        return is_noise ? -slope : slope;
    }

    // The thread that has read parts of scores sends what they make to all blocks.
    __device__ double send_slopes() const {
        double loss = 0;
        for (unsigned int quad = threadIdx.x; quad < own_quads(); quad += blockDim.x) {
            const unsigned int item = block * slots + 4 * quad;
            const bool is_noise = item >= counts.places * kSpan;
            const float4 weight = get(weights + 4 * quad);
            float4 score = zeros();
            for (unsigned int from = 0; from < blocks; ++from) add(score, get(parts + from * slots + 4 * quad));
            const float4 slope = {
                slope_of(score.x, weight.x, is_noise, loss), slope_of(score.y, weight.y, is_noise, loss),
                slope_of(score.z, weight.z, is_noise, loss), slope_of(score.w, weight.w, is_noise, loss)
            };
#pragma unroll 2
            for (unsigned int to = 0; to < blocks; ++to) send(slopes + item, to, slope, slopes_mail);
        }
        return loss;
    }

    // How far a row is moved that words predict: the words in whose window it is, or all.
    __device__ float4 move_of(unsigned int row, unsigned int chunk) const {
        const unsigned int place = row - counts.bag_rows;
        const bool is_near = place < counts.near;
        const unsigned int low = is_near && place >= counts.places ? place - counts.places + 1 : 0;
        const unsigned int high = is_near && place < kSpan ? place + 1 : kSpan;
        const int step = is_near ? 1 - static_cast<int>(kSpan) : 1;  // a word further on has it a place nearer
        const float* slope = slopes + (is_near ? place - low : counts.places + place - counts.near) * kSpan + low;
        const float* vector = vectors + low * stride + 4 * chunk;
        float4 sum = zeros();
#pragma unroll 4
        for (unsigned int word = low; word < high; ++word, slope += step, vector += stride) add_product(sum, *slope, get(vector));
        return sum;
    }

    // Find how far what predicts is moved, and what is predicted. The thread of the first of several that are the same row
    // adds up the moves of all of them.
    __device__ void move_contexts() const {
        const unsigned int sums = sum_parts * kSpan << log_lanes, moved = (counts.rows - counts.bag_rows) << log_lanes;
        for (unsigned int item = threadIdx.x; item < sums + moved; item += blockDim.x) {
            if (item < sums) {
                const unsigned int sum_of = item >> log_lanes, word = sum_of % kSpan, part = sum_of / kSpan;
#pragma unroll 1
                for (unsigned int chunk = lane(item); chunk < chunks; chunk += lanes()) {
                    const float *slope = slopes + word, *row = rows + 4 * chunk;
                    float4 sum = zeros();
                    unsigned int target = part;
#pragma unroll 4
                    for (; target < counts.places; target += sum_parts)
                        add_product(sum, slope[target * kSpan], get(row + (counts.bag_rows + word + target) * stride));
#pragma unroll 4
                    for (; target < counts.targets; target += sum_parts)
                        add_product(sum, slope[target * kSpan], get(row + counts.row_of(word, target) * stride));
                    put(moves + sum_of * stride + 4 * chunk, sum);
                }
                continue;
            }
            const unsigned int row = counts.bag_rows + ((item - sums) >> log_lanes);
            if (!(plan.links[row] & 1)) continue;
#pragma unroll 1
            for (unsigned int chunk = lane(item); chunk < chunks; chunk += lanes()) {
                float4 sum = zeros();
                for (unsigned int same = row; same < counts.rows; same = static_cast<unsigned int>(plan.links[same]) / 2)
                    add(sum, move_of(same, chunk));
                write(moves_of(row), chunk, sum);
            }
        }
    }
    __device__ void move_centers() const {
        for (unsigned int item = threadIdx.x; item < counts.bag_rows << log_lanes; item += blockDim.x) {
            const unsigned int row = item >> log_lanes;
            if (!(plan.links[row] & 1)) continue;
#pragma unroll 1
            for (unsigned int chunk = lane(item); chunk < chunks; chunk += lanes()) {
                float4 sum = zeros();
                for (unsigned int same = row; same < counts.rows; same = static_cast<unsigned int>(plan.links[same]) / 2) {
                    const unsigned int bag = plan.bag_of[same], movers = plan.movers[bag];
                    const unsigned int low = given.cbow ? 0 : bag, high = given.cbow ? kSpan : bag + 1;
                    float4 move = zeros();
#pragma unroll 4
                    for (unsigned int word = low; word < high; ++word)
                        if (movers >> word & 1)
#pragma unroll 1
                            for (unsigned int part = 0; part < sum_parts; ++part)
                                add(move, get(moves + (part * kSpan + word) * stride + 4 * chunk));
                    add(sum, move);
                }
                write(moves_of(row), chunk, sum);
            }
        }
    }
};

__device__ __forceinline__ void train_columns(const Train& given, float* shared, float* memory) {
    const Columns columns(given, shared, memory);
    const long long number = given.first + blockIdx.x / columns.blocks;
    columns.read_plan(given.plans + number * given.plan_size);
    if (threadIdx.x == 0) columns.expect();
    meet_all();  // no block may be sent anything before
    columns.find_weights();
    columns.read_rows();
    meet();
    if (!given.single) {
        columns.find_words();
        meet();
    }
    if (given.cbow) {
        columns.find_vectors();
        meet();
    }
    columns.send_parts();
    wait_for_mail(columns.parts_mail);
    const double loss = columns.send_slopes();
    wait_for_mail(columns.slopes_mail);
    columns.move_contexts();
    meet();
    columns.move_centers();
    if (given.loss != nullptr) given.loss[blockIdx.x * blockDim.x + threadIdx.x] += loss;
    meet_all();  // no block may end before what it has sent is there
}

}  // namespace

extern "C" __global__ void plan_spans(const __grid_constant__ Train given) {
    const Counts counts(given);
    for (long long number = blockIdx.x; number * given.span < given.count; number += gridDim.x)
        plan_span(given, counts, Plan(counts, given.plans + number * given.plan_size), number);
}

// After plan_spans.
extern "C" __global__ void link_spans(const __grid_constant__ Train given) {
    const Counts counts(given);
    for (long long number = blockIdx.x; number * given.span < given.count; number += gridDim.x) link_span(given, counts, number);
}

extern "C" CLUSTER_OF(kBlocks) __launch_bounds__(kThreads, 1) __global__ void train_spans(const __grid_constant__ Train given);

extern "C" __global__ void train_spans(const __grid_constant__ Train given) {
    // Twice, so that the compiler knows which memory it is.
    if (given.room == nullptr) {
        const unsigned int blocks = static_cast<unsigned int>(given.blocks);
        train_columns(given, shared_floats(), shared_floats() + Columns::exchanged(Counts(given), blocks));
    } else {
        train_columns(given, shared_floats(), given.room + blockIdx.x * given.room_size);
    }
}

// After train_spans: add the moves of a round to each row, those of its spans in their order.
extern "C" __global__ void add_moves(const __grid_constant__ Train given) {
    const Counts counts(given);
    const unsigned int end = static_cast<unsigned int>(given.spans) * counts.rows;
    const int* links = given.links + given.first * counts.rows;
    const long long threads = static_cast<long long>(gridDim.x) * blockDim.x;
    for (long long at = static_cast<long long>(blockIdx.x) * blockDim.x + threadIdx.x; at < end * given.dim; at += threads) {
        const unsigned int first = static_cast<unsigned int>(at / given.dim), row = first % counts.rows;
        if (!(links[first] & 1)) continue;
        const long long span = given.first + first / counts.rows;
        float* table = row < counts.bag_rows ? given.center_rows : given.context_rows;
        float* to = table + Plan(counts, given.plans + span * given.plan_size).rows[row] * given.dim + at % given.dim;
        float value = *to;
        for (unsigned int same = first; same < end; same = static_cast<unsigned int>(links[same]) / 2)
            value += given.moves[same * given.dim + at % given.dim];
        *to = value;
    }
}
