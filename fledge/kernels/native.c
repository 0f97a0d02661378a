/* The small steps between the linears of a decode pass on CPU. Each is microseconds of arithmetic; as separate tensor operations
   they cost as much again in dispatch. References: tests/kernels/test_native.py. */
#include <math.h>
#include <stdlib.h>
#include <string.h>

/* exp by range reduction and a polynomial (Cephes), without branches: unlike expf, the compiler turns loops of it into vectors. */
static inline float quick_exp(float x) {
    x = x < -87.0f ? -87.0f : x > 88.0f ? 88.0f : x;
    float n = rintf(x * 1.44269504f);
    float r = x - n * 0.693147181f;
    float p = 1.9875691500e-4f;
    p = p * r + 1.3981999507e-3f;
    p = p * r + 8.3334519073e-3f;
    p = p * r + 4.1665795894e-2f;
    p = p * r + 1.6666665459e-1f;
    p = p * r + 5.0000001201e-1f;
    union { int bits; float value; } power = {((int)n + 127) << 23};
    return (p * r * r + r + 1.0f) * power.value;
}

/* x += delta (if given); out = x / rms(x) * weight, row by row */
void add_rms_norm(float *x, const float *delta, const float *weight, float *out, long rows, long size, float eps) {
    for (long r = 0; r < rows; r++) {
        float *row = x + r * size, sum = 0.0f;
        if (delta)
            for (long i = 0; i < size; i++) row[i] += delta[r * size + i];
        for (long i = 0; i < size; i++) sum += row[i] * row[i];
        float scale = 1.0f / sqrtf(sum / (float)size + eps);
        for (long i = 0; i < size; i++) out[r * size + i] = row[i] * scale * weight[i];
    }
}

/* gate_up [rows, 2 * size]: silu(gate) * up */
void swiglu(const float *gate_up, float *out, long rows, long size) {
    for (long r = 0; r < rows; r++) {
        const float *gate = gate_up + r * 2 * size, *up = gate + size;
        for (long i = 0; i < size; i++) out[r * size + i] = gate[i] / (1.0f + quick_exp(-gate[i])) * up[i];
    }
}

static inline void rotate(const float *x, const float *cosine, const float *sine, float *out, long E, float scale) {
    long half = E / 2;
    for (long e = 0; e < half; e++) {
        out[e] = (x[e] * cosine[e] + x[e + half] * sine[e]) * scale;
        out[e + half] = (x[e + half] * cosine[e + half] + x[e] * sine[e + half]) * scale;
    }
}

/* scores[s] = q · k[s]. One query at a time reads the keys as they lie; several share keys turned on their side, which spares
   the sum across each dot product. */
static inline void score(const float *q, const float *k, const float *turned, long first, long last, long S, long E,
                         float *scores) {
    if (!turned) {
        for (long s = first; s <= last; s++) {
            float dot = 0.0f;
            for (long e = 0; e < E; e++) dot += q[e] * k[s * E + e];
            scores[s] = dot;
        }
        return;
    }
    memset(scores + first, 0, sizeof(float) * (last - first + 1));
    long e = 0;
    for (; e + 3 < E; e += 4) {
        const float *a = turned + e * S, *b = a + S, *c = b + S, *d = c + S;
        for (long s = first; s <= last; s++) scores[s] += q[e] * a[s] + q[e + 1] * b[s] + q[e + 2] * c[s] + q[e + 3] * d[s];
    }
    for (; e < E; e++)
        for (long s = first; s <= last; s++) scores[s] += q[e] * turned[e * S + s];
}

/* Sixteen floats at once, at any address; the compiler maps them to whatever the processor has. */
typedef float lanes __attribute__((vector_size(64), aligned(4)));
enum { LANES = 16 };

/* The same for heads of 64, held in registers: `turned` has rows of S floats, S a multiple of LANES. */
static void score64(const float *q, const float *turned, long first, long last, long S, float *scores) {
    for (long s = first / LANES * LANES; s <= last; s += LANES) {
        lanes a = {0}, b = {0}, c = {0}, d = {0};
        for (long e = 0; e < 64; e += 4) {
            const float *row = turned + e * S + s;
            a += q[e] * *(const lanes *)row;
            b += q[e + 1] * *(const lanes *)(row + S);
            c += q[e + 2] * *(const lanes *)(row + 2 * S);
            d += q[e + 3] * *(const lanes *)(row + 3 * S);
        }
        *(lanes *)(scores + s) = (a + b) + (c + d);
    }
}

static void mix64(const float *scores, const float *v, long first, long last, float total, float *out) {
    lanes a = {0}, b = {0}, c = {0}, d = {0};
    for (long s = first; s <= last; s++) {
        const lanes *row = (const lanes *)(v + s * 64);
        a += scores[s] * row[0];
        b += scores[s] * row[1];
        c += scores[s] * row[2];
        d += scores[s] * row[3];
    }
    lanes *o = (lanes *)out;
    o[0] = a / total, o[1] = b / total, o[2] = c / total, o[3] = d / total;
}

static void mix(const float *scores, const float *v, long first, long last, long E, float total, float *out) {
    memset(out, 0, sizeof(float) * E);
    for (long s = first; s <= last; s++)
        for (long e = 0; e < E; e++) out[e] += scores[s] * v[s * E + e];
    for (long e = 0; e < E; e++) out[e] /= total;
}

static void attend_rows(const float *qkv, const float *cosine, const float *sine, const float *keys, const float *values,
                        long head_stride, long T, long kv_len, long H, long K, long E, long window, float *out, float *scores,
                        float *turned, long S) {
    long width = (H + 2 * K) * E, group = H / K;
    float scale = 1.0f / sqrtf((float)E);
    float q[E];
    for (long kv_head = 0; kv_head < K; kv_head++) {
        const float *k = keys + kv_head * head_stride, *v = values + kv_head * head_stride;
        if (turned)
            for (long s = 0; s < kv_len; s++)
                for (long e = 0; e < E; e++) turned[e * S + s] = k[s * E + e];
        for (long t = 0; t < T; t++) {
            long last = kv_len - T + t, first = window > 0 && last + 1 > window ? last + 1 - window : 0;
            for (long h = kv_head * group; h < (kv_head + 1) * group; h++) {
                rotate(qkv + t * width + h * E, cosine + t * E, sine + t * E, q, E, scale);
                if (turned && E == 64)
                    score64(q, turned, first, last, S, scores);
                else
                    score(q, k, turned, first, last, S, E, scores);
                float highest = scores[first], total = 0.0f;
                for (long s = first; s <= last; s++) highest = scores[s] > highest ? scores[s] : highest;
                for (long s = first; s <= last; s++) {
                    scores[s] = quick_exp(scores[s] - highest);
                    total += scores[s];
                }
                if (E == 64)
                    mix64(scores, v, first, last, total, out + (t * H + h) * E);
                else
                    mix(scores, v, first, last, E, total, out + (t * H + h) * E);
            }
        }
    }
}

/* One sequence: rotates and stores the T new keys and values, then attends causally (the last `window` keys, if > 0).
   qkv [T, (H + 2K) E]; cosine, sine [T, E]; keys, values: the sequence's first slot of kv head 0, heads `head_stride` apart. */
int attend(const float *qkv, const float *cosine, const float *sine, float *keys, float *values, long head_stride, long T,
           long kv_len, long H, long K, long E, long window, float *out) {
    long width = (H + 2 * K) * E;
    for (long t = 0; t < T; t++)
        for (long h = 0; h < K; h++) {
            long at = h * head_stride + (kv_len - T + t) * E;
            rotate(qkv + t * width + (H + h) * E, cosine + t * E, sine + t * E, keys + at, E, 1.0f);
            memcpy(values + at, qkv + t * width + (H + K + h) * E, sizeof(float) * E);
        }
    long S = (kv_len + LANES - 1) / LANES * LANES;
    float *scores = calloc(S * (T > 1 ? 1 + E : 1), sizeof(float));
    if (!scores) return 1;
    attend_rows(qkv, cosine, sine, keys, values, head_stride, T, kv_len, H, K, E, window, out, scores, T > 1 ? scores + S : NULL, S);
    free(scores);
    return 0;
}
