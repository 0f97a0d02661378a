/* Products of GGUF blocks (`blocks.h`) with activations in 8 bits, which have one scale per 32 inputs of a row. Sums over a unit are
   exact integers, scaled and added up in fp32, unit by unit. Each row is quantised and summed independently of the others. */
typedef struct {
    union { int8_t codes[UNIT]; int32_t fours[UNIT / 4]; };
    float scale;
    float sums[3];      /* sums of the activations: all, the first sixteen, the others */
    int32_t minus[3];   /* the same sums of the codes, negated */
    int32_t unused;
} Activations;          /* a unit of one row, as large as a cache line */

/* Returns the index of a row's first unit; *step: units from one to the row's next. Units are stored for chunks of CHUNK rows, with
   the same unit of all rows of a chunk side by side, so that the kernels need one pointer for all of them. */
static inline long first_unit(long row, long rows, long units, long *step) {
    long chunk = row / CHUNK * CHUNK;
    *step = rows - chunk < CHUNK ? rows - chunk : CHUNK;
    return chunk * units + row % CHUNK;
}

/* Adds to each sum the dot product of a word of four codes (0 … 63) with four activations. */
INLINE words dot4(words sums, words codes, int32_t x) {
#if defined(__AVX512VNNI__)
    return (words)_mm512_dpbusd_epi32((__m512i)sums, (__m512i)codes, _mm512_set1_epi32(x));
#elif defined(__AVX512BW__)
    __m512i pairs = _mm512_maddubs_epi16((__m512i)codes, _mm512_set1_epi32(x));
    return sums + (words)_mm512_madd_epi16(pairs, _mm512_set1_epi16(1));
#elif defined(__AVXVNNI__)
    return (words)_mm256_dpbusd_avx_epi32((__m256i)sums, (__m256i)codes, _mm256_set1_epi32(x));
#elif defined(__AVX2__)
    __m256i pairs = _mm256_maddubs_epi16((__m256i)codes, _mm256_set1_epi32(x));
    return sums + (words)_mm256_madd_epi16(pairs, _mm256_set1_epi16(1));
#elif defined(__ARM_FEATURE_DOTPROD)
    return (words)vdotq_s32((int32x4_t)sums, (int8x16_t)codes, vreinterpretq_s8_s32(vdupq_n_s32(x)));
#elif defined(__ARM_NEON)
    int8x16_t four = vreinterpretq_s8_s32(vdupq_n_s32(x)), c = (int8x16_t)codes;
    int16x8_t low = vmull_s8(vget_low_s8(c), vget_low_s8(four)), high = vmull_high_s8(c, four);
    return (words)vpadalq_s16((int32x4_t)sums, vpaddq_s16(low, high));  /* a pair is below 2^15: 2 · 128 · 127 */
#else
    for (int b = 0; b < 32; b += 8) sums += (codes << (24 - b) >> 24) * (int32_t)(int8_t)(x >> b);
    return sums;
#endif
}

/* The same for codes of -128 … 127. VNNI multiplies unsigned by signed numbers: there 128 is added to the codes, and the sums start
   with minus 128 times the sum of the activations' codes (`minus`, SIGNED_SHIFT). */
#if defined(__AVX512VNNI__) || defined(__AVXVNNI__)
enum { SIGNED_SHIFT = 7 };
INLINE words dot4_signed(words sums, words codes, int32_t x) { return dot4(sums, codes ^ (int32_t)0x80808080, x); }
#else
enum { SIGNED_SHIFT = -1 };
INLINE words dot4_signed(words sums, words codes, int32_t x) {
#if defined(__AVX512BW__)
    __m512i four = _mm512_set1_epi32(x), c = (__m512i)codes;
    four = _mm512_mask_sub_epi8(four, _mm512_movepi8_mask(c), _mm512_setzero_si512(), four);
    return sums + (words)_mm512_madd_epi16(_mm512_maddubs_epi16(_mm512_abs_epi8(c), four), _mm512_set1_epi16(1));
#elif defined(__AVX2__)
    __m256i four = _mm256_sign_epi8(_mm256_set1_epi32(x), (__m256i)codes);
    __m256i pairs = _mm256_maddubs_epi16(_mm256_abs_epi8((__m256i)codes), four);
    return sums + (words)_mm256_madd_epi16(pairs, _mm256_set1_epi16(1));
#else
    return dot4(sums, codes, x);
#endif
}
#endif

/* IQ4_NL's values for codes of 0 … 15. */
INLINE words iq4_values(words codes) {
#if defined(__AVX512BW__)
    return (words)_mm512_shuffle_epi8(_mm512_broadcast_i32x4(_mm_loadu_si128((const __m128i *)IQ4_VALUES)), (__m512i)codes);
#elif defined(__AVX2__)
    return (words)_mm256_shuffle_epi8(_mm256_broadcastsi128_si256(_mm_loadu_si128((const __m128i *)IQ4_VALUES)), (__m256i)codes);
#elif defined(__ARM_NEON)
    return (words)vqtbl1q_s8(vld1q_s8(IQ4_VALUES), (uint8x16_t)codes);
#else
    for (int i = 0; i < WIDTH; i++) {
        uint32_t word = 0;
        for (int b = 0; b < 32; b += 8) word |= (uint32_t)(uint8_t)IQ4_VALUES[codes[i] >> b & 15] << b;
        codes[i] = (int32_t)word;
    }
    return codes;
#endif
}

INLINE vector widen_scales(const uint8_t *scales, int is_signed) {
#if defined(__AVX512BW__)
    __m128i few = _mm_loadu_si128((const __m128i *)scales);
    return (vector)_mm512_cvtepi32_ps(is_signed ? _mm512_cvtepi8_epi32(few) : _mm512_cvtepu8_epi32(few));
#elif defined(__AVX2__)
    __m128i few = _mm_loadl_epi64((const __m128i *)scales);
    return (vector)_mm256_cvtepi32_ps(is_signed ? _mm256_cvtepi8_epi32(few) : _mm256_cvtepu8_epi32(few));
#else
    vector wide;
    for (int i = 0; i < WIDTH; i++) wide[i] = is_signed ? (float)(int8_t)scales[i] : (float)scales[i];
    return wide;
#endif
}

/* The codes of the `c`th four inputs of a unit, as bytes; `plane`: the unit's low bits. */
INLINE words codes_at(int format, const words *plane, int c) {
    const int low = low_bits(format), high = high_bits(format), per = 8 / low;
    if (low == 8) return plane[c];
    words codes = plane[c / per] >> low * (c % per) & 0x01010101 * ((1 << low) - 1);
    if (high) {
        const int per_high = 8 / high, shift = low - high * (c % per_high);
        words bits = plane[UNIT / 4 / per + c / per_high];
        bits = shift >= 0 ? bits << shift : bits >> -shift;
        codes |= bits & (0x01010101 * ((1 << high) - 1) << low);
    }
    return format == IQ4_NL ? iq4_values(codes) : codes;
}

#if defined(__clang__)
#define UNROLL _Pragma("clang loop unroll(full)")
#else
#define UNROLL _Pragma("GCC unroll 8")
#endif

/* out[r][0 … WIDTH) = strip · x[r]. Format and number of rows are known at compile time, so that sums stay in registers. */
INLINE void block_strip(const int format, const int R, const Activations *x, long step, long units, const uint8_t *strip,
                        int streamed, float *out) {
    const int group = group_of(format), groups = UNIT / group, part = groups - 1;  /* part: first index into x's sums */
    const int zero = is_signed(format) ? SIGNED_SHIFT : zero_shift(format);
    const long bytes = unit_bytes(format) * WIDTH, header = header_bytes(format) * WIDTH;
    vector sums[BLOCK_ROWS] = {0}, d = {0}, m = {0};
    for (long k = 0; k < units; k++, strip += bytes, x += step) {
        if (is_super(format)) {
            if (k % UNITS == 0) {
                d = widen_halves((const half *)strip);
                if (has_min(format)) m = widen_halves((const half *)strip + WIDTH);
                strip += header;
            }
        } else {
            d = widen_halves((const half *)strip);
            if (has_min(format)) m = widen_halves((const half *)strip + WIDTH);
        }
        load_ahead(strip + AHEAD_BYTES, bytes, streamed);
        const uint8_t *scales = strip;
        const words *plane = (const words *)(strip + (is_super(format) || !has_min(format) ? 2 : 4) * WIDTH);
        UNROLL for (int g = 0; g < groups; g++) {
            words dots[BLOCK_ROWS];
            UNROLL for (int r = 0; r < R; r++) {
                words none = {0};
                dots[r] = zero < 0 ? none : (none + x[r].minus[part + g]) << (zero < 0 ? 0 : zero);
            }
            UNROLL for (int c = 0; c < group / 4; c++) {
                words codes = codes_at(format, plane, g * group / 4 + c);
                UNROLL for (int r = 0; r < R; r++) {
                    int32_t four = x[r].fours[g * group / 4 + c];
                    dots[r] = is_signed(format) ? dot4_signed(dots[r], codes, four) : dot4(dots[r], codes, four);
                }
            }
            vector scale = d, min = m;
            if (format == Q4_K || format == Q5_K) {
                scale = settled(d * widen_scales(scales, 0));
                min = settled(m * -widen_scales(scales + WIDTH, 0));
            } else if (format == Q2_K) {
                uint8_t low[WIDTH], high[WIDTH];
                for (int i = 0; i < WIDTH; i++) low[i] = scales[g * WIDTH + i] & 15, high[i] = scales[g * WIDTH + i] >> 4;
                scale = settled(d * widen_scales(low, 0));
                min = settled(m * -widen_scales(high, 0));
            } else if (format == Q3_K || format == Q6_K) {
                scale = settled(d * widen_scales(scales + g * WIDTH, 1));
            }
            UNROLL for (int r = 0; r < R; r++) {
                vector both = settled(scale * x[r].scale);
                sums[r] = settled(sums[r] + __builtin_convertvector(dots[r], vector) * both);
                if (has_min(format)) sums[r] = settled(sums[r] + min * x[r].sums[part + g]);
            }
        }
    }
    UNROLL for (int r = 0; r < R; r++) memcpy(out + r * PANEL, &sums[r], sizeof sums[r]);
}

typedef void (*StripOf)(const Activations *, long, long, const uint8_t *, int, float *);
#define STRIP_OF(R, FORMAT)                                                                                               \
    static void FORMAT##_strip_##R(const Activations *x, long step, long units, const uint8_t *strip, int streamed, float *out) { \
        block_strip(FORMAT, R, x, step, units, strip, streamed, out);                                                     \
    }
#define STRIP_NAME(R, FORMAT) FORMAT##_strip_##R,
#define STRIPS_OF(FORMAT)                                                                                                 \
    FOR_BLOCK_ROWS(STRIP_OF, FORMAT) static const StripOf FORMAT##_strip[] = {0, FOR_BLOCK_ROWS(STRIP_NAME, FORMAT)};
FOR_BLOCK_FORMATS(STRIPS_OF)

static const StripOf *strips_of(int format) {
    switch (format) {
#define CASE(FORMAT) case FORMAT: return FORMAT##_strip;
    FOR_BLOCK_FORMATS(CASE)
#undef CASE
    }
    return 0;
}

/* out[r][0 … PANEL) = panel · x[r]; `x`, `step`: of the first row */
static void block_panel(int format, const Activations *x, long step, long rows, long inputs, const uint8_t *panel,
                        int streamed, float *out) {
    StripOf strip = strips_of(format)[rows];
    long bytes = block_output_bytes(format, inputs) * WIDTH;
    for (int v = 0; v < VECTORS; v++) strip(x, step, inputs / UNIT, panel + v * bytes, streamed, out + v * WIDTH);
}

/* Where unit `unit` of row `row` of [rows, inputs] is stored. */
static inline Activations *unit_at(Activations *units, long row, long rows, long inputs, long unit) {
    long step, first = first_unit(row, rows, inputs / UNIT, &step);
    return units + first + unit * step;
}

/* Sums of the first sixteen codes and of the others. (A loop over bytes or ints is compiled to 32 extractions.) */
INLINE void code_sums(const int8_t *codes, int32_t *sums) {
#if defined(__AVX2__)
    __m256i pairs = _mm256_maddubs_epi16(_mm256_set1_epi8(1), _mm256_loadu_si256((const __m256i *)codes));
    __m256i fours = _mm256_madd_epi16(pairs, _mm256_set1_epi16(1));
    __m128i eights = _mm_hadd_epi32(_mm256_castsi256_si128(fours), _mm256_extracti128_si256(fours, 1));
    _mm_storel_epi64((__m128i *)sums, _mm_hadd_epi32(eights, eights));
#elif defined(__ARM_NEON)
    for (int i = 0; i < 2; i++) sums[i] = vaddlvq_s8(vld1q_s8(codes + i * UNIT / 2));
#else
    for (int i = 0; i < 2; i++) sums[i] = 0;
    for (int i = 0; i < UNIT; i++) sums[i / (UNIT / 2)] += codes[i];
#endif
}

/* Quantises a unit of activations to 8 bits; if all are zero, the scale is 0. */
static inline void quantise_unit(const float *x, Activations *to) {
    float largest = 0.0f;
    int32_t sums[2];
    for (int i = 0; i < UNIT; i++) largest = fabsf(x[i]) > largest ? fabsf(x[i]) : largest;
    float factor = largest > 0.0f ? 127.0f / largest : 0.0f, scale = largest / 127.0f;
    for (int i = 0; i < UNIT; i++) to->codes[i] = (int8_t)(int)rintf(x[i] * factor);
    code_sums(to->codes, sums);
    to->scale = scale;
    to->minus[0] = -sums[0] - sums[1], to->sums[0] = scale * (float)(sums[0] + sums[1]);
    for (int i = 0; i < 2; i++) to->minus[1 + i] = -sums[i], to->sums[1 + i] = scale * (float)sums[i];
}

/* Quantises row `row` of [rows, inputs] to 8 bits, at its place in `units`. */
static void quantise_row(const float *x, Activations *units, long row, long rows, long inputs) {
    long step, first = first_unit(row, rows, inputs / UNIT, &step);
    for (long k = 0; k < inputs / UNIT; k++) quantise_unit(x + k * UNIT, units + first + k * step);
}
