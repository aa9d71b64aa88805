// A step of Adam, AdamW or SGD on the active rows: their state is read from its planes, or taken as it was read with the weights,
// updated with them, and both are written to the planes at once, with the number of the step where idle rows catch up. A plane
// may live in device memory or in page-locked host memory across the bus, and rows of it in the slots of a cache.
//
// The arithmetic is that of torch's optimizers, operation by operation, so that the bits are those of a step by torch, whose code
// for the CPU and for CUDA differ. A product that torch adds to something is fused with the addition, as there; nothing else is,
// so that the compiler has no choice.

#include "move.cuh"
#include "lanes.cuh"
#include "slots.cuh"
#include "bits.cuh"

namespace {

constexpr int kMaxStates = 3;

enum Kind : long long { kSgd, kMomentum, kAdam, kAmsgrad };  // the number of planes of state
enum Way : long long { kCpu, kForeach };                     // torch's code for the CPU, and that for CUDA with foreach

struct Step {
    const long long* ids;      // (num_rows,): rows of the planes; one that does not exist is left out
    const char* grad;          // (num_rows, width) float32, contiguous
    char* rows;                // (num_rows, width): the weights as read; the new ones are written here too
    long long num_rows;
    long long table_rows;
    long long lanes;           // of a row
    long long lane_bytes;      // 16 or 4
    char* weight;              // (table_rows, width) float32, weight_stride bytes apart
    long long weight_stride;
    char* states[kMaxStates];  // alike: momentum_buffer; exp_avg, exp_avg_sq, max_exp_avg_sq
    long long strides[kMaxStates];
    const char* held[kMaxStates];  // (num_rows, width): state as read with the weights; null: it is read from its plane
    char* last_step;           // (table_rows, 1) int32: set to `now`; null: there is none
    long long last_stride;
    long long now;
    const long long* found;    // (num_rows,): what find_slots in cache.cu left of the planes below; null: there is no cache
    PlaneSlots slots[kMaxStates + 2];  // of weight, the states, last_step
    const float* steps;        // on the device, the number of this one; null: `rate` and `root_correction` are of it
    long long kind;
    long long way;
    long long maximize;
    long long nesterov;
    double decay;              // of weights, through the gradient
    double shrink;             // what weights are multiplied by first
    double rate;               // minus the learning rate; Adam's divided by the correction of its first moment
    double momentum;
    double gradient_share;     // of momentum_buffer: 1 - dampening
    double beta1;
    double first_share;        // 1 - beta1
    double beta2;
    double second_share;       // 1 - beta2
    double root_correction;    // what the square root of the second moment is divided by
    double eps;
};

__device__ inline float f(double number) { return static_cast<float>(number); }

// The larger one, or NaN if either is, as torch.maximum has it.
__device__ inline float maximum(float a, float b) { return a != a || a > b ? a : b; }

// What depends on the number of the step.
struct Scale {
    float rate;
    float root_correction;
};

__device__ inline double power(double base, long long exponent) {
    double result = 1;
    for (; exponent > 0; exponent >>= 1) {
        if (exponent & 1) result *= base;
        base *= base;
    }
    return result;
}

template <Kind kKind>
__device__ inline Scale scale_of(const Step& step) {
    if (kKind == kSgd || kKind == kMomentum || step.steps == nullptr) return {f(step.rate), f(step.root_correction)};
    const long long number = static_cast<long long>(*step.steps);
    const double first = 1 - power(step.beta1, number), second = 1 - power(step.beta2, number);
    return {f(step.rate / first), f(sqrt(second))};
}

template <Kind kKind>
__device__ inline float update(const Step& step, const Scale& scale, float weight, float grad, float* state) {
    if (step.maximize) grad = -grad;
    weight = __fmul_rn(weight, f(step.shrink));
    if (step.decay != 0) grad = __fmaf_rn(f(step.decay), weight, grad);
    if constexpr (kKind == kSgd) return __fmaf_rn(scale.rate, grad, weight);
    if constexpr (kKind == kMomentum) {
        state[0] = __fmaf_rn(f(step.gradient_share), grad, __fmul_rn(state[0], f(step.momentum)));
        grad = step.nesterov ? __fmaf_rn(f(step.momentum), state[0], grad) : state[0];
        return __fmaf_rn(scale.rate, grad, weight);
    }
    // torch.lerp, from whichever end is nearer
    const float share = f(step.first_share), apart = __fsub_rn(grad, state[0]);
    state[0] = fabsf(share) < 0.5f ? __fmaf_rn(share, apart, state[0]) : __fmaf_rn(-apart, __fsub_rn(1, share), grad);
    const float share_of_square = f(step.second_share), kept = __fmul_rn(state[1], f(step.beta2));
    state[1] = step.way == kCpu ? __fmaf_rn(__fmul_rn(share_of_square, grad), grad, kept)
                                : __fmaf_rn(share_of_square, __fmul_rn(grad, grad), kept);
    float second = state[1];
    if constexpr (kKind == kAmsgrad) second = state[2] = maximum(state[2], state[1]);
    const float below = __fadd_rn(__fdiv_rn(__fsqrt_rn(second), scale.root_correction), f(step.eps));
    return step.way == kCpu ? __fadd_rn(weight, __fdiv_rn(__fmul_rn(scale.rate, state[0]), below))
                            : __fmaf_rn(scale.rate, __fdiv_rn(state[0], below), weight);
}

// Where a plane has the row: in its slot, or where it is stored.
struct Place {
    const Step& step;
    long long row, slot;  // -1: it has none

    __device__ char* at(int p, char* plane, long long stride, long long width, long long column) const {
        return slot < 0 ? plane + row * stride + column : step.slots[p].values + slot * width + column;
    }
    // After the row was written there.
    __device__ void note(int p) const {
        if (slot >= 0) step.slots[p].valid[slot] = step.slots[p].dirty[slot] = true;
    }
};

template <Kind kKind, int kBytes>
__device__ inline void step_lanes(const Step& step) {
    constexpr int kStates = static_cast<int>(kKind), kRoom = kStates > 0 ? kStates : 1;
    const Scale scale = scale_of<kKind>(step);
    const long long width = step.lanes * kBytes;
    for (long long item = this_thread(); item < step.num_rows * step.lanes; item += all_threads()) {
        const long long row = step.ids[item / step.lanes], column = item % step.lanes * kBytes;
        if (static_cast<unsigned long long>(row) >= static_cast<unsigned long long>(step.table_rows)) continue;
        const long long found = step.found == nullptr ? kNoSlot : step.found[item / step.lanes];
        const Place place = {step, row, found < 0 ? -1 : found >> kMaxCached};
        Lane<kBytes> states[kRoom];
        for (int s = 0; s < kStates; ++s) {
            const char* stored = has(found, 1 + s) ? place.at(1 + s, nullptr, 0, width, column)
                                                   : step.states[s] + row * step.strides[s] + column;
            states[s] = read_lane<kBytes>(step.held[s] == nullptr ? stored : step.held[s] + item * kBytes);
        }
        Lane<kBytes> weights = read_lane<kBytes>(step.rows + item * kBytes);
        const Lane<kBytes> grads = read_lane<kBytes>(step.grad + item * kBytes);
#pragma unroll
        for (int i = 0; i < kBytes / 4; ++i) {
            float state[kRoom];
            for (int s = 0; s < kStates; ++s) state[s] = as_float(states[s].word[i]);
            weights.word[i] = as_bits(update<kKind>(step, scale, as_float(weights.word[i]), as_float(grads.word[i]), state));
            for (int s = 0; s < kStates; ++s) states[s].word[i] = as_bits(state[s]);
        }
        write_lane<kBytes>(step.rows + item * kBytes, weights);
        write_lane<kBytes>(place.at(0, step.weight, step.weight_stride, width, column), weights);
        for (int s = 0; s < kStates; ++s) {
            write_lane<kBytes>(place.at(1 + s, step.states[s], step.strides[s], width, column), states[s]);
        }
        if (column != 0) continue;
        for (int p = 0; p <= kStates; ++p) place.note(p);
        if (step.last_step == nullptr) continue;
        write_lane<4>(place.at(1 + kStates, step.last_step, step.last_stride, 4, 0), {{static_cast<unsigned int>(step.now)}});
        place.note(1 + kStates);
    }
}

template <Kind kKind>
__device__ inline void step_rows_by(const Step& step) {
    if (step.lane_bytes == 16) step_lanes<kKind, 16>(step);
    else step_lanes<kKind, 4>(step);
}

}  // namespace

extern "C" __global__ void step_rows(const __grid_constant__ Step step) {
    switch (step.kind) {
        case kMomentum: step_rows_by<kMomentum>(step); break;
        case kAdam: step_rows_by<kAdam>(step); break;
        case kAmsgrad: step_rows_by<kAmsgrad>(step); break;
        default: step_rows_by<kSgd>(step); break;
    }
}
