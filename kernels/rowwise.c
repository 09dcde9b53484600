/* What lies between the products of a layer, row by row, in bfloat16: a decode step is short enough that the calls of
 * torch's separate operators are a good part of it. Arithmetic is in float and rounded where torch rounds. */

#include <math.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#include "vectors.h"

INLINE void norm_rows(const uint16_t *x, const uint16_t *weight, uint16_t *y, int64_t rows, int64_t size, float eps) {
    for (int64_t row = 0; row < rows; row++, x += size, y += size) {
        float sums[16] = {0};
        int64_t i = 0;
        for (; i + 16 <= size; i += 16)
            for (int lane = 0; lane < 16; lane++)
                sums[lane] += widen(x[i + lane]) * widen(x[i + lane]);
        float sum = 0;
        for (; i < size; i++)
            sum += widen(x[i]) * widen(x[i]);
        for (int lane = 0; lane < 16; lane++)
            sum += sums[lane];
        float factor = 1.0f / sqrtf(sum / (float)size + eps);
        for (i = 0; i < size; i++)
            y[i] = narrow(widen(x[i]) * factor * widen(weight[i]));
    }
}

/* exp(x), to 2e-7 of its value where it is a float: 2^n times a polynomial in the rest (Cephes' coefficients). */
INLINE float exponential(float x) {
    x = x < -87.0f ? -87.0f : x > 88.0f ? 88.0f : x;
    const float magic = 12582912.0f; /* 1.5 * 2^23: adding it rounds to a whole number */
    float n = (x * 1.44269504f + magic) - magic, r = x - n * 0.693359375f + n * 2.12194440e-4f;
    float p = ((((r * 1.9875691500e-4f + 1.3981999507e-3f) * r + 8.3334519073e-3f) * r + 4.1665795894e-2f) * r +
               1.6666665459e-1f) *
                  r +
              5.0000001201e-1f;
    p = p * r * r + r + 1.0f;
    uint32_t power = (uint32_t)((int32_t)n + 127) << 23;
    float scale;
    memcpy(&scale, &power, sizeof(scale));
    return p * scale;
}

INLINE void gate_rows(const uint16_t *gate_up, uint16_t *y, int64_t rows, int64_t size) {
    for (int64_t row = 0; row < rows; row++, gate_up += 2 * size, y += size)
        for (int64_t i = 0; i < size; i++) {
            float gate = widen(gate_up[i]), quotient = gate / (1.0f + exponential(-gate));
            float silu = widen(narrow(gate < -88.0f ? -0.0f : quotient)); /* `exponential` ends there */
            y[i] = narrow(silu * widen(gate_up[size + i]));
        }
}

INLINE void rotate_rows(const uint16_t *x, int64_t row_stride, const uint16_t *cosine, const uint16_t *sine,
                        uint16_t *y, int64_t rows, int64_t heads, int64_t dim) {
    int64_t half = dim / 2;
    for (int64_t row = 0; row < rows; row++, x += row_stride, cosine += dim, sine += dim)
        for (int64_t head = 0; head < heads; head++, y += dim) {
            const uint16_t *from = x + head * dim;
            for (int64_t part = 0; part < dim; part += half)
                for (int64_t i = part; i < part + half; i++) {
                    float turned = widen(from[part ? i - half : i + half]);
                    y[i] = narrow(widen(narrow(widen(from[i]) * widen(cosine[i]))) + turned * widen(sine[i]));
                }
        }
}

#define DEFINE(SUFFIX, ATTRIBUTE)                                                                                    \
    ATTRIBUTE static void norm_##SUFFIX(const uint16_t *x, const uint16_t *w, uint16_t *y, int64_t rows, int64_t n, \
                                        float eps) {                                                                 \
        norm_rows(x, w, y, rows, n, eps);                                                                            \
    }                                                                                                                \
    ATTRIBUTE static void gate_##SUFFIX(const uint16_t *x, uint16_t *y, int64_t rows, int64_t n) {                  \
        gate_rows(x, y, rows, n);                                                                                    \
    }                                                                                                                \
    ATTRIBUTE static void rotate_##SUFFIX(const uint16_t *x, int64_t stride, const uint16_t *c, const uint16_t *s,  \
                                          uint16_t *y, int64_t rows, int64_t heads, int64_t dim) {                   \
        rotate_rows(x, stride, c, s, y, rows, heads, dim);                                                           \
    }

DEFINE(plain, )
#if defined(__x86_64__)
DEFINE(avx2, __attribute__((target("avx2,fma"))))
DEFINE(avx512, __attribute__((target("avx512f,avx512bw,avx512vl,fma"))))
#define HAS_AVX512                                                                                                   \
    (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vl"))
#define HAS_AVX2 (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma"))
#define CALL(NAME, ...)                                                                                              \
    (HAS_AVX512 ? NAME##_avx512(__VA_ARGS__) : HAS_AVX2 ? NAME##_avx2(__VA_ARGS__) : NAME##_plain(__VA_ARGS__))
#else
#define CALL(NAME, ...) NAME##_plain(__VA_ARGS__)
#endif

/* y = x / sqrt(mean(x^2) + eps) * weight: x and y are [rows, size], weight is [size]. */
void rms_norm(const uint16_t *x, const uint16_t *weight, uint16_t *y, int64_t rows, int64_t size, float eps) {
    CALL(norm, x, weight, y, rows, size, eps);
}

/* y = silu(gate) * up: gate_up is [rows, 2 * size], a row's gate before its up; y is [rows, size]. */
void silu_and_mul(const uint16_t *gate_up, uint16_t *y, int64_t rows, int64_t size) { CALL(gate, gate_up, y, rows, size); }

/* y = x * cos + (x, its halves exchanged) * sin: rows of x are row_stride elements apart, each [heads, dim]; cosine and
 * sine are [rows, dim]; y is [rows, heads, dim]. */
void rotate(const uint16_t *x, int64_t row_stride, const uint16_t *cosine, const uint16_t *sine, uint16_t *y,
            int64_t rows, int64_t heads, int64_t dim) {
    CALL(rotate, x, row_stride, cosine, sine, y, rows, heads, dim);
}
