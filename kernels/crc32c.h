/* What page_copy.c offers to the other kernels. */

#include <stddef.h>
#include <stdint.h>

/* How to go through units of one length: `stream_plan` computes it, which takes as long as 5 KiB of checksum. */
struct plan {
    size_t nbytes, stream;
    uint32_t factor;
};

struct plan stream_plan(size_t nbytes);

/* CRC32C of the `plan->nbytes` bytes at src; `hardware` as in page_copy.c. */
uint32_t crc_unit(const uint8_t *src, const struct plan *plan, int hardware);
