// Map ids of 64 bits to rows, and write what the rows of new ids begin with.
//
// The map is open addressing with linear probing, as vocabulary/numba_index.py: slots of an id and the complement of its row,
// which is zero where no id stands, so that zeros are an empty map and every id can be a key. An id that is taken off leaves a
// mark, since others behind it may be moved by no thread alone; who needs a slot takes one with a mark as well.
//
// Ids change by two kernels in turn, each of ids that are all different: the first sets the rows of those that have a slot, the
// second, which compares no ids, finds slots for the others. So no thread reads the id of a slot that another one takes.
//
// First values have the bits that vocabulary/initial.py computes: every operation is rounded by itself.

#include "move.cuh"
#include "bits.cuh"
#include "halves.cuh"

namespace {

typedef unsigned long long Word;

struct Slot {
    long long id;
    long long complement;
};

constexpr long long kFree = 0, kRemoved = 1;  // complements; of a row it is negative

struct Ids {
    Slot* slots;           // (mask + 1,)
    const long long* ids;  // (count,)
    long long* rows;       // (count,)
    Word* unknown;         // (1,): ids without a row are added to it; or null
    long long count;
    Word mask;
    Word seed;
    Word multiplier;       // odd
    long long unseen;      // the row of ids that have none
};

enum Kind : long long { kNumber, kNormal, kUniform };

struct Values {
    char* values;           // (count, width), contiguous, of `type`
    const long long* ids;   // (count,)
    const long long* rows;  // (count,): values are written where it is `unseen`
    long long count;
    long long width;
    long long unseen;
    Word key;               // the seed, scrambled
    Kind kind;
    long long type;         // 0: float64, else Type
    double first;           // added to the standard value, once it is multiplied by `scale`
    double scale;
    double highest;         // no value exceeds it
};

// vocabulary/mixing.py
constexpr Word kGolden = 0x9E3779B97F4A7C15ull;

__device__ inline Word mix64(Word x) {
    x ^= x >> 27;
    x *= 0x3C79AC492BA7B653ull;
    x ^= x >> 33;
    x *= 0x1C69B3F74AC4AE35ull;
    return x ^ (x >> 27);
}

__device__ inline Word home_of(const Ids& given, long long id) {
    return mix64((static_cast<Word>(id) ^ given.seed) * given.multiplier) & given.mask;
}

// Return the slot of an id, or null.
__device__ inline Slot* search(const Ids& given, long long id) {
    Word at = home_of(given, id);
    for (Word looked = 0; looked <= given.mask; ++looked) {
        Slot* slot = given.slots + at;
        if (slot->complement == kFree) return nullptr;
        if (slot->id == id) return slot;
        at = (at + 1) & given.mask;
    }
    return nullptr;
}

// vocabulary/numba_initial.py
template <typename... Rest>
__device__ inline double polynomial(double, double value) {
    return value;
}

template <typename... Rest>
__device__ inline double polynomial(double r, double value, double next, Rest... rest) {
    return polynomial(r, __dadd_rn(__dmul_rn(value, r), next), rest...);
}

__device__ inline double central(double q) {
    const double r = __dsub_rn(0.180625, __dmul_rn(q, q));
    const double above = polynomial(
        r, 2.5090809287301226727e3, 3.3430575583588128105e4, 6.7265770927008700853e4, 4.5921953931549871457e4,
        1.3731693765509461125e4, 1.9715909503065514427e3, 1.3314166789178437745e2, 3.3871328727963666080e0
    );
    const double below = polynomial(
        r, 5.2264952788528545610e3, 2.8729085735721942674e4, 3.9307895800092710610e4, 2.1213794301586595867e4,
        5.3941960214247511077e3, 6.8718700749205790830e2, 4.2313330701600911252e1, 1.0
    );
    return __ddiv_rn(__dmul_rn(q, above), below);
}

union Real {
    double value;
    Word bits;
};

// The square root of minus the logarithm of a probability, which is positive and normal.
__device__ inline double depth_of(double probability) {
    Real number;
    number.value = probability;
    const int exponent = static_cast<int>(number.bits >> 52) - 1022;
    number.bits = (number.bits & 0xFFFFFFFFFFFFFull) | 1022ull << 52;
    const double half = 0.7071067811865476;
    const double s = __ddiv_rn(__dsub_rn(number.value, half), __dadd_rn(number.value, half));
    const double series = polynomial(
        __dmul_rn(s, s), 1.0 / 21.0, 1.0 / 19.0, 1.0 / 17.0, 1.0 / 15.0, 1.0 / 13.0, 1.0 / 11.0, 1.0 / 9.0, 1.0 / 7.0,
        1.0 / 5.0, 1.0 / 3.0, 1.0
    );
    const double whole = __dmul_rn(__dsub_rn(0.5, exponent), 0.6931471805599453);
    return __dsqrt_rn(__dsub_rn(whole, __dmul_rn(__dmul_rn(2.0, s), series)));
}

__device__ inline double near_tail(double depth) {
    const double r = __dsub_rn(depth, 1.6);
    const double above = polynomial(
        r, 7.74545014278341407640e-4, 2.27238449892691845833e-2, 2.41780725177450611770e-1, 1.27045825245236838258e0,
        3.64784832476320460504e0, 5.76949722146069140550e0, 4.63033784615654529590e0, 1.42343711074968357734e0
    );
    const double below = polynomial(
        r, 1.05075007164441684324e-9, 5.47593808499534494600e-4, 1.51986665636164571966e-2, 1.48103976427480074590e-1,
        6.89767334985100004550e-1, 1.67638483018380384940e0, 2.05319162663775882187e0, 1.0
    );
    return __ddiv_rn(above, below);
}

__device__ inline double far_tail(double depth) {
    const double r = __dsub_rn(depth, 5.0);
    const double above = polynomial(
        r, 2.01033439929228813265e-7, 2.71155556874348757815e-5, 1.24266094738807843860e-3, 2.65321895265761230930e-2,
        2.96560571828504891230e-1, 1.78482653991729133580e0, 5.46378491116411436990e0, 6.65790464350110377720e0
    );
    const double below = polynomial(
        r, 2.04426310338993978564e-15, 1.42151175831644588870e-7, 1.84631831751005468180e-5, 7.86869131145613259100e-4,
        1.48753612908506148525e-2, 1.36929880922735805310e-1, 5.99832206555887937690e-1, 1.0
    );
    return __ddiv_rn(above, below);
}

__device__ inline double normal(Word word) {
    const double middle = __dadd_rn(static_cast<double>(word >> 12), 0.5);
    const double q = __dsub_rn(__dmul_rn(middle, 0x1p-52), 0.5), size = q < 0 ? -q : q;
    if (size <= 0.425) return central(q);
    const double depth = depth_of(__dsub_rn(0.5, size));
    const double tail = depth <= 5.0 ? near_tail(depth) : far_tail(depth);
    return q < 0 ? -tail : tail;
}

__device__ inline double value_of(const Values& given, long long id, long long column) {
    if (given.kind == kNumber) return given.first;
    const Word start = mix64(mix64(static_cast<Word>(id) ^ given.key) + given.key);
    const Word word = mix64(start + static_cast<Word>(column + 1) * kGolden);
    const double standard =
        given.kind == kNormal ? normal(word) : __dmul_rn(static_cast<double>(word >> 11), 0x1p-53);
    const double value = __dadd_rn(__dmul_rn(standard, given.scale), given.first);
    return value < given.highest ? value : given.highest;
}

// Round once, to float16 or bfloat16: of the two neighbours in float32 of an inexact value the odd one is no tie.
__device__ inline unsigned short rounded(double value, Type type) {
    const float near = static_cast<float>(value);
    const double exact = static_cast<double>(near);
    unsigned int bits = as_bits(near);
    if (exact != value && !(bits & 1)) bits += (exact < 0 ? -exact : exact) < (value < 0 ? -value : value) ? 1u : ~0u;
    return static_cast<unsigned short>(narrow(bits, type));
}

}  // namespace

// rows[i] = the row of ids[i], or `unseen`
extern "C" __global__ void find_ids(const __grid_constant__ Ids given) {
    Word unknown = 0;
    for (long long i = this_thread(); i < given.count; i += all_threads()) {
        const Slot* slot = search(given, given.ids[i]);
        const bool known = slot != nullptr && slot->complement != kRemoved;
        given.rows[i] = known ? ~slot->complement : given.unseen;
        unknown += !known;
    }
    if (unknown && given.unknown != nullptr) atomicAdd(given.unknown, unknown);
}

// Give ids[i] the row rows[i], or none where that is negative, if it has a slot; then rows[i] becomes -1.
extern "C" __global__ void change_ids(const __grid_constant__ Ids given) {
    for (long long i = this_thread(); i < given.count; i += all_threads()) {
        Slot* slot = search(given, given.ids[i]);
        if (slot == nullptr) continue;
        slot->complement = given.rows[i] < 0 ? kRemoved : ~given.rows[i];
        given.rows[i] = -1;
    }
}

// Give the others a slot.
extern "C" __global__ void insert_ids(const __grid_constant__ Ids given) {
    for (long long i = this_thread(); i < given.count; i += all_threads()) {
        if (given.rows[i] < 0) continue;
        const Word complement = static_cast<Word>(~given.rows[i]);
        Word at = home_of(given, given.ids[i]);
        for (Word looked = 0; looked <= given.mask; ++looked) {
            Slot* slot = given.slots + at;
            const long long before = slot->complement;
            Word* taken = reinterpret_cast<Word*>(&slot->complement);
            if (before >= 0 && atomicCAS(taken, static_cast<Word>(before), complement) == static_cast<Word>(before)) {
                slot->id = given.ids[i];
                break;
            }
            at = (at + 1) & given.mask;
        }
    }
}

extern "C" __global__ void fill_unseen(const __grid_constant__ Values given) {
    for (long long item = this_thread(); item < given.count * given.width; item += all_threads()) {
        const long long i = item / given.width;
        if (given.rows[i] != given.unseen) continue;
        const double value = value_of(given, given.ids[i], item - i * given.width);
        switch (given.type) {
            case kFloat32: reinterpret_cast<float*>(given.values)[item] = static_cast<float>(value); break;
            case kFloat16: reinterpret_cast<unsigned short*>(given.values)[item] = rounded(value, kFloat16); break;
            case kBFloat16: reinterpret_cast<unsigned short*>(given.values)[item] = rounded(value, kBFloat16); break;
            default: reinterpret_cast<double*>(given.values)[item] = value; break;
        }
    }
}
