/* Attention of a few new tokens over one sequence's keys and values, which lie in one or more runs of consecutive slots. Where
   they lie changes no bit of the result.

   Keys are turned on their side sixteen at a time, so that the scores of sixteen keys are one register and no sum crosses it; all
   the queries that share the keys use the turned tile. What a query gets does not depend on how many others there are. */

typedef struct {
    long end;    /* the run holds the keys before this one that no earlier run holds */
    long shift;  /* slot of a key: its place in the sequence plus this */
} Run;

typedef struct {
    long query_len;  /* new tokens: the last of kv_len */
    long kv_len;
    const Run *runs;  /* the last ends at kv_len */
    const unsigned char *tail_mask;  /* [query_len, tail]: which of the last `tail` keys each new token sees; NULL: causal */
    long tail;
} Sequence;

typedef struct {
    long heads, kv_heads, head_size, window;  /* window 0: none */
    float *keys, *values;                     /* slot 0 of kv head 0 */
    long head_stride;
} Cache;

#if defined(__clang__)
#define SHUFFLE(a, b, ...) __builtin_shufflevector(a, b, __VA_ARGS__)
#else
typedef int lane_indexes __attribute__((vector_size(64)));
#define SHUFFLE(a, b, ...) __builtin_shuffle(a, b, (lane_indexes){__VA_ARGS__})
#endif

/* out[column][key] = rows[key][column], 16 × 16. Interleaving rows i and i + 8 four times over is a transposition. */
static inline void turn(const float *rows, long stride, float *out) {
    lanes a[LANES], b[LANES];
    for (int i = 0; i < LANES; i++) a[i] = load(rows + i * stride);
    for (int round = 0; round < 4; round++) {
        for (int i = 0; i < LANES / 2; i++) {
            b[2 * i] = SHUFFLE(a[i], a[i + 8], 0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23);
            b[2 * i + 1] = SHUFFLE(a[i], a[i + 8], 8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31);
        }
        memcpy(a, b, sizeof a);
    }
    for (int i = 0; i < LANES; i++) store(out + i * LANES, a[i]);
}

/* tile [size][LANES]: the `count` keys that start at `keys`, and zeros up to sixteen. */
static void turn_keys(const float *keys, long count, long size, float *tile) {
    long whole = count >= LANES ? size / LANES * LANES : 0;
    for (long e = 0; e < whole; e += LANES) turn(keys + e, size, tile + e * LANES);
    for (long e = whole; e < size; e++)
        for (long i = 0; i < LANES; i++) tile[e * LANES + i] = i < count ? keys[i * size + e] : 0.0f;
}

static inline long slot_of(const Sequence *sequence, long s) {
    const Run *run = sequence->runs;
    while (run->end <= s) run++;
    return s + run->shift;
}

static inline lanes score(const float *q, const float *tile, long size) {
    lanes a = {0}, b = {0}, c = {0}, d = {0};
    long e = 0;
    for (; e + 4 <= size; e += 4, tile += 4 * LANES) {
        a += q[e] * load(tile);
        b += q[e + 1] * load(tile + LANES);
        c += q[e + 2] * load(tile + 2 * LANES);
        d += q[e + 3] * load(tile + 3 * LANES);
    }
    for (; e < size; e++, tile += LANES) a += q[e] * load(tile);
    return (a + b) + (c + d);
}

/* out[0 … size) = Σ weights[s] · values[s], 64, 16 or fewer columns at a time, always in the keys' order */
static void mix(const float *weights, const float *values, const Run *runs, long first, long last, long size, float *out) {
    long e = 0;
    while (runs->end <= first) runs++;
#define FOR_KEYS(row, ...)                                                           \
    for (long s = first, part = 0; s <= last; part++) {                              \
        long end = runs[part].end <= last ? runs[part].end : last + 1;               \
        const float *row = values + (s + runs[part].shift) * size + e;               \
        for (; s < end; s++, row += size) { __VA_ARGS__; }                           \
    }
    for (; e + 4 * LANES <= size; e += 4 * LANES) {
        lanes a = {0}, b = {0}, c = {0}, d = {0};
        FOR_KEYS(row, a += weights[s] * load(row), b += weights[s] * load(row + LANES), c += weights[s] * load(row + 2 * LANES),
                 d += weights[s] * load(row + 3 * LANES))
        store(out + e, a), store(out + e + LANES, b), store(out + e + 2 * LANES, c), store(out + e + 3 * LANES, d);
    }
    for (; e + LANES <= size; e += LANES) {
        lanes a = {0};
        FOR_KEYS(row, a += weights[s] * load(row))
        store(out + e, a);
    }
    if (e < size) {
        float sums[LANES] = {0};
        long rest = size - e;
        FOR_KEYS(row, for (long i = 0; i < rest; i++) sums[i] += weights[s] * row[i])
        memcpy(out + e, sums, sizeof(float) * rest);
    }
#undef FOR_KEYS
}

/* The keys that new token t sees: all from *first to *last but those its tail mask hides. */
static void seen_keys(const Sequence *sequence, long t, long window, long *first, long *last) {
    long position;
    if (sequence->tail_mask) {
        /* A tree node's position is its place on its own path, not its place in the cache. */
        position = sequence->kv_len - sequence->tail - 1;
        for (long i = 0; i < sequence->tail; i++) position += sequence->tail_mask[t * sequence->tail + i];
        *last = sequence->kv_len - 1;
    } else {
        position = *last = sequence->kv_len - sequence->query_len + t;
    }
    *first = window > 0 && position + 1 > window ? position + 1 - window : 0;
}

/* Scores, in place, to weights that sum to one; hidden keys weigh nothing. */
static void weigh(const Sequence *sequence, long t, long first, long last, float *scores) {
    if (sequence->tail_mask)
        for (long i = 0, s = sequence->kv_len - sequence->tail; i < sequence->tail; i++, s++)
            if (!sequence->tail_mask[t * sequence->tail + i]) scores[s] = -1e30f;  /* its exponential is 0 beside any other */
    float highest = scores[first], total = 0.0f;
    for (long s = first; s <= last; s++) highest = scores[s] > highest ? scores[s] : highest;
    for (long s = first; s <= last; s++) {
        scores[s] = quick_exp(scores[s] - highest);
        total += scores[s];
    }
    if (sequence->tail_mask)
        for (long i = 0, s = sequence->kv_len - sequence->tail; i < sequence->tail; i++, s++)
            if (!sequence->tail_mask[t * sequence->tail + i]) scores[s] = 0.0f;
    float share = 1.0f / total;
    for (long s = first; s <= last; s++) scores[s] *= share;
}

/* New tokens t … t + rows - 1 under one kv head. q, out: token t, query head 0; `width` floats between tokens of q.
   scores: room for rows · group · padded floats, padded = kv_len rounded up to LANES; tile: head_size · LANES. */
static void attend_rows(const Cache *cache, const Sequence *sequence, long kv_head, long t, long rows, const float *q, long width,
                        float *out, float *scores, float *tile) {
    long size = cache->head_size, group = cache->heads / cache->kv_heads;
    long padded = (sequence->kv_len + LANES - 1) / LANES * LANES;
    const float *keys = cache->keys + kv_head * cache->head_stride, *values = cache->values + kv_head * cache->head_stride;
    float scattered[LANES * size];
    const Run *run = sequence->runs;
    long from = sequence->kv_len, to = 0;
    for (long r = 0; r < rows; r++) {
        long first, last;
        seen_keys(sequence, t + r, cache->window, &first, &last);
        from = first < from ? first : from, to = last > to ? last : to;
    }
    for (long s = from / LANES * LANES; s <= to; s += LANES) {
        while (run->end <= s) run++;
        long count = sequence->kv_len - s < LANES ? sequence->kv_len - s : LANES;
        const float *first = keys + (s + run->shift) * size;
        if (run->end < s + count) {  /* a run ends among the sixteen */
            for (long i = 0; i < count; i++) memcpy(scattered + i * size, keys + slot_of(sequence, s + i) * size, sizeof(float) * size);
            first = scattered;
        }
        turn_keys(first, count, size, tile);
        for (long r = 0; r < rows; r++)
            for (long g = 0; g < group; g++)
                store(scores + (r * group + g) * padded + s, score(q + r * width + (kv_head * group + g) * size, tile, size));
    }
    for (long r = 0; r < rows; r++) {
        long first, last;
        seen_keys(sequence, t + r, cache->window, &first, &last);
        for (long g = 0; g < group; g++) {
            float *weights = scores + (r * group + g) * padded;
            weigh(sequence, t + r, first, last, weights);
            mix(weights, values, sequence->runs, first, last, size, out + r * cache->heads * size + (kv_head * group + g) * size);
        }
    }
}
