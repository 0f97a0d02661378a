/* Tests all block formats against a scalar reference, 1 to 16 rows, fixed seeds: for processors of other types (`make test-arm`).
   Python tests check the reference against `gguf`. With an argument, prints the microseconds per product instead. */
#include <time.h>

#include "library.c"

static uint64_t state = 1;
static uint32_t draw(void) { return (uint32_t)((state = state * 6364136223846793005ULL + 1442695040888963407ULL) >> 33); }
static float uniform(void) { return (float)draw() / 1073741824.0f - 1.0f; }

/* Random quantised values and scales; the fp16 numbers get values as real weights have. */
static uint8_t *random_rows(int format, long inputs, long outputs) {
    long blocks = inputs / file_block_inputs(format) * outputs, bytes = file_block_bytes(format);
    uint8_t *file = malloc(blocks * bytes);
    for (long i = 0; i < blocks * bytes; i++) file[i] = (uint8_t)(draw() >> 8);
    for (long i = 0; i < blocks; i++) {
        half d = half_of(0.01f * uniform()), m = half_of(0.02f * uniform());
        uint8_t *block = file + i * bytes;
        long at = format == Q2_K ? 80 : format == Q3_K ? 108 : format == Q6_K ? 208 : 0;
        memcpy(block + at, &d, 2);
        if (has_min(format)) memcpy(block + at + 2, &m, 2);
    }
    return file;
}

static int check(int format, const char *name, long inputs, long outputs) {
    enum { MOST = 16 };
    long row_bytes = inputs / file_block_inputs(format) * file_block_bytes(format), units = inputs / UNIT;
    uint8_t *file = random_rows(format, inputs, outputs);
    uint8_t *panels = aligned_alloc(64, (packed_bytes(format, inputs, outputs) + 63) / 64 * 64);
    pack_blocks(format, file, row_bytes, inputs, outputs, panels, 2);
    Linear linear = {.parts = {{panels, outputs, format}}, .num_parts = 1, .inputs = inputs, .outputs = outputs};
    float x[MOST * inputs], together[MOST * outputs], out[MOST * outputs], weights[inputs];
    for (long i = 0; i < MOST * inputs; i++) x[i] = uniform() * (i % inputs == 5 ? 100 : 1);
    run_linear(&linear, x, together, MOST, 2);
    int bad = 0;
    Activations quantised[units];
    for (long r = 0; r < MOST; r++) {
        quantise_row(x + r * inputs, quantised, 0, 1, inputs);
        for (long o = 0; o < outputs; o++) {
            double sum = 0, size = 0;
            row_weights(format, file + o * row_bytes, inputs, weights);
            for (long k = 0; k < inputs; k++) {
                double term = (double)weights[k] * quantised[k / UNIT].codes[k % UNIT] * quantised[k / UNIT].scale;
                sum += term, size += fabs(term);
            }
            bad += !(fabs(together[r * outputs + o] - sum) <= 2e-6 * size);
        }
    }
    for (long rows = 1; rows <= MOST; rows++)
        for (long first = 0; first + rows <= MOST; first += 3) {
            run_linear(&linear, x + first * inputs, out, rows, 1 + rows % 2);
            bad += memcmp(out, together + first * outputs, rows * outputs * sizeof(float)) != 0;
        }
    printf("%-7s %ld x %ld: %s\n", name, outputs, inputs, bad ? "WRONG" : "right");
    free(file), free(panels);
    return bad;
}

static double now(void) {
    struct timespec time;
    clock_gettime(CLOCK_MONOTONIC, &time);
    return time.tv_sec + 1e-9 * time.tv_nsec;
}

/* Prints microseconds by number of rows, and the bandwidth at one row. Runs 16 linears in turn, as a model does. */
static void measure(int format, const char *name, long inputs, long outputs, int threads) {
    enum { LINEARS = 16 };
    static const long ROW_COUNTS[] = {1, 2, 4, 6, 8, 16, 64};
    long row_bytes = inputs / file_block_inputs(format) * file_block_bytes(format), bytes = packed_bytes(format, inputs, outputs);
    uint8_t *file = random_rows(format, inputs, outputs);
    float *x = malloc(64 * inputs * sizeof(float)), *out = malloc(64 * outputs * sizeof(float));
    Linear linears[LINEARS];
    double start = now();
    for (int i = 0; i < LINEARS; i++) {
        uint8_t *panels = aligned_alloc(64, (bytes + 63) / 64 * 64);
        pack_blocks(format, file, row_bytes, inputs, outputs, panels, threads);
        linears[i] = (Linear){.parts = {{panels, outputs, format}}, .num_parts = 1, .inputs = inputs, .outputs = outputs};
    }
    double packing = now() - start;
    for (long i = 0; i < 64 * inputs; i++) x[i] = uniform();
    printf("%-7s", name);
    for (int n = 0; n < 7; n++) {
        double best = 1e9;
        for (int turn = 0; turn < 5; turn++) {
            start = now();
            for (int i = 0; i < LINEARS; i++) run_linear(linears + i, x, out, ROW_COUNTS[n], threads);
            double each = (now() - start) / LINEARS;
            best = each < best ? each : best;
        }
        printf(" %ld: %.0f us", ROW_COUNTS[n], best * 1e6);
        if (n == 0) printf(" (%.1f GB/s)", bytes / best * 1e-9);
        if (n == 6) printf(" (%.0f GMAC/s)", 64.0 * inputs * outputs / best * 1e-9);
    }
    printf("; packing %.2f GB/s\n", LINEARS * bytes / packing * 1e-9);
    for (int i = 0; i < LINEARS; i++) free((void *)linears[i].parts[0].panels);
    free(file), free(x), free(out);
}

int main(int count, char **arguments) {
    int bad = 0;
#define CASE(FORMAT)                                                                                                      \
    if (count > 1) measure(FORMAT, #FORMAT, 1024, 4864, atoi(arguments[1]));                                              \
    else bad += check(FORMAT, #FORMAT, 256, 51) + check(FORMAT, #FORMAT, 768, 96);
    FOR_BLOCK_FORMATS(CASE)
    return bad != 0;
}
