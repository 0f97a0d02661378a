/* Decoder layers on a CPU: everything between two residual streams in one call. Each step is microseconds of arithmetic; as
   tensor operations they cost as much again in dispatch, and threads would meet as often. References: tests/kernels/test_native.py. */
#include <math.h>
#include <stdio.h>

#include "threads.h"
#include "lanes.h"
#include "linear.h"
#include "attention.h"

typedef struct {
    const float *input_norm;  /* NULL: the input comes normed */
    const float *post_norm;
    const float *q_norm, *k_norm;  /* or NULL */
    const float *attention_output_norm, *mlp_output_norm;  /* of what is added to the residual stream, or NULL */
    float eps;
    int gelu;                      /* the MLP's gate; else silu */
    Linear qkv, o, gate_up, down;  /* down without inputs: the MLP is not run here */
} Layer;

typedef struct {
    const Sequence *sequences;
    const float *cosine, *sine;  /* [rows, head size]; the rotation's sign is in the sine */
    long num_sequences, rows;
    int threads;
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
    const Layer *layer;
    const Batch *batch;
    const Cache *cache;
    float *heads;     /* [rows, (H + 2K) E]: queries are rotated in place */
    float *attended;  /* [rows, H E] */
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

/* Queries are rotated and scaled in place; keys rotated into the cache, values copied there. One item: one block of tokens. */
static void place_block(const void *task, long block) {
    const Attending *a = task;
    const Cache *cache = a->cache;
    const Sequence *sequence = a->batch->sequences + a->block_sequence[block];
    long E = cache->head_size, H = cache->heads, K = cache->kv_heads, start = a->block_start[block];
    long rows = sequence->query_len - start < a->block_rows ? sequence->query_len - start : a->block_rows;
    float scale = 1.0f / sqrtf((float)E);
    for (long r = 0; r < rows; r++) {
        long row = a->block_row[block] + r;
        float *heads = a->heads + row * (H + 2 * K) * E;
        const float *cosine = a->batch->cosine + row * E, *sine = a->batch->sine + row * E;
        long slot = slot_of(sequence, sequence->kv_len - sequence->query_len + start + r) * E;
        for (long h = 0; h < H; h++) rotate(heads + h * E, cosine, sine, a->layer->q_norm, a->layer->eps, scale, E, heads + h * E);
        for (long h = 0; h < K; h++) {
            long at = h * cache->head_stride + slot;
            rotate(heads + (H + h) * E, cosine, sine, a->layer->k_norm, a->layer->eps, 1.0f, E, cache->keys + at);
            memcpy(cache->values + at, heads + (H + K + h) * E, sizeof(float) * E);
        }
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
    long padded = (sequence->kv_len + LANES - 1) / LANES * LANES, scores = rows * (H / K) * padded;
    float *memory = own_memory(scores + E * LANES);
    attend_rows(cache, sequence, kv_head, start, rows, a->heads + row * (H + 2 * K) * E, (H + 2 * K) * E,
                a->attended + row * H * E, memory, memory + scores);
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

static int layer_locked(const Layer *layer, const Cache *cache, const Batch *batch, float *x, const float *normed) {
    long rows = batch->rows, hidden = layer->o.outputs, middle = layer->down.inputs, num_blocks = 0;
    long width = layer->qkv.outputs, H_E = cache->heads * cache->head_size;
    /* Few rows are dealt out to the threads evenly; many go in blocks that share the turned keys. */
    long share = (rows + batch->threads - 1) / batch->threads, block_rows = share < ROWS ? share : ROWS;
    for (long s = 0; s < batch->num_sequences; s++) num_blocks += (batch->sequences[s].query_len + block_rows - 1) / block_rows;
    int normed_outputs = layer->attention_output_norm != NULL;
    size_t floats = rows * (hidden + width + H_E + middle + (normed_outputs ? hidden : 0));
    float *memory = shared_memory(floats * sizeof(float) + 3 * num_blocks * sizeof(long) + 64);
    if (!memory) return 1;
    float *input = memory, *heads = input + rows * hidden, *attended = heads + rows * width, *gated = attended + rows * H_E;
    float *added = normed_outputs ? gated + rows * middle : x;
    long *blocks = (long *)(memory + (floats + 15) / 16 * 16), block = 0, row = 0;
    for (long s = 0; s < batch->num_sequences; row += batch->sequences[s++].query_len)
        for (long t = 0; t < batch->sequences[s].query_len; t += block_rows, block++)
            blocks[block] = s, blocks[num_blocks + block] = t, blocks[2 * num_blocks + block] = row + t;
    Attending a = {layer, batch, cache, heads, attended, blocks, blocks + num_blocks, blocks + 2 * num_blocks, block_rows};

    if (layer->input_norm) {
        rms_norm(x, layer->input_norm, input, rows, hidden, hidden, layer->eps);
        normed = input;
    }
    multiply(&layer->qkv, normed, heads, rows, 0, batch->threads);
    parallel(place_block, &a, num_blocks, batch->threads);
    parallel(attend_block, &a, num_blocks * cache->kv_heads, batch->threads);
    multiply(&layer->o, attended, added, rows, !normed_outputs, batch->threads);
    if (normed_outputs) add_rms_norm(added, layer->attention_output_norm, x, rows, hidden, layer->eps);
    if (!middle) return 0;
    rms_norm(x, layer->post_norm, input, rows, hidden, hidden, layer->eps);
    multiply_gated(&layer->gate_up, input, gated, rows, layer->gelu, batch->threads);
    multiply(&layer->down, gated, added, rows, !normed_outputs, batch->threads);
    if (normed_outputs) add_rms_norm(added, layer->mlp_output_norm, x, rows, hidden, layer->eps);
    return 0;
}

/* x [rows, hidden], in place: the residual stream before and after the layer. `normed`: the attention's input where the layer has
   no input norm (a drafter's first layer). Returns 1 if there was no memory. */
int run_layer(const Layer *layer, const Cache *cache, const Batch *batch, float *x, const float *normed) {
    pthread_mutex_lock(&pool.caller);
    int failed = layer_locked(layer, cache, batch, x, normed);
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
        multiply_gated(&experts[e].gate_up, input, gated, count, 0, threads);
        multiply(&experts[e].down, gated, output, count, 0, threads);
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
    multiply(linear, x, out, rows, 0, threads);
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

/* Per row: the index of the highest value (the first, if several) and its share of the softmax. */
void best_of(const float *logits, long rows, long size, long *index, float *probability) {
    for (long r = 0; r < rows; r++) {
        const float *row = logits + r * size;
        float highest = row[0], total = 0.0f;
        for (long i = 1; i < size; i++) highest = row[i] > highest ? row[i] : highest;
        long at = 0;
        while (at < size - 1 && row[at] != highest) at++;
        index[r] = at;
        if (probability) {
            for (long i = 0; i < size; i++) total += quick_exp(row[i] - highest);
            probability[r] = 1.0f / total;
        }
    }
}
