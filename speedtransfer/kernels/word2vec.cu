// Train the rows of a block of words, copies of those of the tables, as word2vec/compiled.py does: span after span, all scores
// of a span of the rows as the span finds them. One block of threads does it alone. It shares out the numbers of a phase, and
// each number is the work of one thread, in a fixed order: results are the same each time. What a span has is counted in 32 bits,
// as divisions in 64 take long.

namespace {

constexpr unsigned int kParts = 8;  // threads that share a score

struct Train {
    float* center_rows;        // (any, dim)
    float* context_rows;       // (any, dim)
    const long long* bag_rows;  // rows of `center_rows`
    const long long* starts;    // (count + 1,): where the bag of each word begins among them
    const long long* contexts;  // (count,): rows of `context_rows`
    const long long* before;    // (count,): the windows
    const long long* after;
    const long long* draws;     // (spans, num_draws): rows of `context_rows`
    float* vectors;             // (span, dim): what predicts; the rest, too, is room to work in
    float* moves;               // (span, dim): of the rows that vectors are made of
    float* context_moves;       // (span + 2 * reach, dim)
    float* noise_moves;         // (num_draws, dim)
    float* parts;               // (span, targets, kParts): of scores
    float* slopes;              // (span, targets)
    double* loss;               // (threads,), or null
    long long count;
    long long dim;
    long long span;
    long long reach;            // the widest window to a side
    long long num_draws;
    long long cbow;
    long long window;           // pairs count with the probability that a window of 1 to this reaches so far; 0: each once
    double negative;
    double rate;

    // Of a word: the places of its window, of which that in the middle is the only one that CBOW predicts, and the negatives.
    __device__ unsigned int places() const { return static_cast<unsigned int>(2 * reach + 1); }
    __device__ unsigned int targets() const { return places() + static_cast<unsigned int>(num_draws); }
    __device__ unsigned int width() const { return static_cast<unsigned int>(dim); }

    // Whether the word at `near` is in the window of the word at `i`, which is not in it itself.
    __device__ bool in_window(long long i, long long near) const {
        return near != i && near >= i - before[i] && near <= i + after[i];
    }

    // Whether the word at `i` predicts that at `near`.
    __device__ bool predicts(long long i, long long near) const {
        return cbow ? near == i && before[i] + after[i] > 0 : near >= 0 && near < count && in_window(i, near);
    }

    // What a pair of words that are `distance` apart counts, and all pairs up to a distance of `reached`.
    __device__ float pair_weight(long long distance) const {
        return window ? static_cast<float>(window + 1 - distance) / static_cast<float>(window) : 1.0f;
    }
    __device__ double side_weight(long long reached) const {
        const double sum = static_cast<double>(reached);
        return window ? sum * static_cast<double>(2 * window + 1 - reached) / static_cast<double>(2 * window) : sum;
    }

    __device__ float* context_row(long long i, unsigned int target, const long long* drawn) const {
        return context_rows + dim * (target < places() ? contexts[i - reach + target] : drawn[target - places()]);
    }

    // The number `d` of the vector of the word at `i`.
    __device__ float of_word(long long i, unsigned int d) const {
        float sum = 0;
        for (long long bag = starts[i]; bag < starts[i + 1]; ++bag) sum += center_rows[bag_rows[bag] * dim + d];
        return sum / static_cast<float>(starts[i + 1] - starts[i]);
    }
};

__device__ inline float softplus(float score) { return fmaxf(score, 0.0f) + log1pf(expf(-fabsf(score))); }

__device__ inline void find_vectors(const Train& given, long long start, unsigned int words) {
    for (unsigned int item = threadIdx.x; item < words * given.width(); item += blockDim.x) {
        const long long i = start + item / given.width();
        const unsigned int d = item % given.width();
        float sum = 0;
        if (given.cbow) {
            for (long long near = i - given.before[i]; near <= i + given.after[i]; ++near)
                if (near != i) sum += given.of_word(near, d);
            const long long around = given.before[i] + given.after[i];
            sum /= static_cast<float>(around > 0 ? around : 1);
        } else {
            sum = given.of_word(i, d);
        }
        given.vectors[item] = sum;
    }
}

__device__ inline void find_parts(const Train& given, long long start, unsigned int words, const long long* drawn) {
    for (unsigned int item = threadIdx.x; item < words * given.targets() * kParts; item += blockDim.x) {
        const unsigned int word = item / kParts / given.targets(), target = item / kParts % given.targets();
        const long long i = start + word;
        float sum = 0;
        if (target >= given.places() || given.predicts(i, i - given.reach + target)) {
            const float *vector = given.vectors + word * given.dim, *row = given.context_row(i, target, drawn);
            for (unsigned int d = item % kParts; d < given.width(); d += kParts) sum += vector[d] * row[d];
        }
        given.parts[item] = sum;
    }
}

__device__ inline double find_slopes(const Train& given, long long start, unsigned int words) {
    double loss = 0;
    for (unsigned int item = threadIdx.x; item < words * given.targets(); item += blockDim.x) {
        const long long i = start + item / given.targets();
        const unsigned int target = item % given.targets();
        float score = 0;
        for (unsigned int part = 0; part < kParts; ++part) score += given.parts[item * kParts + part];
        const bool is_noise = target >= given.places();
        const long long around = given.before[i] + given.after[i];
        const long long near = i - given.reach + target;
        float weight = given.predicts(i, near) ? 1.0f : 0.0f;
        if (weight != 0.0f && !given.cbow) weight = given.pair_weight(near > i ? near - i : i - near);
        if (is_noise) {
            const double served = given.cbow ? around > 0 : given.side_weight(given.before[i]) + given.side_weight(given.after[i]);
            weight = static_cast<float>(given.negative * served / static_cast<double>(given.num_draws));
            score = -score;
        }
        const float slope = static_cast<float>(given.rate) * weight / (1.0f + expf(score));
        given.slopes[item] = weight == 0.0f ? 0.0f : is_noise ? -slope : slope;
        if (given.loss != nullptr && weight != 0.0f) loss += static_cast<double>(weight * softplus(-score));
    }
    return loss;
}

__device__ inline void find_moves(const Train& given, long long start, unsigned int words, const long long* drawn) {
    const unsigned int dim = given.width(), places = given.places(), targets = given.targets();
    const unsigned int near_words = words + places - 1, rows = words + near_words + targets - places;
    for (unsigned int item = threadIdx.x; item < rows * dim; item += blockDim.x) {
        const unsigned int row = item / dim, d = item % dim;
        float sum = 0;
        if (row < words) {  // of what predicts
            const long long i = start + row;
            const float* slopes = given.slopes + row * targets;
            for (unsigned int target = 0; target < targets; ++target)
                if (target >= places || given.predicts(i, i - given.reach + target))
                    sum += slopes[target] * given.context_row(i, target, drawn)[d];
            given.moves[item] = sum;
        } else if (row < words + near_words) {  // of what is predicted: the word at start - reach, and so on
            const unsigned int place = row - words;
            for (unsigned int word = 0; word < words && word <= place; ++word) {
                const unsigned int target = place - word;  // in the window of that word
                if (target < places && given.predicts(start + word, start - given.reach + place))
                    sum += given.slopes[word * targets + target] * given.vectors[word * dim + d];
            }
            given.context_moves[place * dim + d] = sum;
        } else {
            const unsigned int draw = row - words - near_words;
            for (unsigned int word = 0; word < words; ++word)
                sum += given.slopes[word * targets + places + draw] * given.vectors[word * dim + d];
            given.noise_moves[draw * dim + d] = sum;
        }
    }
}

// Words may share rows, so a number of all rows of a table is the work of one thread.
__device__ inline void move_rows(const Train& given, long long start, unsigned int words, const long long* drawn) {
    const long long stop = start + words;
    const long long low = start > given.reach ? start - given.reach : 0;
    const long long high = stop + given.reach < given.count ? stop + given.reach : given.count;
    for (unsigned int item = threadIdx.x; item < 2 * given.width(); item += blockDim.x) {
        const unsigned int d = item % given.width();
        if (item < given.width()) {
            for (long long near = low; near < high; ++near)
                given.context_rows[given.contexts[near] * given.dim + d] +=
                    given.context_moves[(near - start + given.reach) * given.dim + d];
            for (long long draw = 0; draw < given.num_draws; ++draw)
                given.context_rows[drawn[draw] * given.dim + d] += given.noise_moves[draw * given.dim + d];
            continue;
        }
        for (long long near = given.cbow ? low : start; near < (given.cbow ? high : stop); ++near) {
            float move = 0;
            if (given.cbow) {
                for (long long i = start; i < stop; ++i)
                    if (given.in_window(i, near)) move += given.moves[(i - start) * given.dim + d];
            } else {
                move = given.moves[(near - start) * given.dim + d];
            }
            for (long long bag = given.starts[near]; bag < given.starts[near + 1]; ++bag)
                given.center_rows[given.bag_rows[bag] * given.dim + d] += move;
        }
    }
}

}  // namespace

extern "C" __global__ void train_spans(const __grid_constant__ Train given) {
    double loss = 0;
    for (long long start = 0; start < given.count; start += given.span) {
        const long long left = given.count - start;
        const unsigned int words = static_cast<unsigned int>(left < given.span ? left : given.span);
        const long long* drawn = given.draws + start / given.span * given.num_draws;
        find_vectors(given, start, words);
        __syncthreads();
        find_parts(given, start, words, drawn);
        __syncthreads();
        loss += find_slopes(given, start, words);
        __syncthreads();
        find_moves(given, start, words, drawn);
        __syncthreads();
        move_rows(given, start, words, drawn);
        __syncthreads();
    }
    if (given.loss != nullptr) given.loss[threadIdx.x] = loss;
}
