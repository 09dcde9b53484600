/* y = x @ weight^T + bias for a few rows of x and a large bfloat16 matrix: a decode step reads every weight once, so
 * this is as fast as memory, or nearly. The matrix stays as it is in the file, [out, in].
 *
 * All sums are in float, in an order that depends neither on the number of rows nor on that of threads, and are rounded
 * once. Threads take turns at small ranges of the outputs, so that one that the machine holds up holds up little. */

#define _GNU_SOURCE
#include <pthread.h>
#include <sched.h>
#include <stdatomic.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include "vectors.h"

#define BLOCK 8        /* rows of x whose sums are in registers together, at most */
#define CHUNK 32       /* outputs that a thread takes at a time */
#define MAX_THREADS 64
#define SPINS 1000     /* about 50 us: from one product of a step to the next; a pause is some 40 ns */

/* ---- the product ---- */

struct product {
    const uint16_t *weight, *bias; /* [out, in]; [out] or NULL */
    const float *x;                /* [rows, in]: the caller's, widened */
    uint16_t *y;                   /* [rows, out] */
    int64_t rows, in, out;
};

#define SPAN 16 /* AVX-512 */
#include "linear_tile.h"
#define SPAN 8 /* AVX2 */
#include "linear_tile.h"
#define SPAN 4 /* any */
#include "linear_tile.h"

typedef void (*part)(const struct product *, int64_t, int64_t);

/* Rows at a time and sums: as many as the registers hold beside a few weights. */
static void outputs_plain(const struct product *p, int64_t first, int64_t end) { outputs_of4(p, first, end, 4, 8); }
#if defined(__x86_64__)
__attribute__((target("avx2,fma"))) static void outputs_avx2(const struct product *p, int64_t first, int64_t end) {
    outputs_of8(p, first, end, 6, 12);
}
__attribute__((target("avx512f,avx512bw,avx512vl,fma"))) static void outputs_avx512(const struct product *p,
                                                                                  int64_t first, int64_t end) {
    outputs_of16(p, first, end, BLOCK, 16);
}
#define PAUSE() __builtin_ia32_pause()
#else
#define PAUSE() (void)0
#endif

static part best_part(void) {
#if defined(__x86_64__)
    if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vl"))
        return outputs_avx512;
    if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma"))
        return outputs_avx2;
#endif
    return outputs_plain;
}

/* ---- threads ---- */

static struct {
    pthread_mutex_t calls;   /* one product at a time */
    pthread_mutex_t changed; /* guards what `wake` tells */
    pthread_cond_t wake;
    int threads, sleepers;
    float *wide; /* x of the product */
    int64_t room;
    atomic_uint job; /* its number */
    struct product product;
    part part;
    atomic_ullong rest;  /* the job's number, and how many outputs nobody has taken: a thread takes the last ones */
    atomic_llong undone; /* outputs */
} team = {.calls = PTHREAD_MUTEX_INITIALIZER, .changed = PTHREAD_MUTEX_INITIALIZER, .wake = PTHREAD_COND_INITIALIZER};

/* Who has taken outputs may read the product: the job can't end before they are done. */
static void take_turns(unsigned job) {
    for (;;) {
        unsigned long long rest = atomic_load(&team.rest);
        int64_t end = (int64_t)(rest & 0xFFFFFFFF), taken = end < CHUNK ? end : CHUNK;
        if ((unsigned)(rest >> 32) != job || !end)
            return;
        if (!atomic_compare_exchange_weak(&team.rest, &rest, rest - (unsigned long long)taken))
            continue;
        team.part(&team.product, end - taken, end);
        atomic_fetch_sub(&team.undone, taken);
    }
}

static void *member(void *unused) {
    (void)unused;
    unsigned seen = 0;
    for (;;) {
        for (int spin = 0; spin < SPINS && atomic_load(&team.job) == seen; spin++)
            PAUSE();
        if (atomic_load(&team.job) == seen) {
            pthread_mutex_lock(&team.changed);
            team.sleepers++;
            while (atomic_load(&team.job) == seen)
                pthread_cond_wait(&team.wake, &team.changed);
            team.sleepers--;
            pthread_mutex_unlock(&team.changed);
        }
        seen = atomic_load(&team.job);
        take_turns(seen);
    }
    return NULL;
}

static void grow(int threads) {
    for (; team.threads < threads - 1 && team.threads < MAX_THREADS; team.threads++) {
        pthread_t made;
        if (pthread_create(&made, NULL, member, NULL))
            return; /* fewer threads: slower, and right */
        pthread_detach(made);
    }
}

/* x: [rows, in], in a multiple of LANES; weight: [out, in]; bias: [out] or NULL; y: [rows, out]; all bfloat16.
 * Returns 0, or -1 when there is no memory for a float copy of x. */
int linear(const uint16_t *x, const uint16_t *weight, const uint16_t *bias, uint16_t *y, int64_t rows, int64_t in,
           int64_t out, int threads) {
    pthread_mutex_lock(&team.calls);
    if (rows * in > team.room) {
        free(team.wide);
        team.wide = malloc((size_t)(rows * in) * sizeof(float));
        team.room = team.wide ? rows * in : 0;
        if (!team.wide) {
            pthread_mutex_unlock(&team.calls);
            return -1;
        }
    }
    for (int64_t i = 0; i < rows * in; i++)
        team.wide[i] = widen(x[i]);
    grow(threads);
    unsigned job = atomic_load(&team.job) + 1;
    team.product = (struct product){weight, bias, team.wide, y, rows, in, out};
    team.part = best_part();
    atomic_store(&team.undone, out);
    atomic_store(&team.rest, (unsigned long long)job << 32 | (unsigned long long)out);
    pthread_mutex_lock(&team.changed);
    atomic_store(&team.job, job);
    if (team.sleepers && threads > 1)
        pthread_cond_broadcast(&team.wake);
    pthread_mutex_unlock(&team.changed);
    take_turns(job);
    for (int spin = 0; atomic_load(&team.undone); spin++)
        if (spin < SPINS)
            PAUSE();
        else
            sched_yield(); /* more threads than processors: let the one that is late run */
    pthread_mutex_unlock(&team.calls);
    return 0;
}
