/* Linear layers with weights of 32, 16, 8 or 4 bits, fp32 in, out and between. At a few rows a linear is bound by reading its
   weights: half the bytes is half the time, and the further rows ride along. A row's result does not depend on how many rows
   there are.

   Panels hold the weights of PANEL outputs side by side, the last one padded with zeros:

       32, 16 bits   [outputs / PANEL][inputs][PANEL]
       8, 4 bits     [outputs / PANEL][inputs / group] of
                         fp16 scales[PANEL], fp16 offsets[PANEL] (4 bits alone),
                         int8 codes[group][PANEL] or words[group / 8][PANEL] of eight inputs, the first in the lowest nibble

   A code times its group's scale, plus its offset, is the weight. */
enum { PANEL = 2 * LANES, ROWS = 8, AHEAD = 24, RUN = 8 };

typedef struct {
    const void *panels;
    const float *bias;  /* or NULL */
    long inputs, outputs;
    long bits, group;   /* group: inputs that share a scale */
} Linear;

static inline long num_panels(const Linear *linear) { return (linear->outputs + PANEL - 1) / PANEL; }

static inline long panel_bytes(const Linear *linear) {
    long weights = linear->inputs * linear->bits / 8;
    if (linear->bits > 8) return PANEL * weights;
    return PANEL * (weights + linear->inputs / linear->group * (linear->bits == 4 ? 2 : 1) * (long)sizeof(half));
}

/* out[row][PANEL] = panel · x[row], for a number of rows known at compile time: sums stay in registers. */
#define PANEL_OF(R, WEIGHT, WIDEN)                                                                                        \
    static void WEIGHT##_panel_##R(const Linear *linear, const void *weights, const float *x, const float *sums, float *out) { \
        const WEIGHT *panel = weights;                                                                                    \
        long inputs = linear->inputs;                                                                                     \
        lanes low[R] = {0}, high[R] = {0};                                                                                \
        for (long k = 0; k < inputs; k++, panel += PANEL) {                                                               \
            __builtin_prefetch(panel + AHEAD * PANEL);                                                                    \
            lanes first = WIDEN(panel), second = WIDEN(panel + LANES);                                                    \
            for (int r = 0; r < R; r++) {                                                                                 \
                low[r] += first * x[r * inputs + k];                                                                      \
                high[r] += second * x[r * inputs + k];                                                                    \
            }                                                                                                             \
        }                                                                                                                 \
        for (int r = 0; r < R; r++) store(out + r * PANEL, low[r]), store(out + r * PANEL + LANES, high[r]);              \
    }

/* The same for groups of codes. Every RUN inputs the sums of codes are scaled and begun anew: at one row a single chain of
   additions would take longer than reading the weights. `sums` [row][group] of x, for the offsets. */
#define GROUPED_PANEL_OF(R, CODE, OFFSETS, READ, WIDEN)                                                                   \
    static void CODE##_panel_##R(const Linear *linear, const void *weights, const float *x, const float *sums, float *out) { \
        const char *panel = weights;                                                                                      \
        long inputs = linear->inputs, group = linear->group, groups = inputs / group;                                     \
        lanes low[R] = {0}, high[R] = {0};                                                                                \
        for (long g = 0, k = 0; g < groups; g++) {                                                                        \
            const half *scales = (const half *)panel;                                                                     \
            lanes low_scale = widen(scales), high_scale = widen(scales + LANES);                                          \
            if (OFFSETS) {                                                                                                \
                lanes low_offset = widen(scales + PANEL), high_offset = widen(scales + PANEL + LANES);                    \
                for (int r = 0; r < R; r++) {                                                                             \
                    low[r] += low_offset * sums[r * groups + g];                                                          \
                    high[r] += high_offset * sums[r * groups + g];                                                        \
                }                                                                                                         \
            }                                                                                                             \
            panel += (1 + OFFSETS) * PANEL * sizeof(half);                                                                \
            for (long end = k + group; k < end; k += RUN) {                                                               \
                lanes low_run[R] = {0}, high_run[R] = {0};                                                                \
                READ(panel)                                                                                               \
                _Pragma("GCC unroll 8") for (int i = 0; i < RUN; i++) {                                                   \
                    lanes first = WIDEN(panel, i, 0), second = WIDEN(panel, i, 1);                                        \
                    for (int r = 0; r < R; r++) {                                                                         \
                        low_run[r] += first * x[r * inputs + k + i];                                                      \
                        high_run[r] += second * x[r * inputs + k + i];                                                    \
                    }                                                                                                     \
                }                                                                                                         \
                for (int r = 0; r < R; r++) low[r] += low_run[r] * low_scale, high[r] += high_run[r] * high_scale;        \
                panel += OFFSETS ? PANEL * RUN / 2 : PANEL * RUN;                                                         \
            }                                                                                                             \
        }                                                                                                                 \
        for (int r = 0; r < R; r++) store(out + r * PANEL, low[r]), store(out + r * PANEL + LANES, high[r]);              \
    }
#define READ_BYTES(panel) for (int i = 0; i < RUN / 2; i++) __builtin_prefetch(panel + (2 * AHEAD + 2 * i) * PANEL);
#define BYTES(panel, i, second) widen_bytes((const byte *)panel + i * PANEL + second * LANES)
#define READ_WORDS(panel)                                                                                                 \
    __builtin_prefetch(panel + AHEAD * PANEL * 2), __builtin_prefetch(panel + (AHEAD + 1) * PANEL * 2);                   \
    const words eights[2] = {((const words *)panel)[0], ((const words *)panel)[1]};
#define NIBBLES(panel, i, second) widen_nibbles(eights[second], i)
#define BYTE_PANEL_OF(R, CODE, WIDEN) GROUPED_PANEL_OF(R, CODE, 0, READ_BYTES, WIDEN)
#define NIBBLE_PANEL_OF(R, CODE, WIDEN) GROUPED_PANEL_OF(R, CODE, 1, READ_WORDS, WIDEN)

#define PANELS_OF(KIND, WEIGHT, WIDEN)                                                                                    \
    KIND(1, WEIGHT, WIDEN) KIND(2, WEIGHT, WIDEN) KIND(3, WEIGHT, WIDEN) KIND(4, WEIGHT, WIDEN)                           \
    KIND(5, WEIGHT, WIDEN) KIND(6, WEIGHT, WIDEN) KIND(7, WEIGHT, WIDEN) KIND(8, WEIGHT, WIDEN)                           \
    static const PanelOf WEIGHT##_panel[ROWS + 1] = {0, WEIGHT##_panel_1, WEIGHT##_panel_2, WEIGHT##_panel_3,             \
        WEIGHT##_panel_4, WEIGHT##_panel_5, WEIGHT##_panel_6, WEIGHT##_panel_7, WEIGHT##_panel_8};

typedef void (*PanelOf)(const Linear *, const void *, const float *, const float *, float *);
PANELS_OF(PANEL_OF, float, load)
PANELS_OF(PANEL_OF, half, widen)
PANELS_OF(BYTE_PANEL_OF, byte, BYTES)
PANELS_OF(NIBBLE_PANEL_OF, nibble, NIBBLES)

static void one_panel(const Linear *linear, long index, const float *x, const float *sums, long rows, float *out) {
    long first = index * PANEL, width = linear->outputs - first < PANEL ? linear->outputs - first : PANEL;
    const PanelOf *panel = linear->bits == 32 ? float_panel : linear->bits == 16 ? half_panel
                         : linear->bits == 8 ? byte_panel : nibble_panel;
    panel[rows](linear, (const char *)linear->panels + index * panel_bytes(linear), x, sums, out);
    if (linear->bias)
        for (long r = 0; r < rows; r++)
            for (long i = 0; i < width; i++) out[r * PANEL + i] += linear->bias[first + i];
}

/* Even blocks: a last one of a single row would wait for its own sums. */
static inline long next_rows(long left) {
    long blocks = (left + ROWS - 1) / ROWS;
    return (left + blocks - 1) / blocks;
}

typedef struct {
    const Linear *linear;
    const float *x;
    const float *sums;  /* of x, by row and group; for weights with offsets */
    float *out;
    long rows;
    int add;  /* to what is in `out` already */
} Product;

static inline const float *sums_of(const Product *product, long row) {
    return product->sums ? product->sums + row * (product->linear->inputs / product->linear->group) : NULL;
}

static void product_panel(const void *task, long index) {
    const Product *product = task;
    long outputs = product->linear->outputs, inputs = product->linear->inputs;
    long first = index * PANEL, width = outputs - first < PANEL ? outputs - first : PANEL;
    float sums[ROWS * PANEL];
    for (long row = 0, rows; row < product->rows; row += rows) {
        rows = next_rows(product->rows - row);
        one_panel(product->linear, index, product->x + row * inputs, sums_of(product, row), rows, sums);
        for (long r = 0; r < rows; r++) {
            float *out = product->out + (row + r) * outputs + first;
            if (product->add)
                for (long i = 0; i < width; i++) out[i] += sums[r * PANEL + i];
            else
                memcpy(out, sums + r * PANEL, sizeof(float) * width);
        }
    }
}

/* Not inlined, so that a row's sums are added in the same order wherever it lies. */
__attribute__((noinline)) static float sum_of(const float *x, long size) {
    float sum = 0.0f;
    for (long k = 0; k < size; k++) sum += x[k];
    return sum;
}

/* What every panel of a linear with offsets needs. The memory is whoever's that holds the pool's lock. */
static const float *group_sums(const Linear *linear, const float *x, long rows) {
    static float *memory;
    static long size;
    if (linear->bits != 4) return NULL;
    long needed = rows * (linear->inputs / linear->group);
    if (needed > size) {
        free(memory);
        memory = malloc(sizeof(float) * (size = needed));
        if (!memory) {
            fprintf(stderr, "fledge: no memory for the sums of %ld rows\n", rows);
            abort();
        }
    }
    for (long i = 0; i < needed; i++) memory[i] = sum_of(x + i * linear->group, linear->group);
    return memory;
}

/* out [rows, outputs] = (out +) x [rows, inputs] · weights + bias */
static void multiply(const Linear *linear, const float *x, float *out, long rows, int add, int threads) {
    Product product = {linear, x, group_sums(linear, x, rows), out, rows, add};
    parallel(product_panel, &product, num_panels(linear), threads);
}

/* gate_up holds the gates' outputs, then the ups'; both in whole panels. out [rows, outputs / 2] = silu(gate) · up */
static void gated_panel(const void *task, long index) {
    const Product *product = task;
    long size = product->linear->outputs / 2, inputs = product->linear->inputs;
    float gate[ROWS * PANEL], up[ROWS * PANEL];
    for (long row = 0, rows; row < product->rows; row += rows) {
        rows = next_rows(product->rows - row);
        one_panel(product->linear, index, product->x + row * inputs, sums_of(product, row), rows, gate);
        one_panel(product->linear, index + size / PANEL, product->x + row * inputs, sums_of(product, row), rows, up);
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
    Product product = {gate_up, x, group_sums(gate_up, x, rows), out, rows, 0};
    parallel(gated_panel, &product, num_panels(gate_up) / 2, threads);
}
