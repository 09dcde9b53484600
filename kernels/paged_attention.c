/* Attention of one new token of each of several requests to K and V in pages, read where they lie.
 *
 * K and V of a token are kv_heads * dim consecutive elements. A request's pages are walked twice: once for the scores
 * of all heads, once for the weighted sum of V. All arithmetic is in float; a row's result depends on nothing but the
 * row. */

#include <stddef.h>
#include <stdint.h>
#include <string.h>

#include "vectors.h"

#define MAX_VECTORS 16 /* of LANES elements in a head: dim <= 256 */
#define MAX_GROUP 16   /* query heads of one KV head */

typedef int32_t ints __attribute__((vector_size(4 * LANES)));

INLINE void load(vec *into, const char *from, int bfloat) {
    if (bfloat) {
        halves raw;
        memcpy(&raw, from, sizeof(raw));
        words wide = __builtin_convertvector(raw, words) << 16;
        memcpy(into, &wide, sizeof(wide));
    } else {
        memcpy(into, from, sizeof(*into));
    }
}

/* To bfloat16, round to nearest even, or to float. No NaN comes here from finite input. */
INLINE void store(char *to, const vec *from, int bfloat) {
    if (bfloat) {
        words raw;
        memcpy(&raw, from, sizeof(raw));
        raw = (raw + 0x7FFF + ((raw >> 16) & 1)) >> 16;
        halves narrow = __builtin_convertvector(raw, halves);
        memcpy(to, &narrow, sizeof(narrow));
    } else {
        memcpy(to, from, sizeof(*from));
    }
}

/* exp(x) for x <= 0 to 2e-7 of its value: 2^n times a polynomial in the rest (the coefficients of Cephes' expf). */
INLINE void exponential(vec *x) {
    vec floor_at = *x - *x - 87.0f;
    ints low = *x < floor_at;
    ints bits, bound;
    memcpy(&bits, x, sizeof(bits));
    memcpy(&bound, &floor_at, sizeof(bound));
    bits = (bits & ~low) | (bound & low);
    memcpy(x, &bits, sizeof(bits));
    const float magic = 12582912.0f; /* 1.5 * 2^23: adding it rounds to a whole number */
    vec n = (*x * 1.44269504f + magic) - magic;
    vec r = *x - n * 0.693359375f + n * 2.12194440e-4f;
    vec p = ((((r * 1.9875691500e-4f + 1.3981999507e-3f) * r + 8.3334519073e-3f) * r + 4.1665795894e-2f) * r +
             1.6666665459e-1f) *
                r +
            5.0000001201e-1f;
    p = p * r * r + r + 1.0f;
    ints power = (__builtin_convertvector(n, ints) + 127) << 23;
    vec scale;
    memcpy(&scale, &power, sizeof(scale));
    *x = p * scale;
}

struct shape {
    int64_t heads, kv_heads, dim, page_size, q_row; /* q_row: elements from one row of q to the next */
    float scale;
    int bfloat;
};

/* One row. scores: float [heads, room], room a multiple of LANES; sums: float [heads * dim]. */
INLINE void attend(const struct shape *s, const int64_t dim, const int64_t group, const int bfloat, const char *q, const char *k_pool,
                   const char *v_pool, const int64_t *pages, int64_t length, char *out, float *scores, int64_t room,
                   float *sums) {
    const int vectors = (int)(dim / LANES);
    const int64_t item = bfloat ? 2 : 4, token = s->kv_heads * dim * item;
    vec query[MAX_GROUP * MAX_VECTORS];
    for (int64_t first = 0; first < length; first += s->page_size) {
        int64_t count = length - first < s->page_size ? length - first : s->page_size;
        const char *page = k_pool + pages[first / s->page_size] * s->page_size * token;
        for (int64_t kv = 0; kv < s->kv_heads; kv++) {
            for (int64_t i = 0; i < group * vectors; i++) {
                load(&query[i], q + (kv * group * dim + i * LANES) * item, bfloat);
                query[i] *= s->scale;
            }
            const char *at = page + kv * dim * item;
            float *into = scores + kv * group * room + first;
            for (int64_t t = 0; t < count; t++, at += token) {
                vec key[MAX_VECTORS];
                for (int i = 0; i < vectors; i++)
                    load(&key[i], at + i * LANES * item, bfloat);
                for (int64_t g = 0; g < group; g++) {
                    vec dot = query[g * vectors] * key[0];
                    for (int i = 1; i < vectors; i++)
                        dot += query[g * vectors + i] * key[i];
                    into[g * room + t] = sum_of(&dot);
                }
            }
        }
    }
    for (int64_t h = 0; h < s->heads; h++) {
        float *row = scores + h * room, most = row[0], total = 0;
        for (int64_t t = 1; t < length; t++)
            most = row[t] > most ? row[t] : most;
        for (int64_t t = length; t < room; t++)
            row[t] = -1e30f; /* weighs nothing */
        for (int64_t t = 0; t < room; t += LANES) {
            vec weights;
            memcpy(&weights, row + t, sizeof(weights));
            weights -= most;
            exponential(&weights);
            memcpy(row + t, &weights, sizeof(weights));
        }
        for (int64_t t = 0; t < length; t++)
            total += row[t];
        for (int64_t t = 0; t < length; t++)
            row[t] /= total;
    }
    memset(sums, 0, (size_t)(s->heads * dim) * sizeof(float));
    for (int64_t first = 0; first < length; first += s->page_size) {
        int64_t count = length - first < s->page_size ? length - first : s->page_size;
        const char *page = v_pool + pages[first / s->page_size] * s->page_size * token;
        for (int64_t kv = 0; kv < s->kv_heads; kv++) {
            vec sum[MAX_GROUP * MAX_VECTORS];
            float *kept = sums + kv * group * dim;
            memcpy(sum, kept, (size_t)(group * vectors) * sizeof(vec));
            const char *at = page + kv * dim * item;
            const float *weights = scores + kv * group * room + first;
            for (int64_t t = 0; t < count; t++, at += token) {
                vec value[MAX_VECTORS];
                for (int i = 0; i < vectors; i++)
                    load(&value[i], at + i * LANES * item, bfloat);
                for (int64_t g = 0; g < group; g++)
                    for (int i = 0; i < vectors; i++)
                        sum[g * vectors + i] += weights[g * room + t] * value[i];
            }
            memcpy(kept, sum, (size_t)(group * vectors) * sizeof(vec));
        }
    }
    for (int64_t at = 0; at < s->heads * dim; at += LANES) {
        vec sum;
        memcpy(&sum, sums + at, sizeof(sum));
        store(out + at * item, &sum, bfloat);
    }
}

/* Fixed numbers let the compiler keep a head in registers. */
INLINE void attend_any(const struct shape *s, const char *q, const char *k, const char *v, const int64_t *pages,
                       int64_t length, char *out, float *scores, int64_t room, float *sums) {
    const int64_t group = s->heads / s->kv_heads;
    if (s->dim == 64 && group == 3 && s->bfloat)
        attend(s, 64, 3, 1, q, k, v, pages, length, out, scores, room, sums);
    else if (s->dim == 64 && s->bfloat)
        attend(s, 64, group, 1, q, k, v, pages, length, out, scores, room, sums);
    else if (s->dim == 128 && s->bfloat)
        attend(s, 128, group, 1, q, k, v, pages, length, out, scores, room, sums);
    else if (s->bfloat)
        attend(s, s->dim, group, 1, q, k, v, pages, length, out, scores, room, sums);
    else
        attend(s, s->dim, group, 0, q, k, v, pages, length, out, scores, room, sums);
}

#define DEFINE_ROW(NAME, ATTRIBUTE)                                                                                 \
    ATTRIBUTE static void NAME(const struct shape *s, const char *q, const char *k, const char *v,                 \
                               const int64_t *pages, int64_t length, char *out, float *scores, int64_t room,       \
                               float *sums) {                                                                       \
        attend_any(s, q, k, v, pages, length, out, scores, room, sums);                                             \
    }

DEFINE_ROW(row_plain, )
#if defined(__x86_64__)
DEFINE_ROW(row_avx2, __attribute__((target("avx2,fma"))))
DEFINE_ROW(row_avx512, __attribute__((target("avx512f,avx512bw,avx512vl,fma"))))
#endif

/* q: [rows, heads, dim] with a row every q_row elements; pools: [slots, kv_heads, dim]; row i has lens[i] tokens in
 * pages[starts[i] ...]; out: [rows, heads * dim]. All but the scratch are float, or bfloat16 where `bfloat` is set.
 * scratch: float [heads * room + heads * dim], room at least each length, rounded up to LANES. */
void decode_attention(const char *q, const char *k_pool, const char *v_pool, char *out, const int64_t *pages,
                      const int64_t *starts, const int64_t *lens, int64_t rows, const struct shape *shape,
                      float *scratch) {
    void (*row)(const struct shape *, const char *, const char *, const char *, const int64_t *, int64_t, char *,
                float *, int64_t, float *) = row_plain;
#if defined(__x86_64__)
    if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vl"))
        row = row_avx512;
    else if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma"))
        row = row_avx2;
#endif
    int64_t item = shape->bfloat ? 2 : 4;
    for (int64_t i = 0; i < rows; i++) {
        int64_t room = (lens[i] + LANES - 1) / LANES * LANES;
        row(shape, q + i * shape->q_row * item, k_pool, v_pool, pages + starts[i], lens[i],
            out + i * shape->heads * shape->dim * item, scratch, room, scratch + shape->heads * room);
    }
}
