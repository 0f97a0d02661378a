/* GGUF's block formats: their layout in a file, and the layout of the panels that the kernels read.

   All formats are divided into units of 32 inputs of one output. In a file a unit is a block, or an eighth of a block of 256 (the
   K formats, which have fp16 scales per block and small integer scales per group of 16 or 32 inputs).

   A panel holds PANEL outputs as strips of WIDTH outputs, one after the other; a strip holds its units one after the other:

       blocks of 256 only, before each eighth unit:   fp16 d[WIDTH], fp16 dmin[WIDTH] (Q2_K, Q4_K, Q5_K)
       blocks of 32: fp16 d[WIDTH], fp16 m[WIDTH] (Q4_1, Q5_1)
       Q4_K, Q5_K: uint8 scale[WIDTH], uint8 min[WIDTH];  Q3_K, Q6_K: int8 scale[2][WIDTH];  Q2_K: uint8 scale_and_min[2][WIDTH]
       low bits    words[4 · low / 4 … ][WIDTH]: with 4 bits word i holds the inputs 8 i … 8 i + 3 in its low nibbles, the next four
                   in its high ones; with 2 bits it holds 16 inputs, with 8 bits four
       high bits   the same way: 1 bit: one word of 32 inputs; 2 bits: two words

   So one shift and one mask give four inputs of WIDTH outputs. No number is rounded; only Q3_K, Q4_K and Q5_K grow, by 2 to 4 %,
   since their 6-bit scales take a byte. */
enum Format {
    F32 = 0, F16 = 1, Q4_0 = 2, Q4_1 = 3, Q5_0 = 6, Q5_1 = 7, Q8_0 = 8,  /* GGUF's own numbers */
    Q2_K = 10, Q3_K = 11, Q4_K = 12, Q5_K = 13, Q6_K = 14, IQ4_NL = 20, BF16 = 30,
    GROUPS_OF_BYTES = 108, GROUPS_OF_NIBBLES = 104, GROUPS_WITH_WIDE_OFFSETS = 105  /* Fledge's own formats: linear.h */
};
enum { UNIT = 32, UNITS = 8 };  /* inputs per unit; units per block of 256 */
#define INLINE static inline __attribute__((always_inline))

INLINE int is_super(int format) { return format >= Q2_K && format <= Q6_K; }
INLINE int has_min(int format) {
    return format == Q4_1 || format == Q5_1 || format == Q2_K || format == Q4_K || format == Q5_K;
}
INLINE int low_bits(int format) { return format == Q8_0 ? 8 : format == Q2_K || format == Q3_K ? 2 : 4; }
INLINE int high_bits(int format) {
    return format == Q6_K ? 2 : format == Q5_0 || format == Q5_1 || format == Q5_K || format == Q3_K ? 1 : 0;
}
/* Inputs that share a scale. */
INLINE int group_of(int format) { return format == Q2_K || format == Q3_K || format == Q6_K ? 16 : 32; }
/* The logarithm of the codes' zero point: weight = (code - 2^shift) · scale. -1: the zero point is 0. */
INLINE int zero_shift(int format) {
    return format == Q3_K ? 2 : format == Q4_0 ? 3 : format == Q5_0 ? 4 : format == Q6_K ? 5 : -1;
}
INLINE int is_signed(int format) { return format == Q8_0 || format == IQ4_NL; }
static const int8_t IQ4_VALUES[16] = {-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113};

/* Bytes per output in a panel: of the fp16 scales of a block of 256, and of a unit. */
INLINE long header_bytes(int format) { return is_super(format) ? (has_min(format) ? 4 : 2) : 0; }
INLINE long unit_bytes(int format) {
    long scales = is_super(format) || !has_min(format) ? 2 : 4;
    return scales + UNIT * (low_bits(format) + high_bits(format)) / 8;
}

static inline long block_output_bytes(int format, long inputs) {
    long units = inputs / UNIT;
    return units * unit_bytes(format) + (is_super(format) ? units / UNITS * header_bytes(format) : 0);
}

/* Bytes of a block in the file; below, its number of inputs. */
static long file_block_bytes(int format) {
    switch (format) {
    case F32: return 4;
    case F16: case BF16: return 2;
    case Q4_0: case IQ4_NL: return 18;
    case Q4_1: return 20;
    case Q5_0: return 22;
    case Q5_1: return 24;
    case Q8_0: return 34;
    case Q2_K: return 84;
    case Q3_K: return 110;
    case Q4_K: return 144;
    case Q5_K: return 176;
    case Q6_K: return 210;
    }
    return 0;
}
static long file_block_inputs(int format) { return is_super(format) ? 256 : format == F32 || format == F16 || format == BF16 ? 1 : 32; }

/* A unit as codes of one byte each, and its scales in the panel's form. */
typedef struct {
    union { uint8_t codes[UNIT]; uint32_t words[UNIT / 4]; };
    half d, m;             /* m: the block's smallest value, or dmin of a block of 256 */
    uint8_t scales[2];     /* integer scales in a block of 256; see above */
} Unit;

static inline half half_at(const uint8_t *bytes) { half value; memcpy(&value, bytes, sizeof value); return value; }

static inline void read_nibbles(const uint8_t *qs, uint8_t *codes) {  /* the second sixteen are the high nibbles */
    for (int i = 0; i < 16; i++) codes[i] = qs[i] & 15, codes[i + 16] = qs[i] >> 4;
}

static inline void read_bits(const uint8_t *qh, uint8_t *codes) {
    uint32_t bits;
    memcpy(&bits, qh, sizeof bits);
    for (int i = 0; i < UNIT; i++) codes[i] |= (bits >> i & 1) << 4;
}

/* Reads unit `u` of the block at `b`. */
INLINE void read_unit(int format, const uint8_t *b, int u, Unit *unit) {
    uint8_t *codes = unit->codes;
    switch (format) {
    case Q4_0: case IQ4_NL: unit->d = half_at(b), read_nibbles(b + 2, codes); break;
    case Q4_1: unit->d = half_at(b), unit->m = half_at(b + 2), read_nibbles(b + 4, codes); break;
    case Q5_0: unit->d = half_at(b), read_nibbles(b + 6, codes), read_bits(b + 2, codes); break;
    case Q5_1: unit->d = half_at(b), unit->m = half_at(b + 2), read_nibbles(b + 8, codes), read_bits(b + 4, codes); break;
    case Q8_0: unit->d = half_at(b), memcpy(codes, b + 2, UNIT); break;
    case Q2_K: case Q3_K: {
        const uint8_t *qs = b + (format == Q2_K ? 16 : 32) + UNIT * (u / 4);
        for (int i = 0; i < UNIT; i++) codes[i] = qs[i] >> 2 * (u % 4) & 3;
        if (format == Q2_K) {
            unit->d = half_at(b + 80), unit->m = half_at(b + 82);
            memcpy(unit->scales, b + 2 * u, 2);
            break;
        }
        for (int i = 0; i < UNIT; i++) codes[i] |= (b[i] >> u & 1) << 2;
        unit->d = half_at(b + 108);
        for (int i = 0; i < 2; i++) {
            int group = 2 * u + i;
            int low = group < 8 ? b[96 + group] & 15 : b[96 + group - 8] >> 4, high = b[104 + group % 4] >> 2 * (group / 4) & 3;
            unit->scales[i] = (uint8_t)((low | high << 4) - 32);
        }
        break;
    }
    case Q4_K: case Q5_K: {
        const uint8_t *s = b + 4, *qs = b + (format == Q4_K ? 16 : 48) + UNIT * (u / 2);
        for (int i = 0; i < UNIT; i++) codes[i] = qs[i] >> 4 * (u % 2) & 15;
        if (format == Q5_K)
            for (int i = 0; i < UNIT; i++) codes[i] |= (b[16 + i] >> u & 1) << 4;
        unit->d = half_at(b), unit->m = half_at(b + 2);
        unit->scales[0] = u < 4 ? s[u] & 63 : (s[u + 4] & 15) | s[u - 4] >> 6 << 4;
        unit->scales[1] = u < 4 ? s[u + 4] & 63 : s[u + 4] >> 4 | s[u] >> 6 << 4;
        break;
    }
    case Q6_K: {
        const uint8_t *ql = b + 64 * (u / 4) + 32 * (u & 1), *qh = b + 128 + 32 * (u / 4);
        for (int i = 0; i < UNIT; i++) codes[i] = (ql[i] >> 4 * (u >> 1 & 1) & 15) | (qh[i] >> 2 * (u % 4) & 3) << 4;
        unit->d = half_at(b + 208);
        memcpy(unit->scales, b + 192 + 2 * u, 2);
        break;
    }
    }
}

static inline float float_of(half bits) {
#if defined(__x86_64__)
    return _cvtsh_ss(bits);
#else
    _Float16 one;
    memcpy(&one, &bits, sizeof one);
    return (float)one;
#endif
}

/* The weights of unit `u` as floats, with the meaning that the kernels' sums give them. */
INLINE void unit_weights(int format, const uint8_t *block, int u, float *out) {
    Unit unit;
    read_unit(format, block, u, &unit);
    for (int i = 0; i < UNIT; i++) {
        int code = format == Q8_0 ? (int8_t)unit.codes[i] : format == IQ4_NL ? IQ4_VALUES[unit.codes[i]] : unit.codes[i];
        int part = i / group_of(format);
        float scale = float_of(unit.d), min = has_min(format) ? float_of(unit.m) : 0.0f;
        if (zero_shift(format) >= 0) code -= 1 << zero_shift(format);
        if (format == Q4_K || format == Q5_K) scale *= unit.scales[0], min *= -(float)unit.scales[1];
        if (format == Q2_K) scale *= unit.scales[part] & 15, min *= -(float)(unit.scales[part] >> 4);
        if (format == Q3_K || format == Q6_K) scale *= (int8_t)unit.scales[part];
        out[i] = (float)code * scale + min;
    }
}

/* Packs the units of `WIDTH` rows of the file into a strip; if `rows` is below WIDTH, the others are zero already. */
INLINE void pack_strip(int format, const uint8_t *file, long row_bytes, long rows, long inputs, uint8_t *strip) {
    const int low = low_bits(format), high = high_bits(format), per_low = 8 / low, size = WIDTH;
    long step = file_block_bytes(format), header = header_bytes(format) * WIDTH, bytes = unit_bytes(format) * WIDTH;
    for (long k = 0; k < inputs / UNIT; k++, strip += bytes) {
        int u = is_super(format) ? (int)(k % UNITS) : 0;
        long block = is_super(format) ? k / UNITS : k;
        if (is_super(format) && u == 0) strip += header;
        uint8_t *at = strip;
        half *d = (half *)(is_super(format) ? strip - header : at);
        if (!is_super(format)) at += (has_min(format) ? 4 : 2) * size;
        uint8_t *scales = at;
        if (is_super(format)) at += 2 * size;
        uint32_t *words = (uint32_t *)at;
        for (long row = 0; row < rows; row++) {
            Unit unit;
            read_unit(format, file + row * row_bytes + block * step, u, &unit);
            if (!is_super(format) || u == 0) {
                d[row] = unit.d;
                if (has_min(format)) d[size + row] = unit.m;
            }
            if (is_super(format)) scales[row] = unit.scales[0], scales[size + row] = unit.scales[1];
            uint32_t mask = 0x01010101u * ((1u << low) - 1), *to = words + row;
            for (int word = 0; word < UNIT / 4 / per_low; word++, to += size) {
                uint32_t packed = 0;
                for (int i = 0; i < per_low; i++) packed |= (unit.words[word * per_low + i] & mask) << low * i;
                *to = packed;
            }
            if (high) {
                const int per_high = 8 / high;
                mask = 0x01010101u * ((1u << high) - 1);
                for (int word = 0; word < UNIT / 4 / per_high; word++, to += size) {
                    uint32_t packed = 0;
                    for (int i = 0; i < per_high; i++) packed |= (unit.words[word * per_high + i] >> low & mask) << high * i;
                    *to = packed;
                }
            }
        }
    }
}

#define FOR_BLOCK_FORMATS(DO)                                                                                             \
    DO(Q4_0) DO(Q4_1) DO(Q5_0) DO(Q5_1) DO(Q8_0) DO(Q2_K) DO(Q3_K) DO(Q4_K) DO(Q5_K) DO(Q6_K) DO(IQ4_NL)
