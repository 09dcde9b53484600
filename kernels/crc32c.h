/* What page_copy.c offers to the other kernels. */

#include <stddef.h>
#include <stdint.h>

/* How to go through units of one length: `stream_plan` computes it, which takes as long as 5 KiB of checksum. */
struct plan {
    size_t nbytes, stream;
    uint32_t factor;
};

struct plan stream_plan(size_t nbytes);

/* `runs` runs of `bytes` bytes each: the first at `start` of some data, the others `stride` apart. */
struct unit {
    int64_t start, stride, runs, bytes;
};

/* CRC32C of a unit; `plan` is of the last one, and is renewed when this is longer or shorter; `hardware` as in
 * page_copy.c. */
uint32_t crc_unit(const uint8_t *data, const struct unit *unit, struct plan *plan, int hardware);
