/* The product of some outputs with some rows, for vectors of SPAN floats: included once for each kind of register.
 *
 * A vector must fit one register: the compiler keeps larger ones in memory, and the sums with them. */

#define SPAN_(name, span) name##span
#define SPANNED(name, span) SPAN_(name, span)
#define floats SPANNED(floats, SPAN)
#define lanes SPANNED(lanes, SPAN)
#define raw_halves SPANNED(raw_halves, SPAN)
#define widen_vector SPANNED(widen_vector, SPAN)
#define tile SPANNED(tile, SPAN)
#define outputs_of SPANNED(outputs_of, SPAN)

typedef float floats __attribute__((vector_size(4 * SPAN)));
typedef uint32_t lanes __attribute__((vector_size(4 * SPAN)));
typedef uint16_t raw_halves __attribute__((vector_size(2 * SPAN)));

INLINE void widen_vector(floats *into, const uint16_t *from) {
    raw_halves raw;
    memcpy(&raw, from, sizeof(raw));
    lanes wide = __builtin_convertvector(raw, lanes) << 16;
    memcpy(into, &wide, sizeof(wide));
}

/* `outputs` outputs from `first` of `rows` rows from `row`: both are constants where this is called. */
INLINE void tile(const struct product *p, int64_t first, const int outputs, int64_t row, const int rows) {
    floats sums[4][BLOCK];
    for (int o = 0; o < outputs; o++)
        for (int r = 0; r < rows; r++)
            sums[o][r] = (floats){0};
    for (int64_t i = 0; i < p->in; i += SPAN) {
        floats w[4];
        for (int o = 0; o < outputs; o++)
            widen_vector(&w[o], p->weight + (first + o) * p->in + i);
        if (rows <= 2 && i % 32 == 0) /* what the next tile reads: the processor's own prefetch ends at a page */
            for (int o = 0; o < outputs; o++)
                __builtin_prefetch(p->weight + (first + outputs + o) * p->in + i);
        for (int r = 0; r < rows; r++) {
            floats x;
            memcpy(&x, p->x + (row + r) * p->in + i, sizeof(x));
            for (int o = 0; o < outputs; o++)
                sums[o][r] += w[o] * x;
        }
    }
    for (int o = 0; o < outputs; o++)
        for (int r = 0; r < rows; r++) {
            vec whole = {0};
            memcpy(&whole, &sums[o][r], sizeof(floats));
            float sum = sum_of(&whole) + (p->bias ? widen(p->bias[first + o]) : 0.0f);
            p->y[(row + r) * p->out + first + o] = narrow(sum);
        }
}

#define TILES(OUTPUTS)                                                                                              \
    switch (rows) {                                                                                                 \
    case 1: tile(p, first, OUTPUTS, row, 1); break;                                                                 \
    case 2: tile(p, first, OUTPUTS, row, 2); break;                                                                 \
    case 3: tile(p, first, OUTPUTS, row, 3); break;                                                                 \
    case 4: tile(p, first, OUTPUTS, row, 4); break;                                                                 \
    case 5: tile(p, first, OUTPUTS, row, 5); break;                                                                 \
    case 6: tile(p, first, OUTPUTS, row, 6); break;                                                                 \
    case 7: tile(p, first, OUTPUTS, row, 7); break;                                                                 \
    default: tile(p, first, OUTPUTS, row, 8);                                                                       \
    }

/* Outputs from `first` to before `end` of all rows, `block` rows at a time; so many `sums` fit into registers. */
INLINE void outputs_of(const struct product *p, int64_t first, int64_t end, const int block, const int sums) {
    while (first < end) {
        int64_t most = p->rows < block ? p->rows : block;
        int many = 4 * most <= sums && first + 4 <= end ? 4 : 2 * most <= sums && first + 2 <= end ? 2 : 1;
        for (int64_t row = 0; row < p->rows; row += block) {
            int64_t rows = p->rows - row < block ? p->rows - row : block;
            if (many == 4)
                TILES(4)
            else if (many == 2)
                TILES(2)
            else
                TILES(1)
        }
        first += many;
    }
}

#undef floats
#undef lanes
#undef raw_halves
#undef widen_vector
#undef tile
#undef outputs_of
#undef SPAN_
#undef SPANNED
#undef TILES
#undef SPAN
