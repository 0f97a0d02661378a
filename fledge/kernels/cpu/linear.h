/* Linear layers with fp16 or 8-bit weights, fp32 in, out and between. At a few rows a linear is bound by reading its weights: half
   the bytes is half the time, and the further rows ride along. A row's result does not depend on how many rows there are.

   panels [outputs / PANEL][inputs][PANEL]: the weights of PANEL outputs lie side by side, the last panel padded with zeros. */
enum { PANEL = 2 * LANES, ROWS = 8, AHEAD = 24 };

typedef struct {
    const void *panels;   /* fp16, or int8 with scales */
    const float *scales;  /* of each output; NULL: fp16 */
    const float *bias;    /* or NULL */
    long inputs, outputs;
} Linear;

static inline long num_panels(const Linear *linear) { return (linear->outputs + PANEL - 1) / PANEL; }

/* out[row][PANEL] = panel · x[row], for a number of rows known at compile time: sums stay in registers. */
#define PANEL_OF(R, WEIGHT, WIDEN)                                                                                        \
    static void WEIGHT##_panel_##R(const float *x, const void *weights, long inputs, float *out) {                        \
        const WEIGHT *panel = weights;                                                                                    \
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
#define PANELS_OF(WEIGHT, WIDEN)                                                                                          \
    PANEL_OF(1, WEIGHT, WIDEN) PANEL_OF(2, WEIGHT, WIDEN) PANEL_OF(3, WEIGHT, WIDEN) PANEL_OF(4, WEIGHT, WIDEN)           \
    PANEL_OF(5, WEIGHT, WIDEN) PANEL_OF(6, WEIGHT, WIDEN) PANEL_OF(7, WEIGHT, WIDEN) PANEL_OF(8, WEIGHT, WIDEN)           \
    static const PanelOf WEIGHT##_panel[ROWS + 1] = {0, WEIGHT##_panel_1, WEIGHT##_panel_2, WEIGHT##_panel_3,             \
        WEIGHT##_panel_4, WEIGHT##_panel_5, WEIGHT##_panel_6, WEIGHT##_panel_7, WEIGHT##_panel_8};

typedef void (*PanelOf)(const float *, const void *, long, float *);
PANELS_OF(half, widen)
PANELS_OF(byte, widen_bytes)

static void one_panel(const Linear *linear, long index, const float *x, long rows, float *out) {
    long first = index * PANEL, width = linear->outputs - first < PANEL ? linear->outputs - first : PANEL;
    if (linear->scales) {
        byte_panel[rows](x, (const byte *)linear->panels + first * linear->inputs, linear->inputs, out);
        for (long r = 0; r < rows; r++)
            for (long i = 0; i < width; i++) out[r * PANEL + i] *= linear->scales[first + i];
    } else {
        half_panel[rows](x, (const half *)linear->panels + first * linear->inputs, linear->inputs, out);
    }
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
    float *out;
    long rows;
    int add;  /* to what is in `out` already */
} Product;

static void product_panel(const void *task, long index) {
    const Product *product = task;
    long outputs = product->linear->outputs, inputs = product->linear->inputs;
    long first = index * PANEL, width = outputs - first < PANEL ? outputs - first : PANEL;
    float sums[ROWS * PANEL];
    for (long row = 0, rows; row < product->rows; row += rows) {
        rows = next_rows(product->rows - row);
        one_panel(product->linear, index, product->x + row * inputs, rows, sums);
        for (long r = 0; r < rows; r++) {
            float *out = product->out + (row + r) * outputs + first;
            if (product->add)
                for (long i = 0; i < width; i++) out[i] += sums[r * PANEL + i];
            else
                memcpy(out, sums + r * PANEL, sizeof(float) * width);
        }
    }
}

/* out [rows, outputs] = (out +) x [rows, inputs] · weights + bias */
static void multiply(const Linear *linear, const float *x, float *out, long rows, int add, int threads) {
    Product product = {linear, x, out, rows, add};
    parallel(product_panel, &product, num_panels(linear), threads);
}

/* gate_up holds the gates' outputs, then the ups'; both in whole panels. out [rows, outputs / 2] = silu(gate) · up */
static void gated_panel(const void *task, long index) {
    const Product *product = task;
    long size = product->linear->outputs / 2, inputs = product->linear->inputs;
    float gate[ROWS * PANEL], up[ROWS * PANEL];
    for (long row = 0, rows; row < product->rows; row += rows) {
        rows = next_rows(product->rows - row);
        one_panel(product->linear, index, product->x + row * inputs, rows, gate);
        one_panel(product->linear, index + size / PANEL, product->x + row * inputs, rows, up);
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
    Product product = {gate_up, x, out, rows, 0};
    parallel(gated_panel, &product, num_panels(gate_up) / 2, threads);
}
