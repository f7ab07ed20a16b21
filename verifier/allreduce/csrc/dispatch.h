// From run-time numbers to the compiled instances. A runner has `template <class T, W, M, kBulk> int run() const`.
#pragma once

#include "collective.h"

namespace breakeven::allreduce {

constexpr int kInvalidValue = 1;  // cudaErrorInvalidValue

template <class T, uint32_t W, uint32_t M, class Runner>
int by_family(const Runner& runner, bool bulk) {
  return bulk ? runner.template run<T, W, M, true>() : runner.template run<T, W, M, false>();
}

template <class T, class Runner>
int by_shape(const Runner& runner, uint32_t world, uint32_t shape, bool bulk) {
  switch (world * 16 + shape) {
#if !defined(AR_ONLY_WORLD) || AR_ONLY_WORLD == 2  // tests that need one world build faster
    case 2 * 16 + 0: return by_family<T, 2, 0>(runner, bulk);
    case 2 * 16 + 2: return by_family<T, 2, 2>(runner, bulk);
#endif
#if !defined(AR_ONLY_WORLD) || AR_ONLY_WORLD == 4
    case 4 * 16 + 0: return by_family<T, 4, 0>(runner, bulk);
    case 4 * 16 + 2: return by_family<T, 4, 2>(runner, bulk);
    case 4 * 16 + 4: return by_family<T, 4, 4>(runner, bulk);
#endif
#if !defined(AR_ONLY_WORLD) || AR_ONLY_WORLD == 8
    case 8 * 16 + 0: return by_family<T, 8, 0>(runner, bulk);
    case 8 * 16 + 2: return by_family<T, 8, 2>(runner, bulk);
    case 8 * 16 + 4: return by_family<T, 8, 4>(runner, bulk);
    case 8 * 16 + 8: return by_family<T, 8, 8>(runner, bulk);
#endif
    default: return kInvalidValue;
  }
}

// dtype: 0 bfloat16, 1 float16, 2 float32. shape: 0 one-shot, world = two-shot, less = islands of that many ranks.
template <class Runner>
int dispatch(const Runner& runner, uint32_t dtype, uint32_t world, uint32_t shape, bool bulk) {
  switch (dtype) {
    case 0: return by_shape<BFloat16>(runner, world, shape, bulk);
    case 1: return by_shape<Float16>(runner, world, shape, bulk);
    case 2: return by_shape<Float32>(runner, world, shape, bulk);
    default: return kInvalidValue;
  }
}

}  // namespace breakeven::allreduce
