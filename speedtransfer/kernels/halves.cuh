// float32, float16 and bfloat16 into each other, as bits: to the nearest, ties to even, NaN stays NaN. Integer arithmetic,
// so that no compiler option (flush to zero, fast math) and no header changes a result, and the CPU proves it.

namespace {

__device__ inline unsigned int half_to_float(unsigned int half) {
    const unsigned int sign = (half & 0x8000u) << 16, exponent = (half >> 10) & 0x1fu, fraction = half & 0x3ffu;
    const unsigned int normal = (exponent + 112u) << 23 | fraction << 13;  // 112: the biases, 127 - 15
    const unsigned int special = 0x7f800000u | fraction << 13;             // infinity, NaN
    // Subnormal: shift the leading one to where it goes unsaid. float32 has the exponents for that.
    const unsigned int shift = static_cast<unsigned int>(__clz(static_cast<int>(fraction | 1u))) - 21u;
    const unsigned int subnormal = (113u - shift) << 23 | ((fraction << shift) & 0x3ffu) << 13;
    return sign | (exponent == 0x1fu ? special : exponent ? normal : fraction ? subnormal : 0u);
}

__device__ inline unsigned int float_to_half(unsigned int bits) {
    const unsigned int sign = (bits >> 16) & 0x8000u, size = bits & 0x7fffffffu;
    // From 2^-14 on. Rounding may carry into the exponent, as far as infinity.
    const unsigned int rebiased = size - (112u << 23);
    const unsigned int normal = (rebiased + 0xfffu + ((rebiased >> 13) & 1u)) >> 13;
    // Below, in units of 2^-24: shift out and round what is less than a unit, by 14 to 24 places; 25 leave nothing.
    const unsigned int below = 126u - (size >> 23), shift = below >= 14u && below <= 24u ? below : 25u;
    const unsigned int fraction = (size & 0x7fffffu) | 0x800000u;
    const unsigned int subnormal = (fraction + (1u << (shift - 1u)) - 1u + ((fraction >> shift) & 1u)) >> shift;
    const unsigned int special = size > 0x7f800000u ? 0x7e00u : 0x7c00u;  // NaN, infinity
    return sign | (size >= 0x47800000u ? special : size >= 0x38800000u ? normal : subnormal);
}

__device__ inline unsigned int float_to_bfloat16(unsigned int bits) {
    const unsigned int rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
    return (bits & 0x7fffffffu) > 0x7f800000u ? ((bits >> 16) & 0x8000u) | 0x7fc0u : rounded;  // a NaN must not carry
}

// From and to float32; `type` is kFloat16 or kBFloat16.
__device__ inline unsigned int widen(unsigned int bits, Type type) {
    return type == kFloat16 ? half_to_float(bits) : bits << 16;
}

__device__ inline unsigned int narrow(unsigned int bits, Type type) {
    return type == kFloat16 ? float_to_half(bits) : float_to_bfloat16(bits);
}

}  // namespace
