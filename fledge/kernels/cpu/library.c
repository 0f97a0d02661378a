/* The functions that Python calls: layers, a target's pass, draft steps and chains, one call each. Each step takes microseconds of
   arithmetic; as torch operations the same time would go into dispatch, and threads would have to synchronise after each. References:
   tests/kernels/test_native.py. */
#include <math.h>
#include <stdio.h>

#include "threads.h"
#include "lanes.h"
#include "linear.h"
#include "attention.h"
#include "layer.h"

/* Runs layers. x [rows, hidden], in place: the residual stream before and after them. `normed`: the first attention's input if the
   first layer has no input norm (a drafter's). `next`: the linear that follows them, or NULL. Returns 1 if memory ran out. */
int run_layers(const Layer *layers, const Cache *caches, long num_layers, const Batch *batch, float *x, const float *normed,
               const long *taps, long num_taps, float *tapped, const Linear *next) {
    pthread_mutex_lock(&pool.caller);
    int failed = layers_locked(layers, caches, num_layers, batch, x, normed, taps, num_taps, tapped, next);
    pthread_mutex_unlock(&pool.caller);
    return failed;
}

typedef struct {
    Linear gate_up, down;
} Expert;

/* out [rows, hidden] += Σ_k weight_k · expert_k(x). Each row's experts are added in the order of their indices, so that a row does not
   depend on the experts of other rows. Returns 1 if memory ran out. */
static int experts_locked(const Expert *experts, long num_experts, const float *x, const int64_t *chosen, const float *weights,
                          float *out, long rows, long per_row, int threads) {
    long hidden = experts->down.outputs, middle = experts->down.inputs;
    size_t bytes = rows * (2 * hidden + middle) * sizeof(float) + (rows + 1) * (sizeof(long) + sizeof(float));
    float *memory = at_least(&working, bytes, NULL);
    if (!memory) return 1;
    float *input = memory, *output = input + rows * hidden, *gated = output + rows * hidden, *weight = gated + rows * middle;
    long *row = (long *)(weight + rows + (rows & 1));
    for (long e = 0; e < num_experts; e++) {
        long count = 0;
        for (long r = 0; r < rows; r++)
            for (long k = 0; k < per_row; k++)
                if (chosen[r * per_row + k] == e) row[count] = r, weight[count++] = weights[r * per_row + k];
        if (!count) continue;
        for (long i = 0; i < count; i++) memcpy(input + i * hidden, x + row[i] * hidden, hidden * sizeof(float));
        multiply_gated(&experts[e].gate_up, input, NULL, gated, NULL, count, 0, (Next){&experts[e].down, 0}, threads);
        multiply(&experts[e].down, gated, NULL, output, count, 0, NULL, (Next){0}, threads);
        for (long i = 0; i < count; i++)
            for (long d = 0; d < hidden; d++) out[row[i] * hidden + d] += weight[i] * output[i * hidden + d];
    }
    return 0;
}

int run_experts(const Expert *experts, long num_experts, const float *x, const int64_t *chosen, const float *weights, float *out,
                long rows, long per_row, int threads) {
    pthread_mutex_lock(&pool.caller);
    int failed = experts_locked(experts, num_experts, x, chosen, weights, out, rows, per_row, threads);
    pthread_mutex_unlock(&pool.caller);
    return failed;
}

/* out [rows, outputs] = x [rows, inputs] · weights + bias */
void run_linear(const Linear *linear, const float *x, float *out, long rows, int threads) {
    pthread_mutex_lock(&pool.caller);
    multiply(linear, x, NULL, out, rows, 0, NULL, (Next){0}, threads);
    pthread_mutex_unlock(&pool.caller);
}

/* Bytes of the panels of `outputs` rows of a block format; 0 for formats without panels. */
long packed_bytes(int format, long inputs, long outputs) {
    return strips_of(format) ? (outputs + PANEL - 1) / PANEL * panel_bytes(format, inputs, 0) : 0;
}

/* Packs rows of a file, `row_bytes` apart, into panels. */
void pack_blocks(int format, const void *file, long row_bytes, long inputs, long outputs, void *panels, int threads) {
    Packing packing = {format, file, row_bytes, inputs, outputs, panels};
    pthread_mutex_lock(&pool.caller);
    parallel(pack_panel, &packing, (outputs + PANEL - 1) / PANEL, threads);
    pthread_mutex_unlock(&pool.caller);
}

/* out [count, inputs]: rows of a table with `outputs` rows in a file's format. Returns 1 if there is no such row. */
int look_up(int format, const void *table, long row_bytes, long inputs, long outputs, const int64_t *rows, long count, float *out) {
    for (long i = 0; i < count; i++)
        if (rows[i] < 0 || rows[i] >= outputs) return 1;
    for (long i = 0; i < count; i++) row_weights(format, (const uint8_t *)table + rows[i] * row_bytes, inputs, out + i * inputs);
    return 0;
}

typedef struct {
    const float *logits;
    long size, *index;
    float *probability;
} Best;

static void best_of_row(const void *task, long r) {
    enum { BLOCK = 1024 };  /* the index is searched only in the block that contains the maximum */
    const Best *best = task;
    const float *row = best->logits + r * best->size;
    float highest = row[0], total = 0.0f;
    long at = 0, size = best->size;
    for (long first = 0; first < size; first += BLOCK) {
        long end = first + BLOCK < size ? first + BLOCK : size;
        float most = row[first];
        for (long i = first; i < end; i++) most = row[i] > most ? row[i] : most;
        if (most > highest) highest = most, at = first;
    }
    while (at < size - 1 && row[at] != highest) at++;
    best->index[r] = at;
    if (best->probability) {
        for (long i = 0; i < size; i++) total += quick_exp(row[i] - highest);
        best->probability[r] = 1.0f / total;
    }
}

/* Per row: the index of the highest value (the first, if several) and its share of the softmax. */
void best_of(const float *logits, long rows, long size, long *index, float *probability, int threads) {
    Best best = {logits, size, index, probability};
    pthread_mutex_lock(&pool.caller);
    parallel(best_of_row, &best, rows, threads);
    pthread_mutex_unlock(&pool.caller);
}

typedef struct {
    const void *rows;
    long format, row_bytes, vocab, size;
} Embeddings;

static int embed(const Embeddings *table, const int64_t *tokens, long count, float *out) {
    return look_up((int)table->format, table->rows, table->row_bytes, table->size, table->vocab, tokens, count, out);
}

typedef struct {
    Embeddings embeddings;
    const Layer *layers;
    const Cache *caches;
    long num_layers;
    const float *norm;
    float eps, embedding_scale;
    Linear head;
} Target;

/* A target's pass: x [rows, size], the residual stream after the layers; `tapped`: see `layers_locked`; logits [count, vocab] of the
   rows `wanted`. Returns 1 if memory ran out, 2 if there is no such token. */
int run_target(const Target *target, const Batch *batch, const int64_t *tokens, const long *taps, long num_taps, float *tapped,
               const long *wanted, long count, float *x, float *logits) {
    long size = target->embeddings.size, rows = batch->rows;
    float *normed = malloc((count + 1) * size * sizeof(float));
    if (!normed) return 1;
    int failed = 2 * embed(&target->embeddings, tokens, rows, x);
    if (!failed) {
        if (target->embedding_scale != 1.0f)
            for (long i = 0; i < rows * size; i++) x[i] *= target->embedding_scale;
        failed = run_layers(target->layers, target->caches, target->num_layers, batch, x, NULL, taps, num_taps, tapped, &target->head);
    }
    if (!failed && count) {
        for (long i = 0; i < count; i++) rms_norm(x + wanted[i] * size, target->norm, normed + i * size, 1, size, size, target->eps);
        run_linear(&target->head, normed, logits, count, (int)batch->threads);
    }
    free(normed);
    return failed;
}

typedef struct {
    Embeddings embeddings;
    const float *embedding_norm, *hidden_norm, *norm;
    float eps;
    int norm_before_residual, norm_output;
    const Layer *layers;
    const Cache *caches;
    long num_layers;
    /* For chains: */
    long num_taps, tap_size;
    const float *whole_norm;   /* norm of the concatenated taps, or NULL */
    const float **tap_norms;   /* norm of each tap, or NULL */
    Linear fc, head;
    const int64_t *target_ids; /* target token ids of the head's outputs */
} Drafter;

/* A draft step: tokens with the states h [rows, size] that they are paired with. x [rows, size]: the residual stream after the
   layers; out: its norm. Returns 1 if memory ran out, 2 if there is no such token. */
int run_drafter(const Drafter *drafter, const Batch *batch, const int64_t *tokens, const float *h, float *x, float *out) {
    long size = drafter->embeddings.size, rows = batch->rows, numbers = rows * size;
    float *pairs = malloc(3 * numbers * sizeof(float)), *embedded = pairs + 2 * numbers;
    if (!pairs) return 1;
    int failed = 2 * embed(&drafter->embeddings, tokens, rows, embedded);
    if (!failed) {
        rms_norm(embedded, drafter->embedding_norm, pairs, rows, size, 2 * size, drafter->eps);
        rms_norm(h, drafter->hidden_norm, pairs + size, rows, size, 2 * size, drafter->eps);
        for (long r = 0; r < rows; r++)
            memcpy(x + r * size, drafter->norm_before_residual ? pairs + (2 * r + 1) * size : h + r * size, size * sizeof(float));
        failed = run_layers(drafter->layers, drafter->caches, drafter->num_layers, batch, x, pairs, NULL, 0, NULL, &drafter->head);
        rms_norm(x, drafter->norm, out, rows, size, size, drafter->eps);
    }
    free(pairs);
    return failed;
}

/* The inputs of `fc`: the concatenated taps of each row, normed together or one by one. */
static void join_taps(const Drafter *drafter, const float **taps, long rows, float *out) {
    long size = drafter->tap_size, width = drafter->num_taps * size;
    for (long t = 0; t < drafter->num_taps; t++) {
        if (drafter->tap_norms) rms_norm(taps[t], drafter->tap_norms[t], out + t * size, rows, size, width, drafter->eps);
        else for (long r = 0; r < rows; r++) memcpy(out + r * width + t * size, taps[t] + r * size, size * sizeof(float));
    }
    if (drafter->whole_norm) rms_norm(out, drafter->whole_norm, out, rows, width, width, drafter->eps);
}

/* Syncs one sequence with the target's states (`taps`, [rows, tap_size] each) and drafts a chain: up to `limit` tokens, while the
   product of their probabilities, each times `covered`, stays at or above `threshold`. The sequence's last run must have slots for the
   drafted tokens. Returns the number of drafted tokens; 0 if memory ran out, -1 if there is no such token. */
long draft_chain(const Drafter *drafter, const Batch *synced, const int64_t *tokens, const float **taps, long limit, double threshold,
                 double covered, int64_t *drafted, double *confidences) {
    long size = drafter->embeddings.size, rows = synced->rows, width = drafter->num_taps * drafter->tap_size, outputs = drafter->head.outputs;
    float *memory = malloc((rows * (width + 3 * size) + outputs) * sizeof(float)), probability;
    if (!memory) return 0;
    float *joined = memory, *h = joined + rows * width, *x = h + rows * size, *post = x + rows * size, *logits = post + rows * size;
    const float *last = post + (rows - 1) * size, *fed_back = (drafter->norm_output ? post : x) + (rows - 1) * size;
    Sequence sequence = *synced->sequences;
    Batch batch = *synced;
    int64_t position = sequence.kv_len - 1;
    double joint = 1.0;
    join_taps(drafter, taps, rows, joined);
    run_linear(&drafter->fc, joined, h, rows, (int)batch.threads);
    int failed = run_drafter(drafter, synced, tokens, h, x, post);
    batch.sequences = &sequence, batch.positions = &position, batch.rows = sequence.query_len = 1;
    long depth = 0;
    while (!failed && depth < limit) {
        long best;
        run_linear(&drafter->head, last, logits, 1, (int)batch.threads);
        best_of(logits, 1, outputs, &best, &probability, 1);
        drafted[depth] = drafter->target_ids[best];
        joint *= confidences[depth++] = covered * probability;
        if (depth == limit || joint < threshold) break;
        sequence.kv_len++, position++;
        memcpy(h, fed_back, size * sizeof(float));
        failed = run_drafter(drafter, &batch, drafted + depth - 1, h, x, post);
        last = post, fed_back = drafter->norm_output ? post : x;
    }
    free(memory);
    return failed ? 1 - failed : depth;
}
