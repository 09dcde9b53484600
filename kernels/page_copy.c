/* CRC32C (Castagnoli, reflected polynomial 0x82F63B78) of units, alone or fused with a copy.
 *
 * A unit is one run of bytes or several of equal length, whose checksum is that of all its bytes in order. One run is
 * cut into three equal streams whose checksums are computed side by side: the CRC instruction has a
 * latency of three cycles and a throughput of one. The streams' registers are joined by multiplication with
 * x^(8 * stream bytes) modulo the polynomial, the same factor for every unit of a call. Each word of the source is
 * read once, so that the checksum is that of the bytes written, whatever another process does to the source. On
 * x86-64 the copy writes past the caches: nothing reads a page soon after, and a line that isn't fetched before it is
 * overwritten saves a third of the memory traffic.
 *
 * `hardware` 0 selects the portable slicing-by-8 tables; 1 needs has_crc_instruction() != 0. */

#include <string.h>

#include "crc32c.h"

#if defined(__BYTE_ORDER__) && __BYTE_ORDER__ != __ORDER_LITTLE_ENDIAN__
#error "page_copy.c is written for little-endian machines"
#endif

#define POLYNOMIAL 0x82F63B78u
#define WORD sizeof(uint64_t)
#define LINE 64 /* bytes of a cache line; streams are whole lines */

/* ---- one word of CRC: by table, or by the machine's instruction ---- */

static uint32_t table[8][256];

__attribute__((constructor)) static void fill_table(void) {
    for (uint32_t n = 0; n < 256; n++) {
        uint32_t crc = n;
        for (int bit = 0; bit < 8; bit++)
            crc = crc & 1 ? (crc >> 1) ^ POLYNOMIAL : crc >> 1;
        table[0][n] = crc;
    }
    for (int k = 1; k < 8; k++)
        for (uint32_t n = 0; n < 256; n++)
            table[k][n] = (table[k - 1][n] >> 8) ^ table[0][table[k - 1][n] & 0xFF];
}

static inline uint32_t table_byte(uint32_t crc, uint8_t byte) {
    return (crc >> 8) ^ table[0][(crc ^ byte) & 0xFF];
}

static inline uint32_t table_word(uint32_t crc, uint64_t word) {
    word ^= crc;
    return table[7][word & 0xFF] ^ table[6][(word >> 8) & 0xFF] ^ table[5][(word >> 16) & 0xFF] ^
           table[4][(word >> 24) & 0xFF] ^ table[3][(word >> 32) & 0xFF] ^ table[2][(word >> 40) & 0xFF] ^
           table[1][(word >> 48) & 0xFF] ^ table[0][word >> 56];
}

#if defined(__x86_64__)
#include <nmmintrin.h>
#define HARDWARE __attribute__((target("sse4.2")))
HARDWARE static inline uint32_t hardware_word(uint32_t crc, uint64_t word) {
    return (uint32_t)_mm_crc32_u64(crc, word);
}
int has_crc_instruction(void) { return __builtin_cpu_supports("sse4.2") != 0; }

#elif defined(__aarch64__)
#define HARDWARE
static inline uint32_t hardware_word(uint32_t crc, uint64_t word) {
    __asm__(".arch_extension crc\n\tcrc32cx %w0, %w0, %x1" : "+r"(crc) : "r"(word));
    return crc;
}
#if defined(__linux__)
#include <sys/auxv.h>
#define HWCAP_CRC32_BIT (1ul << 7)
int has_crc_instruction(void) { return (getauxval(AT_HWCAP) & HWCAP_CRC32_BIT) != 0; }
#elif defined(__APPLE__)
int has_crc_instruction(void) { return 1; } /* every 64-bit Apple processor has it */
#else
int has_crc_instruction(void) { return 0; }
#endif

#else
#define HARDWARE
static inline uint32_t hardware_word(uint32_t crc, uint64_t word) { return table_word(crc, word); }
int has_crc_instruction(void) { return 0; }
#endif

/* ---- joining streams ---- */

/* a * b modulo the polynomial; bit 31 is x^0. */
static uint32_t multiply(uint32_t a, uint32_t b) {
    uint32_t product = 0;
    for (int bit = 31; bit >= 0; bit--) {
        product ^= b & (0u - ((a >> bit) & 1u));
        b = (b >> 1) ^ (POLYNOMIAL & (0u - (b & 1u)));
    }
    return product;
}

/* x^(8 * bytes) modulo the polynomial: the factor that moves a CRC register past that many zero bytes. */
static uint32_t shift_factor(size_t bytes) {
    uint32_t result = 1u << 31, square = 1u << 23;
    for (; bytes; bytes >>= 1) {
        if (bytes & 1)
            result = multiply(result, square);
        square = multiply(square, square);
    }
    return result;
}

/* ---- one unit ---- */

static inline uint64_t load_word(const uint8_t *p) {
    uint64_t word;
    memcpy(&word, p, WORD);
    return word;
}

static inline void store_word(uint8_t *p, uint64_t word) { memcpy(p, &word, WORD); }

/* The CRC32C of src[done..nbytes), continuing `crc`; copied to dst unless that is NULL. */
static uint32_t finish_unit(uint8_t *dst, const uint8_t *src, size_t done, size_t nbytes, uint32_t crc) {
    for (; done + WORD <= nbytes; done += WORD) {
        uint64_t word = load_word(src + done);
        if (dst)
            store_word(dst + done, word);
        crc = table_word(crc, word);
    }
    for (; done < nbytes; done++) {
        uint8_t byte = src[done];
        if (dst)
            dst[done] = byte;
        crc = table_byte(crc, byte);
    }
    return ~crc;
}

/* Defines NAME: the CRC32C of src[0..nbytes), copied to dst as it is read when COPY is 1. */
#define DEFINE_UNIT(NAME, ATTRIBUTE, NEXT, COPY)                                                                    \
    ATTRIBUTE static uint32_t NAME(uint8_t *dst, const uint8_t *src, size_t nbytes, size_t stream,                 \
                                   uint32_t factor) {                                                               \
        uint32_t a = ~0u, b = 0, c = 0;                                                                             \
        const uint8_t *src_b = src + stream, *src_c = src_b + stream;                                               \
        for (size_t i = 0; i < stream; i += WORD) {                                                                 \
            uint64_t word_a = load_word(src + i), word_b = load_word(src_b + i), word_c = load_word(src_c + i);     \
            if (COPY) {                                                                                             \
                store_word(dst + i, word_a);                                                                        \
                store_word(dst + stream + i, word_b);                                                               \
                store_word(dst + 2 * stream + i, word_c);                                                           \
            }                                                                                                       \
            a = NEXT(a, word_a);                                                                                    \
            b = NEXT(b, word_b);                                                                                    \
            c = NEXT(c, word_c);                                                                                    \
        }                                                                                                           \
        a = multiply(multiply(a, factor) ^ b, factor) ^ c;                                                          \
        return finish_unit(COPY ? dst : NULL, src, 3 * stream, nbytes, a);                                          \
    }

DEFINE_UNIT(copy_unit_hardware, HARDWARE, hardware_word, 1)
DEFINE_UNIT(copy_unit_table, , table_word, 1)
DEFINE_UNIT(crc_unit_hardware, HARDWARE, hardware_word, 0)
DEFINE_UNIT(crc_unit_table, , table_word, 0)

#if defined(__x86_64__)
#define PREFETCH_BYTES 512 /* measured: without it the copy is a tenth slower */
#define STORE_ALIGNMENT 16

/* copy_unit_hardware with streaming stores; dst is a multiple of STORE_ALIGNMENT. A stream's line is stored whole
 * before another's begins, and copy_unit_fast avoids a dst just ahead of src: a load whose low 12 address bits equal
 * those of a line being written flushes it, and the copy becomes up to ten times slower (measured). */
HARDWARE static uint32_t copy_unit_streaming(uint8_t *dst, const uint8_t *src, size_t nbytes, size_t stream,
                                             uint32_t factor) {
    uint64_t crc[3] = {~0u, 0, 0};
    for (size_t line = 0; line < stream; line += LINE) {
        __m128i pairs[3][LINE / sizeof(__m128i)];
        for (int s = 0; s < 3; s++) {
            const uint8_t *from = src + s * stream + line;
            _mm_prefetch((const char *)from + PREFETCH_BYTES, _MM_HINT_T0);
            for (int i = 0; i < 4; i++)
                pairs[s][i] = _mm_loadu_si128((const __m128i *)from + i);
        }
        for (int s = 0; s < 3; s++)
            for (int i = 0; i < 4; i++)
                _mm_stream_si128((__m128i *)(dst + s * stream + line) + i, pairs[s][i]);
        for (int i = 0; i < 4; i++) {
            for (int s = 0; s < 3; s++)
                crc[s] = _mm_crc32_u64(crc[s], (uint64_t)_mm_extract_epi64(pairs[s][i], 0));
            for (int s = 0; s < 3; s++)
                crc[s] = _mm_crc32_u64(crc[s], (uint64_t)_mm_extract_epi64(pairs[s][i], 1));
        }
    }
    uint32_t joined = multiply(multiply((uint32_t)crc[0], factor) ^ (uint32_t)crc[1], factor) ^ (uint32_t)crc[2];
    return finish_unit(dst, src, 3 * stream, nbytes, joined);
}

static uint32_t copy_unit_fast(uint8_t *dst, const uint8_t *src, size_t nbytes, size_t stream, uint32_t factor) {
    uintptr_t ahead = ((uintptr_t)dst - (uintptr_t)src) % 4096;
    int collides = ahead > 0 && ahead <= 2 * LINE;
    return (uintptr_t)dst % STORE_ALIGNMENT || collides ? copy_unit_hardware(dst, src, nbytes, stream, factor)
                                                        : copy_unit_streaming(dst, src, nbytes, stream, factor);
}
static void order_stores(void) { _mm_sfence(); }
#else
#define copy_unit_fast copy_unit_hardware
static void order_stores(void) {}
#endif

/* ---- several runs ---- */

/* Defines NAME: goes on with `crc`, the register before its last inversion, over src[0..nbytes), copied unless dst is
 * NULL. Runs are short (a token's head or two), so that one stream must do. */
#define DEFINE_RUN(NAME, ATTRIBUTE, NEXT)                                                                           \
    ATTRIBUTE static inline uint32_t NAME(uint8_t *dst, const uint8_t *src, size_t nbytes, uint32_t crc) {         \
        size_t i = 0;                                                                                               \
        for (; i + WORD <= nbytes; i += WORD) {                                                                     \
            uint64_t word = load_word(src + i);                                                                     \
            if (dst)                                                                                                \
                store_word(dst + i, word);                                                                          \
            crc = NEXT(crc, word);                                                                                  \
        }                                                                                                           \
        for (; i < nbytes; i++) {                                                                                   \
            uint8_t byte = src[i];                                                                                  \
            if (dst)                                                                                                \
                dst[i] = byte;                                                                                      \
            crc = table_byte(crc, byte);                                                                            \
        }                                                                                                           \
        return crc;                                                                                                 \
    }

DEFINE_RUN(run_hardware, HARDWARE, hardware_word)
DEFINE_RUN(run_table, , table_word)

#define DEFINE_RUNS(NAME, ATTRIBUTE, RUN)                                                                           \
    ATTRIBUTE static uint32_t NAME(uint8_t *dst, int64_t dst_stride, const uint8_t *src, int64_t src_stride,       \
                                   int64_t runs, size_t nbytes) {                                                   \
        uint32_t crc = ~0u;                                                                                         \
        for (int64_t run = 0; run < runs; run++)                                                                    \
            crc = RUN(dst ? dst + run * dst_stride : NULL, src + run * src_stride, nbytes, crc);                    \
        return ~crc;                                                                                                \
    }

DEFINE_RUNS(runs_hardware, HARDWARE, run_hardware)
DEFINE_RUNS(runs_table, , run_table)

/* ---- the entry points ---- */

struct plan stream_plan(size_t nbytes) {
    size_t stream = nbytes / (3 * LINE) * LINE;
    return (struct plan){nbytes, stream, shift_factor(stream)};
}

uint32_t crc_unit(const uint8_t *data, const struct unit *unit, struct plan *plan, int hardware) {
    const uint8_t *src = data + unit->start;
    size_t nbytes = (size_t)unit->bytes;
    if (unit->runs > 1)
        return (hardware ? runs_hardware : runs_table)(NULL, 0, src, unit->stride, unit->runs, nbytes);
    if (nbytes != plan->nbytes)
        *plan = stream_plan(nbytes);
    return hardware ? crc_unit_hardware(NULL, src, nbytes, plan->stream, plan->factor)
                    : crc_unit_table(NULL, src, nbytes, plan->stream, plan->factor);
}

/* Writes the CRC32C of units of `data` to crc[i]. */
void crc_units(const uint8_t *data, const struct unit *units, size_t count, uint32_t *crc, int hardware) {
    struct plan plan = {0, 0, 0};
    for (size_t i = 0; i < count; i++)
        crc[i] = crc_unit(data, units + i, &plan, hardware);
}

/* Where the bytes of a unit lie: page p's first run is at `device` + p * device_page on the device, and at `host` +
 * p * host_page from the start of the host pool; its other runs follow at the strides. The binding passes these as
 * rows of int64. */
struct place {
    int64_t device, device_page, device_stride, host, host_page, host_stride, runs, bytes;
};

/* For each i < pages copies these units of page device_pages[i] to those of host_pages[i], or the other way when
 * `to_host` is 0, and writes their CRC32C to crc[i * units ...]. Units must not overlap. */
void copy_pages(uint8_t *host, const struct place *places, size_t units, const int64_t *device_pages,
                const int64_t *host_pages, size_t pages, uint32_t *crc, int to_host, int hardware) {
    struct plan plan = {0, 0, 0};
    for (size_t i = 0; i < pages; i++)
        for (size_t u = 0; u < units; u++) {
            const struct place *at = places + u;
            uint8_t *on_device = (uint8_t *)(intptr_t)at->device + device_pages[i] * at->device_page;
            uint8_t *on_host = host + at->host + host_pages[i] * at->host_page;
            uint8_t *dst = to_host ? on_host : on_device;
            const uint8_t *src = to_host ? on_device : on_host;
            if (at->runs > 1) {
                int64_t to = to_host ? at->host_stride : at->device_stride;
                int64_t from = to_host ? at->device_stride : at->host_stride;
                *crc++ = (hardware ? runs_hardware : runs_table)(dst, to, src, from, at->runs, (size_t)at->bytes);
                continue;
            }
            if ((size_t)at->bytes != plan.nbytes)
                plan = stream_plan((size_t)at->bytes);
            *crc++ = hardware ? copy_unit_fast(dst, src, plan.nbytes, plan.stream, plan.factor)
                              : copy_unit_table(dst, src, plan.nbytes, plan.stream, plan.factor);
        }
    order_stores();
}
