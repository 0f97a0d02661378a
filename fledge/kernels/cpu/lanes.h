/* Sixteen floats at once, at any address; the compiler maps them to whatever the processor has. */
#include <stdint.h>
#if defined(__F16C__)
#include <immintrin.h>
#endif

typedef float lanes __attribute__((vector_size(64), aligned(4)));
enum { LANES = 16 };
typedef uint16_t half;  /* the bits of an fp16 number */
typedef int8_t byte;
typedef int32_t words __attribute__((vector_size(64), aligned(4)));

static inline lanes load(const float *x) { return *(const lanes *)x; }
static inline void store(float *x, lanes value) { *(lanes *)x = value; }

/* Sixteen fp16 numbers as floats. */
static inline lanes widen(const half *halves) {
#if defined(__AVX512F__)
    return (lanes)_mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *)halves));
#elif defined(__F16C__)
    union { __m256 parts[2]; lanes whole; } both;
    both.parts[0] = _mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)halves));
    both.parts[1] = _mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)(halves + 8)));
    return both.whole;
#else
    lanes whole;
    for (int i = 0; i < LANES; i++) {
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

static inline lanes widen_bytes(const byte *bytes) {
#if defined(__AVX512F__)
    return (lanes)_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i *)bytes)));
#elif defined(__AVX2__)
    union { __m256 parts[2]; lanes whole; } both;
    both.parts[0] = _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i *)bytes)));
    both.parts[1] = _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i *)(bytes + 8))));
    return both.whole;
#else
    lanes whole;
    for (int i = 0; i < LANES; i++) whole[i] = bytes[i];
    return whole;
#endif
}

/* Of each of sixteen words, its nibble `index`, counted from the lowest. */
static inline lanes widen_nibbles(words eights, int index) {
#if defined(__AVX512F__)
    const __m512 numbers = _mm512_setr_ps(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
    return (lanes)_mm512_permutexvar_ps(_mm512_srli_epi32((__m512i)eights, 4 * index), numbers);  /* looks at four bits only */
#else
    return __builtin_convertvector((eights >> 4 * index) & 15, lanes);
#endif
}

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
