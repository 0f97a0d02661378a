/* A decoder layer: norms, attention over the cached keys and values, the MLP. Each step is divided among the threads. */
enum { MAX_ROPES = 2 };  /* most rotary embeddings of a network */

typedef struct {
    const float *input_norm;  /* NULL: the input is normed already */
    const float *post_norm;
    const float *q_norm, *k_norm;  /* or NULL */
    const float *attention_output_norm, *mlp_output_norm;  /* applied before adding to the residual stream, or NULL */
    float eps;
    int gelu;                      /* the activation of the MLP's gate; else silu */
    int rope;                      /* index of the batch's table of angles */
    Linear qkv, o, gate_up, down;  /* down without inputs: the MLP is not run here */
} Layer;

/* Only longs and pointers, because Python passes it as an array of longs. */
typedef struct {
    const Sequence *sequences;
    const float *cosine[MAX_ROPES], *sine[MAX_ROPES];  /* by position: [positions, head size]; the rotation's sign is in the sine */
    const int64_t *positions;  /* one per row */
    long num_sequences, rows, threads;
} Batch;

static float inverse_rms(const float *x, long size, float eps) {
    float sum = 0.0f;
    for (long i = 0; i < size; i++) sum += x[i] * x[i];
    return 1.0f / sqrtf(sum / (float)size + eps);
}

/* out = x / rms(x) · weight, row by row; rows of `out` are `stride` apart, so that several norms can write to one row */
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

/* Norms of rows, also quantised to 8 bits unless `in_bytes` is NULL. */
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
    Activations *in_bytes;  /* `attended` in 8 bits, or NULL */
    const long *block_sequence, *block_start, *block_row;  /* blocks of at most block_rows tokens of one sequence */
    long block_rows;
    float *shares;    /* results of the parts of each block and kv head, most_parts each; NULL: one thread computes all parts of a block */
    long most_parts;
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

/* The sequence that a row belongs to; *token: its index among the sequence's new tokens. */
static const Sequence *sequence_of(const Batch *batch, long row, long *token) {
    const Sequence *sequence = batch->sequences;
    while (row >= sequence->query_len) row -= sequence++->query_len;
    *token = row;
    return sequence;
}

/* Rotates a row's queries and keys in place, scales the queries, stores keys and values in the cache. */
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

static __thread Memory own_memory;  /* each thread's working memory for attention */

static float *attention_memory(const Cache *cache, long rows) {
    return at_least(&own_memory, attention_floats(cache, rows) * sizeof(float), "attention over a long text");
}

/* A block of rows under one kv head. */
typedef struct {
    const Sequence *sequence;
    const float *q;  /* queries of its first token */
    long kv_head, start, row, rows, from, to;  /* from, to: parts of the keys that it sees */
} Item;

static Item item_of(const Attending *a, long item) {
    const Cache *cache = a->cache;
    long block = item / cache->kv_heads, width = (cache->heads + 2 * cache->kv_heads) * cache->head_size;
    Item i = {.sequence = a->batch->sequences + a->block_sequence[block], .kv_head = item % cache->kv_heads,
              .start = a->block_start[block], .row = a->block_row[block]};
    i.q = a->heads + i.row * width;
    i.rows = i.sequence->query_len - i.start < a->block_rows ? i.sequence->query_len - i.start : a->block_rows;
    seen_parts(cache, i.sequence, i.start, i.rows, &i.from, &i.to);
    return i;
}

/* The most parts of keys that the new tokens of a sequence see. */
static long most_seen_parts(const Cache *cache, const Batch *batch) {
    long most = 1, from, to;
    for (long s = 0; s < batch->num_sequences; s++) {
        seen_parts(cache, batch->sequences + s, 0, batch->sequences[s].query_len, &from, &to);
        most = to - from + 1 > most ? to - from + 1 : most;
    }
    return most;
}

/* Computes one part of an item, if several threads share the item. */
static void attend_one_part(const void *task, long number) {
    const Attending *a = task;
    const Cache *cache = a->cache;
    Item i = item_of(a, number / a->most_parts);
    long part = i.from + number % a->most_parts, width = (cache->heads + 2 * cache->kv_heads) * cache->head_size;
    if (part > i.to) return;
    float *shares = a->shares + number / a->most_parts * a->most_parts * share_floats(cache, a->block_rows);
    attend_part(cache, i.sequence, i.kv_head, i.start, i.rows, part, i.q, width, shares + (part - i.from) * share_floats(cache, i.rows),
                attention_memory(cache, i.rows));
}

static void attend_block(const void *task, long item) {
    const Attending *a = task;
    const Cache *cache = a->cache;
    Item i = item_of(a, item);
    long E = cache->head_size, H = cache->heads, K = cache->kv_heads;
    const float *shares = a->shares ? a->shares + item * a->most_parts * share_floats(cache, a->block_rows) : NULL;
    attend_rows(cache, i.sequence, i.kv_head, i.start, i.rows, i.q, (H + 2 * K) * E, shares, i.from, i.to,
                a->attended + i.row * H * E, attention_memory(cache, i.rows));
    for (long r = i.row; a->in_bytes && r < i.row + i.rows; r++)
        for (long at = i.kv_head * (H / K) * E; at < (i.kv_head + 1) * (H / K) * E; at += UNIT)
            quantise_unit(a->attended + r * H * E + at, unit_at(a->in_bytes, r, a->batch->rows, H * E, at / UNIT));
}

static void expect_o(const void *task, long number, long threads) {
    expect((Next){&((const Attending *)task)->layer->o, 0}, number, threads);
}

enum { FEW_ROWS = 16 };

/* Prefetches the keys and values that a few rows will read. Weights read since the last pass have evicted them from the processor's
   caches; this way they are loaded while the previous linear is computed. */
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

static Memory working;  /* working memory of a call; used only while holding the pool's lock */

/* Runs a layer. `next`: the linear that follows the layer, or NULL. */
static int layer_locked(const Layer *layer, const Cache *cache, const Batch *batch, float *x, const float *normed,
                        const Linear *next) {
    long rows = batch->rows, hidden = layer->o.outputs, middle = layer->down.inputs, num_blocks = 0;
    long width = layer->qkv.outputs, H_E = cache->heads * cache->head_size, units = (hidden + (H_E > middle ? H_E : middle)) / UNIT;
    int threads = (int)batch->threads, normed_outputs = layer->attention_output_norm != NULL;
    /* With few rows, the parts of the keys are distributed over the threads for long texts, and the rows for short ones. Many rows are
       grouped into blocks that share the transposed keys. */
    long most_parts = rows <= ROWS ? most_seen_parts(cache, batch) : 1, in_parts = most_parts > 1;
    long share = in_parts ? rows : (rows + threads - 1) / threads, block_rows = share < ROWS ? share : ROWS;
    for (long s = 0; s < batch->num_sequences; s++) num_blocks += (batch->sequences[s].query_len + block_rows - 1) / block_rows;
    size_t floats = (rows * (hidden + width + H_E + middle + (normed_outputs ? hidden : 0)) + 15) / 16 * 16, shared = 0;
    if (in_parts) shared = num_blocks * cache->kv_heads * most_parts * share_floats(cache, block_rows);
    size_t bytes = (floats + shared) * sizeof(float) + rows * units * sizeof(Activations) + 3 * num_blocks * sizeof(long);
    float *memory = at_least(&working, bytes, NULL);
    if (!memory) return 1;
    float *input = memory, *heads = input + rows * hidden, *attended = heads + rows * width, *gated = attended + rows * H_E;
    float *added = normed_outputs ? gated + rows * middle : x;
    /* Inputs of linears in block formats, in 8 bits: quantised unit by unit as soon as they are computed. */
    Activations *all = (Activations *)(memory + floats), *between = all + rows * (hidden / UNIT);
    Activations *for_qkv = layer->input_norm && in_blocks(&layer->qkv) ? all : NULL, *for_up = in_blocks(&layer->gate_up) ? all : NULL;
    Activations *for_o = in_blocks(&layer->o) && cache->head_size % UNIT == 0 ? between : NULL;
    Activations *for_down = in_blocks(&layer->down) ? between : NULL;
    long *blocks = (long *)(all + rows * units), block = 0, row = 0;
    for (long s = 0; s < batch->num_sequences; row += batch->sequences[s++].query_len)
        for (long t = 0; t < batch->sequences[s].query_len; t += block_rows, block++)
            blocks[block] = s, blocks[num_blocks + block] = t, blocks[2 * num_blocks + block] = row + t;
    Attending a = {layer, batch, cache, heads, attended, for_o, blocks, blocks + num_blocks, blocks + 2 * num_blocks, block_rows,
                   in_parts ? (float *)(blocks + 3 * num_blocks) : NULL, most_parts};
    Ahead cached = {request_cache, &a};

    if (layer->input_norm) {
        norm_rows(x, layer->input_norm, input, for_qkv, rows, hidden, layer->eps, threads);
        normed = input;
    }
    multiply(&layer->qkv, normed, for_qkv, heads, rows, 0, rows <= FEW_ROWS ? &cached : NULL, (Next){&layer->o, 0}, threads);
    parallel(place_row, &a, rows, threads);
    if (in_parts) parallel(attend_one_part, &a, num_blocks * cache->kv_heads * most_parts, threads);
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

/* Runs layers. `taps`, ascending: after how many layers x is copied to the next entry of `tapped` [taps, rows, hidden]. */
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
