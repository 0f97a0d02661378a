/* Vectors of sixteen floats, at any address; the compiler maps them to the processor's registers. */
#include <stdint.h>
#if defined(__x86_64__)
#include <immintrin.h>
#if !defined(__AVX2__) || !defined(__F16C__)
#error "without AVX2 torch's own kernels are faster"
#endif
#elif defined(__ARM_NEON)
#include <arm_neon.h>
#endif

typedef float lanes __attribute__((vector_size(64), aligned(4)));
enum { LANES = 16 };
typedef uint16_t half;  /* the bits of an fp16 number */
typedef struct { uint16_t bits; } bfloat;  /* the upper half of an fp32 number */
typedef int8_t byte;
static inline lanes load(const float *x) { return *(const lanes *)x; }
static inline void store(float *x, lanes value) { *(lanes *)x = value; }

/* Vectors of the size of one register, for loops in which sixteen floats would be spilled to memory: floats and words. */
#if defined(__AVX512BW__)
enum { WIDTH = 16 };
#elif defined(__AVX2__)
enum { WIDTH = 8 };
#else
enum { WIDTH = 4 };
#endif
typedef float vector __attribute__((vector_size(4 * WIDTH), aligned(4)));
typedef int32_t words __attribute__((vector_size(4 * WIDTH), aligned(4)));

static inline vector widen_floats(const float *floats) { return *(const vector *)floats; }

static inline vector widen_halves(const half *halves) {
#if defined(__AVX512BW__)
    return (vector)_mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *)halves));
#elif defined(__AVX2__)
    return (vector)_mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)halves));
#else
    vector whole;
    for (int i = 0; i < WIDTH; i++) {
#if defined(__FLT16_MANT_DIG__)
        _Float16 one;
        memcpy(&one, halves + i, sizeof one);
        whole[i] = (float)one;
#else
#error "this compiler has no 16-bit floats"
#endif
    }
    return whole;
#endif
}

/* Rounds to the nearest; ties to even. */
static inline half half_of(float value) {
#if defined(__x86_64__)
    return _cvtss_sh(value, 0);
#else
    _Float16 one = (_Float16)value;
    half bits;
    memcpy(&bits, &one, sizeof bits);
    return bits;
#endif
}

/* The same for a register of floats. */
static inline void narrow_floats(const float *floats, half *halves) {
#if defined(__AVX512BW__)
    _mm256_storeu_si256((__m256i *)halves, _mm512_cvtps_ph(_mm512_loadu_ps(floats), 0));
#elif defined(__AVX2__)
    _mm_storeu_si128((__m128i *)halves, _mm256_cvtps_ph(_mm256_loadu_ps(floats), 0));
#else
    for (int i = 0; i < WIDTH; i++) halves[i] = half_of(floats[i]);
#endif
}

static inline vector widen_bfloats(const bfloat *bfloats) {
    typedef uint16_t halves __attribute__((vector_size(2 * WIDTH), aligned(2)));
    return (vector)(__builtin_convertvector(*(const halves *)bfloats, words) << 16);
}

/* Pairs of bytes as pairs of 16-bit numbers, one pair per word. */
static inline words widen_pairs(const byte *bytes) {
#if defined(__AVX512BW__)
    return (words)_mm512_cvtepi8_epi16(_mm256_loadu_si256((const __m256i *)bytes));
#elif defined(__AVX2__)
    return (words)_mm256_cvtepi8_epi16(_mm_loadu_si128((const __m128i *)bytes));
#else
    words whole;
    for (int i = 0; i < WIDTH; i++) whole[i] = (int32_t)((uint32_t)bytes[2 * i + 1] << 16 | (uint16_t)bytes[2 * i]);
    return whole;
#endif
}

/* Adds to each sum the dot product of its pair with `pair`: exact, and twice as many products per instruction as with floats. */
static inline words add_products(words sums, words pairs, int32_t pair) {
#if defined(__AVX512VNNI__)
    return (words)_mm512_dpwssd_epi32((__m512i)sums, (__m512i)pairs, _mm512_set1_epi32(pair));
#elif defined(__AVX512BW__)
    return sums + (words)_mm512_madd_epi16((__m512i)pairs, _mm512_set1_epi32(pair));
#elif defined(__AVX2__)
    return sums + (words)_mm256_madd_epi16((__m256i)pairs, _mm256_set1_epi32(pair));
#else
    return sums + (pairs << 16 >> 16) * (pair << 16 >> 16) + (pairs >> 16) * (pair >> 16);
#endif
}

/* Returns the value, but keeps the compiler from adding its terms in another order. */
static inline vector settled(vector value) {
#if defined(__x86_64__)
    __asm__("" : "+v"(value));
#elif defined(__aarch64__)
    __asm__("" : "+w"(value));
#endif
    return value;
}

/* exp by range reduction and a polynomial (Cephes), without branches, so that the compiler can vectorise loops of it (not of expf). */
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
