/* Linear layers with weights of 32, 16, 8 or 4 bits, fp32 in and out. At a few rows a linear is bound by reading its weights:
   half the bytes is half the time, and the further rows ride along. A row's result does not depend on how many rows there are.

   Panels hold the weights of PANEL outputs side by side, the last one padded with zeros:

       32, 16 bits   [outputs / PANEL][inputs][PANEL]
       8, 4 bits     [outputs / PANEL][inputs / group] of fp16 scales[PANEL], fp16 offsets[PANEL] (4 bits alone), and
                         8 bits: codes[group / 2][PANEL][2]
                         4 bits: words[group / 8][PANEL] of eight inputs; the nibbles i and i + 4 are the inputs 2 i and 2 i + 1

   A code times its group's scale, plus its offset, is the weight. Codes meet activations in 16-bit fixed point, a scale a
   group: their sums are exact integers, and the rounding (2^-16 of a group's largest) is far below that of fp16 weights. */
enum { PANEL = 32, VECTORS = PANEL / WIDTH, AHEAD = 24 };
/* Rows whose sums fit the registers. */
#if defined(__AVX512BW__)
enum { ROWS = 8 };
#else
enum { ROWS = 3 };
#endif

typedef struct {
    const void *panels;
    const float *bias;  /* or NULL */
    long inputs, outputs;
    long bits, group;   /* group: inputs that share a scale, up to 512 */
} Linear;

typedef struct {
    const Linear *linear;
    const float *x;         /* [rows, inputs] */
    const int16_t *fixed;   /* x in fixed point, for 8 and 4 bits: */
    const float *scales;    /* [rows, groups] */
    const float *sums;      /* [rows, groups] of x */
    float *out;
    long rows;
    int add;                /* to what is in `out` already */
} Product;

static inline long num_panels(const Linear *linear) { return (linear->outputs + PANEL - 1) / PANEL; }

static inline long panel_bytes(const Linear *linear) {
    long weights = linear->inputs * linear->bits / 8;
    if (linear->bits > 8) return PANEL * weights;
    return PANEL * (weights + linear->inputs / linear->group * (linear->bits == 4 ? 2 : 1) * (long)sizeof(half));
}

/* out[r][PANEL] = panel · x[row + r], for a number of rows known at compile time: sums stay in registers. */
#define FOR_ALL(R) for (int r = 0; r < R; r++) for (int v = 0; v < VECTORS; v++)
#define PANEL_OF(R, WEIGHT, WIDEN)                                                                                        \
    static void WEIGHT##_panel_##R(const Product *product, long row, const void *weights, float *out) {                   \
        const WEIGHT *panel = weights;                                                                                    \
        long inputs = product->linear->inputs;                                                                            \
        const float *x = product->x + row * inputs;                                                                       \
        vector sums[R][VECTORS] = {0}, wide[VECTORS];                                                                     \
        for (long k = 0; k < inputs; k++, panel += PANEL) {                                                               \
            __builtin_prefetch(panel + AHEAD * PANEL);                                                                    \
            for (int v = 0; v < VECTORS; v++) wide[v] = WIDEN(panel + v * WIDTH);                                         \
            FOR_ALL(R) sums[r][v] += wide[v] * x[r * inputs + k];                                                         \
        }                                                                                                                 \
        memcpy(out, sums, sizeof sums);                                                                                   \
    }

/* The same for groups of codes, eight inputs at a time. */
#define GROUPED_PANEL_OF(R, CODE, PAIRS)                                                                                  \
    static void CODE##_panel_##R(const Product *product, long row, const void *weights, float *out) {                     \
        enum { BITS = sizeof(CODE) == 1 ? 8 : 4 };                                                                        \
        const char *panel = weights;                                                                                      \
        long inputs = product->linear->inputs, group = product->linear->group, groups = inputs / group;                   \
        const int32_t *x = (const int32_t *)(product->fixed + row * inputs);                                              \
        const float *scales = product->scales + row * groups, *sums_of_x = product->sums + row * groups;                  \
        vector sums[R][VECTORS] = {0};                                                                                    \
        for (long g = 0; g < groups; g++) {                                                                               \
            const half *header = (const half *)panel;                                                                     \
            words dots[R][VECTORS] = {0}, pairs[VECTORS];                                                                 \
            panel += (BITS == 4 ? 2 : 1) * PANEL * sizeof(half);                                                          \
            for (long end = (g + 1) * group / 2, k = g * group / 2; k < end; k += 4, panel += PANEL * BITS) {             \
                for (int line = 0; line < PANEL * BITS; line += 64) __builtin_prefetch(panel + 64 * AHEAD + line);        \
                _Pragma("GCC unroll 4") for (int i = 0; i < 4; i++) {                                                     \
                    for (int v = 0; v < VECTORS; v++) pairs[v] = PAIRS(panel, i, v);                                      \
                    FOR_ALL(R) dots[r][v] = add_products(dots[r][v], pairs[v], x[r * inputs / 2 + k + i]);                \
                }                                                                                                         \
            }                                                                                                             \
            FOR_ALL(R) {                                                                                                  \
                vector scale = settled(widen_halves(header + v * WIDTH) * scales[r * groups + g]);                        \
                sums[r][v] = settled(sums[r][v] + __builtin_convertvector(dots[r][v], vector) * scale);                   \
                if (BITS == 4) sums[r][v] += widen_halves(header + PANEL + v * WIDTH) * sums_of_x[r * groups + g];        \
                sums[r][v] = settled(sums[r][v]);                                                                         \
            }                                                                                                             \
        }                                                                                                                 \
        memcpy(out, sums, sizeof sums);                                                                                   \
    }
#define PAIRS_OF_BYTES(panel, i, v) widen_pairs((const byte *)panel + 2 * (i * PANEL + v * WIDTH))
#define PAIRS_OF_NIBBLES(panel, i, v) (((const words *)panel)[v] >> 4 * i & 0x000f000f)
typedef struct { byte pair[2]; } nibble;  /* any type but a byte */

#if defined(__AVX512BW__)
#define PANELS_OF(KIND, WEIGHT, WIDEN)                                                                                    \
    KIND(1, WEIGHT, WIDEN) KIND(2, WEIGHT, WIDEN) KIND(3, WEIGHT, WIDEN) KIND(4, WEIGHT, WIDEN)                           \
    KIND(5, WEIGHT, WIDEN) KIND(6, WEIGHT, WIDEN) KIND(7, WEIGHT, WIDEN) KIND(8, WEIGHT, WIDEN)                           \
    static const PanelOf WEIGHT##_panel[ROWS + 1] = {0, WEIGHT##_panel_1, WEIGHT##_panel_2, WEIGHT##_panel_3,             \
        WEIGHT##_panel_4, WEIGHT##_panel_5, WEIGHT##_panel_6, WEIGHT##_panel_7, WEIGHT##_panel_8};
#else
#define PANELS_OF(KIND, WEIGHT, WIDEN)                                                                                    \
    KIND(1, WEIGHT, WIDEN) KIND(2, WEIGHT, WIDEN) KIND(3, WEIGHT, WIDEN)                                                  \
    static const PanelOf WEIGHT##_panel[ROWS + 1] = {0, WEIGHT##_panel_1, WEIGHT##_panel_2, WEIGHT##_panel_3};
#endif

typedef void (*PanelOf)(const Product *, long, const void *, float *);
PANELS_OF(PANEL_OF, float, widen_floats)
PANELS_OF(PANEL_OF, half, widen_halves)
PANELS_OF(GROUPED_PANEL_OF, byte, PAIRS_OF_BYTES)
PANELS_OF(GROUPED_PANEL_OF, nibble, PAIRS_OF_NIBBLES)

static void one_panel(const Product *product, long index, long row, long rows, float *out) {
    const Linear *linear = product->linear;
    long first = index * PANEL, width = linear->outputs - first < PANEL ? linear->outputs - first : PANEL;
    const PanelOf *panel = linear->bits == 32 ? float_panel : linear->bits == 16 ? half_panel
                         : linear->bits == 8 ? byte_panel : nibble_panel;
    panel[rows](product, row, (const char *)linear->panels + index * panel_bytes(linear), out);
    if (linear->bias)
        for (long r = 0; r < rows; r++)
            for (long i = 0; i < width; i++) out[r * PANEL + i] += linear->bias[first + i];
}

/* Even blocks: a last one of a single row would wait for its own sums. */
static inline long next_rows(long left) {
    long blocks = (left + ROWS - 1) / ROWS;
    return (left + blocks - 1) / blocks;
}

static void product_panel(const void *task, long index) {
    const Product *product = task;
    long outputs = product->linear->outputs;
    long first = index * PANEL, width = outputs - first < PANEL ? outputs - first : PANEL;
    float sums[ROWS * PANEL];
    for (long row = 0, rows; row < product->rows; row += rows) {
        rows = next_rows(product->rows - row);
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

/* Activations in fixed point, for weights of 8 and 4 bits. The memory is whoever's that holds the pool's lock. */
static void fix(Product *product) {
    static char *memory;
    static size_t size;
    const Linear *linear = product->linear;
    if (linear->bits > 8) return;
    long numbers = product->rows * linear->inputs, groups = numbers / linear->group;
    size_t needed = numbers * sizeof(int16_t) + 2 * groups * sizeof(float);
    if (needed > size) {
        free(memory);
        memory = aligned_alloc(64, size = (needed + 63) / 64 * 64);
        if (!memory) {
            fprintf(stderr, "fledge: no memory for a linear of %ld rows\n", product->rows);
            abort();
        }
    }
    float *scales = (float *)memory, *sums = scales + groups;
    int16_t *fixed = (int16_t *)(sums + groups);
    for (long g = 0; g < groups; g++) {
        const float *x = product->x + g * linear->group;
        int16_t *to = fixed + g * linear->group;
        float largest = 1e-30f;
        int sum = 0;
        for (long k = 0; k < linear->group; k++) largest = fabsf(x[k]) > largest ? fabsf(x[k]) : largest;
        float factor = 32767.0f / largest;
        for (long k = 0; k < linear->group; k++) to[k] = (int16_t)rintf(x[k] * factor);
        for (long k = 0; k < linear->group; k++) sum += to[k];
        scales[g] = largest / 32767.0f;
        sums[g] = (float)sum * scales[g];
    }
    product->fixed = fixed, product->scales = scales, product->sums = sums;
}

/* out [rows, outputs] = (out +) x [rows, inputs] · weights + bias */
static void multiply(const Linear *linear, const float *x, float *out, long rows, int add, int threads) {
    Product product = {.linear = linear, .x = x, .out = out, .rows = rows, .add = add};
    fix(&product);
    parallel(product_panel, &product, num_panels(linear), threads);
}

/* gate_up holds the gates' outputs, then the ups'; both in whole panels. out [rows, outputs / 2] = silu(gate) · up */
static void gated_panel(const void *task, long index) {
    const Product *product = task;
    long size = product->linear->outputs / 2;
    float gate[ROWS * PANEL], up[ROWS * PANEL];
    for (long row = 0, rows; row < product->rows; row += rows) {
        rows = next_rows(product->rows - row);
        one_panel(product, index, row, rows, gate);
        one_panel(product, index + size / PANEL, row, rows, up);
        for (long r = 0; r < rows; r++) {
            float *out = product->out + (row + r) * size + index * PANEL;
            for (long i = 0; i < PANEL; i++) {
                float g = gate[r * PANEL + i];
                out[i] = g / (1.0f + quick_exp(-g)) * up[r * PANEL + i];
            }
        }
    }
}

static void multiply_gated(const Linear *gate_up, const float *x, float *out, long rows, int threads) {
    Product product = {.linear = gate_up, .x = x, .out = out, .rows = rows};
    fix(&product);
    parallel(gated_panel, &product, num_panels(gate_up) / 2, threads);
}
