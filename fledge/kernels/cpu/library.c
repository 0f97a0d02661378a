/* Decoder layers on a CPU: everything between two residual streams in one call. Each step is microseconds of arithmetic; as
   tensor operations they cost as much again in dispatch, and threads would meet as often. References: tests/kernels/test_native.py. */
#include <math.h>
#include <stdio.h>

#include "threads.h"
#include "lanes.h"
#include "linear.h"
#include "attention.h"

enum { MAX_ROPES = 2 };  /* rotary embeddings of a network */

typedef struct {
    const float *input_norm;  /* NULL: the input comes normed */
    const float *post_norm;
    const float *q_norm, *k_norm;  /* or NULL */
    const float *attention_output_norm, *mlp_output_norm;  /* of what is added to the residual stream, or NULL */
    float eps;
    int gelu;                      /* the MLP's gate; else silu */
    int rope;                      /* which of the batch's tables */
    Linear qkv, o, gate_up, down;  /* down without inputs: the MLP is not run here */
} Layer;

/* Longs and pointers alone: Python lays it out as an array of longs. */
typedef struct {
    const Sequence *sequences;
    const float *cosine[MAX_ROPES], *sine[MAX_ROPES];  /* by position: [positions, head size]; the rotation's sign is in the sine */
    const int64_t *positions;  /* of the rows */
    long num_sequences, rows, threads;
} Batch;

static float inverse_rms(const float *x, long size, float eps) {
    float sum = 0.0f;
    for (long i = 0; i < size; i++) sum += x[i] * x[i];
    return 1.0f / sqrtf(sum / (float)size + eps);
}

/* out = x / rms(x) · weight, row by row; rows of `out` lie `stride` apart, so that several norms can share a row */
void rms_norm(const float *x, const float *weight, float *out, long rows, long size, long stride, float eps) {
    for (long r = 0; r < rows; r++) {
        const float *row = x + r * size;
        float scale = inverse_rms(row, size, eps);
        for (long i = 0; i < size; i++) out[r * stride + i] = row[i] * scale * weight[i];
    }
}

/* out += x / rms(x) · weight */
static void add_rms_norm(const float *x, const float *weight, float *out, long rows, long size, float eps) {
    for (long r = 0; r < rows; r++, x += size, out += size) {
        float scale = inverse_rms(x, size, eps);
        for (long i = 0; i < size; i++) out[i] += x[i] * scale * weight[i];
    }
}

typedef struct {
    const float *x, *weight;
    float *out;
    Activations *in_bytes;
    long rows, size;
    float eps;
} Norm;

static void norm_row(const void *task, long row) {
    const Norm *n = task;
    float *out = n->out + row * n->size;
    rms_norm(n->x + row * n->size, n->weight, out, 1, n->size, n->size, n->eps);
    if (n->in_bytes) quantise_row(out, n->in_bytes, row, n->rows, n->size);
}

/* Norms of rows, in 8 bits too if there is a place for that. */
static void norm_rows(const float *x, const float *weight, float *out, Activations *in_bytes, long rows, long size, float eps,
                      int threads) {
    Norm norm = {x, weight, out, in_bytes, rows, size, eps};
    parallel(norm_row, &norm, rows, threads);
}

typedef struct {
    const Layer *layer;
    const Batch *batch;
    const Cache *cache;
    float *heads;     /* [rows, (H + 2K) E]: queries and keys are rotated in place */
    float *attended;  /* [rows, H E] */
    Activations *in_bytes;  /* the same in 8 bits, or NULL */
    const long *block_sequence, *block_start, *block_row;  /* blocks of at most block_rows tokens of one sequence */
    long block_rows;
} Attending;

static void rotate(float *x, const float *cosine, const float *sine, const float *norm, float eps, float factor, long size, float *out) {
    long half = size / 2;
    float normed[size];
    if (norm) {
        float scale = inverse_rms(x, size, eps);
        for (long e = 0; e < size; e++) normed[e] = x[e] * scale * norm[e];
    } else {
        memcpy(normed, x, sizeof(float) * size);
    }
    for (long e = 0; e < half; e++) {
        out[e] = (normed[e] * cosine[e] + normed[e + half] * sine[e]) * factor;
        out[e + half] = (normed[e + half] * cosine[e + half] + normed[e] * sine[e + half]) * factor;
    }
}

/* The sequence that has this row; *token: which of its new tokens it is. */
static const Sequence *sequence_of(const Batch *batch, long row, long *token) {
    const Sequence *sequence = batch->sequences;
    while (row >= sequence->query_len) row -= sequence++->query_len;
    *token = row;
    return sequence;
}

/* Queries and keys are rotated in place, queries scaled; keys and values stored. */
static void place_row(const void *task, long row) {
    const Attending *a = task;
    const Cache *cache = a->cache;
    long E = cache->head_size, H = cache->heads, K = cache->kv_heads, at = a->batch->positions[row] * E, token;
    const Sequence *sequence = sequence_of(a->batch, row, &token);
    float scale = 1.0f / sqrtf((float)E), *heads = a->heads + row * (H + 2 * K) * E;
    const float *cosine = a->batch->cosine[a->layer->rope] + at, *sine = a->batch->sine[a->layer->rope] + at;
    long slot = slot_of(sequence, sequence->kv_len - sequence->query_len + token) * cache->slot_bytes;
    for (long h = 0; h < H; h++) rotate(heads + h * E, cosine, sine, a->layer->q_norm, a->layer->eps, scale, E, heads + h * E);
    for (long h = 0; h < K; h++) {
        long place = h * cache->head_bytes + slot;
        float *key = heads + (H + h) * E;
        rotate(key, cosine, sine, a->layer->k_norm, a->layer->eps, 1.0f, E, key);
        narrow(cache->format, key, E, cache->keys + place);
        narrow(cache->format, heads + (H + K + h) * E, E, cache->values + place);
    }
}

/* A thread's own working memory, kept between calls. */
static float *own_memory(size_t floats) {
    static __thread float *memory;
    static __thread size_t size;
    if (floats > size) {
        free(memory);
        memory = aligned_alloc(64, (floats * sizeof(float) + 63) / 64 * 64);
        if (!memory) {
            fprintf(stderr, "fledge: no memory for attention over a long text\n");
            abort();
        }
        size = floats;
    }
    return memory;
}

static void attend_block(const void *task, long item) {
    const Attending *a = task;
    const Cache *cache = a->cache;
    long block = item / cache->kv_heads, kv_head = item % cache->kv_heads;
    const Sequence *sequence = a->batch->sequences + a->block_sequence[block];
    long E = cache->head_size, H = cache->heads, K = cache->kv_heads, start = a->block_start[block], row = a->block_row[block];
    long rows = sequence->query_len - start < a->block_rows ? sequence->query_len - start : a->block_rows;
    attend_rows(cache, sequence, kv_head, start, rows, a->heads + row * (H + 2 * K) * E, (H + 2 * K) * E,
                a->attended + row * H * E, own_memory(attention_floats(cache, sequence, rows)));
    for (long r = row; a->in_bytes && r < row + rows; r++)
        for (long at = kv_head * (H / K) * E; at < (kv_head + 1) * (H / K) * E; at += UNIT)
            quantise_unit(a->attended + r * H * E + at, unit_at(a->in_bytes, r, a->batch->rows, H * E, at / UNIT));
}

static void expect_o(const void *task, long number, long threads) {
    expect((Next){&((const Attending *)task)->layer->o, 0}, number, threads);
}

enum { FEW_ROWS = 16 };

/* Requests the keys and values that few rows will read. The weights read since the last pass have pushed them out of the caches: in
   this way they arrive while the linear before is computed, and no miss is waited for. */
static void request_cache(const void *what, long share, long shares) {
    const Attending *a = what;
    const Cache *cache = a->cache;
    long most = MOST_KEYS / a->batch->num_sequences, seen = cache->window && cache->window < most ? cache->window : most;
    for (long s = 0; s < a->batch->num_sequences; s++) {
        const Sequence *sequence = a->batch->sequences + s;
        long first = sequence->kv_len > seen ? sequence->kv_len - seen : 0, count = (sequence->kv_len - first + shares - 1) / shares;
        long from = first + share * count, to = from + count < sequence->kv_len ? from + count : sequence->kv_len;
        const Run *run = from < to ? run_of(sequence, from) : NULL;
        for (long h = 0; run && h < cache->kv_heads; h++) {
            fetch(cache, cache->keys + h * cache->head_bytes, run, from, to - from);
            fetch(cache, cache->values + h * cache->head_bytes, run, from, to - from);
        }
    }
}

/* The callers' working memory; whoever holds the pool's lock has it. */
static void *shared_memory(size_t bytes) {
    static void *memory;
    static size_t size;
    if (bytes > size) {
        free(memory);
        size = (bytes + 4095) / 4096 * 4096;
        memory = aligned_alloc(64, size);
        if (!memory) size = 0;
    }
    return memory;
}

/* `next`: the linear that follows the layer, or NULL. */
static int layer_locked(const Layer *layer, const Cache *cache, const Batch *batch, float *x, const float *normed,
                        const Linear *next) {
    long rows = batch->rows, hidden = layer->o.outputs, middle = layer->down.inputs, num_blocks = 0;
    long width = layer->qkv.outputs, H_E = cache->heads * cache->head_size, units = (hidden + (H_E > middle ? H_E : middle)) / UNIT;
    int threads = (int)batch->threads, normed_outputs = layer->attention_output_norm != NULL;
    /* Few rows are dealt out to the threads evenly; many go in blocks that share the turned keys. */
    long share = (rows + threads - 1) / threads, block_rows = share < ROWS ? share : ROWS;
    for (long s = 0; s < batch->num_sequences; s++) num_blocks += (batch->sequences[s].query_len + block_rows - 1) / block_rows;
    size_t floats = (rows * (hidden + width + H_E + middle + (normed_outputs ? hidden : 0)) + 15) / 16 * 16;
    float *memory = shared_memory(floats * sizeof(float) + rows * units * sizeof(Activations) + 3 * num_blocks * sizeof(long));
    if (!memory) return 1;
    float *input = memory, *heads = input + rows * hidden, *attended = heads + rows * width, *gated = attended + rows * H_E;
    float *added = normed_outputs ? gated + rows * middle : x;
    /* What linears of blocks read, in 8 bits: made where it is computed, a unit at a time. */
    Activations *all = (Activations *)(memory + floats), *between = all + rows * (hidden / UNIT);
    Activations *for_qkv = layer->input_norm && in_blocks(&layer->qkv) ? all : NULL, *for_up = in_blocks(&layer->gate_up) ? all : NULL;
    Activations *for_o = in_blocks(&layer->o) && cache->head_size % UNIT == 0 ? between : NULL;
    Activations *for_down = in_blocks(&layer->down) ? between : NULL;
    long *blocks = (long *)(all + rows * units), block = 0, row = 0;
    for (long s = 0; s < batch->num_sequences; row += batch->sequences[s++].query_len)
        for (long t = 0; t < batch->sequences[s].query_len; t += block_rows, block++)
            blocks[block] = s, blocks[num_blocks + block] = t, blocks[2 * num_blocks + block] = row + t;
    Attending a = {layer, batch, cache, heads, attended, for_o, blocks, blocks + num_blocks, blocks + 2 * num_blocks, block_rows};
    Ahead cached = {request_cache, &a};

    if (layer->input_norm) {
        norm_rows(x, layer->input_norm, input, for_qkv, rows, hidden, layer->eps, threads);
        normed = input;
    }
    multiply(&layer->qkv, normed, for_qkv, heads, rows, 0, rows <= FEW_ROWS ? &cached : NULL, (Next){&layer->o, 0}, threads);
    parallel(place_row, &a, rows, threads);
    parallel_then(attend_block, &a, expect_o, num_blocks * cache->kv_heads, threads);
    Next after_o = {middle ? &layer->gate_up : next, middle > 0};
    multiply(&layer->o, attended, for_o, added, rows, !normed_outputs, NULL, after_o, threads);
    if (normed_outputs) add_rms_norm(added, layer->attention_output_norm, x, rows, hidden, layer->eps);
    if (!middle) return 0;
    norm_rows(x, layer->post_norm, input, for_up, rows, hidden, layer->eps, threads);
    multiply_gated(&layer->gate_up, input, for_up, gated, for_down, rows, layer->gelu, (Next){&layer->down, 0}, threads);
    multiply(&layer->down, gated, for_down, added, rows, !normed_outputs, NULL, (Next){next, 0}, threads);
    if (normed_outputs) add_rms_norm(added, layer->mlp_output_norm, x, rows, hidden, layer->eps);
    return 0;
}

/* `taps`, ascending: how many layers have run when x is copied to the next of `tapped` [taps, rows, hidden]. */
static int layers_locked(const Layer *layers, const Cache *caches, long num_layers, const Batch *batch, float *x, const float *normed,
                         const long *taps, long num_taps, float *tapped, const Linear *next) {
    long size = batch->rows * layers->o.outputs, tap = 0;
    for (long i = 0; i <= num_layers; i++) {
        for (; tap < num_taps && taps[tap] == i; tap++) memcpy(tapped + tap * size, x, size * sizeof(float));
        if (i == num_layers) break;
        const Linear *after = i + 1 < num_layers ? &layers[i + 1].qkv : next;
        if (layer_locked(layers + i, caches + i, batch, x, i ? NULL : normed, after)) return 1;
    }
    return 0;
}

/* x [rows, hidden], in place: the residual stream before and after the layers. `normed`: the first attention's input where the first
   layer has no input norm (a drafter's). `next`: the linear that follows them, or NULL. Returns 1 if there was no memory. */
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

/* out [rows, hidden] += Σ_k weight_k · expert_k(x). Each row's experts are added in the order of their numbers, so that no row
   depends on where the others go. Returns 1 if there was no memory. */
static int experts_locked(const Expert *experts, long num_experts, const float *x, const int64_t *chosen, const float *weights,
                          float *out, long rows, long per_row, int threads) {
    long hidden = experts->down.outputs, middle = experts->down.inputs;
    float *memory = shared_memory(rows * (2 * hidden + middle) * sizeof(float) + (rows + 1) * (sizeof(long) + sizeof(float)));
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

/* Bytes of the panels of `outputs` rows of a block format; 0 for formats that have none. */
long packed_bytes(int format, long inputs, long outputs) {
    return strips_of(format) ? (outputs + PANEL - 1) / PANEL * panel_bytes(format, inputs, 0) : 0;
}

/* Rows of a file, `row_bytes` apart, into panels. */
void pack_blocks(int format, const void *file, long row_bytes, long inputs, long outputs, void *panels, int threads) {
    Packing packing = {format, file, row_bytes, inputs, outputs, panels};
    pthread_mutex_lock(&pool.caller);
    parallel(pack_panel, &packing, (outputs + PANEL - 1) / PANEL, threads);
    pthread_mutex_unlock(&pool.caller);
}

/* out [count, inputs]: rows of a table of `outputs` as it lies in a file. Returns 1 if there is no such row. */
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
    enum { BLOCK = 1024 };  /* only the block that has it is searched */
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
   rows `wanted`. Returns 1 if there was no memory, 2 if there is no such token. */
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
    const float *whole_norm;   /* of the taps side by side, or NULL */
    const float **tap_norms;   /* of each, or NULL */
    Linear fc, head;
    const int64_t *target_ids; /* of the head's outputs */
} Drafter;

/* A draft step: tokens with the states h [rows, size] that they are paired with. x [rows, size]: the residual stream after the
   layers; out: its norm. Returns 1 if there was no memory, 2 if there is no such token. */
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

/* What `fc` reads: the taps of each row side by side, normed together or one by one. */
static void join_taps(const Drafter *drafter, const float **taps, long rows, float *out) {
    long size = drafter->tap_size, width = drafter->num_taps * size;
    for (long t = 0; t < drafter->num_taps; t++) {
        if (drafter->tap_norms) rms_norm(taps[t], drafter->tap_norms[t], out + t * size, rows, size, width, drafter->eps);
        else for (long r = 0; r < rows; r++) memcpy(out + r * width + t * size, taps[t] + r * size, size * sizeof(float));
    }
    if (drafter->whole_norm) rms_norm(out, drafter->whole_norm, out, rows, width, width, drafter->eps);
}

/* Synchronises one sequence with the target's states (`taps`, [rows, tap_size] each) and drafts a chain: up to `limit` tokens, while
   the product of their probabilities, each times `covered`, stays at or above `threshold`. The sequence's last run reaches past what
   is drafted. Returns how many tokens there are; 0 if there was no memory, -1 if there is no such token. */
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
