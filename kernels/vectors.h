/* Vectors of 16 floats, and bfloat16 as the kernels of the model have it. */

#include <stdint.h>
#include <string.h>

#define LANES 16
#define INLINE static inline __attribute__((always_inline))

typedef float vec __attribute__((vector_size(4 * LANES)));
typedef float eight __attribute__((vector_size(32)));
typedef float four __attribute__((vector_size(16)));
typedef uint32_t words __attribute__((vector_size(4 * LANES)));
typedef uint16_t halves __attribute__((vector_size(2 * LANES)));

INLINE float sum_of(const vec *v) {
    eight low, high;
    memcpy(&low, v, sizeof(low));
    memcpy(&high, (const char *)v + sizeof(low), sizeof(high));
    low += high;
    four left, right;
    memcpy(&left, &low, sizeof(left));
    memcpy(&right, (const char *)&low + sizeof(left), sizeof(right));
    left += right;
    return (left[0] + left[2]) + (left[1] + left[3]);
}

INLINE float widen(uint16_t half) {
    uint32_t word = (uint32_t)half << 16;
    float value;
    memcpy(&value, &word, sizeof(value));
    return value;
}

/* Round to nearest even; a NaN stays one. */
INLINE uint16_t narrow(float value) {
    uint32_t word;
    memcpy(&word, &value, sizeof(word));
    uint32_t rounded = (word + 0x7FFF + ((word >> 16) & 1)) >> 16, nan = word >> 16 | 0x40;
    return (uint16_t)((word & 0x7FFFFFFF) > 0x7F800000 ? nan : rounded);
}
