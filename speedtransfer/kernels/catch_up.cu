// Let rows take, in place, the steps without a gradient that they have missed: by the sums of idle/sums.py, or one by one as
// idle/replay.py does. Each thread has values of its own, so nothing depends on the order of threads.
//
// Every operation is rounded by itself, so that float32 and float64 rows get the bits that numba computes. A row that was
// touched last before the steps remembered here begin exists in no table: nothing happens to it.

#include "move.cuh"
#include "bits.cuh"
#include "halves.cuh"

namespace {

// As idle/quadrature.py has them.
constexpr long long kBlock = 256, kSums = 8, kStep = 6;
constexpr float kTiny = 1e-30f;

// One step, as `IdleStep`.
struct Step {
    double decay;
    double factors[2];
    double mix[4];
    double scale;
    double root;
    double eps;
};

struct Missed {
    char* weight;           // (count, width) each, contiguous, of `type`; null where there is none
    char* factors[2];       // the planes of `Rule.factors`; the first is the numerator
    char* partner;          // that of `Rule.partner`
    const char* bottom;     // that of `Rule.denominator`, which may be one of the factors
    const double* lines;    // (newest + 1, columns): of `Sums.table`
    const double* blocks;   // (any, products)
    const int* last;        // (count,): the step that touched each row last
    long long count;
    long long width;
    long long columns;
    long long products;
    long long base;         // line 0 is that of rows touched last at this step
    long long newest;       // the line of rows that have missed nothing
    long long horizon;
    long long mixes;        // whether the weights mix with the partner
    long long floor;        // as `Rule.floor`
    long long type;         // 0: float64, else Type
    const int* skipped;     // whether the step `further` was not made after all; null: there is none
    double eps;             // the least that the denominator holds, with `floor`
    Step further;           // one that follows those of the lines
};

struct Replayed {
    char* planes[4];        // (count, width) each, contiguous, of `type`: weights and `replay.PLANES`; null where there is none
    const char* numbers;    // (now - base, 8) in the precision of the steps
    const int* last;        // (count,)
    long long count;
    long long width;
    long long base;
    long long now;
    long long kind;
    long long type;
    const int* skipped;     // whether the last of the steps was not made after all; null: it was
};

// A product that no compiler puts together with a sum.
__device__ inline float times(float a, float b) { return __fmul_rn(a, b); }
__device__ inline double times(double a, double b) { return __dmul_rn(a, b); }
__device__ inline float root(float value) { return sqrtf(value); }
__device__ inline double root(double value) { return sqrt(value); }

// How values are stored, and the precision that they are computed in.
template <typename T>
struct Whole {
    using Real = T;
    __device__ static T read(const char* plane, long long i) { return reinterpret_cast<const T*>(plane)[i]; }
    __device__ static void write(char* plane, long long i, T value) { reinterpret_cast<T*>(plane)[i] = value; }
    __device__ static T rounded(T value) { return value; }
};

template <Type kType>
struct Half {
    using Real = float;
    __device__ static float widened(unsigned int bits) { return as_float(widen(bits, kType)); }
    __device__ static unsigned int narrowed(float value) { return narrow(as_bits(value), kType); }
    __device__ static float read(const char* plane, long long i) {
        return widened(reinterpret_cast<const unsigned short*>(plane)[i]);
    }
    __device__ static void write(char* plane, long long i, float value) {
        reinterpret_cast<unsigned short*>(plane)[i] = static_cast<unsigned short>(narrowed(value));
    }
    __device__ static float rounded(float value) { return widened(narrowed(value)); }
};

// The weight of a value whose root is too small for the sums of its line: step by step.
__device__ inline double one_by_one(const Missed& given, long long line, double weight, double m, double bottom) {
    const long long beyond = line + given.horizon < given.newest ? line + given.horizon : given.newest;
    double size = given.floor ? bottom : root(bottom);
    for (long long number = line; number < beyond; ++number) {
        const double* step = given.lines + (number + 1) * given.columns - kStep;
        const double scale = step[0], eps = step[2];
        m = times(m, step[3]);
        size = times(size, step[4]);
        const double divisor = given.floor ? (size > eps ? size : eps) : times(step[1], size) + eps;
        weight = times(weight, step[5]) - times(scale, m == 0 ? 0.0 : m / divisor);
    }
    const double left = times(given.lines[beyond * given.columns], given.blocks[beyond / kBlock * given.products]);
    return times(weight, left);
}

template <typename T>
__device__ inline typename T::Real stepped(
    const Missed& given, long long line, double decay, typename T::Real weight, typename T::Real m,
    typename T::Real bottom
) {
    using Real = typename T::Real;
    const double* sums = given.lines + line * given.columns + given.products;
    const auto of = [&](int column) { return static_cast<Real>(sums[column]); };
    const Real size = given.floor ? bottom : root(bottom), valid_from = of(kSums - 1), kept = static_cast<Real>(decay);
    if (size < valid_from && m != 0) return static_cast<Real>(one_by_one(given, line, weight, m, bottom));
    const bool has_sums = valid_from - valid_from == 0;  // it is infinite where there are none
    if (m == 0 || !has_sums) return times(weight, kept);
    const Real tiny = static_cast<Real>(kTiny), least = valid_from > tiny ? valid_from : tiny;
    const Real x = size < least ? least : size;
    const Real linear = static_cast<Real>(times(sums[0], decay)), mass = static_cast<Real>(times(sums[1], decay));
    const Real below = (x + of(3)) - of(5 + 1) / (x + of(4));
    const Real value = mass / ((x + of(2)) - of(5) / below);
    return times(weight, kept) - times(value + linear, m);
}

// A value of a row, in each of its planes; those that there are not stay zero.
template <typename Real>
struct Values {
    Real weight, factors[2], partner, bottom;
};

template <typename T, typename Real>
__device__ inline void take_lines(const Missed& given, long long line, Values<Real>& at) {
    const double* own = given.lines + line * given.columns;
    const double* later = given.blocks + line / kBlock * given.products;
    const Real weight = at.weight;
    if (given.bottom != nullptr && given.factors[0] != nullptr) {
        at.weight = stepped<T>(given, line, times(own[0], later[0]), weight, at.factors[0], at.bottom);
    } else if (given.mixes) {
        // The product of two matrices, of the steps of the block and of those after it.
        const auto mix = [&](int row, int column) {
            const double *left = later + 1 + 2 * row, *right = own + 1 + column;
            return static_cast<Real>(times(left[0], right[0]) + times(left[1], right[2]));
        };
        at.weight = times(weight, mix(0, 0)) + times(at.partner, mix(0, 1));
        at.partner = times(at.partner, mix(1, 1)) + times(weight, mix(1, 0));
    }
    for (int plane = 0; plane < 2; ++plane) {
        if (given.factors[plane] == nullptr) continue;
        Real& value = at.factors[plane];
        value = times(value, static_cast<Real>(times(own[5 + plane], later[5 + plane])));
        const Real eps = static_cast<Real>(given.eps);
        if (given.floor && given.factors[plane] == given.bottom && value < eps) value = eps;
    }
}

template <typename Real>
__device__ inline void take_further(const Missed& given, Values<Real>& at) {
    const Step& step = given.further;
    const auto of = [](double number) { return static_cast<Real>(number); };
    for (int plane = 0; plane < 2; ++plane) {
        at.factors[plane] = times(at.factors[plane], of(step.factors[plane]));
        if (given.factors[plane] == given.bottom) {
            Real& value = at.factors[plane];
            if (given.floor && value < of(step.eps)) value = of(step.eps);
            at.bottom = value;
        }
    }
    const Real weight = at.weight;
    if (given.bottom != nullptr && given.factors[0] != nullptr) {
        const Real divisor = given.floor ? at.bottom : times(of(step.root), root(at.bottom)) + of(step.eps);
        const Real term = at.factors[0] == 0 ? 0 : times(of(step.scale), at.factors[0] / divisor);
        at.weight = times(weight, of(step.decay)) - term;
    } else if (given.mixes) {
        at.weight = times(weight, of(step.mix[0])) + times(at.partner, of(step.mix[1]));
        at.partner = times(at.partner, of(step.mix[3])) + times(weight, of(step.mix[2]));
    }
}

template <typename T>
__device__ inline void take_missed_of(const Missed& given) {
    const bool further = given.skipped != nullptr && *given.skipped == 0;
    const auto read = [](const char* plane, long long i) { return plane == nullptr ? 0 : T::read(plane, i); };
    const auto write = [](char* plane, long long i, typename T::Real value) {
        if (plane != nullptr) T::write(plane, i, value);
    };
    for (long long i = this_thread(); i < given.count * given.width; i += all_threads()) {
        const long long line = given.last[i / given.width] - given.base;
        if (line < 0 || line >= given.newest + further) continue;
        Values<typename T::Real> at = {
            T::read(given.weight, i), {read(given.factors[0], i), read(given.factors[1], i)}, read(given.partner, i),
            read(given.bottom, i)
        };
        if (line < given.newest) take_lines<T>(given, line, at);
        if (further) take_further(given, at);
        write(given.weight, i, at.weight);
        write(given.factors[0], i, at.factors[0]);
        write(given.factors[1], i, at.factors[1]);
        write(given.partner, i, at.partner);
    }
}

// A step of each kind, as in idle/numba_replay.py: of a weight `p` and its state.

enum Kind : long long { kAdam, kAdamax, kRMSprop, kAdadelta, kAdagrad };

// As torch has it: exactly `end` where the weight is 1.
template <typename Real>
__device__ inline Real lerp(Real start, Real end, Real weight) {
    const Real way = end - start;
    return weight < Real(0.5) ? start + times(weight, way) : end - times(way, Real(1) - weight);
}

template <typename Real>
__device__ inline void take_step(
    Kind kind, bool has_largest, const Real* n, Real& p, Real& a, Real& b, Real& c
) {
    const Real grad = times(n[0], p);
    if (kind == kAdam) {
        a = lerp(a, grad, n[1]);
        b = times(b, n[2]) + times(times(n[3], grad), grad);
        if (has_largest) {
            c = c < b ? b : c;
            const Real divisor = times(root(c), n[4]) + n[5];
            p = p - (times(n[6], a) / divisor + times(n[7], grad) / divisor);
        } else {
            p = p - (times(n[6], a) + times(n[7], grad)) / (times(root(b), n[4]) + n[5]);
        }
    } else if (kind == kAdamax) {
        a = lerp(a, grad, n[1]);
        const Real kept = times(b, n[2]), size = (grad < 0 ? -grad : grad) + n[5];
        b = kept < size ? size : kept;
        p = p - times(n[6], a) / b;
    } else if (kind == kRMSprop) {
        a = times(a, n[1]) + times(times(n[2], grad), grad);
        Real spread = a;
        if (n[6] != 0) {
            b = lerp(b, grad, n[2]);
            spread = spread - times(b, b);
        }
        Real step = grad / (root(spread) + n[3]);
        if (n[5] != 0) {
            step = step + times(c, n[5]);
            c = step;
        }
        p = p - times(n[4], step);
    } else if (kind == kAdadelta) {
        a = times(a, n[1]) + times(times(n[2], grad), grad);
        const Real delta = times(root(b + n[3]) / root(a + n[3]), grad);
        b = times(b, n[1]) + times(times(n[2], delta), delta);
        p = p - times(n[4], delta);
    } else {
        a = a + times(grad, grad);
        p = p - times(n[1], grad) / (root(a) + n[2]);
    }
}

template <typename T>
__device__ inline void replay_steps_of(const Replayed& given) {
    using Real = typename T::Real;
    const auto* numbers = reinterpret_cast<const Real*>(given.numbers);
    const long long steps = given.now - given.base - (given.skipped != nullptr && *given.skipped != 0);
    for (long long i = this_thread(); i < given.count * given.width; i += all_threads()) {
        const long long first = given.last[i / given.width] - given.base;
        if (first < 0 || first >= steps) continue;
        Real values[4];
        for (int plane = 0; plane < 4; ++plane) {
            values[plane] = given.planes[plane] == nullptr ? 0 : T::read(given.planes[plane], i);
        }
        for (long long number = first; number < steps; ++number) {
            const auto kind = static_cast<Kind>(given.kind);
            take_step<Real>(kind, given.planes[3] != nullptr, numbers + number * 8, values[0], values[1], values[2], values[3]);
            for (Real& value : values) value = T::rounded(value);
        }
        for (int plane = 0; plane < 4; ++plane) {
            if (given.planes[plane] != nullptr) T::write(given.planes[plane], i, values[plane]);
        }
    }
}

}  // namespace

extern "C" __global__ void take_missed(const __grid_constant__ Missed given) {
    switch (given.type) {
        case kFloat32: take_missed_of<Whole<float>>(given); break;
        case kFloat16: take_missed_of<Half<kFloat16>>(given); break;
        case kBFloat16: take_missed_of<Half<kBFloat16>>(given); break;
        default: take_missed_of<Whole<double>>(given); break;
    }
}

extern "C" __global__ void replay_steps(const __grid_constant__ Replayed given) {
    switch (given.type) {
        case kFloat32: replay_steps_of<Whole<float>>(given); break;
        case kFloat16: replay_steps_of<Half<kFloat16>>(given); break;
        case kBFloat16: replay_steps_of<Half<kBFloat16>>(given); break;
        default: replay_steps_of<Whole<double>>(given); break;
    }
}
