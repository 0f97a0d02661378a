/* Linear layers, fp32 in and out, with weights in several formats. With few rows a linear is bound by reading its weights: half
   the bytes take half the time, and further rows cost little. A row's result does not depend on the number of rows.

   Panels hold the weights of PANEL outputs side by side, the last panel padded with zeros:

       F32, F16, BF16      [outputs / PANEL][inputs][PANEL]
       groups              [outputs / PANEL][inputs / group] of fp16 scales[PANEL], offsets[PANEL] (only with nibbles: fp16, or fp32
                           in the format with wide offsets), and
                               bytes:   codes[group / 2][PANEL][2]
                               nibbles: words[group / 8][PANEL] of eight inputs; the nibbles i and i + 4 are the inputs 2 i, 2 i + 1
       GGUF's blocks       blocks.h

   In groups, a weight is its code times the scale, plus the offset. Codes are multiplied with activations in 16-bit fixed point, one
   scale per group: sums are exact integers, and the rounding (2^-16 of a group's largest) is far below that of fp16 weights. */
/* AHEAD_BYTES: how far ahead blocks are prefetched. With 10 KB instead of 4 and weights in memory, a row of a 135M target takes 6 % less
   time, of a 0.5B one 10 %; 16 KB and more are slower again, as prefetched lines evict each other from the L1 cache. */
enum { PANEL = 32, VECTORS = PANEL / WIDTH, AHEAD = 24, AHEAD_BYTES = 10240 };
/* Calls DO(R, …) for every number of rows R up to the largest */
#define UP_TO_3(DO, ...) DO(1, __VA_ARGS__) DO(2, __VA_ARGS__) DO(3, __VA_ARGS__)
#define UP_TO_4(DO, ...) UP_TO_3(DO, __VA_ARGS__) DO(4, __VA_ARGS__)
#define UP_TO_8(DO, ...) UP_TO_4(DO, __VA_ARGS__) DO(5, __VA_ARGS__) DO(6, __VA_ARGS__) DO(7, __VA_ARGS__) DO(8, __VA_ARGS__)
/* Rows whose sums fit the registers; more with block formats, whose panels are computed WIDTH outputs at a time. */
#if defined(__AVX512BW__)
enum { ROWS = 8, BLOCK_ROWS = 8 };
#define FOR_ROWS UP_TO_8
#define FOR_BLOCK_ROWS UP_TO_8
#elif defined(__AVX2__)
enum { ROWS = 3, BLOCK_ROWS = 4 };
#define FOR_ROWS UP_TO_3
#define FOR_BLOCK_ROWS UP_TO_4
#else
enum { ROWS = 3, BLOCK_ROWS = 8 };
#define FOR_ROWS UP_TO_3
#define FOR_BLOCK_ROWS UP_TO_8
#endif
enum { CHUNK = 8 };  /* rows that are multiplied with a panel at a time */

/* Prefetches weights. `streamed`: into no cache but L1. A target larger than the last-level cache is evicted before the next pass
   anyway: keeping its weights out of the caches leaves room for the drafter's weights and the activations. */
static inline void load_ahead(const void *weights, long bytes, int streamed) {
    for (long line = 0; line < bytes; line += 64)
        if (streamed) __builtin_prefetch((const char *)weights + line, 0, 0);
        else __builtin_prefetch((const char *)weights + line);
}

#include "blocks.h"
#include "block_linear.h"

/* The outputs of a linear that have one format, in panels of their own. */
typedef struct {
    const void *panels;
    long outputs, format;
} Part;

enum { MAX_PARTS = 3 };

typedef struct {
    Part parts[MAX_PARTS];
    long num_parts;
    const float *bias;  /* or NULL */
    long inputs, outputs;
    long group;         /* in formats with groups: inputs that share a scale, up to 512 */
    const int64_t *order;  /* in formats with groups: the input that each column reads; NULL: in order */
    long streamed;         /* few rows read the weights without keeping them in the caches */
} Linear;

/* Memory that is prefetched, in shares, while something else is computed. */
typedef struct {
    void (*request)(const void *what, long share, long shares);
    const void *what;
} Ahead;

/* The next linear, or NULL; gated: its panels are processed in pairs. */
typedef struct {
    const Linear *linear;
    int gated;
} Next;

typedef struct {
    const Linear *linear;
    const float *x;         /* [rows, inputs] */
    const int16_t *fixed;   /* x in fixed point, for groups: */
    const float *scales;    /* [rows, groups] */
    const float *sums;      /* [rows, groups] of x */
    Activations *in_bytes;  /* x in 8 bits, for blocks; NULL: not quantised yet */
    Activations *out_bytes; /* gated only: where outputs are also stored in 8 bits, or NULL */
    float *out;
    long rows;
    int add;                /* adds the result to `out` */
    int gelu;               /* gated only: gelu (tanh) instead of silu */
    const Ahead *ahead;     /* or NULL */
    Next next;              /* prefetched while threads wait for each other */
    int streamed;           /* as in the linear; off if there are more rows than ROWS, which read each panel more than once */
} Product;

static inline int is_grouped(long format) {
    return format == GROUPS_OF_BYTES || format == GROUPS_OF_NIBBLES || format == GROUPS_WITH_WIDE_OFFSETS;
}

static inline long part_panels(const Part *part) { return (part->outputs + PANEL - 1) / PANEL; }

static inline long num_panels(const Linear *linear) {
    long panels = 0;
    for (long i = 0; i < linear->num_parts; i++) panels += part_panels(linear->parts + i);
    return panels;
}

static inline long panel_bytes(long format, long inputs, long group) {
    switch (format) {
    case F32: return PANEL * inputs * 4;
    case F16: case BF16: return PANEL * inputs * 2;
    case GROUPS_OF_BYTES: return PANEL * (inputs + inputs / group * 2);
    case GROUPS_OF_NIBBLES: return PANEL * (inputs / 2 + inputs / group * 4);
    case GROUPS_WITH_WIDE_OFFSETS: return PANEL * (inputs / 2 + inputs / group * 6);
    default: return PANEL * block_output_bytes((int)format, inputs);
    }
}

/* out[r][PANEL] = panel · x[row + r]. The number of rows is known at compile time, so that sums stay in registers. */
#define FOR_ALL(R) for (int r = 0; r < R; r++) for (int v = 0; v < VECTORS; v++)
#define PANEL_OF(R, WEIGHT, WIDEN)                                                                                        \
    static void WEIGHT##_panel_##R(const Product *product, long row, const void *weights, float *out) {                   \
        const WEIGHT *panel = weights;                                                                                    \
        long inputs = product->linear->inputs;                                                                            \
        const float *x = product->x + row * inputs;                                                                       \
        vector sums[R][VECTORS] = {0}, wide[VECTORS];                                                                     \
        for (long k = 0; k < inputs; k++, panel += PANEL) {                                                               \
            load_ahead(panel + AHEAD * PANEL, PANEL * sizeof(WEIGHT), product->streamed);                                 \
            for (int v = 0; v < VECTORS; v++) wide[v] = WIDEN(panel + v * WIDTH);                                         \
            FOR_ALL(R) sums[r][v] += wide[v] * x[r * inputs + k];                                                         \
        }                                                                                                                 \
        memcpy(out, sums, sizeof sums);                                                                                   \
    }

/* The same for groups of codes, eight inputs at a time. */
#define GROUPED_PANEL_OF(R, CODE, PAIRS)                                                                                  \
    static void CODE##_panel_##R(const Product *product, long row, const void *weights, float *out) {                     \
        enum { BITS = sizeof(CODE) == 1 ? 8 : 4, WIDE = sizeof(CODE) == 3 };                                              \
        const char *panel = weights;                                                                                      \
        long inputs = product->linear->inputs, group = product->linear->group, groups = inputs / group;                   \
        const int32_t *x = (const int32_t *)(product->fixed + row * inputs);                                              \
        const float *scales = product->scales + row * groups, *sums_of_x = product->sums + row * groups;                  \
        vector sums[R][VECTORS] = {0};                                                                                    \
        for (long g = 0; g < groups; g++) {                                                                               \
            const half *header = (const half *)panel;                                                                     \
            words dots[R][VECTORS] = {0}, pairs[VECTORS];                                                                 \
            const float *wide_offsets = (const float *)(panel + PANEL * sizeof(half));                                    \
            panel += (BITS == 8 ? 1 : WIDE ? 3 : 2) * PANEL * sizeof(half);                                               \
            for (long end = (g + 1) * group / 2, k = g * group / 2; k < end; k += 4, panel += PANEL * BITS) {             \
                load_ahead(panel + 64 * AHEAD, PANEL * BITS, product->streamed);                                          \
                _Pragma("GCC unroll 4") for (int i = 0; i < 4; i++) {                                                     \
                    for (int v = 0; v < VECTORS; v++) pairs[v] = PAIRS(panel, i, v);                                      \
                    FOR_ALL(R) dots[r][v] = add_products(dots[r][v], pairs[v], x[r * inputs / 2 + k + i]);                \
                }                                                                                                         \
            }                                                                                                             \
            FOR_ALL(R) {                                                                                                  \
                vector scale = settled(widen_halves(header + v * WIDTH) * scales[r * groups + g]);                        \
                sums[r][v] = settled(sums[r][v] + __builtin_convertvector(dots[r][v], vector) * scale);                   \
                if (WIDE) sums[r][v] += widen_floats(wide_offsets + v * WIDTH) * sums_of_x[r * groups + g];               \
                else if (BITS == 4) sums[r][v] += widen_halves(header + PANEL + v * WIDTH) * sums_of_x[r * groups + g];   \
                sums[r][v] = settled(sums[r][v]);                                                                         \
            }                                                                                                             \
        }                                                                                                                 \
        memcpy(out, sums, sizeof sums);                                                                                   \
    }
#define PAIRS_OF_BYTES(panel, i, v) widen_pairs((const byte *)panel + 2 * (i * PANEL + v * WIDTH))
#define PAIRS_OF_NIBBLES(panel, i, v) (((const words *)panel)[v] >> 4 * i & 0x000f000f)
typedef struct { byte pair[2]; } nibble;  /* the macros tell the formats apart by the type's size */
typedef struct { byte pair[3]; } wide_nibble;

#define PANEL_NAME(R, WEIGHT) WEIGHT##_panel_##R,
#define PANELS_OF(KIND, WEIGHT, WIDEN)                                                                                    \
    FOR_ROWS(KIND, WEIGHT, WIDEN) static const PanelOf WEIGHT##_panel[ROWS + 1] = {0, FOR_ROWS(PANEL_NAME, WEIGHT)};

typedef void (*PanelOf)(const Product *, long, const void *, float *);
PANELS_OF(PANEL_OF, float, widen_floats)
PANELS_OF(PANEL_OF, half, widen_halves)
PANELS_OF(PANEL_OF, bfloat, widen_bfloats)
PANELS_OF(GROUPED_PANEL_OF, byte, PAIRS_OF_BYTES)
PANELS_OF(GROUPED_PANEL_OF, nibble, PAIRS_OF_NIBBLES)
PANELS_OF(GROUPED_PANEL_OF, wide_nibble, PAIRS_OF_NIBBLES)

/* The rows of the next block, in blocks of even size: a last block of one row would be slow, as each sum waits for the one before. */
static inline long next_rows(long left, long most) {
    long blocks = (left + most - 1) / most;
    return (left + blocks - 1) / blocks;
}

/* The part that contains panel `index`, which becomes an index into the part; *first and *width: the panel's outputs. */
static const Part *find_panel(const Linear *linear, long *index, long *first, long *width) {
    const Part *part = linear->parts;
    for (*first = 0; *index >= part_panels(part); part++) *index -= part_panels(part), *first += part->outputs;
    *width = part->outputs - *index * PANEL < PANEL ? part->outputs - *index * PANEL : PANEL;
    *first += *index * PANEL;
    return part;
}

/* Prefetches the first bytes of a panel that does not follow the previous one in memory. */
static inline void fetch_start(const Product *product, long index) {
    const Linear *linear = product->linear;
    long first, width;
    const Part *part = find_panel(linear, &index, &first, &width);
    const char *weights = (const char *)part->panels + index * panel_bytes(part->format, linear->inputs, linear->group);
    load_ahead(weights, AHEAD_BYTES, product->streamed);
}

/* Makes the thread that took the `number`th stretch prefetch the beginning of its share of the next linear while it waits: threads wait
   for an eighth of a pass, and memory would be idle. A plain step of a 135M target takes 5-8 % less time, one of four rows 3 %. */
static void expect(Next next, long number, long threads) {
    enum { BYTES = 65536 };
    if (!next.linear) return;
    long items = num_panels(next.linear) / (next.gated ? 2 : 1), first, width, index = number * large_stretch(items, threads);
    if (index >= items) return;  /* fewer panels than threads */
    const Part *part = find_panel(next.linear, &index, &first, &width);
    expected.at = (const char *)part->panels + index * panel_bytes(part->format, next.linear->inputs, next.linear->group);
    expected.end = expected.at + BYTES;
    expected.streamed = next.linear->streamed != 0;
}

static void expect_next(const void *task, long number, long threads) { expect(((const Product *)task)->next, number, threads); }

/* out[r][0 … PANEL) for the rows of a chunk */
static void one_panel(const Product *product, long index, long row, long rows, float *out) {
    const Linear *linear = product->linear;
    long first, width, inputs = linear->inputs;
    const Part *part = find_panel(linear, &index, &first, &width);
    const PanelOf *panel = part->format == F32 ? float_panel : part->format == F16 ? half_panel : part->format == BF16 ? bfloat_panel
                         : part->format == GROUPS_OF_BYTES ? byte_panel : part->format == GROUPS_OF_NIBBLES ? nibble_panel
                         : part->format == GROUPS_WITH_WIDE_OFFSETS ? wide_nibble_panel : 0;
    const char *weights = (const char *)part->panels + index * panel_bytes(part->format, inputs, linear->group);
    for (long r = 0, some; r < rows; r += some) {
        some = next_rows(rows - r, panel ? ROWS : BLOCK_ROWS);
        if (panel)
            panel[some](product, row + r, weights, out + r * PANEL);
        else {
            long step, first_x = first_unit(row + r, product->rows, inputs / UNIT, &step);
            const Activations *x = product->in_bytes + first_x;
            block_panel((int)part->format, x, step, some, inputs, (const uint8_t *)weights, product->streamed, out + r * PANEL);
        }
    }
    if (linear->bias)
        for (long r = 0; r < rows; r++)
            for (long i = 0; i < width; i++) out[r * PANEL + i] += linear->bias[first + i];
}

static void product_panel(const void *task, long index) {
    const Product *product = task;
    long outputs = product->linear->outputs, first, width, in_part = index;
    float sums[CHUNK * PANEL];
    if (product->ahead) product->ahead->request(product->ahead->what, index, num_panels(product->linear));
    find_panel(product->linear, &in_part, &first, &width);
    for (long row = 0, rows; row < product->rows; row += rows) {
        rows = product->rows - row < CHUNK ? product->rows - row : CHUNK;
        one_panel(product, index, row, rows, sums);
        for (long r = 0; r < rows; r++) {
            float *out = product->out + (row + r) * outputs + first;
            if (product->add)
                for (long i = 0; i < width; i++) out[i] += sums[r * PANEL + i];
            else
                memcpy(out, sums + r * PANEL, sizeof(float) * width);
        }
    }
}

/* A buffer that is kept between calls and grows. */
typedef struct { void *at; size_t bytes; } Memory;

/* Returns at least `bytes` of memory; the content is lost. If memory runs out: NULL, or abort() if a `purpose` is given. */
static void *at_least(Memory *memory, size_t bytes, const char *purpose) {
    if (bytes > memory->bytes) {
        free(memory->at);
        memory->bytes = (bytes + 4095) / 4096 * 4096;
        memory->at = aligned_alloc(64, memory->bytes);
        if (!memory->at) {
            memory->bytes = 0;
            if (purpose) fprintf(stderr, "fledge: no memory for %s (%zu bytes)\n", purpose, bytes), abort();
        }
    }
    return memory->at;
}

static Memory activations;  /* used only while holding the pool's lock */

/* Converts activations to fixed point, for weights in groups. */
static void to_fixed_point(Product *product) {
    const Linear *linear = product->linear;
    long numbers = product->rows * linear->inputs, groups = numbers / linear->group, in_row = linear->inputs / linear->group;
    float gathered[linear->group];
    size_t bytes = numbers * sizeof(int16_t) + 2 * groups * sizeof(float);
    float *scales = at_least(&activations, bytes, "a linear's activations"), *sums = scales + groups;
    int16_t *fixed = (int16_t *)(sums + groups);
    for (long g = 0; g < groups; g++) {
        const float *x = product->x + g * linear->group;
        int16_t *to = fixed + g * linear->group;
        float largest = 1e-30f;
        int sum = 0;
        if (linear->order) {
            const int64_t *order = linear->order + g % in_row * linear->group;
            const float *row = product->x + g / in_row * linear->inputs;
            for (long k = 0; k < linear->group; k++) gathered[k] = row[order[k]];
            x = gathered;
        }
        for (long k = 0; k < linear->group; k++) largest = fabsf(x[k]) > largest ? fabsf(x[k]) : largest;
        float factor = 32767.0f / largest;
        for (long k = 0; k < linear->group; k++) to[k] = (int16_t)rintf(x[k] * factor);
        for (long k = 0; k < linear->group; k++) sum += to[k];
        scales[g] = largest / 32767.0f;
        sums[g] = (float)sum * scales[g];
    }
    product->fixed = fixed, product->scales = scales, product->sums = sums;
}

static void quantise_row_of(const void *task, long row) {
    const Product *product = task;
    long inputs = product->linear->inputs;
    quantise_row(product->x + row * inputs, product->in_bytes, row, product->rows, inputs);
}

/* Quantises activations to 8 bits, for block formats. */
static void quantise(Product *product, int threads) {
    size_t bytes = product->rows * (product->linear->inputs / UNIT) * sizeof(Activations);
    product->in_bytes = at_least(&activations, bytes, "a linear's activations");
    parallel(quantise_row_of, product, product->rows, threads);
}

/* Whether any of its weights have a block format. */
static int in_blocks(const Linear *linear) {
    for (long i = 0; i < linear->num_parts; i++)
        if (strips_of((int)linear->parts[i].format)) return 1;
    return 0;
}

static void prepare(Product *product, int threads) {
    product->streamed = product->linear->streamed && product->rows <= (in_blocks(product->linear) ? BLOCK_ROWS : ROWS);
    if (is_grouped(product->linear->parts[0].format)) to_fixed_point(product);
    else if (!product->in_bytes && in_blocks(product->linear)) quantise(product, threads);
}

/* out [rows, outputs] = (out +) x [rows, inputs] · weights + bias; in_bytes: x in 8 bits, or NULL */
static void multiply(const Linear *linear, const float *x, Activations *in_bytes, float *out, long rows, int add,
                     const Ahead *ahead, Next next, int threads) {
    Product product = {.linear = linear, .x = x, .in_bytes = in_bytes, .out = out, .rows = rows, .add = add, .ahead = ahead, .next = next};
    prepare(&product, threads);
    parallel_then(product_panel, &product, expect_next, num_panels(linear), threads);
}

INLINE float activated(float x, const int gelu) {
    if (!gelu) return x / (1.0f + quick_exp(-x));
    /* x/2 (1 + tanh y) = x / (1 + exp(-2 y)) */
    return x / (1.0f + quick_exp(-1.5957691216f * (x + 0.044715f * x * x * x)));
}

/* gate = silu(gate) · up, or gelu */
INLINE void apply_gates(const int gelu, float *gate, const float *up, long rows) {
    for (long r = 0; r < rows; r++, gate += PANEL, up += PANEL)
        for (long i = 0; i < PANEL; i++) gate[i] = activated(gate[i], gelu) * up[i];
}

/* out [rows, outputs / 2] = silu(gate) · up, or gelu. gate_up has the gates' outputs, then the ups', both in whole panels. A panel of
   outputs is a unit of activations. */
static void gated_panel(const void *task, long index) {
    const Product *product = task;
    const Linear *linear = product->linear;
    long size = linear->outputs / 2;
    /* Small panels need no prefetch: data prefetched beyond a panel of gates is still cached after a panel of ups. */
    int is_large = panel_bytes(linear->parts->format, linear->inputs, linear->group) > 2 * AHEAD_BYTES;
    float gate[CHUNK * PANEL], up[CHUNK * PANEL];
    for (long row = 0, rows; row < product->rows; row += rows) {
        rows = product->rows - row < CHUNK ? product->rows - row : CHUNK;
        if (!row && is_large) fetch_start(product, index + size / PANEL);
        one_panel(product, index, row, rows, gate);
        if (!row && is_large && index + 1 < size / PANEL) fetch_start(product, index + 1);
        one_panel(product, index + size / PANEL, row, rows, up);
        /* All rows are activated before any is quantised, so that quantising does not wait for the same row's activation. */
        if (product->gelu) apply_gates(1, gate, up, rows);
        else apply_gates(0, gate, up, rows);
        for (long r = 0; r < rows; r++) {
            memcpy(product->out + (row + r) * size + index * PANEL, gate + r * PANEL, sizeof(float) * PANEL);
            if (product->out_bytes)
                quantise_unit(gate + r * PANEL, unit_at(product->out_bytes, row + r, product->rows, size, index));
        }
    }
}

static void multiply_gated(const Linear *gate_up, const float *x, Activations *in_bytes, float *out, Activations *out_bytes,
                           long rows, int gelu, Next next, int threads) {
    Product product = {.linear = gate_up, .x = x, .in_bytes = in_bytes, .out = out, .out_bytes = out_bytes, .rows = rows, .gelu = gelu,
                       .next = next};
    prepare(&product, threads);
    parallel_then(gated_panel, &product, expect_next, num_panels(gate_up) / 2, threads);
}

typedef struct {
    int format;
    const uint8_t *file;
    long row_bytes, inputs, outputs;
    uint8_t *panels;
} Packing;

static void pack_panel(const void *task, long index) {
    const Packing *p = task;
    long strip = block_output_bytes(p->format, p->inputs) * WIDTH;
    for (int v = 0; v < VECTORS; v++) {
        long first = index * PANEL + v * WIDTH, rows = p->outputs - first < WIDTH ? p->outputs - first : WIDTH;
        const uint8_t *file = p->file + first * p->row_bytes;
        uint8_t *to = p->panels + (index * VECTORS + v) * strip;
        if (rows < WIDTH) memset(to, 0, strip);
        switch (p->format) {
#define CASE(FORMAT) case FORMAT: pack_strip(FORMAT, file, p->row_bytes, rows, p->inputs, to); break;
        FOR_BLOCK_FORMATS(CASE)
#undef CASE
        }
    }
}

/* The weights of a row of the file as floats: all formats except Fledge's own. */
static void row_weights(int format, const uint8_t *row, long inputs, float *out) {
    long step = file_block_bytes(format), per_block = file_block_inputs(format) / UNIT;
    switch (format) {
    case F32: memcpy(out, row, inputs * sizeof(float)); break;
    case F16: for (long i = 0; i < inputs; i++) out[i] = float_of(half_at(row + 2 * i)); break;
    case BF16:
        for (long i = 0; i < inputs; i++) {
            uint32_t bits = (uint32_t)half_at(row + 2 * i) << 16;
            memcpy(out + i, &bits, sizeof bits);
        }
        break;
#define CASE(FORMAT)                                                                                                      \
    case FORMAT:                                                                                                          \
        for (long k = 0; k < inputs / UNIT; k++) unit_weights(FORMAT, row + k / per_block * step, (int)(k % per_block), out + k * UNIT); \
        break;
    FOR_BLOCK_FORMATS(CASE)
#undef CASE
    }
}
