/* Linear layers with fp16 weights, fp32 in, out and between. At a few rows a linear is bound by reading its weights: half the
   bytes is half the time, and the further rows ride along. A row's result does not depend on how many rows there are.

   panels [outputs / PANEL][inputs][PANEL]: the weights of PANEL outputs lie side by side, the last panel padded with zeros. */
enum { PANEL = 2 * LANES, ROWS = 8, AHEAD = 24 };

typedef struct {
    const uint16_t *panels;
    const float *bias;  /* or NULL */
    long inputs, outputs;
} Linear;

static inline long num_panels(const Linear *linear) { return (linear->outputs + PANEL - 1) / PANEL; }

/* out[row][PANEL] = panel · x[row], for a number of rows known at compile time: sums stay in registers. */
#define PANEL_OF(R)                                                                                                       \
    static void panel_of_##R(const float *x, const uint16_t *panel, long inputs, long x_stride, float *out) {             \
        lanes low[R] = {0}, high[R] = {0};                                                                                \
        for (long k = 0; k < inputs; k++, panel += PANEL) {                                                               \
            __builtin_prefetch(panel + AHEAD * PANEL);                                                                    \
            lanes first = widen(panel), second = widen(panel + LANES);                                                    \
            for (int r = 0; r < R; r++) {                                                                                 \
                low[r] += first * x[r * x_stride + k];                                                                    \
                high[r] += second * x[r * x_stride + k];                                                                  \
            }                                                                                                             \
        }                                                                                                                 \
        for (int r = 0; r < R; r++) store(out + r * PANEL, low[r]), store(out + r * PANEL + LANES, high[r]);              \
    }
PANEL_OF(1) PANEL_OF(2) PANEL_OF(3) PANEL_OF(4) PANEL_OF(5) PANEL_OF(6) PANEL_OF(7) PANEL_OF(8)

typedef void (*PanelOf)(const float *, const uint16_t *, long, long, float *);
static const PanelOf panel_of[ROWS + 1] = {0, panel_of_1, panel_of_2, panel_of_3, panel_of_4,
                                           panel_of_5, panel_of_6, panel_of_7, panel_of_8};

static void one_panel(const Linear *linear, long index, const float *x, long rows, float *out) {
    panel_of[rows](x, linear->panels + index * linear->inputs * PANEL, linear->inputs, linear->inputs, out);
    if (linear->bias) {
        long first = index * PANEL, width = linear->outputs - first < PANEL ? linear->outputs - first : PANEL;
        for (long r = 0; r < rows; r++)
            for (long i = 0; i < width; i++) out[r * PANEL + i] += linear->bias[first + i];
    }
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
    for (long row = 0; row < product->rows; row += ROWS) {
        long rows = product->rows - row < ROWS ? product->rows - row : ROWS;
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
    for (long row = 0; row < product->rows; row += ROWS) {
        long rows = product->rows - row < ROWS ? product->rows - row : ROWS;
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
