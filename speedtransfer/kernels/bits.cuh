// The bits of a float32 as a word, and back.

namespace {

union Number {
    unsigned int bits;
    float value;
};

__device__ inline float as_float(unsigned int bits) {
    Number number;
    number.bits = bits;
    return number.value;
}

__device__ inline unsigned int as_bits(float value) {
    Number number;
    number.value = value;
    return number.bits;
}

}  // namespace
