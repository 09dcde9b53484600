/* Page files read into memory and written from it, a batch at a time: each file is a header and a page. Once begun, a
 * page is opened, checked against its header and closed without the interpreter; several threads share a batch, each
 * with pages of its own. Linux only.
 *
 * A file that isn't in the kernel's cache moves with O_DIRECT where memory and file system allow that: then the disk
 * reads and writes the caller's memory itself. One that is there is copied from it in steps, each of which is
 * checksummed while the processor's cache has it. */

#if defined(__linux__)
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <stdio.h>
#include <string.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <time.h>
#include <unistd.h>

#include "crc32c.h"

#define BLOCK 4096
#define CRC_BYTES 4
#define STEP_BYTES (256 * 1024)  /* of a copy out of the kernel's cache: it stays in the processor's until checksummed */
#define SLICE_NS 1000000         /* the interpreter is asked whether to go on at most this often, between two pages */
#define CACHESTAT 451            /* since Linux 6.5, the same number on every processor */

/* What became of a page, if it isn't an errno; `page_batch.py` has the same list. */
enum { DONE = 0, WAITING = -1, NO_REGULAR_FILE = -2, WRONG_LENGTH = -3, CHECK_FAILED = -4 };

/* The binding has the same structure. */
struct page_batch {
    const char *const *paths;       /* of the files */
    const char *const *temporaries; /* names while they are written */
    uint8_t *headers;               /* header_bytes each */
    uint8_t *const *pages;
    const uint8_t *beginnings;      /* beginning_bytes each: what a header begins with; its table of CRCs follows */
    int32_t *outcomes;              /* only pages that are WAITING are begun */
    int64_t *lengths;               /* bytes that a file written takes on the disk; of a file of WRONG_LENGTH, that */
    const uint8_t *replaces;        /* 1: a file that is there is bad, write over it; else EEXIST becomes of the page */
    uint8_t *past_cache;            /* 1: moved with O_DIRECT */
    const struct unit *table;       /* the units of any page */
    uint32_t *crc;                  /* of the units of each page: found by a read, given for a write */
    int64_t header_bytes, page_bytes, beginning_bytes, units, call_bytes, touch_after_s;
    int32_t verify, direct, sync, sealed, hardware, stop; /* sealed: the headers of pages to be written are there */
};

typedef ssize_t (*move_call)(int, const struct iovec *, int, off_t);

/* Moves bytes [from, to) of a file, which is a header and a page, in calls of at most `call_bytes`. An errno,
 * WRONG_LENGTH when the file ends early, or DONE. */
static int move(move_call call, int file, const struct page_batch *batch, size_t at, int64_t from, int64_t to) {
    uint8_t *header = batch->headers + at * (size_t)batch->header_bytes;
    while (from < to) {
        int64_t end = to - from > batch->call_bytes ? from + batch->call_bytes : to;
        int64_t split = from < batch->header_bytes ? (end < batch->header_bytes ? end : batch->header_bytes) : from;
        struct iovec parts[2] = {
            {header + from, (size_t)(split - from)},
            {batch->pages[at] + (split - batch->header_bytes), (size_t)(end - split)},
        };
        int first = split == from, last = end > split ? 2 : 1;
        ssize_t moved = call(file, parts + first, last - first, from);
        if (moved < 0 && errno != EINTR)
            return errno;
        if (moved == 0)
            return WRONG_LENGTH;
        if (moved > 0)
            from += moved;
    }
    return DONE;
}

/* The same for a whole file past the cache; EINVAL where that is impossible. */
static int move_direct(move_call call, int file, struct page_batch *batch, size_t at) {
    uintptr_t places = (uintptr_t)batch->headers | (uintptr_t)batch->pages[at];
    if ((places | (uintptr_t)batch->header_bytes | (uintptr_t)batch->page_bytes) % BLOCK)
        return EINVAL;
    int flags = fcntl(file, F_GETFL);
    if (flags < 0 || fcntl(file, F_SETFL, flags | O_DIRECT))
        return errno;
    int outcome = move(call, file, batch, at, 0, batch->header_bytes + batch->page_bytes);
    batch->past_cache[at] = outcome == DONE;
    if (outcome == EINVAL && fcntl(file, F_SETFL, flags))
        return errno;
    return outcome;
}

/* Is all of a file in the kernel's cache? */
enum cached { NO, YES, UNKNOWN };

static enum cached in_cache(int file, int64_t length) {
    uint64_t span[2] = {0, (uint64_t)length}, found[5] = {0};
    if (syscall(CACHESTAT, file, span, found, 0))
        return UNKNOWN;
    long page = sysconf(_SC_PAGESIZE);
    return found[0] >= (uint64_t)((length + page - 1) / page) ? YES : NO;
}

/* How far the units of a page are checksummed. */
struct progress {
    int64_t units;
    struct plan plan;
};

/* Checksums the units, in the order of the table, that end within the first `ready` bytes of a page. */
static void checksum(const struct page_batch *batch, size_t at, int64_t ready, struct progress *done) {
    uint32_t *crc = batch->crc + at * (size_t)batch->units;
    for (; done->units < batch->units; done->units++) {
        const struct unit *unit = batch->table + done->units;
        if (unit->start + (unit->runs - 1) * unit->stride + unit->bytes > ready)
            return;
        crc[done->units] = crc_unit(batch->pages[at], unit, &done->plan, batch->hardware);
    }
}

/* CRC32C of all of a header but the last field, which is that. */
static uint32_t crc_of_header(const struct page_batch *batch, const uint8_t *header) {
    struct plan plan = {0, 0, 0};
    struct unit whole = {0, 0, 1, batch->header_bytes - CRC_BYTES};
    return crc_unit(header, &whole, &plan, batch->hardware);
}

/* Makes the header of a page: beginning, table, zeros and the CRC32C of all that. */
static void seal(const struct page_batch *batch, size_t at) {
    uint8_t *header = batch->headers + at * (size_t)batch->header_bytes;
    size_t beginning = (size_t)batch->beginning_bytes, table = (size_t)batch->units * CRC_BYTES;
    size_t end = (size_t)batch->header_bytes - CRC_BYTES;
    memcpy(header, batch->beginnings + at * beginning, beginning);
    memcpy(header + beginning, batch->crc + at * (size_t)batch->units, table);
    memset(header + beginning + table, 0, end - beginning - table);
    uint32_t crc = crc_of_header(batch, header);
    memcpy(header + end, &crc, CRC_BYTES);
}

/* Is the header that of this page, and are the bytes those that it tells of? */
static int check(const struct page_batch *batch, size_t at) {
    const uint8_t *header = batch->headers + at * (size_t)batch->header_bytes;
    const uint8_t *beginning = batch->beginnings + at * (size_t)batch->beginning_bytes;
    uint32_t crc = crc_of_header(batch, header);
    size_t end = (size_t)batch->header_bytes - CRC_BYTES;
    size_t table = (size_t)batch->units * CRC_BYTES;
    if (memcmp(header, beginning, (size_t)batch->beginning_bytes) || memcmp(header + end, &crc, CRC_BYTES))
        return CHECK_FAILED;
    if (batch->verify && memcmp(header + batch->beginning_bytes, batch->crc + at * (size_t)batch->units, table))
        return CHECK_FAILED;
    return DONE;
}

static int read_bytes(int file, struct page_batch *batch, size_t at) {
    int64_t length = batch->header_bytes + batch->page_bytes;
    struct progress done = {0, {0, 0, 0}};
    enum cached cached = in_cache(file, length);
    int outcome = cached == NO ? move_direct(preadv, file, batch, at) : EINVAL;
    if (outcome == EINVAL) {
        if (cached != YES)
            posix_fadvise(file, 0, 0, POSIX_FADV_WILLNEED); /* a cold page in one request instead of small ones */
        outcome = DONE;
        for (int64_t from = 0, to = batch->header_bytes; outcome == DONE && from < length; from = to) {
            to = length - from > STEP_BYTES ? from + STEP_BYTES : length;
            outcome = move(preadv, file, batch, at, from, to);
            if (outcome == DONE && batch->verify)
                checksum(batch, at, to - batch->header_bytes, &done);
        }
    }
    if (outcome == DONE && batch->verify)
        checksum(batch, at, batch->page_bytes, &done);
    return outcome == DONE ? check(batch, at) : outcome;
}

static int read_page(struct page_batch *batch, size_t at) {
    /* A FIFO in the file's place must not hold the thread. */
    int file = open(batch->paths[at], O_RDONLY | O_CLOEXEC | O_NOFOLLOW | O_NONBLOCK);
    if (file < 0)
        return errno;
    struct stat status;
    int outcome;
    if (fstat(file, &status))
        outcome = errno;
    else if (!S_ISREG(status.st_mode))
        outcome = NO_REGULAR_FILE;
    else if (status.st_size != batch->header_bytes + batch->page_bytes)
        outcome = WRONG_LENGTH;
    else
        outcome = read_bytes(file, batch, at);
    if (outcome == DONE && time(NULL) - status.st_mtim.tv_sec > batch->touch_after_s)
        futimens(file, NULL); /* for the next start's LRU order; another user's file can't be touched, nor need it be */
    if (outcome == WRONG_LENGTH && !fstat(file, &status))
        batch->lengths[at] = status.st_size;
    close(file);
    return outcome;
}

/* Writes a file's folder to the disk, so that its name is there after a power cut. */
static int sync_folder(const char *path) {
    char folder[PATH_MAX];
    const char *name = strrchr(path, '/');
    int length = snprintf(folder, sizeof folder, "%.*s", name ? (int)(name - path) : 1, name ? path : ".");
    if (length >= (int)sizeof folder)
        return ENAMETOOLONG;
    int file = open(folder, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    if (file < 0)
        return errno;
    int outcome = fsync(file) ? errno : DONE;
    close(file);
    return outcome;
}

static int write_bytes(int file, struct page_batch *batch, size_t at) {
    int64_t length = batch->header_bytes + batch->page_bytes;
    /* Locked while its writer lives: what isn't locked is a dead one's and may be removed. */
    if (flock(file, LOCK_EX | LOCK_NB))
        return errno;
    int outcome = posix_fallocate(file, 0, length);
    if (outcome)
        return outcome;
    outcome = batch->direct ? move_direct(pwritev, file, batch, at) : EINVAL;
    if (outcome == EINVAL)
        outcome = move(pwritev, file, batch, at, 0, length);
    if (outcome == DONE && batch->sync && fdatasync(file))
        outcome = errno;
    return outcome == WRONG_LENGTH ? EIO : outcome;
}

static int write_page(struct page_batch *batch, size_t at) {
    const char *temporary = batch->temporaries[at];
    struct stat status;
    if (!batch->replaces[at] && lstat(batch->paths[at], &status) == 0)
        return EEXIST;
    int file = open(temporary, O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC | O_NOFOLLOW, 0600);
    if (file < 0)
        return errno;
    if (!batch->sealed)
        seal(batch, at);
    int outcome = write_bytes(file, batch, at);
    if (outcome == DONE && fstat(file, &status))
        outcome = errno;
    if (outcome == DONE && rename(temporary, batch->paths[at]))
        outcome = errno;
    if (outcome != DONE)
        unlink(temporary);
    else if (batch->sync && (outcome = sync_folder(batch->paths[at])) != DONE)
        unlink(batch->paths[at]);
    if (outcome == DONE) /* its length where compression hides what it takes */
        batch->lengths[at] = status.st_blocks * 512 > status.st_size ? status.st_blocks * 512 : status.st_size;
    close(file);
    return outcome;
}

static int64_t now_ns(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (int64_t)now.tv_sec * 1000000000 + now.tv_nsec;
}

/* Reads or writes the pages [first, last) of a batch that are WAITING. Returns the first that it didn't come to:
 * `last`, or less after SLICE_NS, and once `stop` is set. */
int64_t move_pages(struct page_batch *batch, int64_t first, int64_t last, int32_t writing) {
    int64_t begun = now_ns();
    int64_t at = first;
    while (at < last && !__atomic_load_n(&batch->stop, __ATOMIC_RELAXED)) {
        if (batch->outcomes[at] == WAITING)
            batch->outcomes[at] = writing ? write_page(batch, (size_t)at) : read_page(batch, (size_t)at);
        at++;
        if (now_ns() - begun > SLICE_NS)
            break;
    }
    return at;
}
#endif
