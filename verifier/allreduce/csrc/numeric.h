// Element types: widen a pack to fp32, round it back once (to nearest even). Every NaN becomes the one NaN that the GPU's
// own conversion writes, so that CPU and GPU ranks agree bit for bit.
#pragma once

#include "protocol.h"

#ifdef __CUDACC__
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#endif

namespace breakeven::allreduce {

AR_FN uint32_t bits_of(float x) {
  uint32_t u;
  std::memcpy(&u, &x, 4);
  return u;
}
AR_FN float float_of(uint32_t u) {
  float x;
  std::memcpy(&x, &u, 4);
  return x;
}
AR_FN bool is_nan_bits(uint32_t u) { return (u & 0x7fffffffu) > 0x7f800000u; }

struct Float32 {
  static constexpr uint32_t kPerPack = 4;
  static constexpr uint32_t kNan = 0x7fffffffu;
  AR_FN static void widen(const uint32_t (&d)[4], float (&x)[4]) {
#pragma unroll
    for (int i = 0; i < 4; ++i) x[i] = float_of(d[i]);
  }
  AR_FN static void round(const float (&x)[4], uint32_t (&d)[4]) {
#pragma unroll
    for (int i = 0; i < 4; ++i) d[i] = is_nan_bits(bits_of(x[i])) ? kNan : bits_of(x[i]);
  }
};

struct BFloat16 {
  static constexpr uint32_t kPerPack = 8;
  static constexpr uint32_t kNan = 0x7fff7fffu;
  AR_FN static uint32_t round_one(float x) {
    const uint32_t u = bits_of(x);
    if (is_nan_bits(u)) return 0x7fffu;
    return (u + 0x7fffu + ((u >> 16) & 1u)) >> 16;
  }
  AR_FN static void widen(const uint32_t (&d)[4], float (&x)[8]) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      x[2 * i] = float_of(d[i] << 16);
      x[2 * i + 1] = float_of(d[i] & 0xffff0000u);
    }
  }
  AR_FN static void round(const float (&x)[8], uint32_t (&d)[4]) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
#ifdef __CUDACC__
      asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(d[i]) : "f"(x[2 * i + 1]), "f"(x[2 * i]));
#else
      d[i] = round_one(x[2 * i]) | round_one(x[2 * i + 1]) << 16;
#endif
    }
  }
};

struct Float16 {
  static constexpr uint32_t kPerPack = 8;
  static constexpr uint32_t kNan = 0x7fff7fffu;

  AR_FN static float widen_one(uint32_t h) {
    const uint32_t sign = (h & 0x8000u) << 16, exponent = (h >> 10) & 31u, mantissa = h & 1023u;
    if (exponent == 31) return float_of(sign | 0x7f800000u | mantissa << 13);
    if (exponent != 0) return float_of(sign | (exponent + 112u) << 23 | mantissa << 13);
    const float tiny = static_cast<float>(mantissa) * 0x1p-24f;  // zero and subnormals, exact
    return float_of(sign | bits_of(tiny));
  }
  AR_FN static uint32_t round_one(float x) {
    const uint32_t u = bits_of(x), sign = (u >> 16) & 0x8000u, size = u & 0x7fffffffu;
    if (size > 0x7f800000u) return 0x7fffu;
    if (size >= 0x477ff000u) return sign | 0x7c00u;  // 65520 and above round to infinity
    if (size < 0x38800000u) {                         // subnormal or zero: adding 0.5 leaves the rounded bits at the end
      return sign | (bits_of(float_of(size) + 0.5f) - 0x3f000000u);
    }
    return sign | ((size - 0x38000000u + 0xfffu + ((size >> 13) & 1u)) >> 13);
  }
  AR_FN static void widen(const uint32_t (&d)[4], float (&x)[8]) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
#ifdef __CUDACC__
      __half2 pair;
      std::memcpy(&pair, &d[i], 4);
      const float2 both = __half22float2(pair);
      x[2 * i] = both.x;
      x[2 * i + 1] = both.y;
#else
      x[2 * i] = widen_one(d[i] & 0xffffu);
      x[2 * i + 1] = widen_one(d[i] >> 16);
#endif
    }
  }
  AR_FN static void round(const float (&x)[8], uint32_t (&d)[4]) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
#ifdef __CUDACC__
      asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(d[i]) : "f"(x[2 * i + 1]), "f"(x[2 * i]));
#else
      d[i] = round_one(x[2 * i]) | round_one(x[2 * i + 1]) << 16;
#endif
    }
  }
};

}  // namespace breakeven::allreduce
