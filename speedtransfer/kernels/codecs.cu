// Encode float32 rows with stochastic rounding, and decode blocks of 8-bit floats and rows of 24 bits: the bits of
// encoding/codecs.py, float8.py and split24.py. Random bits are made here of the ids of the rows, as encoding/rounding.py makes them.
//
// A scale belongs to a row or to a block of its columns. One thread takes all of that, 16 bytes at a time where
// the address allows it. No value depends on whether a product and a sum are rounded once or twice: products are exact.

#include "move.cuh"
#include "bits.cuh"

namespace {

// Named after dtypes of torch, but kBlocks, whose codes are `codecs.Blocks8`, and kSplit24.
enum Form : long long { kToBFloat16, kToFloat16, kToInt8, kBlocks, kFloat8E4M3, kFloat8E5M2, kSplit24 };

struct Encoding {
    const float* values;   // (count, width)
    const long long* ids;  // (count,)
    char* codes;           // (count, width), of the form's type
    union {
        float* scales;     // (count, blocks); null where the form has none
        signed char* low;  // (count, width), of kSplit24: what is added to the bits of its bfloat16
    };
    long long count;
    long long width;
    long long blocks;      // of a row; those without a scale are any number
    long long key;         // of seed, write and plane
    Form form;
};

struct Decoding {
    const unsigned char* codes;  // (count, width)
    union {
        const float* scales;     // (count, blocks)
        const signed char* low;  // (count, width), of kSplit24
    };
    float* values;               // (count, width)
    long long count;
    long long width;
    long long blocks;
    Form form;                   // of decode_blocks: one of those of 8-bit floats
};

// The two dtypes of torch: a bit of sign, an exponent, `kDigits` of significand.
struct E4M3 {
    static constexpr unsigned int kDigits = 3, kBias = 7;
    static constexpr float kLargest = 448.0f, kSmallest = 0x1p-6f, kLeastScale = 0x1p-117f;
    // Exponents go on where others have infinities; all bits set is a NaN.
    __device__ static bool is_special(unsigned int size) { return size == 0x7fu; }
};

struct E5M2 {
    static constexpr unsigned int kDigits = 2, kBias = 15;
    static constexpr float kLargest = 57344.0f, kSmallest = 0x1p-14f, kLeastScale = 0x1p-110f;
    __device__ static bool is_special(unsigned int size) { return size >= 0x7cu; }
};

constexpr unsigned int kSign = 0x80000000u, kSize = 0x7fffffffu, kInfinity = 0x7f800000u, kNaN = 0x7fc00000u;

// The high half of SplitMix64's finalizer of `key + id * golden`, as `rounding._hashed`.
__device__ inline unsigned int hashed(long long id, unsigned long long key) {
    unsigned long long word = static_cast<unsigned long long>(id) * 0x9E3779B97F4A7C15ull + key;
    word = (word ^ word >> 30) * 0xBF58476D1CE4E5B9ull;
    word = (word ^ word >> 27) * 0x94D049BB133111EBull;
    return static_cast<unsigned int>((word ^ word >> 31) >> 32);
}

// As `rounding.random_bits`.
__device__ inline unsigned int random_bits(unsigned int row_key, long long column) {
    unsigned int word = (row_key ^ hashed(column, 0x9E3779B97F4A7C15ull)) * 0x7FEB352Du;
    return (word ^ word >> 15) * 0x846CA68Bu;
}

__device__ inline unsigned int to_bfloat16(unsigned int word, unsigned int random) {
    const unsigned int size = word & kSize;
    unsigned int top = (size + (random >> 16)) >> 16;
    top = top < 0x7f7fu ? top : 0x7f7fu;
    top = size == kInfinity ? 0x7f80u : size > kInfinity ? 0x7fc0u : top;
    return top | ((word >> 16) & 0x8000u);
}

__device__ inline unsigned int to_float16(unsigned int word, unsigned int random) {
    const unsigned int size = word & kSize;
    // Below the smallest ordinary number all steps are alike. Added to it they are those of an ordinary one.
    const bool below = size < (113u << 23);
    const unsigned int sum = below ? as_bits(as_float(size) + as_float(113u << 23)) : size;
    unsigned int top = ((sum + (random >> 19)) >> 13) - ((below ? 113u : 112u) << 10);
    top = top < 0x7bffu ? top : 0x7bffu;
    top = size == kInfinity ? 0x7c00u : size > kInfinity ? 0x7e00u : top;
    return top | ((word >> 16) & 0x8000u);
}

// The number of 24 bits that a float32 becomes, without its sign.
__device__ inline unsigned int to_24_bits(unsigned int size, unsigned int random) {
    const unsigned int rounded = (size + (random >> 24)) >> 8;
    return rounded < 0x7f7f7fu ? rounded : 0x7f7f7fu;
}

// The largest magnitude among some values, and whether one of them is negative.
struct Range {
    unsigned int largest = 0;
    bool negative = false;
};

// What makes a code of a value, from what all values of a block share.
struct Int8Scale {
    float scale;
    __device__ Int8Scale(const Range& range) {
        const float scaled = as_float(as_bits(as_float(range.largest) / 127.0f) & 0xffffff80u);
        scale = scaled > 0x1p-126f ? scaled : 0x1p-126f;
    }
    __device__ float stored() const { return scale; }
    __device__ unsigned int code(unsigned int word, unsigned int random) const {
        float code = floorf(as_float(word) / scale + static_cast<float>(random >> 16) * 0x1p-16f);
        code = code > -127.0f ? code : -127.0f;
        code = code < 127.0f ? code : 127.0f;
        return static_cast<unsigned int>(static_cast<int>(code)) & 0xffu;
    }
};

struct BlockScale {
    float scale;
    bool negative;
    __device__ BlockScale(const Range& range) : negative(range.negative) {
        const float scaled = as_float(range.largest & 0xfffffff0u);
        scale = scaled > 0x1p-94f ? scaled : 0x1p-94f;
    }
    __device__ float stored() const { return negative ? -scale : scale; }
    __device__ unsigned int code(unsigned int word, unsigned int random) const {
        const unsigned int size = word & kSize, added = random >> 12;
        float share = as_float(size) / scale;
        share = share < 1.0f ? share : 1.0f;
        const float least = negative ? 1.25f * 0x1p-16f : 1.25f * 0x1p-32f;  // what the code 1 means
        unsigned int code = ((as_bits(share) + added) >> 20) - (negative ? 889u : 761u);
        if (share < least) code = negative ? share > static_cast<float>(added) * 0x1p-20f * least : size > 0;
        return (code | (negative && word > kSign ? 128u : 0u)) & 0xffu;
    }
};

template <typename Kind>
struct Float8Scale {
    float scale;
    __device__ Float8Scale(const Range& range) {
        const float scaled = as_float(as_bits(as_float(range.largest) / Kind::kLargest) & ~0u << (Kind::kDigits + 1));
        scale = scaled > Kind::kLeastScale ? scaled : Kind::kLeastScale;
    }
    __device__ float stored() const { return scale; }
    __device__ unsigned int code(unsigned int word, unsigned int random) const {
        float share = as_float(word & kSize) / scale;
        share = share < Kind::kLargest ? share : Kind::kLargest;
        const bool below = share < Kind::kSmallest;  // as in to_float16
        const unsigned int sum = as_bits(below ? share + Kind::kSmallest : share) + (random >> (9 + Kind::kDigits));
        const unsigned int first = (below ? 128u : 127u) - Kind::kBias;
        return ((sum >> (23 - Kind::kDigits)) - (first << Kind::kDigits)) | ((word >> 24) & 128u);
    }
};

// Call `use` with the words of `count` values and the number of the first: four at a time where `kWide`, else one.
template <bool kWide, typename Use>
__device__ inline void each_word(const float* values, long long count, Use use) {
    if constexpr (kWide) {
        for (long long i = 0; i < count; i += 4) {
            const uint4 words = *reinterpret_cast<const uint4*>(values + i);
            use(i, words.x, words.y, words.z, words.w);
        }
    } else {
        for (long long i = 0; i < count; ++i) use(i, as_bits(values[i]));
    }
}

template <typename Scale, bool kWide>
__device__ inline void encode_block(const Encoding& given, long long row, long long block) {
    const long long size = (given.width + given.blocks - 1) / given.blocks, first = block * size;
    const long long count = first + size < given.width ? size : given.width - first;
    const float* values = given.values + row * given.width + first;
    char* codes = given.codes + row * given.width + first;
    Range range;
    each_word<kWide>(values, count, [&](long long, auto... words) {
        const auto note = [&](unsigned int word) {
            range.largest = (word & kSize) > range.largest ? word & kSize : range.largest;
            range.negative |= word > kSign;  // minus zero is no negative number
        };
        (note(words), ...);
    });
    float& stored = given.scales[row * given.blocks + block];
    const bool finite = range.largest < kInfinity;
    const Scale scale(range);
    stored = finite ? scale.stored() : as_float(kNaN);
    const unsigned int key = hashed(given.ids[row], static_cast<unsigned long long>(given.key));
    each_word<kWide>(values, count, [&](long long i, auto... words) {
        unsigned int packed = 0, place = 0;
        const auto add = [&](unsigned int word) {
            const unsigned int code = finite ? scale.code(word, random_bits(key, first + i + place)) : 0;
            packed |= code << 8 * place++;
        };
        (add(words), ...);
        if constexpr (kWide) *reinterpret_cast<unsigned int*>(codes + i) = packed;
        else codes[i] = static_cast<char>(packed);
    });
}

template <typename Scale>
__device__ inline void encode_blocks(const Encoding& given) {
    const long long size = (given.width + given.blocks - 1) / given.blocks;
    const unsigned long long places = reinterpret_cast<unsigned long long>(given.values)
        | reinterpret_cast<unsigned long long>(given.codes) * 4 | given.width * 4 | size * 4;
    for (long long item = this_thread(); item < given.count * given.blocks; item += all_threads()) {
        if (places % 16 == 0) encode_block<Scale, true>(given, item / given.blocks, item % given.blocks);
        else encode_block<Scale, false>(given, item / given.blocks, item % given.blocks);
    }
}

template <typename Cast>
__device__ inline void encode_values(const Encoding& given, Cast cast) {
    for (long long item = this_thread(); item < given.count * given.width; item += all_threads()) {
        const unsigned int key = hashed(given.ids[item / given.width], static_cast<unsigned long long>(given.key));
        const unsigned int code = cast(as_bits(given.values[item]), random_bits(key, item % given.width));
        reinterpret_cast<unsigned short*>(given.codes)[item] = static_cast<unsigned short>(code);
    }
}

__device__ inline void encode_split24(const Encoding& given) {
    for (long long item = this_thread(); item < given.count * given.width; item += all_threads()) {
        const unsigned int key = hashed(given.ids[item / given.width], static_cast<unsigned long long>(given.key));
        const unsigned int word = as_bits(given.values[item]), size = word & kSize;
        const unsigned int rounded = to_24_bits(size, random_bits(key, item % given.width));
        unsigned int top = (rounded + 0x80u) >> 8;
        // What is added may be negative: the nearest bfloat16 may be the larger one.
        const unsigned int rest = size < kInfinity ? rounded - (top << 8) : 0;
        top = size == kInfinity ? 0x7f80u : size > kInfinity ? 0x7fc0u : top;
        reinterpret_cast<unsigned short*>(given.codes)[item] = static_cast<unsigned short>(top | ((word >> 16) & 0x8000u));
        given.low[item] = static_cast<signed char>(rest);
    }
}

// The sign of a scale tells which codes its block has.
__device__ inline float block_value(unsigned int code, float scale) {
    const bool negative = scale < 0;
    const unsigned int step = negative ? code & 127u : code;
    const unsigned int word = step == 0 ? 0 : ((step + (negative ? 889u : 761u)) << 20) | (negative ? (code >> 7) << 31 : 0);
    return as_float(word) * (negative ? -scale : scale);
}

template <typename Kind>
__device__ inline float float8_value(unsigned int code, float scale) {
    const unsigned int size = code & 127u, shifted = size << (23 - Kind::kDigits), sign = (code & 128u) << 24;
    // Infinity and NaN have the exponent of all ones in float32; the bits below it are those here.
    const unsigned int special = kInfinity | (shifted & 0x7fffffu), ordinary = shifted + ((127u - Kind::kBias) << 23);
    const float below = static_cast<float>(size) * Kind::kSmallest / (1u << Kind::kDigits);
    const unsigned int word = Kind::is_special(size) ? special : size >> Kind::kDigits ? ordinary : as_bits(below);
    return as_float(word | sign) * scale;
}

template <typename Value>
__device__ inline void decode_values(const Decoding& given, Value value) {
    const long long size = (given.width + given.blocks - 1) / given.blocks;
    for (long long item = this_thread(); item < given.count * given.width; item += all_threads()) {
        const float scale = given.scales[item / given.width * given.blocks + item % given.width / size];
        given.values[item] = value(given.codes[item], scale);
    }
}

}  // namespace

extern "C" __global__ void encode_rows(const __grid_constant__ Encoding given) {
    switch (given.form) {
        case kToBFloat16: encode_values(given, to_bfloat16); break;
        case kToFloat16: encode_values(given, to_float16); break;
        case kToInt8: encode_blocks<Int8Scale>(given); break;
        case kBlocks: encode_blocks<BlockScale>(given); break;
        case kFloat8E4M3: encode_blocks<Float8Scale<E4M3>>(given); break;
        case kSplit24: encode_split24(given); break;
        default: encode_blocks<Float8Scale<E5M2>>(given); break;
    }
}

extern "C" __global__ void decode_blocks(const __grid_constant__ Decoding given) {
    switch (given.form) {
        case kBlocks: decode_values(given, block_value); break;
        case kFloat8E4M3: decode_values(given, float8_value<E4M3>); break;
        default: decode_values(given, float8_value<E5M2>); break;
    }
}

extern "C" __global__ void decode_split24(const __grid_constant__ Decoding given) {
    for (long long item = this_thread(); item < given.count * given.width; item += all_threads()) {
        const unsigned int top = reinterpret_cast<const unsigned short*>(given.codes)[item], size = top & 0x7fffu;
        // As in split24.py: beside zeros, infinities and NaN may be what has no meaning.
        int low = given.low[item];
        low = size >= 0x7f80u || (size == 0 && low < 0) ? 0 : low;
        given.values[item] = as_float((top << 16) + (static_cast<unsigned int>(low) << 8));
    }
}
