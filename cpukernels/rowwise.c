/* Row-invariant CPU kernels for skinny batches (a handful of rows against a large weight matrix), fp32, one thread.
 *
 * Row-invariant: what one row gets does not depend on which other rows share the batch. Each output element is one
 * chain of fused multiply-adds in a fixed order over the inner dimension, whatever the number of rows. A verify pass
 * over K+1 rows therefore returns bit for bit what K+1 single-row decode steps return, and speculation on the CPU is
 * lossless in the strict sense, not "up to ties". BLAS libraries switch kernels by row count and give this up.
 *
 * Fast: weights are packed once into panels of NB output columns, so a pass streams each weight exactly once and
 * keeps ROWS x NB accumulators in registers. Up to ROWS rows cost about one row (measured in benchmarks/embedded.py).
 *
 * Vector types are GCC/Clang extensions; the compiler maps them to the widest unit the machine has.
 */
#include <math.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>
#if defined(__AVX2__)
#include <immintrin.h>
#endif

#define LANES 16
typedef float vec __attribute__((vector_size(4 * LANES), aligned(4)));
typedef int32_t ivec __attribute__((vector_size(4 * LANES), aligned(4)));

#define NB 32            /* output columns of a packed panel = 2 vectors */
#define NV (NB / LANES)
#if defined(__AVX512F__)
#define ROWS 12          /* 12 rows x 2 vectors = 24 of 32 registers */
#else
#define ROWS 4           /* 16-register machines split each vec in two or four */
#endif

int bk_panel_columns(void) { return NB; }
int bk_rows_per_pass(void) { return ROWS; }

/* weights [N, K] row-major -> panels [ceil(N/NB)][K][NB], zero padded. */
void bk_pack(const float *weights, float *packed, size_t N, size_t K) {
  size_t panels = (N + NB - 1) / NB;
  for (size_t p = 0; p < panels; p++)
    for (size_t k = 0; k < K; k++)
      for (size_t j = 0; j < NB; j++) {
        size_t n = p * NB + j;
        packed[(p * K + k) * NB + j] = n < N ? weights[n * K + k] : 0.0f;
      }
}

/* Three forms of weights, one tile for each form and number of rows:
 *
 *   full     float32
 *   half     bfloat16, for weights that are such numbers
 *   grouped  in every GROUP positions of a row, w = scale * code + offset with code in 0..255, for weights that are such
 *            numbers: what a conversion from GGUF's Q4_1 and Q8_0 leaves behind. A pass reads 1.25 bytes a weight.
 *
 * The packing functions of the small forms answer 0 where one weight is not exactly that, and then the matrix stays
 * full. All tiles compute the same sums in the same order, so the form changes what a pass reads from memory and not
 * one bit of what it returns.
 */
#define GROUP 32
typedef uint8_t code_vec __attribute__((vector_size(LANES), aligned(1)));
typedef uint16_t half_vec __attribute__((vector_size(2 * LANES), aligned(2)));
typedef uint32_t uvec __attribute__((vector_size(4 * LANES), aligned(4)));

/* [ceil(N/NB)][K/GROUP] of these */
typedef struct {
  float scale[NB];
  float offset[NB];
  uint8_t code[GROUP][NB];
} grouped;

static inline vec from_half(half_vec h) { return (vec)(__builtin_convertvector(h, uvec) << 16); }

/* GCC 12 makes scalar code of the portable conversion. */
#if defined(__AVX512F__)
static inline vec from_code(code_vec c) { return (vec)_mm512_cvtepi32_ps(_mm512_cvtepu8_epi32((__m128i)c)); }
#elif defined(__AVX2__)
static inline vec from_code(code_vec c) {
  union {
    __m256 part[2];
    vec whole;
  } to;
  to.part[0] = _mm256_cvtepi32_ps(_mm256_cvtepu8_epi32((__m128i)c));
  to.part[1] = _mm256_cvtepi32_ps(_mm256_cvtepu8_epi32(_mm_srli_si128((__m128i)c, 8)));
  return to.whole;
}
#else
static inline vec from_code(code_vec c) { return __builtin_convertvector(c, vec); }
#endif

/* Whether the grouped form is faster here and not only smaller. */
int bk_has_fast_codes(void) {
#if defined(__AVX2__) || defined(__clang__)
  return 1;
#else
  return 0;
#endif
}

static inline uint32_t bits_of(float x) {
  uint32_t bits;
  memcpy(&bits, &x, sizeof bits);
  return bits;
}

/* weights [N, K] row-major -> panels [ceil(N/NB)][K][NB] of bfloat16 bits, zero padded. 0: some weight is none. */
int bk_pack_half(const float *weights, uint16_t *packed, size_t N, size_t K) {
  size_t panels = (N + NB - 1) / NB;
  for (size_t p = 0; p < panels; p++)
    for (size_t k = 0; k < K; k++)
      for (size_t j = 0; j < NB; j++) {
        size_t n = p * NB + j;
        uint32_t bits = n < N ? bits_of(weights[n * K + k]) : 0;
        if (bits & 0xffff) return 0;
        packed[(p * K + k) * NB + j] = (uint16_t)(bits >> 16);
      }
  return 1;
}

size_t bk_grouped_bytes(size_t N, size_t K) { return (N + NB - 1) / NB * (K / GROUP) * sizeof(grouped); }

/* The nearest number of float16's 11 significant bits: GGUF keeps scales so. */
static inline float to_scale(float x) {
  uint32_t bits = bits_of(x);
  bits = (bits + 0xfff + (bits >> 13 & 1)) & ~(uint32_t)0x1fff;
  memcpy(&x, &bits, sizeof x);
  return x;
}

/* Codes of GROUP weights on the grid scale * code + offset; 0: not all are on it. A scale of 11 bits times a code of 8
 * is exact, so the sum rounds once, fused or not. -0 and 0 compare equal, and no sum that starts at 0 can tell them
 * apart. */
static int on_grid(const float *w, float scale, float offset, uint8_t *codes) {
  float inverse = scale == 0.0f ? 0.0f : 1.0f / scale;
  for (int i = 0; i < GROUP; i++) {
    float code = rintf((w[i] - offset) * inverse);
    if (!(code >= 0.0f && code <= 255.0f) || scale * code + offset != w[i]) return 0;
    codes[i] = (uint8_t)code;
  }
  return 1;
}

/* weights [N, K] row-major -> panels of groups, zero padded; K a multiple of GROUP. 0: some group is on no grid.
 * The grids tried are those of Q4_1 (the smallest weight is code 0, the largest 15) and Q8_0 (the largest is +-127). */
int bk_pack_grouped(const float *weights, void *packed, size_t N, size_t K) {
  size_t groups = K / GROUP;
  grouped *out = packed;
  memset(packed, 0, bk_grouped_bytes(N, K));
  for (size_t n = 0; n < N; n++)
    for (size_t g = 0; g < groups; g++) {
      const float *w = weights + n * K + g * GROUP;
      float lowest = w[0], highest = w[0];
      for (int i = 1; i < GROUP; i++) {
        lowest = w[i] < lowest ? w[i] : lowest;
        highest = w[i] > highest ? w[i] : highest;
      }
      uint8_t codes[GROUP];
      float scale = to_scale((highest - lowest) / 15.0f), offset = lowest;
      if (!on_grid(w, scale, offset, codes)) {
        scale = to_scale((-lowest > highest ? -lowest : highest) / 127.0f);
        offset = -128.0f * scale;
        if (!on_grid(w, scale, offset, codes)) return 0;
      }
      grouped *to = out + (n / NB) * groups + g;
      size_t j = n % NB;
      to->scale[j] = scale;
      to->offset[j] = offset;
      for (int i = 0; i < GROUP; i++) to->code[i][j] = codes[i];
    }
  return 1;
}

#define START(MT)                                                                                          \
  vec acc[MT][NV];                                                                                         \
  for (int m = 0; m < MT; m++)                                                                             \
    for (int v = 0; v < NV; v++) acc[m][v] = (vec){0};

#define MULTIPLY(MT, k)                                                                                    \
  for (int m = 0; m < MT; m++) {                                                                           \
    vec a = x[m * ldx + (k)] - (vec){0};                                                                   \
    for (int v = 0; v < NV; v++) acc[m][v] += a * b[v];                                                    \
  }

#define FINISH(MT)                                                                                         \
  for (int m = 0; m < MT; m++) {                                                                           \
    float *out = y + m * ldy;                                                                              \
    const float *from = (const float *)acc[m];                                                             \
    if (accumulate)                                                                                        \
      for (size_t j = 0; j < columns; j++) out[j] += from[j];                                              \
    else                                                                                                   \
      memcpy(out, from, columns * sizeof(float));                                                          \
  }

#define TILE_ARGUMENTS                                                                                     \
  const float *x, size_t ldx, const void *weights, size_t K, float *y, size_t ldy, size_t columns, int accumulate

#define DEFINE_TILE(MT)                                                                                    \
  static void full_##MT(TILE_ARGUMENTS) {                                                                  \
    const float *w = weights;                                                                              \
    START(MT)                                                                                              \
    for (size_t k = 0; k < K; k++) {                                                                       \
      const float *wk = w + k * NB;                                                                        \
      __builtin_prefetch(wk + NB * 16);                                                                    \
      __builtin_prefetch(wk + NB * 16 + LANES);                                                            \
      vec b[NV];                                                                                           \
      for (int v = 0; v < NV; v++) b[v] = *(const vec *)(wk + v * LANES);                                  \
      MULTIPLY(MT, k)                                                                                      \
    }                                                                                                      \
    FINISH(MT)                                                                                             \
  }                                                                                                        \
  static void half_##MT(TILE_ARGUMENTS) {                                                                  \
    const uint16_t *w = weights;                                                                           \
    START(MT)                                                                                              \
    for (size_t k = 0; k < K; k++) {                                                                       \
      const uint16_t *wk = w + k * NB;                                                                     \
      __builtin_prefetch(wk + NB * 32);                                                                    \
      vec b[NV];                                                                                           \
      for (int v = 0; v < NV; v++) b[v] = from_half(*(const half_vec *)(wk + v * LANES));                  \
      MULTIPLY(MT, k)                                                                                      \
    }                                                                                                      \
    FINISH(MT)                                                                                             \
  }                                                                                                        \
  static void grouped_##MT(TILE_ARGUMENTS) {                                                               \
    const grouped *w = weights;                                                                            \
    START(MT)                                                                                              \
    for (size_t g = 0; g < K / GROUP; g++) {                                                               \
      vec scale[NV], offset[NV];                                                                           \
      for (int v = 0; v < NV; v++) {                                                                       \
        scale[v] = *(const vec *)(w[g].scale + v * LANES);                                                 \
        offset[v] = *(const vec *)(w[g].offset + v * LANES);                                               \
      }                                                                                                    \
      for (size_t i = 0; i < GROUP; i++) {                                                                 \
        __builtin_prefetch((const char *)&w[g + 1] + i * (sizeof(grouped) / GROUP));                       \
        vec b[NV];                                                                                         \
        for (int v = 0; v < NV; v++)                                                                       \
          b[v] = from_code(*(const code_vec *)(w[g].code[i] + v * LANES)) * scale[v] + offset[v];          \
        MULTIPLY(MT, g * GROUP + i)                                                                        \
      }                                                                                                    \
    }                                                                                                      \
    FINISH(MT)                                                                                             \
  }
DEFINE_TILE(1) DEFINE_TILE(2) DEFINE_TILE(3) DEFINE_TILE(4)
#if ROWS >= 12
DEFINE_TILE(5) DEFINE_TILE(6) DEFINE_TILE(7) DEFINE_TILE(8)
DEFINE_TILE(9) DEFINE_TILE(10) DEFINE_TILE(11) DEFINE_TILE(12)
#endif

typedef void (*tile_fn)(TILE_ARGUMENTS);
#if ROWS >= 12
#define TILES(form) {0, form##_1, form##_2, form##_3, form##_4, form##_5, form##_6, form##_7, form##_8, form##_9, \
                     form##_10, form##_11, form##_12}
#else
#define TILES(form) {0, form##_1, form##_2, form##_3, form##_4}
#endif
static const tile_fn FULL[ROWS + 1] = TILES(full);
static const tile_fn HALF[ROWS + 1] = TILES(half);
static const tile_fn GROUPED[ROWS + 1] = TILES(grouped);

static void linear(const tile_fn *tiles, const float *x, const char *packed, size_t panel_bytes, float *y, size_t M,
                   size_t N, size_t K, int accumulate) {
  size_t panels = (N + NB - 1) / NB;
  for (size_t p = 0; p < panels; p++) {
    size_t columns = N - p * NB < NB ? N - p * NB : NB;
    size_t m = 0;
    while (m < M) {
      size_t left = M - m;
      size_t rows = left <= ROWS ? left : (left >= 2 * ROWS ? ROWS : (left + 1) / 2);
      tiles[rows](x + m * K, K, packed + p * panel_bytes, K, y + m * N + p * NB, N, columns, accumulate);
      m += rows;
    }
  }
}

/* y[M, N] (+)= x[M, K] . W[N, K]^T, W packed by bk_pack. accumulate != 0 adds to y (fused residual). */
void bk_linear(const float *x, const void *packed, float *y, size_t M, size_t N, size_t K, int accumulate) {
  linear(FULL, x, packed, K * NB * sizeof(float), y, M, N, K, accumulate);
}

/* The same, W packed by bk_pack_half. */
void bk_linear_half(const float *x, const void *packed, float *y, size_t M, size_t N, size_t K, int accumulate) {
  linear(HALF, x, packed, K * NB * sizeof(uint16_t), y, M, N, K, accumulate);
}

/* The same, W packed by bk_pack_grouped. */
void bk_linear_grouped(const float *x, const void *packed, float *y, size_t M, size_t N, size_t K, int accumulate) {
  linear(GROUPED, x, packed, K / GROUP * sizeof(grouped), y, M, N, K, accumulate);
}

static inline float vec_sum(vec v) {
  float s = 0.0f;
  for (int i = 0; i < LANES; i++) s += v[i];
  return s;
}

/* y[M, H] = x / sqrt(mean(x^2) + eps) * weight; H a multiple of LANES. ldx and ldy are row strides in floats. */
void bk_rms_norm(const float *x, size_t ldx, const float *weight, float *y, size_t ldy, size_t M, size_t H, float eps) {
  for (size_t m = 0; m < M; m++) {
    const float *row = x + m * ldx;
    float *out = y + m * ldy;
    vec acc = {0};
    for (size_t h = 0; h < H; h += LANES) {
      vec v = *(const vec *)(row + h);
      acc += v * v;
    }
    float scale = 1.0f / sqrtf(vec_sum(acc) / (float)H + eps);
    for (size_t h = 0; h < H; h += LANES)
      *(vec *)(out + h) = *(const vec *)(row + h) * scale * *(const vec *)(weight + h);
  }
}

/* exp for x <= 0 or moderate x; below -87 gives 0. Relative error under 2e-7 (degree-6 polynomial, Cody-Waite). */
static inline vec vec_exp(vec x) {
  const vec log2e = 1.44269504088896341f - (vec){0};
  ivec too_small = x < (-87.0f - (vec){0});
  ivec too_big = x > (88.0f - (vec){0});
  x = (vec)(((ivec)x & ~too_small) | ((ivec)(-87.0f - (vec){0}) & too_small));
  x = (vec)(((ivec)x & ~too_big) | ((ivec)(88.0f - (vec){0}) & too_big));
  vec scaled = x * log2e;
  ivec n = __builtin_convertvector(scaled + ((vec)((ivec)(0.5f - (vec){0}) | ((ivec)scaled & (int32_t)0x80000000))), ivec);
  vec nf = __builtin_convertvector(n, vec);
  vec r = x - nf * 0.693359375f;
  r = r - nf * -2.12194440e-4f;
  vec p = 1.9875691500e-4f - (vec){0};
  p = p * r + 1.3981999507e-3f;
  p = p * r + 8.3334519073e-3f;
  p = p * r + 4.1665795894e-2f;
  p = p * r + 1.6666665459e-1f;
  p = p * r + 5.0000001201e-1f;
  p = p * (r * r) + r + 1.0f;
  vec result = p * (vec)((n + 127) << 23);
  return (vec)((ivec)result & ~too_small);
}

/* out[M, I] = silu(gate_up[:, :I]) * gate_up[:, I:2I]; I a multiple of LANES. */
void bk_silu_mul(const float *gate_up, float *out, size_t M, size_t I) {
  for (size_t m = 0; m < M; m++) {
    const float *gate = gate_up + m * 2 * I, *up = gate + I;
    for (size_t i = 0; i < I; i += LANES) {
      vec g = *(const vec *)(gate + i);
      *(vec *)(out + m * I + i) = g / (1.0f + vec_exp(-g)) * *(const vec *)(up + i);
    }
  }
}

/* Rotate q and k in place (half-split convention) and append k, v to the cache of their request.
 *
 * qkv [M, (Hq + 2 Hkv) * D]: q heads, then k heads, then v heads. cos, sin [max_pos, D/2].
 * Caches are per request and layer: keys in blocks of LANES positions, [Hkv][cap/LANES][D][LANES] (so that a score
 * needs no horizontal sum), values [Hkv][cap][D].
 */
void bk_rope_append(float *qkv, const int64_t *positions, const float *cos, const float *sin, float *const *keys,
                    float *const *values, const int64_t *slots, const int64_t *capacities, size_t M, size_t Hq,
                    size_t Hkv, size_t D) {
  size_t half = D / 2;
  for (size_t m = 0; m < M; m++) {
    float *row = qkv + m * (Hq + 2 * Hkv) * D;
    const float *c = cos + positions[m] * half, *s = sin + positions[m] * half;
    for (size_t h = 0; h < Hq + Hkv; h++) {
      float *head = row + h * D;
      for (size_t i = 0; i < half; i++) {
        float a = head[i], b = head[i + half];
        head[i] = a * c[i] - b * s[i];
        head[i + half] = b * c[i] + a * s[i];
      }
    }
    size_t slot = (size_t)slots[m], cap = (size_t)capacities[m];
    for (size_t h = 0; h < Hkv; h++) {
      const float *k = row + (Hq + h) * D;
      float *block = keys[m] + (h * (cap / LANES) + slot / LANES) * D * LANES + slot % LANES;
      for (size_t d = 0; d < D; d++) block[d * LANES] = k[d];
      memcpy(values[m] + (h * cap + slot) * D, row + (Hq + Hkv + h) * D, D * sizeof(float));
    }
  }
}

/* o[D] = inverse * sum_t weights[t] * values[t, D], summed in position order. Inlined so that common D unroll. */
static inline __attribute__((always_inline)) void weighted_values(const float *weights, const float *values, size_t len,
                                                                  float inverse, float *o, size_t nd) {
  vec acc[16];
  for (size_t v = 0; v < nd; v++) acc[v] = (vec){0};
  for (size_t t = 0; t < len; t++) {
    float w = weights[t];
    for (size_t v = 0; v < nd; v++) acc[v] += w * *(const vec *)(values + (t * nd + v) * LANES);
  }
  for (size_t v = 0; v < nd; v++) *(vec *)(o + v * LANES) = acc[v] * inverse;
}

/* Causal attention of M query rows, each over the first lengths[m] positions of its own request's cache.
 *
 * qkv as above (only q is read), out [M, Hq * D], scores: scratch of at least round_up(max length, LANES) floats
 * times Hq/Hkv. D a multiple of LANES, D <= 256. Result of a row depends on its own q, cache and length alone.
 */
void bk_attention(const float *qkv, float *const *keys, float *const *values, const int64_t *lengths,
                  const int64_t *capacities, float *out, float *scores, size_t M, size_t Hq, size_t Hkv, size_t D,
                  float scale) {
  size_t group = Hq / Hkv;
  for (size_t m = 0; m < M; m++) {
    const float *row = qkv + m * (Hq + 2 * Hkv) * D;
    size_t len = (size_t)lengths[m], cap = (size_t)capacities[m], blocks = (len + LANES - 1) / LANES;
    size_t stride = blocks * LANES;
    for (size_t h = 0; h < Hkv; h++) {
      const float *kh = keys[m] + h * (cap / LANES) * D * LANES, *vh = values[m] + h * cap * D;
      for (size_t g = 0; g < group; g++) {
        const float *q = row + (h * group + g) * D;
        float *sc = scores + g * stride;
        vec top = -INFINITY - (vec){0};
        for (size_t b = 0; b < blocks; b++) {
          const float *kb = kh + b * D * LANES;
          vec s0 = {0}, s1 = {0};
          for (size_t d = 0; d < D; d += 2) {
            s0 += q[d] * *(const vec *)(kb + d * LANES);
            s1 += q[d + 1] * *(const vec *)(kb + (d + 1) * LANES);
          }
          vec s = (s0 + s1) * scale;
          if (b == blocks - 1)
            for (size_t i = len - b * LANES; i < LANES; i++) s[i] = -INFINITY;
          *(vec *)(sc + b * LANES) = s;
          ivec bigger = s > top;
          top = (vec)(((ivec)s & bigger) | ((ivec)top & ~bigger));
        }
        float max = top[0];
        for (int i = 1; i < LANES; i++) max = top[i] > max ? top[i] : max;
        vec total = {0};
        for (size_t b = 0; b < blocks; b++) {
          vec e = vec_exp(*(const vec *)(sc + b * LANES) - max);
          *(vec *)(sc + b * LANES) = e;
          total += e;
        }
        float inverse = 1.0f / vec_sum(total);
        float *o = out + m * Hq * D + (h * group + g) * D;
        switch (D / LANES) {
          case 4: weighted_values(sc, vh, len, inverse, o, 4); break;
          case 8: weighted_values(sc, vh, len, inverse, o, 8); break;
          default: weighted_values(sc, vh, len, inverse, o, D / LANES);
        }
      }
    }
  }
}
