/* Attention of a few new tokens over one sequence's keys and values, which are in one or more runs of consecutive slots. The
   number and place of runs do not change a bit of the result.

   Keys are transposed sixteen at a time, so that the scores of sixteen keys are one register and no sum goes across its lanes;
   all queries that share the keys use the transposed tile. A query's result does not depend on the number of other queries. */

typedef struct {
    long end;    /* the run holds the keys before this position that no earlier run holds */
    long shift;  /* a key's slot is its position in the sequence plus this */
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
    uint8_t *keys, *values;                   /* slot 0 of kv head 0 */
    long format;                              /* F32, F16 or Q8_0 */
    long slot_bytes, head_bytes;              /* from one slot, and from one kv head, to the next */
} Cache;

/* Converts `count` floats to the cache's format. */
static void narrow(long format, const float *x, long count, uint8_t *stored) {
    if (format == F32) {
        memcpy(stored, x, sizeof(float) * count);
    } else if (format == F16) {
        long i = 0;
        for (; i + WIDTH <= count; i += WIDTH) narrow_floats(x + i, (half *)stored + i);
        for (; i < count; i++) ((half *)stored)[i] = half_of(x[i]);
    } else {
        for (long first = 0; first < count; first += UNIT, stored += 2 + UNIT) {
            float most = 0.0f;
            for (int i = 0; i < UNIT; i++) most = fmaxf(most, fabsf(x[first + i]));
            half scale = half_of(most / 127.0f);
            float inverse = most > 0.0f ? 127.0f / most : 0.0f;
            memcpy(stored, &scale, sizeof scale);
            for (int i = 0; i < UNIT; i++) ((int8_t *)stored)[2 + i] = (int8_t)rintf(x[first + i] * inverse);
        }
    }
}

/* Converts `count` numbers from the cache's format to floats. */
static void widen(long format, const uint8_t *stored, long count, float *out) {
    if (format == F32) {
        memcpy(out, stored, sizeof(float) * count);
    } else if (format == F16) {
        long i = 0;
        for (; i + WIDTH <= count; i += WIDTH) *(vector *)(out + i) = widen_halves((const half *)stored + i);
        for (; i < count; i++) out[i] = float_of(half_at(stored + 2 * i));
    } else {
        for (long first = 0; first < count; first += UNIT, stored += 2 + UNIT) {
            float scale = float_of(half_at(stored));
            for (int i = 0; i < UNIT; i++) out[first + i] = scale * (float)((const int8_t *)stored)[2 + i];
        }
    }
}

#if defined(__clang__)
#define SHUFFLE(a, b, ...) __builtin_shufflevector(a, b, __VA_ARGS__)
#else
typedef int lane_indexes __attribute__((vector_size(64)));
#define SHUFFLE(a, b, ...) __builtin_shuffle(a, b, (lane_indexes){__VA_ARGS__})
#endif

/* out[column][key] = rows[key][column], 16 × 16. Interleaving rows i and i + 8 four times transposes the tile. */
static inline void transpose(const float *rows, long stride, float *out) {
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

/* The same for sixteen rows of halves, `size` apart: pairs of halves are transposed as floats, which is half the work. */
static inline void transpose_halves(const half *rows, long size, float *out) {
    typedef uint32_t lane_words __attribute__((vector_size(64)));
    typedef uint16_t lane_halves __attribute__((vector_size(32)));
    float pairs[LANES * LANES];
    transpose((const float *)rows, size / 2, pairs);
    for (int i = 0; i < LANES; i++) {
        lane_words both = (lane_words)load(pairs + i * LANES);
        lane_halves even = __builtin_convertvector(both, lane_halves), odd = __builtin_convertvector(both >> 16, lane_halves);
        for (int v = 0; v < LANES; v += WIDTH) {
            *(vector *)(out + 2 * i * LANES + v) = widen_halves((const half *)&even + v);
            *(vector *)(out + (2 * i + 1) * LANES + v) = widen_halves((const half *)&odd + v);
        }
    }
}

/* tile [size][LANES]: sixteen keys, transposed. */
static void transpose_keys(const float *keys, long size, float *tile) {
    long whole = size / LANES * LANES;
    for (long e = 0; e < whole; e += LANES) transpose(keys + e, size, tile + e * LANES);
    for (long e = whole; e < size; e++)
        for (long i = 0; i < LANES; i++) tile[e * LANES + i] = keys[i * size + e];
}

/* Keys or values s … s + count - 1 as consecutive floats: in the cache itself if possible, else in `out`. `run` holds s. */
static const float *gather(const Cache *cache, const uint8_t *stored, const Run *run, long s, long count, float *out) {
    const uint8_t *first = stored + (s + run->shift) * cache->slot_bytes;
    if (run->end < s + count) {  /* a run ends before the last of them */
        for (long i = 0; i < count; i++) {
            while (run->end <= s + i) run++;
            widen(cache->format, stored + (s + i + run->shift) * cache->slot_bytes, cache->head_size, out + i * cache->head_size);
        }
        return out;
    }
    if (cache->format == F32) return (const float *)first;
    widen(cache->format, first, count * cache->head_size, out);
    return out;
}

/* tile [size][LANES]: the `count` keys from s on, transposed, and zeros up to sixteen keys. */
static void tile_of(const Cache *cache, const uint8_t *keys, const Run *run, long s, long count, float *widened, float *tile) {
    long size = cache->head_size;
    if (cache->format == F16 && size % (2 * LANES) == 0 && run->end >= s + count) {
        const half *halves = (const half *)(keys + (s + run->shift) * cache->slot_bytes);
        if (count < LANES) {
            memset((half *)widened + count * size, 0, sizeof(half) * (LANES - count) * size);
            halves = memcpy(widened, halves, sizeof(half) * count * size);
        }
        for (long e = 0; e < size; e += 2 * LANES) transpose_halves(halves + e, size, tile + e * LANES);
        return;
    }
    const float *floats = gather(cache, keys, run, s, count, widened);
    if (count < LANES) {
        if (floats != widened) memcpy(widened, floats, sizeof(float) * count * size);
        memset(widened + count * size, 0, sizeof(float) * (LANES - count) * size);
        floats = widened;
    }
    transpose_keys(floats, size, tile);
}

static inline const Run *run_of(const Sequence *sequence, long s) {
    const Run *run = sequence->runs;
    while (run->end <= s) run++;
    return run;
}

static inline long slot_of(const Sequence *sequence, long s) { return s + run_of(sequence, s)->shift; }

enum {
    MOST_KEYS = 1024,  /* keys of all sequences prefetched before attention begins: what the L2 caches hold beside the weights */
    KEYS_AHEAD = 64    /* keys that a longer text is prefetched ahead; the processor's own prefetching ends at a 4 KB page.
                          A plain step of a 135M target after 4,000 tokens takes 17 % less time with it. */
};

/* Prefetches `count` keys or values from s on, as far as they are in the same run. */
static inline void fetch(const Cache *cache, const uint8_t *stored, const Run *run, long s, long count) {
    const uint8_t *first = stored + (s + run->shift) * cache->slot_bytes;
    count = run->end - s < count ? run->end - s : count;
    for (long line = 0; line < count * cache->slot_bytes; line += 64) __builtin_prefetch(first + line, 0, 2);
}

/* The same for a long text; short ones are prefetched before attention begins. `run`: the run of s, or an earlier one.
   Returns the run of s. */
static inline const Run *fetch_later(const Cache *cache, const Sequence *sequence, const uint8_t *stored, const Run *run, long s,
                                     long count) {
    if (sequence->kv_len <= MOST_KEYS || s >= sequence->kv_len) return run;
    while (run->end <= s) run++;
    fetch(cache, stored, run, s, count);
    return run;
}

/* Query heads of a row that are processed together, so that keys and values are loaded once; their sums fit the registers. */
#if defined(__AVX512BW__)
enum { HEADS = 4 };
#else
enum { HEADS = 1 };
#endif

/* Loads into a register; otherwise the compiler would load from memory again for each product. */
INLINE lanes loaded(const float *x) {
    lanes value = load(x);
#if defined(__AVX512BW__)
    __asm__("" : "+v"(value));
#endif
    return value;
}

/* out[n][0 … LANES) = q[n] · tile, for N heads; `stride`: floats between rows of out */
INLINE void score(const int N, const float *q, const float *tile, long size, float *out, long stride) {
    lanes sums[HEADS][4] = {0};
    long e = 0;
    for (; e + 4 <= size; e += 4)
        UNROLL for (int c = 0; c < 4; c++, tile += LANES) {
            lanes keys = loaded(tile);
            UNROLL for (int n = 0; n < N; n++) sums[n][c] += q[n * size + e + c] * keys;
        }
    for (; e < size; e++, tile += LANES)
        for (int n = 0; n < N; n++) sums[n][0] += q[n * size + e] * load(tile);
    UNROLL for (int n = 0; n < N; n++) store(out + n * stride, (sums[n][0] + sums[n][1]) + (sums[n][2] + sums[n][3]));
}

/* out[n][0 … size) += Σ weights[n][i] · values[i] for N heads, 64, 16 or fewer columns at a time, always in the values' order;
   `stride`, `step`: floats between rows of weights, and of out */
INLINE void weighted_sum(const int N, const float *weights, long stride, const float *values, long count, long size, float *out,
                         long step) {
    long e = 0;
    for (; e + 4 * LANES <= size; e += 4 * LANES) {
        lanes sums[HEADS][4];
        UNROLL for (int n = 0; n < N; n++)
            UNROLL for (int c = 0; c < 4; c++) sums[n][c] = load(out + n * step + e + c * LANES);
        const float *row = values + e;
        for (long i = 0; i < count; i++, row += size)
            UNROLL for (int c = 0; c < 4; c++) {
                lanes some = loaded(row + c * LANES);
                UNROLL for (int n = 0; n < N; n++) sums[n][c] += weights[n * stride + i] * some;
            }
        UNROLL for (int n = 0; n < N; n++)
            UNROLL for (int c = 0; c < 4; c++) store(out + n * step + e + c * LANES, sums[n][c]);
    }
    for (int n = 0; n < N; n++, weights += stride, out += step) {
        long rest = e;
        for (; rest + LANES <= size; rest += LANES) {
            lanes sum = load(out + rest);
            for (long i = 0; i < count; i++) sum += weights[i] * load(values + i * size + rest);
            store(out + rest, sum);
        }
        for (long i = 0; rest < size && i < count; i++)
            for (long column = rest; column < size; column++) out[column] += weights[i] * values[i * size + column];
    }
}

/* Calls DO(N, …) with a number of heads that is known at compile time */
#if defined(__AVX512BW__)
#define FOR_HEADS(N, DO, ...)                                                                                             \
    switch (N) {                                                                                                          \
    case 1: DO(1, __VA_ARGS__); break;                                                                                    \
    case 2: DO(2, __VA_ARGS__); break;                                                                                    \
    case 3: DO(3, __VA_ARGS__); break;                                                                                    \
    default: DO(4, __VA_ARGS__);                                                                                          \
    }
#else
#define FOR_HEADS(N, DO, ...) DO(1, __VA_ARGS__)
#endif

/* The keys that new token t sees: all from *first to *last except those hidden by its tail mask. */
static void seen_keys(const Sequence *sequence, long t, long window, long *first, long *last) {
    long position;
    if (sequence->tail_mask) {
        /* A tree node's position is counted along its own path, not in the cache. */
        position = sequence->kv_len - sequence->tail - 1;
        for (long i = 0; i < sequence->tail; i++) position += sequence->tail_mask[t * sequence->tail + i];
        *last = sequence->kv_len - 1;
    } else {
        position = *last = sequence->kv_len - sequence->query_len + t;
    }
    *first = window > 0 && position + 1 > window ? position + 1 - window : 0;
}

/* Keys are processed in parts of fixed size, the same for every token, so that the result is the same whether one or several
   threads compute the parts. A share is a query's result for one part: `size` floats, the highest score, the total of weights. */
enum { PART_KEYS = 512, SHARE_ENDS = 2 };

/* Turns scores [0 … PART_KEYS) of a part's keys into weights in place, from `begin` to `end`; hidden keys get weight 0. */
static void softmax_weights(const Sequence *sequence, long t, long part, long begin, long end, float *scores, float *ends) {
    long hidden = part * PART_KEYS - (sequence->kv_len - sequence->tail);  /* index in the tail of the part's first key */
    const unsigned char *mask = sequence->tail_mask ? sequence->tail_mask + t * sequence->tail + hidden : NULL;
    long masked = begin + hidden > 0 ? begin : -hidden;
    for (long s = masked; mask && s < end; s++)
        if (!mask[s]) scores[s] = -1e30f;  /* low enough that its exponential is 0 if any key is visible */
    float highest = scores[begin], total = 0.0f;
    for (long s = begin; s < end; s++) highest = scores[s] > highest ? scores[s] : highest;
    for (long s = begin; s < end; s++) {
        scores[s] = quick_exp(scores[s] - highest);
        total += scores[s];
    }
    for (long s = masked; mask && s < end; s++)
        if (!mask[s]) scores[s] = 0.0f;
    ends[0] = highest, ends[1] = total;
}

/* Adds a part's share to the sum of the parts before it. */
static __attribute__((noinline)) void add_share(const float *share, long size, float *sum) {
    float highest = sum[size] > share[size] ? sum[size] : share[size];
    float before = quick_exp(sum[size] - highest), now = quick_exp(share[size] - highest);
    for (long e = 0; e < size; e++) sum[e] = sum[e] * before + share[e] * now;
    sum[size] = highest, sum[size + 1] = sum[size + 1] * before + share[size + 1] * now;
}

enum { TILE_KEYS = 32 };  /* values that are widened at a time: they stay in the L1 cache for all queries */

/* Floats for the shares of `rows` tokens under one kv head; below, floats of attend_rows's working memory. */
static long share_floats(const Cache *cache, long rows) {
    return rows * (cache->heads / cache->kv_heads) * (cache->head_size + SHARE_ENDS);
}
static long attention_floats(const Cache *cache, long rows) {
    long working = (LANES + TILE_KEYS) * cache->head_size + rows * (cache->heads / cache->kv_heads) * PART_KEYS;
    return working + 2 * share_floats(cache, rows);
}

/* The first and last part that any of the new tokens t … t + rows - 1 sees. */
static void seen_parts(const Cache *cache, const Sequence *sequence, long t, long rows, long *from, long *to) {
    *from = sequence->kv_len, *to = 0;
    for (long r = 0; r < rows; r++) {
        long first, last;
        seen_keys(sequence, t + r, cache->window, &first, &last);
        *from = first / PART_KEYS < *from ? first / PART_KEYS : *from, *to = last / PART_KEYS > *to ? last / PART_KEYS : *to;
    }
}

/* The keys of a part, counted from its first, that token t sees: none if *begin is *end or more. */
static void seen_of_part(const Cache *cache, const Sequence *sequence, long t, long part, long *begin, long *end) {
    long first, last;
    seen_keys(sequence, t, cache->window, &first, &last);
    *begin = first - part * PART_KEYS > 0 ? first - part * PART_KEYS : 0;
    *end = last + 1 - part * PART_KEYS < PART_KEYS ? last + 1 - part * PART_KEYS : PART_KEYS;
}

/* The shares [rows][group] of new tokens t … t + rows - 1 for one part under one kv head. q: token t, query head 0;
   `width`: floats between tokens of q. memory: attention_floats. */
static void attend_part(const Cache *cache, const Sequence *sequence, long kv_head, long t, long rows, long part, const float *q,
                        long width, float *shares, float *memory) {
    long size = cache->head_size, group = cache->heads / cache->kv_heads, stride = size + SHARE_ENDS, start = part * PART_KEYS;
    const uint8_t *keys = cache->keys + kv_head * cache->head_bytes, *values = cache->values + kv_head * cache->head_bytes;
    float *tile = memory, *widened = tile + LANES * size, *scores = widened + TILE_KEYS * size;
    const Run *run = sequence->runs, *later = run;
    long begin[rows], end[rows], from = PART_KEYS, to = 0;  /* of all of them: counted from the part's first key */
    q += kv_head * group * size;
    for (long r = 0; r < rows; r++) {
        seen_of_part(cache, sequence, t + r, part, begin + r, end + r);
        from = begin[r] < from ? begin[r] : from, to = end[r] > to ? end[r] : to;
    }
    memset(shares, 0, sizeof(float) * rows * group * stride);
    for (long s = from / LANES * LANES; s < from + KEYS_AHEAD; s += LANES)
        later = fetch_later(cache, sequence, keys, later, start + s, LANES);
    for (long s = from / LANES * LANES; s < to; s += LANES) {
        while (run->end <= start + s) run++;
        long left = sequence->kv_len - start - s;
        later = fetch_later(cache, sequence, keys, later, start + s + KEYS_AHEAD, LANES);
        tile_of(cache, keys, run, start + s, left < LANES ? left : LANES, widened, tile);
        for (long r = 0; r < rows; r++)
            for (long g = 0; g < group; g += HEADS)
                FOR_HEADS(group - g, score, q + r * width + g * size, tile, size, scores + (r * group + g) * PART_KEYS + s, PART_KEYS);
    }
    later = sequence->runs;
    for (long s = from / TILE_KEYS * TILE_KEYS; s < from + KEYS_AHEAD; s += TILE_KEYS)
        later = fetch_later(cache, sequence, values, later, start + s, TILE_KEYS);
    for (long r = 0; r < rows; r++)
        for (long g = 0; g < group && begin[r] < end[r]; g++)
            softmax_weights(sequence, t + r, part, begin[r], end[r], scores + (r * group + g) * PART_KEYS,
                            shares + (r * group + g) * stride + size);
    run = sequence->runs;
    for (long s = from / TILE_KEYS * TILE_KEYS; s < to; s += TILE_KEYS) {
        while (run->end <= start + s) run++;
        long count = to - s < TILE_KEYS ? to - s : TILE_KEYS;
        later = fetch_later(cache, sequence, values, later, start + s + KEYS_AHEAD, TILE_KEYS);
        const float *some = gather(cache, values, run, start + s, count, widened);
        for (long r = 0; r < rows; r++) {
            long low = begin[r] > s ? begin[r] - s : 0, high = end[r] - s < count ? end[r] - s : count;
            for (long g = 0; g < group && low < high; g += HEADS) {
                const float *weights = scores + (r * group + g) * PART_KEYS + s + low;
                FOR_HEADS(group - g, weighted_sum, weights, PART_KEYS, some + low * size, high - low, size,
                          shares + (r * group + g) * stride, stride);
            }
        }
    }
}

/* Attention of new tokens t … t + rows - 1 under one kv head. q, out: token t, query head 0. `shares`: those of all parts
   from `from` on, or NULL: they are computed here. memory: attention_floats. */
static void attend_rows(const Cache *cache, const Sequence *sequence, long kv_head, long t, long rows, const float *q, long width,
                        const float *shares, long from, long to, float *out, float *memory) {
    long size = cache->head_size, group = cache->heads / cache->kv_heads, stride = size + SHARE_ENDS, floats = share_floats(cache, rows);
    float *sums = memory + attention_floats(cache, rows) - floats, *own = sums - floats;
    for (long part = from; part <= to; part++) {
        const float *added = shares ? shares + (part - from) * floats : own;
        if (!shares) attend_part(cache, sequence, kv_head, t, rows, part, q, width, own, memory);
        for (long r = 0; r < rows; r++) {
            long begin, end, first, last;
            seen_of_part(cache, sequence, t + r, part, &begin, &end);
            seen_keys(sequence, t + r, cache->window, &first, &last);
            for (long g = r * group; g < (r + 1) * group && begin < end; g++)
                if (first / PART_KEYS == part) memcpy(sums + g * stride, added + g * stride, sizeof(float) * stride);
                else add_share(added + g * stride, size, sums + g * stride);
        }
    }
    for (long r = 0; r < rows; r++)
        for (long g = 0; g < group; g++) {
            const float *sum = sums + (r * group + g) * stride;
            float *row = out + r * cache->heads * size + (kv_head * group + g) * size, over = 1.0f / sum[size + 1];
            for (long e = 0; e < size; e++) row[e] = sum[e] * over;
        }
}
